"""Items of a dataset into the rows of a batch that is there already."""

from __future__ import annotations

import reprlib
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
from numpy.ma import MaskedArray

from xferlib.in_flight import meet
from xferlib.memory.arrays import extent
from xferlib.tree import PLAIN, Trees, check_structure, path, rides_along

__all__ = ["stack", "stack_as"]


def stack(items: Iterable[Any], out: Any) -> int:
    """Write items into the first rows of arrays, one row for each, and return how many they are.

    `out`: a tree of NumPy arrays, such as the slot that `fill` of a `SharedRing` is given, or `slot.tree` of a `Ring`'s.
    Each item is a tree of the same structure, with numbers, or with arrays that lack the first axis; rows of `out` may be among
    them. Dtypes are converted within a kind alone, as `numpy.stack` does: float64 to float32, int64 to int32. Floats are rounded.
    If items are dicts, text and numbers under keys for which `out` has no array ride along: `out` gets a list of them under each
    such key, in place of what was there.

    Raises `ValueError` for items of another structure or shape, for integers that do not fit, and for more items than there are
    rows; `TypeError` for dtypes, masked arrays, and what is no array in `out`. Then some rows may be written.
    """
    return stack_as(PLAIN, items, out)


def stack_as(trees: Trees, items: Iterable[Any], out: Any) -> int:
    """Do as `stack`, with what one backend knows as trees."""
    is_dict = type(out) is dict
    lists = {key for key, value in out.items() if _is_list(value)} if is_dict else set()
    targets = {key: value for key, value in out.items() if key not in lists and not rides_along(type(value))} if is_dict else out
    arrays, spec = trees.flatten(targets)
    for index, array in enumerate(arrays):
        if not isinstance(array, np.ndarray) or not array.ndim:
            raise TypeError(f"out has {reprlib.repr(array)} ({path(spec, index)}): expected a NumPy array of rows")
    room = min(map(len, arrays), default=None)
    columns: list[list[Any]] = [[] for _ in arrays]
    beside: dict[Any, list[Any]] = {}
    rows = 0
    for item in items:
        if rows == room:
            index = [len(array) for array in arrays].index(room)
            raise ValueError(f"more items than rows: there is room for {room} ({path(spec, index)})")
        extra = _beside(item, targets) if is_dict else {}
        if rows and extra.keys() != beside.keys():
            raise ValueError(f"item {rows} has {[*extra]} beside its arrays, and those before it have {[*beside]}")
        if not lists <= extra.keys():
            raise ValueError(f"item {rows} has {[*extra]} beside its arrays, and out has {[*lists]}, of other items: take them out")
        for key, value in extra.items():
            beside.setdefault(key, []).append(value)
        leaves, structure = trees.flatten({key: item[key] for key in item if key not in extra} if extra else item)
        if structure != spec:
            check_structure(spec, structure, name=f"item {rows}")
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
        rows += 1
    if not rows:
        return 0
    extents = [extent(array) for array in arrays]
    columns = [[_apart(leaf, extents) for leaf in column] for column in columns]
    for index, (array, column) in enumerate(zip(arrays, columns, strict=True)):
        try:
            if any(issubclass(kind, MaskedArray) for kind in set(map(type, column))):
                raise TypeError("masked arrays cannot be stacked: the mask would be lost. Give array.filled() or array.data")
            if array.dtype.kind in "iu":
                _check_fits(column, array.dtype)
            np.stack(column, out=array[:rows])
        except (TypeError, ValueError) as error:
            shape = array.shape[1:]
            odd = next(
                (f", and item {row} of shape {np.shape(leaf)}" for row, leaf in enumerate(column) if np.shape(leaf) != shape), ""
            )
            error.add_note(f"at {path(spec, index)}: a row is of shape {shape} and dtype {array.dtype}{odd}")
            raise
    if beside:
        out.update(beside)
    return rows


def _check_fits(column: Iterable[Any], dtype: np.dtype[Any]) -> None:
    """Raise `ValueError` for integers that an integer dtype cannot hold: NumPy would cut them off in silence."""
    held = np.iinfo(dtype)
    for row, leaf in enumerate(column):
        if type(leaf) is int:
            # A label. To make an array of it would take longer than all else that is done with it.
            least = most = leaf
        else:
            given = np.asarray(leaf)
            if given.dtype == dtype or given.dtype.kind not in "iu" or not given.size or np.can_cast(given.dtype, dtype):
                continue
            least, most = given.min(), given.max()
        if least < held.min or most > held.max:
            raise ValueError(
                f"item {row} has integers from {least} to {most}, and {dtype} holds those from {held.min} to {held.max}"
            )


def _beside(item: Any, targets: Container[Any]) -> dict[Any, Any]:
    """Return what an item has that rides along, under keys that are no target's."""
    if type(item) is not dict:
        return {}
    return {key: value for key, value in item.items() if key not in targets and rides_along(type(value))}


def _is_list(value: Any) -> bool:
    """Tell whether a value is what an earlier call has put beside the arrays."""
    return type(value) is list and bool(value) and all(rides_along(type(one)) for one in value)


def _apart(leaf: Any, extents: list[tuple[int, int]]) -> Any:
    """Return the leaf, or a copy of it if it is a view of memory that is written to."""
    if not isinstance(leaf, np.ndarray) or leaf.base is None:
        return leaf
    place = extent(leaf)
    return leaf.copy() if any(meet(*place, *other) for other in extents) else leaf
