"""Arrays in memory that is not NumPy's own, such as a mapped file's, which may be cut off while it is read."""

from __future__ import annotations

from ctypes import c_int64

import numpy as np

from xferlib.engine.native import OK, library
from xferlib.memory.arrays import Array, address_of

__all__ = ["copy_foreign", "is_foreign"]


def is_foreign(array: Array) -> bool:
    """Tell whether an array may lie in memory that is not NumPy's own."""
    base = array.base
    return base is not None and not (type(base) is np.ndarray and base.base is None)


def copy_foreign(array: Array, address: int) -> bool:
    """Copy an array of any strides to an address, in C order. False: its memory is a file's, which is shorter by now."""
    if array.flags.c_contiguous:
        return bool(library().xe_copy(address, address_of(array), array.nbytes, 0) == OK)
    found = array.ctypes
    shape, strides = found.shape_as(c_int64), found.strides_as(c_int64)
    return bool(library().xe_gather(address, found.data, array.ndim, shape, strides, array.itemsize) == OK)
