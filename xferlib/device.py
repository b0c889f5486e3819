"""Device memory that puts take and give back: blocks, leases, and when a block may be written again.

A lease stands for "some array may reach this block". It ends on any thread, inside the garbage collector, so its end takes no lock:
it appends to a deque. The next put turns ended leases into idle blocks, each with an event for the work that may still read it.
A fresh block and an idle one are the same thing: a block with an optional event.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol, TypeAlias, final

from xferlib.errors import AllocationError, CapabilityError
from xferlib.forks import forget_in_child, leave
from xferlib.protocol import DeviceBlock, Event, HostStager, Source, Stream

__all__ = ["BlockCache", "Lease", "Streams"]

READERS_BEHIND = 8
"""Blocks of one size that may wait for their readers before a put waits for the oldest of them, and does not take one more."""
WORTH_WAITING = 64 << 20
"""Bytes of such blocks, together. The many small puts of one step must not wait for the step before."""

Streams: TypeAlias = dict[int, Stream]
"""By handle: the streams that were told to wait for a transfer, and so may read its arrays."""
Ended: TypeAlias = tuple[DeviceBlock, Streams]
"""The block of a lease that has ended, and the streams that may still read it."""
Cell: TypeAlias = deque[tuple[DeviceBlock, Event | None]]
"""Idle blocks of one size, oldest first, each with the event after which it may be written."""


class Flow(Protocol):
    """What is in flight: it may hold leases that end when it is done."""

    def reap(self) -> bool: ...

    def wait_oldest(self) -> bool: ...


@final
class Lease:
    """The right to a block while an array may reach it."""

    __slots__ = ("__weakref__", "_cache", "_streams", "block")

    def __init__(self, cache: BlockCache, block: DeviceBlock, streams: Streams) -> None:
        self.block = block
        self._cache = cache
        self._streams = streams

    def __del__(self) -> None:
        for stream in self._streams.values():
            if stream.keepalive is None:
                self._cache.end_now(self.block, self._streams)
                return
        self._cache.end((self.block, self._streams))


@final
class BlockCache:
    """Blocks by size class. Any thread.

    Takes the first idle block whose readers are done; else grows; at the limit, or with many that wait for their readers, lets
    the H2D stream, not the host, wait for the oldest. Classes are an eighth apart, so at most an eighth of a block is unused and
    batches of near sizes share blocks.
    """

    def __init__(self, backend: HostStager[Any], flow: Flow, limit: int | None) -> None:
        self.ended: deque[Ended] = deque()
        self.end: Callable[[Ended], None] = self.ended.append
        self.fenced: Cell = deque()
        self.limit = limit
        self.peak_nbytes = self.waits = 0
        self._backend = backend
        self._flow = flow
        self._lock = threading.RLock()
        self._inside = self._over = False
        self._changes = self._nbytes = 0
        self._dropped: deque[int] = deque()
        """Bytes that were let go of without the lock, still to be taken off the account."""
        self._idle: dict[int, Cell] = {}
        self._live: dict[int, tuple[int, Streams]] = {}
        forget_in_child(self)

    @property
    def nbytes(self) -> int:
        """Bytes taken from the framework, in use or idle."""
        return self._nbytes - sum(self._dropped.copy())

    def lease(self, nbytes: int, streams: Streams) -> Lease:
        """Lease a block of at least `nbytes` that copies started from now on may write. Raises `AllocationError`."""
        size = size_class(nbytes)
        block = self._idle_now(size) or self._find(size) or self._grow(size)
        self._live[block.address] = (block.address + block.nbytes, streams)
        return Lease(self, block, streams)

    def streams_of(self, target: Source) -> Streams:
        """Return the streams of the lease whose block this memory is in; new ones if it is not ours."""
        found = self._live.get(target.address)
        if found is not None:
            return found[1]
        for start, (end, streams) in self._live.copy().items():
            if start <= target.address < end:
                return streams
        return {}

    def end_now(self, block: DeviceBlock, streams: Streams) -> None:
        """End a lease with a stream known by its bare handle, which its owner may destroy as soon as the arrays are gone.

        Called by finalizers: takes no lock.
        """
        if self._over:
            # The backend is asked nothing any more.
            self.end((block, streams))
            return
        self._fence(block, streams, self.fenced)

    def trim(self) -> None:
        """Free every idle block. May wait for kernels."""
        with self._lock:
            if self._inside:
                # In a finalizer that runs inside another request, which is looking through these very cells.
                return
            self._inside = True
            try:
                self._collect()
                idle: Cell = deque(chain.from_iterable(self._idle.values()))
                self._idle.clear()
            finally:
                self._inside = False
        if idle:
            self._free(idle)

    def close(self) -> None:
        """Free what is idle; a block that an array still reaches is freed when its lease ends."""
        with suppress(*self._backend.failures):
            self._backend.sweep()
        self._over = True
        # From here on the end of a lease is the end of its block, and only the account is kept.
        dropped = self._dropped
        self.end = lambda entry: dropped.append(entry[0].nbytes)
        ended, self.ended = self.ended, deque(maxlen=0)
        fenced, self.fenced = self.fenced, deque(maxlen=0)
        with self._lock:
            self._shelve(ended, fenced)
        self.trim()

    def forget(self) -> None:
        """See `Forgetful`."""
        self._over = True
        # What ends in the child is left, too; after close the old one would keep nothing.
        later: deque[Ended] = deque()
        leave(self._idle, self.ended, self.fenced, later)
        self.ended, self.end = later, later.append
        self._lock = threading.RLock()
        self._inside = False

    def _idle_now(self, size: int) -> DeviceBlock | None:
        """Return an idle block that may be written, if there is one."""
        with self._lock:
            if self._inside:
                raise AllocationError(
                    f"{size} bytes of device memory asked by a finalizer that ran inside another put. Put from ordinary code"
                )
            self._inside = True
            try:
                self._collect()
                return self._reuse(size)
            finally:
                self._inside = False

    def _find(self, size: int) -> DeviceBlock | None:
        """Return a block to be written, or None after counting one to be allocated."""
        # Copies that are done may hold the last reference to an array, and so to its block.
        self._flow.reap()
        collected = False
        while True:
            changes = self._changes
            block = self._idle_now(size)
            if block is not None:
                return block
            block, victims, reserved = self._make_room(size)
            if block is not None or reserved:
                return block
            if victims:
                self._free(victims)
            elif self._flow.wait_oldest() or changes != self._changes or self.ended or self.fenced:
                continue
            elif collected:
                raise self._full(size)
            else:
                gc.collect()
                collected = True

    def _make_room(self, size: int) -> tuple[DeviceBlock | None, Cell, bool]:
        """Return a block whose readers the H2D stream waits for, or idle blocks to be freed first, or whether one was counted."""
        with self._lock:
            self._inside = True
            try:
                behind = len(self._idle.get(size, ()))
                if behind >= READERS_BEHIND and behind * size >= WORTH_WAITING:
                    # A program that never waits for the device would else take all of its memory: let the copies wait instead.
                    with suppress(CapabilityError):
                        return self._oldest(size), deque(), False
                if self._reserve(size):
                    return None, deque(), True
                victims = self._others(size, reached=True)
                block = None if victims else self._oldest(size)
                if not victims and block is None:
                    victims = self._others(size, reached=False)
                return block, victims, False
            finally:
                self._inside = False

    def _collect(self) -> None:
        self._backend.sweep()
        self._shelve(self.ended, self.fenced)
        while self._dropped:
            self._nbytes -= self._dropped.popleft()
            self._changes += 1

    def _shelve(self, ended: deque[Ended], fenced: Cell) -> None:
        while ended:
            block, streams = ended.popleft()
            self._fence(block, streams, fenced)
        while fenced:
            entry = fenced.popleft()
            block = entry[0]
            self._live.pop(block.address, None)
            cell = self._idle.get(block.nbytes)
            if cell is None:
                cell = self._idle[block.nbytes] = deque()
            cell.append(entry)
            self._changes += 1

    def _fence(self, block: DeviceBlock, streams: Streams, fenced: Cell) -> None:
        try:
            fence = self._backend.retire(streams.values())
        except BaseException as error:
            # Nobody can say when its readers are done. The framework's own free waits for them.
            self._live.pop(block.address, None)
            self._dropped.append(block.nbytes)
            if not isinstance(error, self._backend.failures):
                raise
            return
        fenced.append((block, fence))

    def _reuse(self, size: int) -> DeviceBlock | None:
        """Return an idle block whose readers are done."""
        cell = self._idle.get(size)
        if not cell:
            return None
        # Oldest first: its readers are the likeliest to be done, so one question is the rule.
        block, fence = cell[0]
        if fence is None and not self._backend.lost(block):
            cell.popleft()
            return block
        waiting: Cell = deque()
        found = None
        try:
            while cell and found is None:
                block, fence = cell[0]
                reached = self._reached(fence)
                lost = reached is None or self._backend.lost(block)
                # Only now, and the others go back whatever happens: an interrupt must lose none.
                cell.popleft()
                if lost:
                    self._nbytes -= size
                elif reached:
                    found = block
                else:
                    waiting.append((block, fence))
        finally:
            cell.extendleft(reversed(waiting))
        return found

    def _reached(self, fence: Event | None) -> bool | None:
        """Tell whether a block's readers are done; None if that failed, and nobody can say."""
        try:
            return fence is None or fence.done()
        except self._backend.failures:
            return None

    def _reserve(self, size: int) -> bool:
        """Count a block to be allocated, if the limit has room."""
        if self.limit is not None and self._nbytes + size > self.limit:
            return False
        self._nbytes += size
        return True

    def _oldest(self, size: int) -> DeviceBlock | None:
        """Return the oldest idle block of this size, which the H2D stream was told to wait for."""
        cell = self._idle.get(size)
        if not cell:
            return None
        block, fence = cell[0]
        if fence is not None:
            self._backend.order_h2d(fence)
            self.waits += 1
        cell.popleft()
        return block

    def _others(self, size: int, *, reached: bool) -> Cell:
        """Take idle blocks of other sizes out of the cache, enough to make room under the limit; none if there are not enough."""
        assert self.limit is not None
        excess = self._nbytes + size - self.limit
        chosen: Cell = deque()
        for other, cell in self._idle.items():
            if other == size:
                continue
            for block, fence in cell:
                if excess > 0 and (not reached or self._reached(fence)):
                    chosen.append((block, fence))
                    excess -= other
        if excess > 0:
            return deque()
        for entry in chosen:
            self._idle[entry[0].nbytes].remove(entry)
        return chosen

    def _free(self, cell: Cell) -> None:
        """Wait for the readers of blocks and drop them. Outside the lock."""
        try:
            for fence in [fence for _, fence in cell if fence is not None]:
                with suppress(*self._backend.failures):
                    fence.synchronize()
        finally:
            # Interrupted, too: the framework's own free waits for the readers.
            nbytes = sum(block.nbytes for block, _ in cell)
            cell.clear()
            self._forget_nbytes(nbytes)

    def _grow(self, size: int) -> DeviceBlock:
        block = self._allocate(size)
        if block.ready is not None:
            self._backend.order_h2d(block.ready)
            # Such a framework may still be reading the memory that it gave us: have the next one ready ahead of need.
            self._add_spare(size)
        return block

    def _allocate(self, size: int) -> DeviceBlock:
        try:
            try:
                return self._had(self._backend.alloc_device(size))
            except self._backend.failures:
                # Idle blocks of other sizes may be all that stands in the way.
                self.trim()
                return self._had(self._backend.alloc_device(size))
        except BaseException as error:
            self._forget_nbytes(size)
            if not isinstance(error, self._backend.failures):
                raise
            raise AllocationError(
                f"the device has no {size} bytes left ({self._nbytes} are taken by puts): {error}. Drop arrays, use smaller "
                "batches, or free memory that other libraries hold"
            ) from error

    def _add_spare(self, size: int) -> None:
        with self._lock:
            if self._idle.get(size) or not self._reserve(size):
                return
        try:
            block = self._had(self._backend.alloc_device(size))
        except BaseException as error:
            self._forget_nbytes(size)
            if not isinstance(error, self._backend.failures):
                raise
            return
        with self._lock:
            self._idle.setdefault(size, deque()).append((block, block.ready))

    def _had(self, block: DeviceBlock) -> DeviceBlock:
        """Note that a block was allocated, not only asked for."""
        with self._lock:
            self.peak_nbytes = max(self.peak_nbytes, self._nbytes)
        return block

    def _forget_nbytes(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes -= nbytes
            self._changes += 1

    def _full(self, size: int) -> AllocationError:
        return AllocationError(
            f"device memory is full: {size} bytes asked, {self._nbytes} of device_limit={self.limit} taken by arrays that can "
            "still be reached. Raise device_limit, or drop arrays that earlier puts returned"
        )


def size_class(nbytes: int) -> int:
    """Round up to a multiple of an eighth of the power of two below, at least 256."""
    step = 1 << max(8, nbytes.bit_length() - 4)
    return -(-max(nbytes, 1) // step) * step
