"""A driver for backends whose device is host memory: as strict as one of a GPU, and it sees what is done to freed memory.

Device memory comes from one arena, packed side by side; what is freed is poisoned at once and is the first to be handed out again,
to stagers and to canaries alike. Every copy must lie inside one live allocation, when it is started and when it is run. Host memory
that a copy engine uses must be page-locked, as a whole, in the table of the process.
What it finds is noted, and told when it is asked: it is found on threads and in finalizers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
from bisect import bisect_right, insort
from collections import deque
from functools import partial
from typing import Any, final

import numpy as np

from tests.random_programs.content import Array

__all__ = ["DRIVER", "Driver", "StrictStager", "bytes_at"]

SEGMENT = 32 << 20
ALIGNMENT = 256
POISON = 0xDD


def bytes_at(address: int, nbytes: int) -> Array:
    """Return memory as an array of bytes."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@final
class Driver:
    """The memory of one process. Any thread; what is freed takes no lock, since finalizers free."""

    def __init__(self) -> None:
        self.violations: deque[str] = deque()
        self._lock = threading.RLock()
        self._segments: list[Array] = []
        self._bounds: list[tuple[int, int]] = []
        self._free: list[tuple[int, int]] = []
        self._freed: deque[tuple[int, int]] = deque()
        self._dirty: list[tuple[int, int]] = []
        """What was freed since anybody looked."""
        self._live: dict[int, int] = {}
        self._starts: list[int] = []
        self._locked: dict[int, int] = {}
        self.calls = 0
        """How often memory was allocated, freed, locked or unlocked."""

    # Device memory.

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory, what was freed last where that is large enough."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self.calls += 1
            self._settle()
            for index in range(len(self._free) - 1, -1, -1):
                start, free = self._free[index]
                if free >= size:
                    self._take(index, size)
                    break
            else:
                start = self._grow(size)
            self._look_at_poison(start, size)
            self._live[start] = start + nbytes
            insort(self._starts, start)
        return start

    def free(self, address: int) -> None:
        """Free memory, on any thread, in a finalizer, too."""
        self.calls += 1
        end = self._live.pop(address, None)
        if end is None:
            self.violations.append("device memory was freed that is not allocated, or was freed before")
            return
        size = -(-max(end - address, 1) // ALIGNMENT) * ALIGNMENT
        ctypes.memset(address, POISON, size)
        self._freed.append((address, size))

    def look_at_freed(self) -> None:
        """See whether anybody wrote to what was freed, since the last look, and is free."""
        with self._lock:
            self._settle()
            dirty, self._dirty = self._dirty, []
            for start, size in dirty:
                if any(low <= start and start + size <= low + free for low, free in self._free):
                    self._look_at_poison(start, size)

    def allocated(self) -> int:
        """Count what is allocated."""
        return len(self._live)

    def check_device(self, address: int, nbytes: int, what: str) -> None:
        """Note a range that is not inside one allocation. Memory that is not of the arena is not looked at."""
        with self._lock:
            if not any(low <= address < high for low, high in self._bounds):
                return
            at = bisect_right(self._starts, address) - 1
            end = self._live.get(self._starts[at], 0) if at >= 0 else 0
        if address + nbytes > end:
            self.violations.append(f"{what} of {nbytes} bytes of device memory that is freed, or of two allocations")

    def check_copy(self, dst: int, src: int, nbytes: int) -> None:
        """Note a copy that goes, or comes, where it must not: looked at as it is run, whoever has started it."""
        what = "a copy by the engine was run"
        for device, host in ((dst, src), (src, dst)):
            if any(low <= device < high for low, high in list(self._bounds)):
                self.check_device(device, nbytes, what)
                self.check_host(host, nbytes, what)

    # Host memory.

    def lock(self, address: int, nbytes: int, refused: type[Exception]) -> None:
        with self._lock:
            if any(start < address + nbytes and address < end for start, end in self._locked.copy().items()):
                raise refused("this memory is page-locked already")
            self.calls += 1
            self._locked[address] = address + nbytes

    def unlock(self, address: int) -> None:
        self.calls += 1
        if self._locked.pop(address, None) is None:
            self.violations.append("host memory was unlocked that is not locked")

    def is_locked(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._locked.copy().items())

    def check_host(self, address: int, nbytes: int, what: str) -> None:
        """Note a range that is not page-locked as a whole."""
        at, ranges = address, sorted(self._locked.copy().items())
        for start, end in ranges:
            if start <= at < end:
                at = end
        if at < address + nbytes:
            self.violations.append(f"{what} of {nbytes} bytes of host memory of which byte {at - address} is not page-locked")

    def _settle(self) -> None:
        while self._freed:
            start, size = self._freed.popleft()
            self._starts.remove(start)
            self._dirty.append((start, size))
            self._put_back(start, size)

    def _put_back(self, start: int, size: int) -> None:
        """Merge with what is free beside it, inside one segment; the last in is the first out."""
        for low, high in self._bounds:
            if low <= start < high:
                break
        for other in [(at, n) for at, n in self._free if low <= at < high and (at + n == start or start + size == at)]:
            self._free.remove(other)
            start, size = min(start, other[0]), size + other[1]
        self._free.append((start, size))

    def _take(self, index: int, size: int) -> None:
        start, free = self._free.pop(index)
        if free > size:
            self._free.append((start + size, free - size))

    def _grow(self, size: int) -> int:
        memory = np.full(max(SEGMENT, size) + ALIGNMENT, POISON, np.uint8)
        self._segments.append(memory)
        start = -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        end = start + (memory.ctypes.data + memory.nbytes - start) // ALIGNMENT * ALIGNMENT
        self._bounds.append((start, end))
        if end - start > size:
            self._free.insert(0, (start + size, end - start - size))
        return start

    def _look_at_poison(self, start: int, size: int) -> None:
        for low, high in self._bounds:
            if low <= start < high:
                memory = bytes_at(start, size)
                if not (memory == POISON).all():
                    self.violations.append(f"device memory was written after it was freed: {size} bytes at {start:#x}")
                    ctypes.memset(start, POISON, size)


DRIVER = Driver()


@final
class StrictBlock:
    """A block of the arena. It has a finalizer as long as the protocol frees blocks by theirs."""

    __slots__ = ("__weakref__", "_by_itself", "address", "nbytes", "ready")

    def __init__(self, address: int, nbytes: int, *, by_itself: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.ready = None
        self._by_itself = by_itself

    def __del__(self) -> None:
        if self._by_itself:
            DRIVER.free(self.address)


class Visible(np.ndarray[Any, np.dtype[Any]]):
    """An array whose hold on its memory the garbage collector sees, as that of arrays written in Python: NumPy's own hides it."""

    held: object = None

    def __array_finalize__(self, other: object) -> None:
        self.held = getattr(other, "held", None)


class StrictStager:
    """A backend over host memory, its memory and copies by way of `DRIVER`; all else is the backend's own.

    It says that it is a GPU, so that the core does what it does for those.

    `locks`: it says that its pinned memory is page-locked, and is held to it. `visible`: its arrays are `Visible`.
    """

    def __init__(self, backend: Any, *, locks: bool, visible: bool = False) -> None:
        self._backend = backend
        self.on_gpu = True
        if visible:
            self.as_array = self._as_visible
        self._locks = locks
        self.capabilities = dataclasses.replace(backend.capabilities, pinned=locks)
        self._failure = backend.failures[1]
        # By a method of the backend's, or else by their finalizers.
        self._frees = hasattr(backend, "free_device")
        if self._frees:
            self.free_device = self._free_device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def alloc_device(self, nbytes: int) -> StrictBlock:
        return StrictBlock(DRIVER.allocate(nbytes), nbytes, by_itself=not self._frees)

    def _free_device(self, block: StrictBlock) -> None:
        DRIVER.free(block.address)

    def _as_visible(
        self, block: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, after: Any, lease: object
    ) -> Visible:
        nbytes = math.prod(shape) * dtype.itemsize
        array = np.ndarray.__new__(Visible, shape, dtype, bytes_at(block.address + offset, nbytes))
        array.held = (lease, block)
        return array

    def alloc_pinned(self, nbytes: int) -> int:
        address: int = self._backend.alloc_pinned(nbytes)
        DRIVER.lock(address, nbytes, self._failure)
        return address

    def free_pinned(self, address: int) -> None:
        DRIVER.unlock(address)
        self._backend.free_pinned(address)

    def pin(self, address: int, nbytes: int) -> None:
        DRIVER.lock(address, nbytes, self._failure)
        self._backend.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        DRIVER.unlock(address)
        self._backend.unpin(address)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        if not self._locks:
            return bool(self._backend.is_pinned(address, nbytes))
        # Both ends, by whomever: all that a driver says.
        return DRIVER.is_locked(address) and DRIVER.is_locked(address + max(nbytes, 1) - 1)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self._check(dst, src, nbytes, "a copy to the device was started")
        self._backend.h2d.submit(partial(self._check, dst, src, nbytes, "a copy to the device was run"))
        self._backend.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self._check(src, dst, nbytes, "a copy to the host was started")
        self._backend.d2h.submit(partial(self._check, src, dst, nbytes, "a copy to the host was run"))
        self._backend.copy_d2h(dst, src, nbytes)

    def _check(self, device: int, host: int, nbytes: int, what: str) -> None:
        DRIVER.check_device(device, nbytes, what)
        # Where nothing is really locked, it must be memory that was given out as if it were.
        DRIVER.check_host(host, nbytes, what)
