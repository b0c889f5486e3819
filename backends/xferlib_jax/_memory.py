"""Host memory where the device is the CPU: "pinned" memory, memory pinned in place and device blocks, and the count of such calls.

Invariant: what was handed out is in a table until it is given back. Giving back takes no lock, because finalizers do it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any, final

import numpy as np

__all__ = ["Block", "Memory", "MemoryCallError"]

ALIGNMENT = 256


class MemoryCallError(Exception):
    """Raised when memory cannot be had, is pinned already, or is not what it is given back as."""


@final
class Memory:
    """The tables of one stager. It outlives `close()`, and its blocks outlive it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # For what adds to a table; never taken to remove.
        self._pages: dict[int, mmap.mmap] = {}
        self._ends: dict[int, int] = {}  # Where each range that may be copied directly ends, by its start.
        self._blocks: dict[int, int] = {}
        self._made = 0

    @property
    def calls(self) -> int:
        """How often memory was allocated, freed, pinned or unpinned."""
        with self._lock:
            # What was made and is not in its table any more was given back.
            return 2 * self._made - len(self._ends) - len(self._blocks)

    def alloc_pinned(self, nbytes: int) -> int:
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryCallError(f"the system has no {nbytes!r} bytes for pinned memory. Ask for less") from error
        # The export ends with this line: pages with an exported buffer could not be unmapped later.
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        with self._lock:
            self._pages[address] = pages
            self._ends[address] = address + nbytes
            self._made += 1
        return address

    def free_pinned(self, address: int) -> None:
        pages = self._pages.pop(address, None)
        if pages is None:
            raise MemoryCallError(f"no pinned memory starts at {address:#x}. Free what alloc_pinned returned, once")
        del self._ends[address]
        pages.close()

    def pin(self, address: int, nbytes: int) -> None:
        end = address + nbytes
        with self._lock:
            if any(start < end and address < stop for start, stop in self._ends.copy().items()):
                raise MemoryCallError(f"memory from {address:#x} to {end:#x} is pinned already, all or part of it. Unpin it first")
            self._ends[address] = end
            self._made += 1

    def unpin(self, address: int) -> None:
        if address in self._pages or self._ends.pop(address, None) is None:
            raise MemoryCallError(f"no memory was pinned at {address:#x}. Unpin what was given to pin, once")

    def is_pinned(self, address: int, nbytes: int) -> bool:
        last = address + max(nbytes, 1) - 1
        ranges = list(self._ends.copy().items())
        return all(any(start <= end < stop for start, stop in ranges) for end in (address, last))

    def alloc_device(self, nbytes: int) -> Block:
        try:
            memory = np.empty(nbytes + ALIGNMENT - 1, np.uint8)
        except MemoryError as error:
            raise MemoryCallError(f"the system has no {nbytes!r} bytes for device memory. Ask for less") from error
        start: int = memory.__array_interface__["data"][0]
        address = -(-start // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._blocks[address] = nbytes
            self._made += 1
        return Block(address, nbytes, memory, self._blocks)


@final
class Block:
    """Memory that JAX arrays lie in, freed when the last reference goes."""

    __slots__ = ("__weakref__", "_live", "_memory", "address", "nbytes", "ready")

    def __init__(self, address: int, nbytes: int, memory: np.ndarray[Any, Any], live: dict[int, int]) -> None:
        self.address = address
        self.nbytes = nbytes
        self.ready = None
        self._memory = memory
        self._live = live

    def __del__(self) -> None:
        # Before the memory itself goes, while nobody else can be given this address.
        del self._live[self.address]
