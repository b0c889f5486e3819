"""The bounded pool of pinned host memory.

Invariants: the bytes pinned never exceed the limit; memory that a copy may still read or write is never handed out again, because
what is in flight holds the `HostBlock`; nothing is pinned or unpinned while requests fit what is already there, since both may
wait for kernels. Sizes are exact up to alignment. Memory goes back to the system by `trim()`, by `close()`, and to make room under
the limit; never by a timer.

A `HostBlock` may die on any thread, inside the garbage collector, while that thread holds the pool's lock. So its finalizer takes
no lock: it appends to a deque, which is drained at the next request.
"""

from __future__ import annotations

import gc
import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any, final

import numpy as np

from xferlib.errors import AllocationError
from xferlib.memory.arrays import Array
from xferlib.memory.ranges import Ranges

__all__ = ["HostBlock", "PinnedPool"]

ALIGNMENT = 256
"""Bytes. What device memory is aligned to, so that a packed block has one layout on both sides."""
PAGE = 4096
SHARED_SEGMENT = 2 << 20
"""Bytes. Small requests share segments of this size: a page-lock costs milliseconds and whole pages."""
SMALL = 1 << 20


@final
class HostBlock:
    """Pinned bytes, given back to the pool when the last array over them dies."""

    __slots__ = ("__array_interface__", "_pool", "address", "nbytes")

    def __init__(self, pool: PinnedPool, address: int, nbytes: int) -> None:
        self._pool = pool
        self.address = address
        self.nbytes = nbytes
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    def __del__(self) -> None:
        self._pool._give_back(self.address, self.nbytes)


