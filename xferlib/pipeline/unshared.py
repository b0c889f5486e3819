"""Batches that nobody but the pipeline can reach, so that no one can rewrite them while a copy reads them.

References are counted, as NumPy does it to work in the memory of a temporary. What is not known for sure counts as shared: views of
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
"""What rides along, and no copy reads. Not what else is derived from these: a framework may take that apart."""


def is_unshared(box: list[Any]) -> bool:
    """Tell whether nothing refers to the one item of a list, nor to any array in it, but the list. Any thread.

    The item: an array, or any nest of dict, list and tuple with arrays at the leaves; not of classes derived from these, which may
    have finalizers, attributes and iterators of their own. The caller must not refer to it otherwise. An array owns its memory, or
    is the only view of an array that does, or of `bytes`.
    """
    return _IS_COUNTED and _are_unshared(box, 0)


def _are_unshared(items: list[Any], owners: int) -> bool:
    """Look at items of a list that is this function's, or the box. `owners`: how many references each has besides."""
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
    """Tell whether the memory of a view is nobody else's. A view refers to the owner of the memory, says NumPy, and to no view."""
    (kind,) = map(type, bases)
    if kind is bytes:
        # Others may write to it: NumPy lets those do so that it has made of it itself, by pickle.
        return _counts(bases) == [_ALONE + 1]
    return kind is np.ndarray and _are_unshared(bases, 1)


def _counts(items: list[Any]) -> list[int]:
    return list(map(sys.getrefcount, items))


_EMPTY = ()
_ALONE = _counts([object()])[0]
"""Of an object that only a list refers to: what the interpreter adds while it counts is its own affair."""
