"""Arrays that several devices share, read for one file, each shard by the stager of its device.

A piece of the file has of each shard bytes that lie side by side there. Where they do so in the piece, too, they are copied to
their place. Else each device copies all that it has of the piece at once, and the CPU lays it out, in memory of its own.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import numpy as np

from xferlib.byte_reader import ByteReader, Numbers
from xferlib.checks import check_like_array, without_arrays
from xferlib.errors import AllocationError, XferError
from xferlib.files.regions import Region, region
from xferlib.files.temporary import BORDER
from xferlib.latch import Turn
from xferlib.memory.arrays import Array, address_of
from xferlib.protocol import HostStager
from xferlib.stager import Stager
from xferlib.transfer import Transfer
from xferlib.tree import ShapeDtype, note_place, trees_of

__all__ = ["ShardedArrays", "ShardedReader"]

WORTH_A_COPY = 64 << 10
"""Bytes. If there are fewer for each copy, the CPU lays a piece out in less time than it starts them; but one for each device."""

Shard: TypeAlias = tuple[Stager, Any, tuple[int, ...]]
"""Whose device has it, the array that it is there, and the index of its first item in the whole."""


class ShardedArrays(Protocol):
    """What may stand in a stager's place for `save`: it knows the shards of arrays.

    Attributes:
        backend: Says what the device arrays are, and which trees there are.
        stagers: Those of all shards, each once. What one has pinned is pinned for all.
    """

    @property
    def backend(self) -> HostStager[Any]: ...

    @property
    def stagers(self) -> Sequence[Stager]: ...

    def shards(self, array: Any) -> list[Shard]:
        """Return shards that have each item of an array once. Raises `TypeError` and `ValueError` for what cannot be read."""

    def release(self) -> None:
        """Let the stagers go: nothing more is read. Any thread, any number of times. Not called if an interrupt comes before."""


class _ShardPlace(NamedTuple):
    """A shard: its number in the reader of its stager, and where it begins in the array."""

    reader: ByteReader
    number: int
    start: tuple[int, ...]


class _ShardBytes(NamedTuple):
    """What a piece has of a shard: bytes from `first` on. `where`: where the array begins, from the front of the piece on."""

    number: int
    region: Region
    first: int
    nbytes: int
    where: int


_Copy: TypeAlias = tuple[ByteReader, int, list[_ShardBytes]]
"""Whose, to which place in the piece, and of what, one behind the other."""


@final
class ShardedReader:
    """Reads the arrays of a tree as a `ByteReader` does, for threads of ours. What is not said here is as there."""

    def __init__(self, arrays: ShardedArrays, tree: Any, *, snapshot: bool) -> None:
        trees = trees_of(arrays.backend)
        leaves, self.spec = trees.arrays(tree)
        if not leaves:
            raise without_arrays(tree, self.spec, "a device array", "Numbers and text are on the host already")
        of_stager: dict[int, list[Any]] = {id(stager): [] for stager in arrays.stagers}
        found: list[list[tuple[int, int, tuple[int, ...]]]] = []
        for index, leaf in enumerate(leaves):
            found.append([])
            try:
                # What else may be an array is a matter of a backend that describes its own.
                if not hasattr(arrays.backend, "describe"):
                    check_like_array(leaf)
                for stager, array, start in arrays.shards(leaf):
                    found[-1].append((id(stager), len(of_stager[id(stager)]), start))
                    of_stager[id(stager)].append(array)
            except (TypeError, ValueError) as error:
                note_place(error, self.spec, index)
                raise
        self.described: list[ShapeDtype] = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
        self.sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self.described]
        self._arrays: ShardedArrays | None = arrays
        readers: dict[int, ByteReader] = {}
        self._readers = readers.values()
        try:
            _open(readers, arrays.stagers, of_stager, snapshot=snapshot)
        except BaseException:
            self.close()
            raise
        self.snapshot = all(reader.snapshot for reader in self._readers)
        self._shards = [[_ShardPlace(readers[stager], number, start) for stager, number, start in some] for some in found]
        self._turns = itertools.cycle(list(self._readers))

    def empty(self, nbytes: int, *, wait: bool = True) -> Array:
        """Return memory of each stager's pool in turn, or of one that has room, or where something in flight will make some."""
        for waits in (False, True) if wait else (False,):
            for _ in self._readers:
                with suppress(AllocationError):
                    return next(self._turns).empty(nbytes, wait=waits)
        return next(self._turns).empty(nbytes, wait=wait)

    def read_row(self, arrays: Numbers, skipped: int, nbytes: int, out: Array) -> _ShardedRead:
        """Start copying what a `ByteReader` would. What is returned gives the bytes by `result`, perhaps not in `out`."""
        found = self._found(arrays, skipped, nbytes)
        copies = _in_place(found, nbytes)
        read = _ShardedRead(out[:nbytes], [one for some in found.values() for one in some] if copies is None else [])
        try:
            for reader, place, some in _packed(found) if copies is None else copies:
                numbers, starts, sizes = np.array([(one.number, one.first, one.nbytes) for one in some], np.int64).T.copy()
                read.transfers.append(reader.read_each(numbers, starts, sizes, out[place : place + int(sizes.sum())]))
        except BaseException:
            read.wait()
            raise
        return read

    def _found(self, arrays: Numbers, skipped: int, nbytes: int) -> dict[ByteReader, list[_ShardBytes]]:
        """Return what a piece has of each shard, in the order of the piece."""
        found: dict[ByteReader, list[_ShardBytes]] = defaultdict(list)
        turn = Turn()
        where = -skipped
        for index in arrays.tolist():
            shape, dtype = self.described[index]
            front, end = max(0, -where), min(self.sizes[index], nbytes - where)
            for reader, number, start in self._shards[index]:
                extents, _ = reader.described[number]
                place = region(shape, dtype.itemsize, start, extents)
                first, last = place.before(front), place.before(end)
                if first < last:
                    found[reader].append(_ShardBytes(number, place, first, last - first, where))
            where += self.sizes[index]
            turn.end_if_long()
        return found

    def hand_over(self) -> None:
        for reader in self._readers:
            reader.hand_over()

    def join(self) -> None:
        for reader in self._readers:
            reader.join()

    def leave(self) -> None:
        for reader in self._readers:
            reader.leave()

    def let_go(self) -> None:
        """Let go of the arrays, and of their stagers. Called behind `close`, when nothing is under way."""
        for reader in self._readers:
            reader.let_go()
        if self._arrays is not None:
            # What goes wrong as they are closed is nothing of what was read.
            with suppress(XferError):
                self._arrays.release()
            self._arrays = None

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


