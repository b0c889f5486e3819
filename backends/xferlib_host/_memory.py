"""Host memory as a driver would hand it out: "pinned" memory, memory pinned in place, device blocks; and the count of such calls.

Invariant: what was handed out is in a table until it is given back, and only the tables own it: an array over a freed block reads
whatever lies there then. There is no lock, since a finaliser of the caller's may come back in here; each table changes in one step.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "Calls", "Memory", "MemoryCallError", "array_over"]

_ALIGNMENT = 256
_FREED = 0xA5
"""What freed memory holds, so that whoever still reads it does not find the right values by luck."""


class MemoryCallError(Exception):
    """Raised when memory cannot be had, is pinned already, or is given back as something that it is not."""


class Calls(NamedTuple):
    """How many calls of each kind have succeeded so far."""

    pinned_allocations: int
    pinned_frees: int
    pins: int
    unpins: int
    device_allocations: int
    device_frees: int


@final
class _Count:
    """A number that goes up by one. Each method is one step, so neither a thread nor a finaliser can come in between."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = itertools.repeat(None, sys.maxsize)

    def add(self) -> None:
        next(self._left)

    def value(self) -> int:
        return sys.maxsize - operator.length_hint(self._left)


@final
class Block:
    """Device memory. Its table owns the bytes; the block says where they are."""

    __slots__ = ("__weakref__", "address", "nbytes", "ready")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.ready = None


class _Row(NamedTuple):
    """A block that is not freed, and its memory."""

    block: Block
    memory: npt.NDArray[np.uint8]


@final
class Memory:
    """The tables of one stager. It outlives `close()`."""

    def __init__(self) -> None:
        self._pinned: dict[int, tuple[int, mmap.mmap]] = {}  # Where each range ends, and its pages.
        self._registered: dict[int, tuple[int]] = {}  # Where each range ends.
        self._device: dict[int, _Row] = {}
        self._counts = {kind: _Count() for kind in Calls._fields}

    def alloc_pinned(self, nbytes: int) -> int:
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryCallError(f"the system has no {nbytes!r} bytes for pinned memory. Ask for less") from error
        # The export ends with this line: pages with an exported buffer could not be unmapped later.
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._pinned[address] = (address + nbytes, pages)
        self._counts["pinned_allocations"].add()
        return address

    def free_pinned(self, address: int) -> None:
        found = self._pinned.pop(address, None)
        if found is None:
            raise MemoryCallError(f"no pinned memory starts at {address:#x}. Free what alloc_pinned returned, once")
        found[1].close()
        self._counts["pinned_frees"].add()

    def pin(self, address: int, nbytes: int) -> None:
        end = address + nbytes
        taken = MemoryCallError(f"memory from {address:#x} to {end:#x} is pinned already, all or part of it. Unpin it first")
        mine = (end,)
        # Entered before the others are looked at: if two pins that overlap come at once, at least one sees the other.
        if self._registered.setdefault(address, mine) is not mine:
            raise taken
        if sum(start < end and address < stop for start, stop in self._ranges()) > 1:
            self._registered.pop(address, None)
            raise taken
        self._counts["pins"].add()

    def unpin(self, address: int) -> None:
        if self._registered.pop(address, None) is None:
            raise MemoryCallError(f"no memory was pinned at {address:#x}. Unpin what was given to pin, once")
        self._counts["unpins"].add()

    def is_pinned(self, address: int, nbytes: int) -> bool:
        last = address + max(nbytes, 1) - 1
        found = self._pinned.get(address)
        if found is not None and last < found[0]:
            return True  # A block as it was allocated: the usual case needs no search.
        ranges = list(self._ranges())
        return all(any(start <= end < stop for start, stop in ranges) for end in (address, last))

    def alloc_device(self, nbytes: int) -> Block:
        try:
            memory = np.empty(nbytes + _ALIGNMENT - 1, np.uint8)
        except MemoryError as error:
            raise MemoryCallError(f"the system has no {nbytes!r} bytes for device memory. Ask for less") from error
        start: int = memory.__array_interface__["data"][0]
        block = Block(-(-start // _ALIGNMENT) * _ALIGNMENT, nbytes)
        self._device[block.address] = _Row(block, memory)
        self._counts["device_allocations"].add()
        return block

    def free_device(self, block: object) -> None:
        """Free a block, whoever may still read it."""
        address = getattr(block, "address", 0)
        found = self._device.get(address)
        # By identity: at the address of a freed block another one may lie by now.
        if found is None or found.block is not block or self._device.pop(address, None) is None:
            raise MemoryCallError(f"no device memory of {block!r} at {address:#x}. Free what alloc_device returned, once")
        found.memory.fill(_FREED)
        self._counts["device_frees"].add()

    def calls(self) -> Calls:
        return Calls(**{kind: count.value() for kind, count in self._counts.items()})

    def _ranges(self) -> Iterator[tuple[int, int]]:
        # Copies, made in one step: another thread, or a finaliser on this one, may change a table at any time.
        for start, (stop, _) in self._pinned.copy().items():
            yield start, stop
        for start, (stop,) in self._registered.copy().items():
            yield start, stop


@final
class _Bytes:
    """Bytes that NumPy can look at; every array and view over them keeps this object, and so the lease, but not the memory."""

    __slots__ = ("__array_interface__", "_lease")

    def __init__(self, lease: object, address: int, nbytes: int) -> None:
        self.__array_interface__: Mapping[str, Any] = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self._lease = lease


def array_over(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, lease: object) -> npt.NDArray[Any]:
    """Make an array over memory that its owner keeps. It begins as bytes: the array interface has no words for extension dtypes."""
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    raw = np.asarray(_Bytes(lease, address, nbytes))
    return np.ndarray(shape, dtype, raw)
