"""The bounded pool of pinned host memory.

Invariants: the bytes pinned, here and beside the pool by `reserve`, never exceed the limit; memory that a copy may still read or
write is never handed out again, because what is in flight holds the `HostBlock`; nothing is pinned or unpinned while requests fit
what is already there, since both may wait for kernels. Sizes are exact up to alignment. Memory goes back to the system by `trim()`,
by `close()`, and to make room under the limit; never by a timer. Nobody waits for what nothing will end: see `WhenFull`.

A `HostBlock` may die on any thread, inside the garbage collector, while that thread holds the pool's lock. So its finalizer takes
no lock: it appends to a deque, which is drained at the next request.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias, final

import numpy as np

from xferlib.errors import AllocationError
from xferlib.forks import forget_in_child
from xferlib.memory.account import Account, asked_inside
from xferlib.memory.arrays import Array
from xferlib.memory.blocks import Flow, HostBlock, Returned, Usage, Wanted, WhenFull, check_when_full, round_up
from xferlib.memory.ranges import Ranges, Segment, evict

__all__ = ["HostBlock", "PinnedPool"]

ALIGNMENT = 256
"""Bytes. What device memory is aligned to, so that a packed block has one layout on both sides."""
PAGE = 4096
SHARED_SEGMENT = 2 << 20
"""Bytes. Small requests share segments of this size: a page-lock costs milliseconds and whole pages."""
SMALL = 1 << 20
STAGING_SHARE = 64 << 20
"""Bytes, or half of the limit where that is less. What arrays leave to staging where they give way to it."""
_Growth: TypeAlias = tuple[Ranges, int]


@final
class PinnedPool:
    """Hands out pinned memory as NumPy arrays. Any thread. `allocate` and `free` are the backend's.

    Write-combined memory, which `combine` allocates, lies in segments of its own: nobody gets it who did not ask for it.
    """

    def __init__(
        self,
        *,
        allocate: Callable[[int], int],
        free: Callable[[int], None],
        flow: Flow,
        limit: int,
        combine: Callable[[int], int] | None = None,
        when_full: WhenFull = "wait",
    ) -> None:
        check_when_full(when_full)
        self.limit = limit
        self.when_full = when_full
        self._arrays_limit = limit - min(STAGING_SHARE, limit // 2) if when_full == "stage" else limit
        self._allocate = allocate
        self._combine = combine
        self._free = free
        self._flow = flow
        self._lock = threading.RLock()
        self._inside = False
        self._changes = 0
        """How often there was more room than before. Who found none looks again if that was meanwhile."""
        self._returned: deque[Returned] = deque()
        self._large = Ranges()
        self._small = Ranges()
        self._combined = Ranges()
        self._parts = (self._large, self._small, self._combined)
        self._index: tuple[list[int], list[int]] = ([], [])
        self._closed = False
        # By name in the instance: at interpreter exit modules lose theirs.
        self._is_finalizing = sys.is_finalizing
        self.hits = self.misses = self.waits = self.fallbacks = 0
        self.wait_seconds = 0.0
        self._account = Account(limit)
        forget_in_child(self)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, combined: bool = False) -> Array:
        """Return an array in pinned memory, contents undefined; see `WhenFull`. Raises `AllocationError`, saying what to do."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        try:
            block = self._take(nbytes, None, combined=combined, for_array=True)
        except AllocationError:
            if self.when_full != "stage":
                raise
            self.fallbacks += 1
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, buffer=np.asarray(block))

    def take(self, nbytes: int, taken: Callable[[], None] | None = None) -> HostBlock:
        """Return `nbytes` bytes (at least 1) for staging, waiting for transfers in flight where that makes room.

        `taken` is called before any other thread can find the memory gone.
        """
        return self._take(nbytes, taken, combined=False, for_array=False)

    def try_take(self, nbytes: int) -> HostBlock | None:
        """Return `nbytes` bytes for staging as `take` does, where that neither waits for a transfer nor unpins."""
        wanted = Wanted(round_up(nbytes, ALIGNMENT), nbytes, None, False, False)
        block, growth, _ = self._look(wanted, may_grow=True, may_evict=False)
        return self._grow(wanted, *growth) if growth is not None else block

    def _take(self, nbytes: int, taken: Callable[[], None] | None, *, combined: bool, for_array: bool) -> HostBlock:
        size = round_up(nbytes, ALIGNMENT)
        if round_up(size, PAGE) > self.limit:
            raise self._account.too_large(nbytes)
        wanted = Wanted(size, nbytes, taken, combined, for_array)
        waits = not for_array or self.when_full == "wait"
        reaped = yielded = collected = False
        while True:
            changes = self._changes
            block, growth, victims = self._look(wanted, may_grow=reaped)
            if block is not None:
                return block
            if growth is not None:
                return self._grow(wanted, *growth)
            if victims:
                self._release(victims)
            elif not reaped:
                # Copies that are done may hold the last reference to what is asked for.
                self._flow.reap()
                reaped = True
            elif not yielded:
                # What is only kept for later comes before any wait.
                self._flow.yield_idle()
                yielded = True
            elif (waits and self._wait()) or changes != self._changes or self._returned:
                continue
            elif collected or (for_array and self.when_full == "stage"):
                raise self._account.full(nbytes, self.when_full)
            else:
                # Arrays in reference cycles hold pinned memory until the collector runs, and it knows nothing of the limit.
                gc.collect()
                collected = True

    def reserve(self, address: int, nbytes: int) -> None:
        """Count memory that is about to be page-locked beside the pool, until `unreserve`.

        Idle memory is unpinned first, where that makes room. It waits for no transfer. Raises `AllocationError`, saying what to do.
        """
        for make_room in (self._flow.reap, self._flow.yield_idle, gc.collect, None):
            reserved, victims = self._try_reserve(address, nbytes)
            while victims:
                self._release(victims)
                reserved, victims = self._try_reserve(address, nbytes)
            if reserved:
                return
            if make_room is not None:
                make_room()
        raise self._account.no_room(nbytes)

    def note_locked(self) -> None:
        """Note that what was reserved is locked now: a refused lock was never had."""
        with self._lock:
            self._account.note_peaks()

    def unreserve(self, address: int) -> None:
        """Count it no more: it is unlocked. Twice is fine."""
        with self._lock:
            self._account.unreserve(address)
            self._changes += 1

    @property
    def lends_arrays(self) -> bool:
        """Whether any array over this pool may be alive."""
        return self._account.arrays > 0

    def contains(self, address: int, nbytes: int) -> bool:
        """Tell whether the range lies inside one segment of this pool. Takes no lock."""
        starts, ends = self._index
        index = bisect_right(starts, address) - 1
        return index >= 0 and address + nbytes <= ends[index]

    def usage(self) -> Usage:
        """Return the figures of this moment."""
        with self._lock:
            if not self._inside:
                self._inside = True
                try:
                    self._drain()
                finally:
                    self._inside = False
            figures = self._account.usage()
        if self._closed:
            self._drain_closed()
        return figures

    def trim(self) -> None:
        """Unpin every segment that is wholly idle. May wait for kernels."""
        with self._lock:
            victims = self._evict_all()
        self._release(victims)

    def close(self) -> None:
        """Unpin what is idle now; what arrays still hold is unpinned when the last of them dies."""
        self._closed = True
        self.trim()
        self._drain_closed()

    def forget(self) -> None:
        """See `Forgetful`."""
        self._free = _leave
        self._lock = threading.RLock()
        self._inside = False

    def _wait(self) -> bool:
        """Block until something in flight has ended. Returns False if nothing could."""
        start = time.perf_counter()
        if not self._flow.wait_oldest():
            return False
        with self._lock:
            self.waits += 1
            self.wait_seconds += time.perf_counter() - start
        return True

    def _look(
        self, wanted: Wanted, *, may_grow: bool, may_evict: bool = True
    ) -> tuple[HostBlock | None, _Growth | None, list[Segment]]:
        """Return a block from idle memory, or a new segment that has been counted, or idle ones to be unpinned first."""
        with self._lock:
            if self._inside:
                raise asked_inside(wanted.size)
            self._inside = True
            try:
                self._drain()
                if wanted.for_array and self._account.arrays + wanted.size > self._arrays_limit:
                    return None, None, []
                ranges = self._combined if wanted.combined else self._class_of(wanted.size)
                address = ranges.take(wanted.size)
                if address is not None:
                    self.hits += 1
                    return self._handed_out(address, wanted), None, []
                return (None, *self._room(ranges, wanted.size, may_evict=may_evict)) if may_grow else (None, None, [])
            finally:
                self._inside = False

    def _room(self, ranges: Ranges, size: int, *, may_evict: bool) -> tuple[_Growth | None, list[Segment]]:
        """Count a new segment if the limit has room; else name idle ones that make room, if there are enough."""
        exact = round_up(size, PAGE)
        for nbytes in (SHARED_SEGMENT, exact) if ranges is self._small else (exact,):
            excess = self._account.excess(nbytes)
            if excess <= 0:
                self._account.segments += nbytes
                return (ranges, nbytes), []
            victims = self._evict(excess) if may_evict else []
            if victims:
                return None, victims
        return None, []

    def _try_reserve(self, address: int, nbytes: int) -> tuple[bool, list[Segment]]:
        """Reserve, or return idle segments to be unpinned first, if they are enough."""
        with self._lock:
            if self._inside:
                raise asked_inside(nbytes)
            self._inside = True
            try:
                self._drain()
                excess = self._account.excess(nbytes)
                if excess > 0:
                    return False, self._evict(excess)
                self._account.reserve(address, nbytes)
                return True, []
            finally:
                self._inside = False

    def _grow(self, wanted: Wanted, ranges: Ranges, nbytes: int) -> HostBlock:
        # Outside the lock: page-locking takes milliseconds, and other threads may find idle memory meanwhile.
        try:
            allocate = self._combine if ranges is self._combined else self._allocate
            assert allocate is not None
            start = allocate(nbytes)
        except BaseException:
            self._shrink(nbytes)
            raise
        with self._lock:
            self._inside = True
            try:
                # Only now: a refused one was never had.
                self.misses += 1
                self._account.note_peaks()
                ranges.add_segment(start, nbytes)
                self._reindex()
                # Out of the new segment, not the best fit: another thread may have asked meanwhile.
                ranges.take_at(start, wanted.size)
                self._changes += 1
                return self._handed_out(start, wanted)
            finally:
                self._inside = False

    def _handed_out(self, address: int, wanted: Wanted) -> HostBlock:
        self._account.hand_out(wanted)
        if wanted.taken is not None:
            wanted.taken()
        return HostBlock(self, address, wanted)

    def _class_of(self, size: int) -> Ranges:
        return self._small if size < SMALL and self.limit >= 2 * SHARED_SEGMENT else self._large

    def _evict(self, excess: int | None) -> list[Segment]:
        """Forget idle segments and return them to be unpinned; see `evict`."""
        victims = evict(self._parts, excess)
        if victims:
            self._reindex()
        return victims

    def _evict_all(self) -> list[Segment]:
        if self._inside:
            return []
        self._inside = True
        try:
            self._drain()
            return self._evict(None)
        finally:
            self._inside = False

    def _release(self, victims: list[Segment]) -> None:
        """Unpin segments, each whatever the others raise."""
        with ExitStack() as steps:
            for victim in victims:
                steps.callback(self._unpin, *victim)

    def _unpin(self, ranges: Ranges, start: int, nbytes: int) -> None:
        """Unpin a segment, and only then take it off the account: the limit holds at every moment."""
        try:
            self._free(start)
        except Exception:
            # Refused: it is still there, and the next request or trim finds it.
            self._restore(ranges, start, nbytes)
            raise
        except BaseException:
            # An interrupt is raised when the driver has returned: what may be gone is handed out to nobody.
            self._shrink(nbytes)
            raise
        self._shrink(nbytes)

    def _restore(self, ranges: Ranges, start: int, nbytes: int) -> None:
        with self._lock:
            self._inside = True
            try:
                ranges.add_segment(start, nbytes)
                self._reindex()
                self._changes += 1
            finally:
                self._inside = False

    def _shrink(self, nbytes: int) -> None:
        with self._lock:
            self._account.segments -= nbytes
            self._changes += 1

    def _give_back(self, returned: Returned) -> None:
        self._returned.append(returned)
        # At interpreter exit modules are taken apart, the backend's too; the memory goes with the process.
        if self._closed and not self._is_finalizing():
            self._drain_closed()

    def _drain_closed(self) -> None:
        # After close nobody asks any more. Whoever cannot have the lock leaves the work to its holder, who looks again.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                if self._inside:
                    return
                victims = self._evict_all()
            finally:
                self._lock.release()
            self._release(victims)

    def _drain(self) -> None:
        while self._returned:
            returned = self._returned.popleft()
            self._account.take_back(returned)
            address, nbytes, _, _ = returned
            self._changes += 1
            starts, _ = self._index
            segment = starts[bisect_right(starts, address) - 1]
            next(part for part in self._parts if segment in part.segments).give_back(address, nbytes)

    def _reindex(self) -> None:
        segments = sorted(segment for part in self._parts for segment in part.segments.items())
        # One assignment: `contains` reads without the lock.
        self._index = [start for start, _ in segments], [start + nbytes for start, nbytes in segments]


def _leave(address: int) -> None:
    """Stand in for `free` in a forked child."""
