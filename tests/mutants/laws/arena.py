"""The host backend as if a driver gave out its device memory: what was freed last is handed out first, to whoever asks.

Its arrays are objects that the garbage collector looks into, as those of most frameworks are: what they hold is part of a reference
cycle that they are in. Both are honest; memory that is released too early belongs to others at once.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from typing import Any, NamedTuple, final

import numpy as np
from xferlib_host._stream import CopyError
from xferlib_host.conformance import TestHost

from tests.mutants.laws.broken import BrokenBackend

__all__ = ["ArenaBackend", "ArenaHost", "Block", "DeviceArray"]

ARENA_NBYTES = 512 << 20
"""Of address space: pages that nobody writes take no memory."""
ALIGNMENT = 256


class Block(NamedTuple):
    """Device memory. Without a finalizer: it is the arena's until `free_device`."""

    address: int
    nbytes: int
    ready: None = None


class DeviceArray(np.ndarray[Any, np.dtype[Any]]):
    """An array whose attributes the collector sees. Its views hold the lease, too."""

    lease: object = None

    def __array_finalize__(self, base: object) -> None:
        self.lease = getattr(base, "lease", None)


@final
class Arena:
    """Device memory of one size of device. Any thread."""

    def __init__(self) -> None:
        self._memory = np.empty(ARENA_NBYTES, np.uint8)
        self._next = -(-self._memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._end = self._memory.ctypes.data + ARENA_NBYTES
        self._idle: defaultdict[int, list[int]] = defaultdict(list)
        self._taken: dict[int, int] = {}
        self.calls = 0

    def take(self, nbytes: int) -> int:
        self.calls += 1
        nbytes = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        if self._idle[nbytes]:
            address = self._idle[nbytes].pop()
        else:
            address, self._next = self._next, self._next + nbytes
            assert self._next <= self._end, "the arena is full"
        self._taken[address] = nbytes
        return address

    def give_back(self, address: int) -> None:
        """Take back what was handed out; what was not is ignored, as some drivers do."""
        nbytes = self._taken.pop(address, None)
        if nbytes is not None:
            self.calls += 1
            self._idle[nbytes].append(address)

    def is_cut(self, address: int, nbytes: int) -> bool:
        """Tell whether the range begins in one allocation and ends in another."""
        return any(start <= address < start + had < address + nbytes for start, had in self._taken.copy().items())

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], lease: object) -> DeviceArray:
        raw: Any = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
        array = DeviceArray(shape, dtype, raw)
        array.lease = lease
        return array


class ArenaBackend(BrokenBackend):
    """Device memory from the arena."""

    def __init__(self, inner: Any, arena: Arena) -> None:
        super().__init__(inner)
        self.arena = arena

    def alloc_device(self, nbytes: int) -> Any:
        return Block(self.arena.take(nbytes), nbytes)

    def free_device(self, block: Any) -> None:
        self.arena.give_back(block.address)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        if self.arena.is_cut(dst, nbytes):
            raise CopyError("invalid argument: the destination lies in several allocations")
        self.inner.copy_h2d(dst, src, nbytes)

    def as_array(self, block: Any, offset: int, shape: Any, dtype: Any, *, after: Any, lease: object) -> Any:
        return self.arena.array(block.address + offset, shape, dtype, lease)


class _Owner:
    """What an array holds that was made without a stager."""


class ArenaHost(TestHost):
    """Honest hooks for it."""

    @property
    def arena(self) -> Arena:
        made = self.__dict__.get("_arena")
        if made is None:
            made = self.__dict__["_arena"] = Arena()
        assert isinstance(made, Arena)
        return made

    def open(self) -> Any:
        return ArenaBackend(super().open(), self.arena)

    def from_numpy(self, values: np.ndarray) -> Any:
        owner, address = _Owner(), self.arena.take(values.nbytes)
        weakref.finalize(owner, self.arena.give_back, address).atexit = False
        array = self.arena.array(address, values.shape, values.dtype, owner)
        array[...] = values
        return array

    def to_numpy(self, array: Any) -> np.ndarray:
        return np.array(array, subok=False)

    def memory_calls(self, stager: Any) -> int:
        return super().memory_calls(stager) + self.arena.calls
