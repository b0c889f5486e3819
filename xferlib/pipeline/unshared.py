"""Batches that nobody but the pipeline can reach, so that no one can rewrite them while a copy reads them.

References are counted, as NumPy does it to work in the memory of a temporary. What is not known for sure counts as shared: views of
arrays that somebody else may refer to, memory of other libraries, instances of classes, interpreters that do not count exactly.
"""

from __future__ import annotations

import sys
import sysconfig
import weakref
from typing import Any

import numpy as np

__all__ = ["is_unshared"]

_IS_COUNTED = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Elsewhere `sys.getrefcount` leaves out references, or there is none to ask."""
_CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes})


def is_unshared(box: list[Any]) -> bool:
    """Tell whether nothing refers to the one item of a list, nor to any array in it, but the list. Any thread.

    The item: an array, or any nest of dict, list, tuple and named tuple with arrays at the leaves. The caller must not refer to it
    otherwise. An array owns its memory, is a view of one that does and that nothing else refers to, or reads `bytes`.
    """
    return _IS_COUNTED and _are_unshared(box, 0)


def _are_unshared(items: list[Any], owners: int) -> bool:
    """Look at items of a list that is this function's, or the box. `owners`: how many references each has besides."""
    for item, count in zip(items, _counts(items), strict=True):
        kind = type(item)
        if kind in _CONSTANTS:
            continue
        if count != _ALONE + owners or weakref.getweakrefcount(item):
            return False
        if kind is np.ndarray:
            if not (item.flags.owndata or _is_base_unshared([item.base])):
                return False
        elif kind is dict:
            if not _are_unshared(list(item.values()), 1):
                return False
        elif kind is list or isinstance(item, tuple):
            if not _are_unshared(list(kind.__iter__(item)), 1):
                return False
        else:
            return False
    return True


def _is_base_unshared(bases: list[Any]) -> bool:
    """Tell whether the memory of a view is nobody else's. A view refers to the owner of the memory, says NumPy, and to no view."""
    (kind,) = map(type, bases)
    return kind is bytes or (kind is np.ndarray and _are_unshared(bases, 1))


def _counts(items: list[Any]) -> list[int]:
    return list(map(sys.getrefcount, items))


_ALONE = _counts([object()])[0]
"""Of an object that only a list refers to: what the interpreter adds while it counts is its own affair."""
