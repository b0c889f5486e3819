"""Arrays that travel together: which of them, and how their bytes are laid one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from xferlib.memory.arrays import Array
from xferlib.memory.blocks import ALIGNMENT
from xferlib.memory.foreign import is_foreign
from xferlib.packing import PackedBlock

__all__ = ["CoalescedCopy", "Placed", "coalesce", "copy_in", "packed_copy"]

BYTES = np.dtype(np.uint8)
_PADS = [np.zeros(nbytes, np.uint8) for nbytes in range(ALIGNMENT)]


class CoalescedCopy(NamedTuple):
    """A range of device memory, and the host arrays that lie in it one after the other, pads included."""

    address: int
    nbytes: int
    arrays: Sequence[Array]
    dtype: np.dtype[Any] | None = None
    """The dtype of all arrays, where there are several; None: they are taken as bytes."""
    foreign: bool = False
    """Whether some of several arrays may lie in memory that is not NumPy's own, but a file's. Contiguous ones are bytes then."""


class Placed(NamedTuple):
    """A pageable array and the device address that it goes to."""

    address: int
    array: Array
    block: int
    """Arrays with the same number lie in one block of device memory. Two blocks may lie side by side, but no copy may span them."""


def coalesce(leaves: Sequence[Placed]) -> list[CoalescedCopy]:
    """Join small arrays into as few copies as possible, where they follow each other in one block.

    The bytes between them, fewer than 256, are overwritten.
    """
    if len(leaves) == 1:
        ((address, array, _),) = leaves
        return [CoalescedCopy(address, array.nbytes, (array,))]
    copies: list[CoalescedCopy] = []
    arrays: list[Array] = []
    start = end = last = 0
    foreign = False
    for address, array, block in leaves:
        nbytes = array.nbytes
        gap = address - end
        if not arrays or block != last or not 0 <= gap < ALIGNMENT:
            if arrays:
                copies.append(CoalescedCopy(start, end - start, arrays, None, len(arrays) > 1 and foreign))
            arrays, start, last, foreign = [], address, block, False
        elif gap:
            arrays.append(_PADS[gap])
        if is_foreign(array):
            foreign = True
            # The others are copied only where a file that is cut off meanwhile is survived.
            arrays.append(_as_bytes(array) if array.flags.c_contiguous else array)
        else:
            arrays.append(_as_bytes(array))
        end = address + nbytes
    if arrays:
        copies.append(CoalescedCopy(start, end - start, arrays, None, len(arrays) > 1 and foreign))
    return copies


def packed_copy(packed: PackedBlock, address: int, arrays: Sequence[Array]) -> CoalescedCopy:
    """Return the one copy that takes the arrays of a packed block to an address. The bytes between them are overwritten."""
    if packed.dtype is None:
        arrays = list(map(_as_bytes, arrays))
    if packed.pads is not None:
        arrays = list(chain.from_iterable(zip(arrays, packed.pads, strict=True)))
    return CoalescedCopy(address, packed.extent, arrays, packed.dtype)


def copy_in(coalesced: CoalescedCopy, into: Array) -> None:
    """Copy the arrays one behind the other into bytes of that size."""
    arrays = coalesced.arrays
    if len(arrays) > 1:
        # Without an axis arrays of any shapes, and of any layouts, are taken in C order.
        np.concatenate(arrays, axis=None, out=into if coalesced.dtype is None else into.view(coalesced.dtype))
        return
    (array,) = arrays
    flat = array.dtype is BYTES and array.ndim == 1
    np.copyto(into if flat else np.ndarray(array.shape, array.dtype, buffer=into), array)


def _as_bytes(array: Array) -> Array:
    """Return an array of one axis over the bytes; a copy of those that are not contiguous."""
    try:
        return array if array.dtype is BYTES and array.ndim == 1 else array.reshape(-1).view(np.uint8)
    except ValueError:
        # Not contiguous: copied now, and once more. It is small.
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