@final
class _ShardedRead:
    """Bytes that several stagers copy to one piece of memory. `packed`: what is to be laid out when they are there, in order."""

    def __init__(self, memory: Array, packed: list[_ShardBytes]) -> None:
        self.transfers: list[Transfer[Array]] = []
        self._memory = memory
        self._packed = packed

    def wait(self) -> None:
        """Block until all copies are over, whether they failed or not."""
        for transfer in self.transfers:
            with suppress(XferError):
                transfer.synchronize()

    def result(self) -> Array:
        """Block until the bytes are there, and return them, in memory that lies at the file's borders as that of the copies does.

        Raises `TransferError` when no copy is under way any more.
        """
        self.wait()
        for transfer in self.transfers:
            transfer.synchronize()
        return self._laid_out() if self._packed else self._memory

    def _laid_out(self) -> Array:
        memory = self._memory
        more = np.empty(memory.nbytes + BORDER, np.uint8)
        begin = (address_of(memory) - address_of(more)) % BORDER
        target = more[begin : begin + memory.nbytes]
        turn = Turn()
        taken = 0
        for _, place, first, nbytes, where in self._packed:
            place.lay(memory[taken : taken + nbytes], first, target, where, turn)
            taken += nbytes
        return target


def _open(readers: dict[int, ByteReader], stagers: Sequence[Stager], arrays: Mapping[int, list[Any]], *, snapshot: bool) -> None:
    """Enter a reader for each stager that has arrays, by its number. What is entered when this raises is to be closed."""
    for stager in stagers:
        if arrays[id(stager)]:
            readers[id(stager)] = stager.reader(arrays[id(stager)], snapshot=snapshot)


def _in_place(found: Mapping[ByteReader, list[_ShardBytes]], nbytes: int) -> list[_Copy] | None:
    """Return copies that bring everything to its place in a piece of so many bytes. None: it is to be laid out."""
    copies: list[_Copy] = []
    most = max(len(found), nbytes // WORTH_A_COPY)
    for reader, some in found.items():
        end = None
        for one in some:
            if one.region.offset is None:
                return None
            place = one.where + one.region.offset + one.first
            if place != end:
                copies.append((reader, place, []))
                if len(copies) > most:
                    return None
            copies[-1][2].append(one)
            end = place + one.nbytes
    return copies


def _packed(found: Mapping[ByteReader, list[_ShardBytes]]) -> list[_Copy]:
    """Return copies that bring everything to the same memory, one behind the other."""
    ends = itertools.accumulate([sum([one.nbytes for one in some]) for some in found.values()], initial=0)
    return [(reader, end, some) for end, (reader, some) in zip(ends, found.items(), strict=False)]
