"""Batches that nobody but the pipeline can reach, so that no one can rewrite them while a copy reads them.

References are counted, as NumPy does to work in the memory of a temporary. What is not known for sure counts as shared: views of
arrays that somebody else may refer to, memory of other libraries, instances of classes, interpreters that do not count exactly.
"""

from __future__ import annotations

import sys
import sysconfig
import weakref
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from xferlib.tree import RIDERS

__all__ = ["is_unshared"]

_IS_COUNTED = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Elsewhere `sys.getrefcount` leaves out references, or there is none to ask."""
_UNREAD = frozenset({type(None), bool, datetime, type(Path()), type(PurePath()), *RIDERS})
"""Types that ride along and that no copy reads. Classes derived from these are not among them: a framework may take those apart."""


def is_unshared(box: list[Any]) -> bool:
    """Tell whether nothing outside a list refers to its one item, nor to any array in that item. Any thread.

    The item must be an array, or any nest of dict, list and tuple with arrays at the leaves. Instances of classes derived from
    these count as shared: they may have finalizers, attributes and iterators of their own. The caller must not refer to the item
    otherwise. Each array must own its memory, or be the only view of an array that does, or of `bytes`.
    """
    return _IS_COUNTED and _are_unshared(box, 0)


def _are_unshared(items: list[Any], owners: int) -> bool:
    """Look at the items of a list, which is this function's or the box. `owners`: how many other references each item has."""
    for item, count in zip(items, _counts(items), strict=True):
        kind = type(item)
        if kind in _UNREAD or item is _EMPTY:
            continue
        if count != _ALONE + owners or weakref.getweakrefcount(item):
            return False
        if kind is np.ndarray:
            if not (item.flags.owndata or _is_base_unshared([item.base])):
                return False
        elif kind is dict or kind is list or kind is tuple:
            if not _are_unshared(list(item.values() if kind is dict else item), 1):
                return False
        else:
            return False
    return True


def _is_base_unshared(bases: list[Any]) -> bool:
    """Tell whether the memory of a view is nobody else's. NumPy says that a view refers to the memory's owner, and to no view."""
    (kind,) = map(type, bases)
    if kind is bytes:
        # Others may write to it: NumPy allows that to arrays which it has made of the bytes itself, by pickle.
        return _counts(bases) == [_ALONE + 1]
    return kind is np.ndarray and _are_unshared(bases, 1)


def _counts(items: list[Any]) -> list[int]:
    return list(map(sys.getrefcount, items))


_EMPTY = ()
_ALONE = _counts([object()])[0]
"""The count for an object that only a list refers to: what the interpreter adds while it counts is its own affair."""
