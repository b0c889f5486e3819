"""Device memory that puts take and give back: blocks, leases, and when a block may be written again.

A lease stands for "some array may reach this block". It ends on any thread, inside the garbage collector, so its end does nothing
but append to a deque. The next put turns ended leases into idle blocks, each with an event for the work that may still read it.
A fresh block and an idle one are the same thing: a block with an optional event.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, final

from xferlib.errors import AllocationError
from xferlib.protocol import DeviceBlock, Event, HostStager, Stream

__all__ = ["BlockCache", "Lease"]

Streams = dict[int, Stream]


@final
class Lease:
    """The right to a block while an array may reach it. `streams` are those told to wait for its copy, by handle."""

    __slots__ = ("__weakref__", "_block", "_cache", "_streams")

    def __init__(self, cache: BlockCache, block: DeviceBlock, streams: Streams) -> None:
        self._cache = cache
        self._block = block
        self._streams = streams

    def __del__(self) -> None:
        self._cache.ended.append((self._block, self._streams))


@final
class BlockCache:
    """Blocks by size class. Any thread.

    Takes the first idle block whose readers are done; else grows; at the limit lets the H2D stream, not the host, wait for the
    oldest. Classes are an eighth apart, so at most an eighth of a block is unused and batches of near sizes share blocks.
    """

    def __init__(self, backend: HostStager[Any], limit: int | None) -> None:
        self.ended: deque[tuple[DeviceBlock, Mapping[int, Stream]]] = deque()
        self.limit = limit
        self.nbytes = self.peak_nbytes = 0
        self.waits = 0
        self._backend = backend
        self._lock = threading.Lock()
        self._idle: dict[int, deque[tuple[DeviceBlock, Event | None]]] = {}

    def take(self, nbytes: int) -> DeviceBlock:
        """Return a block of at least `nbytes` that copies started from now on may write. Raises `AllocationError`."""
        size = size_class(nbytes)
        with self._lock:
            self._collect()
            block = self._reuse(size) or self._reserve(size)
        if block is not None:
            return block
        block = self._allocate(size)
        if block.ready is not None:
            self._backend.order_h2d(block.ready)
            # Such a framework may still be reading the memory that it gave us: have the next one ready ahead of need.
            self._spare(size)
        return block

    def trim(self) -> None:
        """Free every idle block. May wait for kernels."""
        with self._lock:
            self._collect()
            idle = list(self._idle.values())
            self._idle.clear()
            self.nbytes -= sum(block.nbytes for cell in idle for block, _ in cell)
        for cell in idle:
            self._settle(cell)

    def close(self) -> None:
        """Free what is idle; a block that an array still reaches is freed when its lease ends."""
        # A deque that keeps nothing: from here on the end of a lease is the end of its block.
        ended, self.ended = self.ended, deque(maxlen=0)
        with self._lock:
            self._shelve(ended)
        self.trim()

    def forget(self) -> None:
        """Free nothing from here on: this process is a forked child, and the memory is its parent's."""
        _left.append((self._idle, self.ended))

    def _collect(self) -> None:
        self._backend.sweep()
        self._shelve(self.ended)

    def _shelve(self, ended: deque[tuple[DeviceBlock, Mapping[int, Stream]]]) -> None:
        while ended:
            block, streams = ended.popleft()
            try:
                fence = self._backend.retire(streams.values())
            except self._backend.failures:
                # A stream that was named is gone, so nobody can say when its work is done. The framework's own free waits for it.
                self.nbytes -= block.nbytes
                continue
            self._idle.setdefault(block.nbytes, deque()).append((block, fence))

    def _reuse(self, size: int) -> DeviceBlock | None:
        cell = self._idle.get(size)
        if not cell:
            return None
        # Oldest first: its readers are the likeliest to be done, so one question is the rule.
        for index, (block, fence) in enumerate(cell):
            if fence is None or fence.done():
                del cell[index]
                if not self._backend.lost(block):
                    return block
                self.nbytes -= block.nbytes
                return self._reuse(size)
        return None

    def _reserve(self, size: int) -> DeviceBlock | None:
        """Count a block to be allocated (None), or at the limit return one that the H2D stream waits for."""
        if self.limit is not None and self.nbytes + size > self.limit:
            self._free_other_classes(size)
        if self.limit is None or self.nbytes + size <= self.limit:
            self.nbytes += size
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
            return None
        cell = self._idle.get(size)
        if not cell:
            raise AllocationError(
                f"device memory is full: {size} bytes asked, {self.nbytes} of device_limit={self.limit} taken by arrays that can "
                "still be reached. Raise device_limit, or drop arrays that earlier puts returned"
            )
        block, fence = cell.popleft()
        if fence is not None:
            self.waits += 1
            self._backend.order_h2d(fence)
        return block

    def _free_other_classes(self, size: int) -> None:
        assert self.limit is not None
        for other, cell in self._idle.items():
            while other != size and cell and self.nbytes + size > self.limit:
                self.nbytes -= other
                self._settle(deque([cell.popleft()]))

    def _allocate(self, size: int) -> DeviceBlock:
        try:
            return self._backend.alloc_device(size)
        except self._backend.failures:
            # Idle blocks of other sizes may be all that stands in the way.
            self.trim()
        try:
            return self._backend.alloc_device(size)
        except self._backend.failures as error:
            with self._lock:
                self.nbytes -= size
            raise AllocationError(
                f"the device has no {size} bytes left ({self.nbytes} are taken by puts). Drop arrays, use smaller batches, or free "
                "memory that other libraries hold"
            ) from error

    def _spare(self, size: int) -> None:
        with self._lock:
            if self._idle.get(size) or (self.limit is not None and self.nbytes + size > self.limit):
                return
            self.nbytes += size
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        try:
            block = self._backend.alloc_device(size)
        except self._backend.failures:
            with self._lock:
                self.nbytes -= size
            return
        with self._lock:
            self._idle.setdefault(size, deque()).append((block, block.ready))

    def _settle(self, cell: deque[tuple[DeviceBlock, Event | None]]) -> None:
        """Wait for the readers of blocks that are about to be freed."""
        for _, fence in cell:
            if fence is not None:
                with suppress(*self._backend.failures):
                    fence.synchronize()


_left: list[object] = []
"""What a forked child must never free: held to the end of the process."""


def size_class(nbytes: int) -> int:
    """Round up to a multiple of an eighth of the power of two below, at least 256."""
    step = 1 << max(8, nbytes.bit_length() - 4)
    return -(-max(nbytes, 1) // step) * step
