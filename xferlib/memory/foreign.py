"""Arrays in memory that is not NumPy's own, such as a mapped file's, which may be cut off while it is read."""

from __future__ import annotations

import mmap
from ctypes import c_int64
from typing import IO, Any, final

import numpy as np

from xferlib.engine.native import OK, library
from xferlib.memory.arrays import Array, address_of

__all__ = ["MappedFile", "copy_foreign", "file_of", "is_foreign", "mapped"]


@final
class MappedFile(mmap.mmap):
    """All of a file, mapped to be read. As long as `stream` is open, the engine reads arrays over it from the file itself."""

    stream: IO[bytes]
    address: int


def mapped(stream: IO[bytes]) -> Array:
    """Return the bytes of an open file, over a `MappedFile`. Raises as `mmap.mmap`."""
    pages = MappedFile(stream.fileno(), 0, access=mmap.ACCESS_READ)
    pages.stream = stream
    raw = np.frombuffer(pages, np.uint8)
    pages.address = address_of(raw)
    return raw


def file_of(array: Array) -> MappedFile | None:
    """Return the open file that an array is a part of."""
    base: Any = array.base
    while type(base) is np.ndarray:
        base = base.base
    if type(base) is memoryview:
        base = base.obj
    return base if type(base) is MappedFile and not base.stream.closed else None


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
