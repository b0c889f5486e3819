"""Cutting transfers into what fits a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xferlib.memory.arrays import Array, pieces

__all__ = ["ALIGNMENT", "LEAST", "Part", "Placed", "cut", "flat_bytes", "lay", "pick_up", "run_of"]

ALIGNMENT = 256
BYTES = np.dtype(np.uint8)
LEAST = 1 << 20
"""Bytes. Below this the Python around a copy takes as long as the copy."""
FIRST = 512 << 10
"""Bytes of a transfer's first part, by which the next ones grow: the link has work soon, and threads do not all come at once."""
_PADS = [np.zeros(nbytes, np.uint8) for nbytes in range(ALIGNMENT)]


class Part(NamedTuple):
    """A range of device memory, and the host arrays that lie in it one after the other, pads included."""

    address: int
    nbytes: int
    arrays: Sequence[Array]


class Placed(NamedTuple):
    """A pageable array and the device address that it goes to."""

    address: int
    array: Array
    block: int
    """Arrays of one number lie in one piece of device memory. Others may lie side by side all the same: no copy may span two."""


def cut(address: int, array: Array, *, largest: int, ways: int, begins: bool = False) -> list[Part]:
    """Cut an array into parts of at most `largest` bytes, smaller towards the end, so that `ways` threads end together.

    `begins`: nothing is on the link before it, so the first parts are small, too.
    """
    if not array.flags.c_contiguous:
        parts = []
        for piece in pieces(array, largest):
            parts.append(Part(address, piece.nbytes, (piece,)))
            address += piece.nbytes
        return parts
    whole = flat_bytes(array)
    start, end = 0, whole.nbytes
    parts = []
    while start < end:
        most = min(largest, FIRST * (len(parts) + 1)) if begins else largest
        nbytes = min(end - start, size_of_next(end - start, most, ways))
        parts.append(Part(address + start, nbytes, (whole[start : start + nbytes],)))
        start += nbytes
    return parts


def run_of(leaves: Iterable[Placed], *, largest: int) -> list[Part]:
    """Join small arrays into parts of at most `largest` bytes, where they follow each other in one block.

    The bytes between them, fewer than 256, are overwritten.
    """
    parts: list[Part] = []
    arrays: list[Array] = []
    start = end = last = 0
    for address, array, block in leaves:
        nbytes = array.nbytes
        gap = address - end
        if not arrays or block != last or not 0 <= gap < ALIGNMENT or address + nbytes - start > largest:
            if arrays:
                parts.append(Part(start, end - start, arrays))
            arrays, start, last = [], address, block
        elif gap:
            arrays.append(_PADS[gap])
        # The time of a tree of many leaves is spent here.
        try:
            arrays.append(array if array.dtype is BYTES and array.ndim == 1 else array.reshape(-1).view(np.uint8))
        except ValueError:
            # Not contiguous: copied now, and once more. It is small.
            arrays.append(flat_bytes(np.ascontiguousarray(array)))
        end = address + nbytes
    if arrays:
        parts.append(Part(start, end - start, arrays))
    return parts


def size_of_next(left: int, largest: int, ways: int) -> int:
    """Return how much of what is left one thread should take."""
    share = left // (2 * ways)
    if share >= largest:
        return largest
    least = min(LEAST, largest)
    return max(least, -(-share // ALIGNMENT) * ALIGNMENT)


def lay(part: Part, into: Array) -> None:
    """Copy a part's arrays into bytes of its size."""
    arrays = part.arrays
    if len(arrays) > 1:
        np.concatenate(arrays, out=into)
        return
    (array,) = arrays
    np.copyto(into if array.dtype == np.uint8 and array.ndim == 1 else _shaped(into, array), array)


def pick_up(source: Array, part: Part) -> None:
    """Copy bytes of a part's size into its array."""
    (array,) = part.arrays
    np.copyto(array, source if array.dtype == np.uint8 and array.ndim == 1 else _shaped(source, array))


def flat_bytes(array: Array) -> Array:
    """Return a contiguous array's memory as bytes."""
    return array.reshape(-1).view(np.uint8)


def _shaped(memory: Array, like: Array) -> np.ndarray[Any, Any]:
    return np.ndarray(like.shape, like.dtype, buffer=memory)