@final
class PinnedPool:
    """Hands out pinned memory as NumPy arrays. Any thread.

    `allocate` and `free` are the backend's; `wait` blocks until something in flight has ended and says whether there was anything.
    """

    def __init__(
        self, *, allocate: Callable[[int], int], free: Callable[[int], None], wait: Callable[[], bool], limit: int
    ) -> None:
        self.limit = limit
        self._allocate = allocate
        self._free = free
        self._wait = wait
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int]] = deque()
        self._large = Ranges()
        self._small = Ranges()
        self._index: tuple[list[int], list[int]] = ([], [])
        self._closed = False
        self.hits = self.misses = 0
        self.nbytes = self.peak_nbytes = self.used_nbytes = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array in pinned memory, contents undefined. Raises `AllocationError`, saying what to do."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, buffer=np.asarray(self.take(nbytes)))

    def take(self, nbytes: int) -> HostBlock:
        """Return `nbytes` bytes (at least 1) of pinned memory, waiting for transfers in flight where that makes room."""
        size = _round_up(nbytes, ALIGNMENT)
        ranges, grow = self._class_of(size)
        if grow > self.limit:
            raise AllocationError(
                f"{_mib(nbytes)} of pinned memory asked, more than pinned_limit={self.limit} ({_mib(self.limit)}). "
                "Raise pinned_limit, or use smaller arrays"
            )
        collected = False
        while True:
            address, victims = self._cut_or_reserve(ranges, size, grow)
            if address is not None:
                return HostBlock(self, address, size)
            if victims is not None:
                return self._grow(ranges, size, grow, victims)
            if not self._wait():
                if collected:
                    raise self._full(nbytes)
                # Arrays in reference cycles hold pinned memory until the collector runs, and it knows nothing of the limit.
                gc.collect()
                collected = True

    def contains(self, address: int, nbytes: int) -> bool:
        """Tell whether the range lies inside one segment of this pool. Takes no lock."""
        starts, ends = self._index
        index = bisect_right(starts, address) - 1
        return index >= 0 and address + nbytes <= ends[index]

    def usage(self) -> tuple[int, int, int]:
        """Return the bytes pinned now, at the peak, and handed out now."""
        with self._lock:
            self._drain()
            return self.nbytes, self.peak_nbytes, self.used_nbytes

    def trim(self) -> None:
        """Unpin every segment that is wholly idle. May wait for kernels."""
        with self._lock:
            self._drain()
            victims = self._evict(self._large, None) + self._evict(self._small, None)
        self._release(victims)

    def close(self) -> None:
        """Unpin what is idle now; what arrays still hold is unpinned when the last of them dies."""
        self._closed = True
        self.trim()

    def forget(self) -> None:
        """Free nothing from here on: this process is a forked child, and the memory is its parent's."""
        self._free = _leave
        self._closed = False

    def _class_of(self, size: int) -> tuple[Ranges, int]:
        if size < SMALL and self.limit >= 2 * SHARED_SEGMENT:
            return self._small, SHARED_SEGMENT
        return self._large, _round_up(size, PAGE)

    def _cut_or_reserve(self, ranges: Ranges, size: int, grow: int) -> tuple[int | None, list[tuple[int, int]] | None]:
        """Return (address, None) from idle memory; or (None, segments to unpin first), `grow` bytes reserved; or (None, None)."""
        with self._lock:
            self._drain()
            address = ranges.take(size)
            if address is not None:
                self.hits += 1
                self.used_nbytes += size
                return address, None
            excess = self.nbytes + grow - self.limit
            if excess > sum(nbytes for part in (self._large, self._small) for _, nbytes in part.whole()):
                return None, None
            victims = self._evict(self._large, excess)
            victims += self._evict(self._small, excess - sum(nbytes for _, nbytes in victims))
            self.nbytes += grow
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
            self.misses += 1
            return None, victims

    def _grow(self, ranges: Ranges, size: int, grow: int, victims: list[tuple[int, int]]) -> HostBlock:
        # Outside the lock: page-locking takes milliseconds, and other threads may find idle memory meanwhile.
        self._release(victims)
        try:
            start = self._allocate(grow)
        except BaseException:
            with self._lock:
                self.nbytes -= grow
            raise
        with self._lock:
            ranges.add_segment(start, grow)
            self._reindex()
            # First fit of the new segment; the lock has not been released since it was added.
            address = ranges.take(size)
            assert address is not None
            self.used_nbytes += size
            return HostBlock(self, address, size)

    def _evict(self, ranges: Ranges, excess: int | None) -> list[tuple[int, int]]:
        """Forget idle segments until `excess` bytes are gone (None: all of them) and return them to be unpinned."""
        victims: list[tuple[int, int]] = []
        for start, nbytes in ranges.whole():
            if excess is not None:
                if excess <= 0:
                    break
                excess -= nbytes
            ranges.remove_segment(start)
            self.nbytes -= nbytes
            victims.append((start, nbytes))
        if victims:
            self._reindex()
        return victims

    def _release(self, victims: list[tuple[int, int]]) -> None:
        for start, _ in victims:
            self._free(start)

    def _give_back(self, address: int, nbytes: int) -> None:
        self._returned.append((address, nbytes))
        # After close nobody drains any more. Whoever cannot have the lock leaves the work to its holder, who looks again.
        while self._closed and self._returned and self._lock.acquire(blocking=False):
            try:
                self._drain()
                victims = self._evict(self._large, None) + self._evict(self._small, None)
            finally:
                self._lock.release()
            self._release(victims)

    def _drain(self) -> None:
        while self._returned:
            address, nbytes = self._returned.popleft()
            self.used_nbytes -= nbytes
            starts, _ = self._index
            segment = starts[bisect_right(starts, address) - 1]
            (self._small if segment in self._small.segments else self._large).give_back(address, nbytes)

    def _reindex(self) -> None:
        segments = sorted((self._large.segments | self._small.segments).items())
        # One assignment: `contains` reads without the lock.
        self._index = [start for start, _ in segments], [start + nbytes for start, nbytes in segments]

    def _full(self, nbytes: int) -> AllocationError:
        return AllocationError(
            f"pinned memory is full: {_mib(nbytes)} asked, {_mib(self.limit - self.used_nbytes)} of {_mib(self.limit)} free, and "
            "nothing is in flight that could free more. Raise pinned_limit, lower the depth, or drop pinned arrays"
        )


def _leave(address: int) -> None:
    """Stand in for `free` in a forked child."""


def _round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
