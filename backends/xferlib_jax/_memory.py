"""Host memory where the device is the CPU: "pinned" memory, memory pinned in place and device memory, and the count of such calls.

Invariant: what was handed out is in a table, which alone keeps it alive, until it is given back. Tables change in single steps, so
there is no lock that a finalizer could meet.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, final

import numpy as np

__all__ = ["Block", "Memory", "MemoryCallError"]

ALIGNMENT = 256


class MemoryCallError(Exception):
    """Raised when memory cannot be had, is pinned already, or is given back as something that it is not."""


@final
class Block:
    """Memory that JAX arrays lie in. The table owns it: neither a block nor an array keeps it alive."""

    __slots__ = ("__weakref__", "address", "nbytes", "ready")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.ready = None


@final
class Memory:
    """The tables of one stager. They outlive `close()`. Any thread."""

    def __init__(self) -> None:
        self._pages: dict[int, mmap.mmap] = {}
        self._ends: dict[int, int] = {}  # Where each range that may be copied directly ends, by its start.
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}
        self._made: list[None] = []  # One for each row that ever was: appending is a single step, adding to a number is not.

    @property
    def calls(self) -> int:
        """How often memory was allocated, freed, pinned or unpinned."""
        # What was made and is no longer in its table was given back.
        return 2 * len(self._made) - len(self._ends) - len(self._blocks)

    @property
    def blocks(self) -> int:
        """How many blocks of device memory are not freed."""
        return len(self._blocks)

    def alloc_pinned(self, nbytes: int) -> int:
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryCallError(f"the system has no {nbytes!r} bytes for pinned memory. Ask for less") from error
        # The export ends with this line: pages with an exported buffer could not be unmapped later.
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._pages[address] = pages
        self._ends[address] = address + nbytes
        self._made.append(None)
        return address

    def free_pinned(self, address: int) -> None:
        try:
            pages = self._pages[address]
        except KeyError:
            raise MemoryCallError(f"no pinned memory starts at {address:#x}. Free what alloc_pinned returned, once") from None
        del self._pages[address], self._ends[address]
        pages.close()

    def pin(self, address: int, nbytes: int) -> None:
        """Enter the range. Of two threads that pin overlapping memory at the same moment, both may succeed."""
        end = address + nbytes
        if any(start < end and address < stop for start, stop in self._ends.copy().items()):
            raise MemoryCallError(f"memory from {address:#x} to {end:#x} is pinned already, all or part of it. Unpin it first")
        self._ends[address] = end
        self._made.append(None)

    def unpin(self, address: int) -> None:
        if address in self._pages or self._ends.pop(address, None) is None:
            raise MemoryCallError(f"no memory was pinned at {address:#x}. Unpin what was given to pin, once")

    def is_pinned(self, address: int, nbytes: int) -> bool:
        last = address + max(nbytes, 1) - 1
        begins = ends = False
        for start, stop in self._ends.copy().items():
            begins = begins or start <= address < stop
            ends = ends or start <= last < stop
        return begins and ends

    def alloc_device(self, nbytes: int) -> Block:
        try:
            memory = np.empty(nbytes + ALIGNMENT - 1, np.uint8)
        except MemoryError as error:
            raise MemoryCallError(f"the system has no {nbytes!r} bytes for device memory. Ask for less") from error
        start: int = memory.__array_interface__["data"][0]
        address = -(-start // ALIGNMENT) * ALIGNMENT
        self._blocks[address] = memory
        self._made.append(None)
        return Block(address, nbytes)

    def free_device(self, address: int) -> None:
        """Free a block, by its address. Raises `MemoryCallError` unless it is in the table."""
        try:
            del self._blocks[address]
        except KeyError:
            raise MemoryCallError(f"no device memory starts at {address:#x}. Free what alloc_device returned, once") from None
