"""Items of a dataset into the rows of a batch that is there already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from xferlib.tree import PLAIN, Trees, check_structure, path, rides_along

__all__ = ["stack", "stack_as"]


def stack(items: Iterable[Any], out: Any) -> int:
    """Write items into the first rows of arrays, one row for each, and return how many they are.

    `out`: a tree of NumPy arrays, such as the slot that `fill` of a `SharedRing` is given, or `slot.tree` of a `Ring`'s.
    Each item is a tree of the same structure, with numbers, or with arrays that lack the first axis. Dtypes are converted within a
    kind alone, as `numpy.stack` does: float64 to float32, int64 to int32, which cuts off what does not fit.
    If items are dicts, text and numbers under keys that `out` lacks ride along: `out` gets a list of them under each such key.

    Raises `ValueError` for items of another structure or shape, and for more of them than there are rows; `TypeError` for dtypes.
    Then some rows may be written.
    """
    return stack_as(PLAIN, items, out)


def stack_as(trees: Trees, items: Iterable[Any], out: Any) -> int:
    """Do as `stack`, with what one backend knows as trees."""
    arrays, spec = trees.flatten(out)
    columns: list[list[Any]] = [[] for _ in arrays]
    beside: dict[Any, list[Any]] = {}
    rows = 0
    for item in items:
        extra = _beside(item, out)
        if rows and extra.keys() != beside.keys():
            raise ValueError(f"item {rows} has {[*extra]} beside its arrays, and those before it have {[*beside]}")
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
    for index, (array, column) in enumerate(zip(arrays, columns, strict=True)):
        try:
            if rows > len(array):
                raise ValueError(f"{rows} items, and room for {len(array)}")
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


def _beside(item: Any, out: Any) -> dict[Any, Any]:
    """Return what an item has under keys of its own that rides along."""
    if type(item) is not dict or type(out) is not dict or item.keys() <= out.keys():
        return {}
    return {key: value for key, value in item.items() if key not in out and rides_along(type(value))}
