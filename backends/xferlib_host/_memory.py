"""Host memory as a driver would hand it out: "pinned" memory, memory pinned in place, device blocks; and the count of such calls.

Invariant: what was handed out is in a table until it is given back, and the tables are never wrong about live memory.
Giving back takes no lock, because finalisers do it, on any thread, also inside the garbage collector: one step on a dictionary.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "Calls", "Memory", "MemoryCallError", "array_over"]

_ALIGNMENT = 256


class MemoryCallError(Exception):
    """Raised when memory cannot be had, is pinned already, or is not what it is given back as."""


class Calls(NamedTuple):
    """How many calls of each kind have succeeded so far."""

    pinned_allocations: int
    pinned_frees: int
    pins: int
    unpins: int
    device_allocations: int
    device_frees: int


@final
class Memory:
    """The tables of one stager. It outlives `close()`, and its blocks outlive it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # For what adds to a table; never taken to remove.
        self._pinned: dict[int, tuple[int, mmap.mmap]] = {}  # Where each range ends, and its pages.
        self._registered: dict[int, int] = {}  # Where each range ends.
        self._device: dict[int, int] = {}  # How many bytes each block has.
        self._pinned_made = self._registered_made = self._device_made = 0

    def alloc_pinned(self, nbytes: int) -> int:
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryCallError(f"the system has no {nbytes!r} bytes for pinned memory. Ask for less") from error
        # The export ends with this line: pages with an exported buffer could not be unmapped later.
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        with self._lock:
            self._pinned[address] = (address + nbytes, pages)
            self._pinned_made += 1
        return address

    def free_pinned(self, address: int) -> None:
        found = self._pinned.pop(address, None)
        if found is None:
            raise MemoryCallError(f"no pinned memory starts at {address:#x}. Free what alloc_pinned returned, once")
        found[1].close()

    def pin(self, address: int, nbytes: int) -> None:
        end = address + nbytes
        with self._lock:
            if any(start < end and address < stop for start, stop in self._ranges()):
                raise MemoryCallError(f"memory from {address:#x} to {end:#x} is pinned already, all or part of it. Unpin it first")
            self._registered[address] = end
            self._registered_made += 1

    def unpin(self, address: int) -> None:
        if self._registered.pop(address, None) is None:
            raise MemoryCallError(f"no memory was pinned at {address:#x}. Unpin what was given to pin, once")

    def is_pinned(self, address: int, nbytes: int) -> bool:
        last = address + max(nbytes, 1) - 1
        found = self._pinned.get(address)
        if found is not None and last < found[0]:
            return True  # A block as it was allocated: what is mostly asked about, without a search.
        ranges = list(self._ranges())
        return all(any(start <= end < stop for start, stop in ranges) for end in (address, last))

    def alloc_device(self, nbytes: int) -> Block:
        try:
            memory = np.empty(nbytes + _ALIGNMENT - 1, np.uint8)
        except MemoryError as error:
            raise MemoryCallError(f"the system has no {nbytes!r} bytes for device memory. Ask for less") from error
        start: int = memory.__array_interface__["data"][0]
        address = -(-start // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._device[address] = nbytes
            self._device_made += 1
        return Block(address, nbytes, memory, self._device)

    def free_device(self, block: Block) -> None:
        if self._device.pop(block.address, None) is None:
            raise MemoryCallError(f"no device memory is at {block.address:#x}. Free what alloc_device returned, once")
        block._memory = None

    def calls(self) -> Calls:
        """Count. What was made and is not in its table any more was given back."""
        with self._lock:
            return Calls(
                self._pinned_made,
                self._pinned_made - len(self._pinned),
                self._registered_made,
                self._registered_made - len(self._registered),
                self._device_made,
                self._device_made - len(self._device),
            )

    def _ranges(self) -> Iterator[tuple[int, int]]:
        # Copies, made in one step: another thread, or a finaliser on this one, may change a table at any time.
        for start, (stop, _) in self._pinned.copy().items():
            yield start, stop
        yield from self._registered.copy().items()


@final
class Block:
    """Device memory that is freed when the last reference goes."""

    __slots__ = ("__weakref__", "_live", "_memory", "address", "nbytes", "ready")

    def __init__(self, address: int, nbytes: int, memory: npt.NDArray[np.uint8], live: dict[int, int]) -> None:
        self.address = address
        self.nbytes = nbytes
        self.ready = None
        self._memory = memory
        self._live = live


@final
class _Bytes:
    """Bytes that NumPy can look at; every array and view over them keeps this object, and so the lease and the block."""

    __slots__ = ("__array_interface__", "_block", "_lease")

    def __init__(self, block: object, lease: object, address: int, nbytes: int) -> None:
        self.__array_interface__: Mapping[str, Any] = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self._block = block
        self._lease = lease


def array_over(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, block: object, lease: object) -> npt.NDArray[Any]:
    """Make an array over memory of the block. As bytes first: the array interface cannot spell the dtypes of extensions."""
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    raw = np.asarray(_Bytes(block, lease, address, nbytes))
    return np.ndarray(shape, dtype, raw)
