"""Where the arrays of one batch lie in a slot: the same words on both sides of the process boundary.

Pure arithmetic over bytes that others own. A worker is sent `SlotTree`. A structure with classes that are new to the other process
does not travel by pickle, so there it is kept as a tree with numbers at the leaves.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import optree

from xferlib.errors import AllocationError
from xferlib.memory.arrays import Array, check_dtype
from xferlib.memory.blocks import ALIGNMENT, PAGE, round_up
from xferlib.sketch import sketched
from xferlib.tree import PLAIN, Host, Spec, Trees, path, rides_along, unflatten
from xferlib.words import counted, in_words

__all__ = ["SlotArray", "SlotLayout", "SlotTree", "marked"]

Bytes = npt.NDArray[np.uint8]


class SlotArray(NamedTuple):
    """One array inside a slot. `offset` counts bytes from the slot's beginning."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]

    def view(self, slot: Bytes) -> Array:
        """Look at the slot's bytes. Raises `ValueError` if the array would reach beyond them."""
        return np.ndarray(self.shape, self.dtype, slot, self.offset, self.strides)


class SlotTree(NamedTuple):
    """A tree of arrays inside a slot: the numbers at its leaves count `arrays`, and a `Host` has what rides along in its place."""

    tree: Any
    arrays: tuple[SlotArray, ...]

    def views(self, slot: Bytes) -> Any:
        """Return the tree of arrays over these bytes."""
        marks, spec = PLAIN.flatten(self.tree)
        return unflatten(spec, [mark.value if isinstance(mark, Host) else self.arrays[mark].view(slot) for mark in marks])

    def returned(self, value: Any, slot: Bytes) -> SlotTree | None:
        """Say where a batch lies, from what `fill` returned: None: all of it; a number of rows; a tree of views of the slot.

        Text, numbers and what else rides along may stand beside the views.
        """
        if value is None:
            return None
        if isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_)):
            return self._rows(operator.index(value))
        leaves, structure = PLAIN.flatten(value)
        indices = [index for index, leaf in enumerate(leaves) if not rides_along(type(leaf))]
        arrays = tuple(_slot_array(leaves[index], slot, path(structure, index)) for index in indices)
        if not arrays:
            raise TypeError(f"fill returned {value!r}: expected None, a number of rows, or views of its slot")
        return SlotTree(marked(leaves, structure), arrays)

    def _rows(self, rows: int) -> SlotTree:
        room = min((array.shape[0] if array.shape else -1) for array in self.arrays)
        if not 0 <= rows <= room:
            raise ValueError(f"fill returned {counted(rows, 'row')}; the first axis of its slot has room for 0 to {room}")
        return self._replace(arrays=tuple(array._replace(shape=(rows, *array.shape[1:])) for array in self.arrays))


def marked(leaves: Sequence[Any], structure: Spec) -> Any:
    """Return the tree of `SlotTree` for these leaves: a number for each array, in order, and for each that rides along a `Host`."""
    numbers = itertools.count()
    return unflatten(structure, [Host(leaf) if rides_along(type(leaf)) else next(numbers) for leaf in leaves])


@final
class SlotLayout:
    """The batch that a slot has room for. It stays in its process.

    A leaf of `spec` is anything with a shape and a dtype, such as an array, or a pair (shape, dtype).
    Raises `TypeError` and `ValueError` for anything else.
    """

    def __init__(self, spec: Any, trees: Trees = PLAIN) -> None:
        leaves, structure = trees.flatten(_with_leaves(spec, trees))
        if not leaves:
            raise ValueError(f"there is no array in {spec!r}: expected a shape and dtype, or a tree of them")
        arrays = []
        end = 0
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, _Leaf):
                where = path(structure, index)
                raise TypeError(f"{where}: expected an array, or a pair (shape, dtype) such as ((8, 3), 'float32'), got {leaf!r}")
            arrays.append(SlotArray(end, leaf.shape, None, leaf.dtype))
            end += round_up(math.prod(leaf.shape) * leaf.dtype.itemsize, ALIGNMENT)
        if not end:
            raise ValueError(f"every array in {spec!r} is empty: there is no memory to share")
        self.structure = structure
        self.whole = SlotTree(unflatten(structure, range(len(arrays))), tuple(arrays))
        """The full batch."""
        self.nbytes = round_up(end, PAGE)
        """Bytes of one slot."""

    @property
    def in_words(self) -> str:
        """The arrays and their sizes, for people."""
        return sketched(unflatten(self.structure, [_Leaf(array.shape, array.dtype) for array in self.whole.arrays]))

    def check_room(self, slots: int, limit: int, *, least: int = 1) -> None:
        """Raise `AllocationError` where `pinned_limit` has no room for so many slots. `least`: how many a ring must have."""
        fit, total = limit // self.nbytes, slots * self.nbytes
        if slots > fit:
            advice = f"Use slots={fit}, or raise pinned_limit" if fit >= least else "Raise pinned_limit, or use smaller batches"
            raise AllocationError(
                f"{counted(slots, 'slot')} of {in_words(self.nbytes)} need {in_words(total)} of pinned memory, more than "
                f"pinned_limit={limit} ({in_words(limit)}). {advice}"
            )

    def views(self, slot: Bytes) -> Any:
        """Return the tree of arrays of the full batch over these bytes."""
        return unflatten(self.structure, [array.view(slot) for array in self.whole.arrays])


@final
class _Leaf:
    """An array to come. Its class is nothing that a tree could be made of."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        check_dtype(dtype)
        if any(length < 0 for length in shape):
            raise ValueError(f"shape {shape!r} has a negative length. Give the shape of a full batch")
        self.shape = shape
        self.dtype = dtype


def _with_leaves(spec: Any, trees: Trees) -> Any:
    # Only to have its classes known as trees: the pairs in it are no leaves yet.
    trees.flatten(spec)
    return optree.tree_map(_leaf, spec, is_leaf=_is_pair, namespace=trees.namespace)


def _leaf(given: Any) -> Any:
    if _is_pair(given):
        shape, dtype = given
        lengths = shape if isinstance(shape, Sequence) else (shape,)
    elif hasattr(given, "shape") and hasattr(given, "dtype") and not isinstance(given, type):
        lengths, dtype = given.shape, given.dtype
    else:
        return given
    try:
        known = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype {dtype!r} of {given!r} is none that NumPy knows") from None
    return _Leaf(tuple(operator.index(length) for length in lengths), known)


def _is_pair(given: Any) -> bool:
    if type(given) is not tuple or len(given) != 2:
        return False
    shape, dtype = given
    lengths = shape if type(shape) in (tuple, list) else (shape,)
    return isinstance(dtype, (str, type, np.dtype)) and all(isinstance(length, (int, np.integer)) for length in lengths)


def _slot_array(leaf: Any, slot: Bytes, where: str) -> SlotArray:
    if not isinstance(leaf, np.ndarray):
        raise TypeError(f"fill returned {leaf!r} ({where}): expected None, a number of rows, or views of its slot")
    offset = leaf.ctypes.data - slot.ctypes.data if leaf.nbytes else 0
    array = SlotArray(offset, leaf.shape, leaf.strides, leaf.dtype)
    try:
        if offset >= 0:
            array.view(slot)
            return array
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"fill returned an array that is not in its slot ({where}: shape {leaf.shape}, {leaf.dtype}). "
        "Write into the arrays of the slot and return views of them"
    )
