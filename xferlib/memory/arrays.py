"""Facts about NumPy arrays as memory: which can be transferred, where they lie, how to cut them.

No policy and no allocation beyond views.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from inspect import isroutine
from typing import Any

import numpy as np
from numpy.ma import MaskedArray

__all__ = ["Array", "address_of", "check_dtype", "extent", "host_array", "split"]

Array = np.ndarray[Any, np.dtype[Any]]

BYTE: Any = ctypes.c_char.from_buffer
ADDRESS = ctypes.addressof


def address_of(array: Array) -> int:
    """Return the address of the array's first element."""
    # A third of the time of `array.ctypes.data`, which is a fifth of a small transfer. It cannot serve memory that is read-only,
    # empty, not contiguous, or of a dtype that the buffer protocol does not know.
    try:
        return ADDRESS(BYTE(array))
    except (TypeError, ValueError, BufferError):
        return array.ctypes.data


def extent(array: Array) -> tuple[int, int]:
    """Return the lowest address of an array's elements, and the bytes from there to the end of the highest."""
    if array.nbytes == 0:
        return array.ctypes.data, 0
    if array.flags.c_contiguous:
        return address_of(array), array.nbytes
    reaches = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    low = sum(reach for reach in reaches if reach < 0)
    return array.ctypes.data + low, sum(map(abs, reaches)) + array.itemsize


def host_array(leaf: object, *, advice: str = "") -> Array:
    """Return the leaf as a plain array, or raise `TypeError` if it is not one that can be transferred.

    `advice`: what to do about a leaf of which nothing better is known.
    """
    if isinstance(leaf, MaskedArray):
        raise TypeError("masked arrays cannot be transferred: the mask would be lost. Transfer array.filled() or array.data")
    if isinstance(leaf, np.generic):
        leaf = np.asarray(leaf)
    if not isinstance(leaf, np.ndarray):
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        loop = "A loop puts the batches of a source: xferlib.prefetch(source, stager)" if hasattr(type(leaf), "__next__") else ""
        raise TypeError(". ".join(filter(None, (f"expected a NumPy array, got {kind}", _advice(leaf) or advice, loop))))
    return np.asarray(leaf)


def _advice(leaf: object) -> str:
    """Say what to do with what is no array, by what its type offers: asked for its attributes, the object itself may compute."""
    offered = set(dir(type(leaf)))
    if {"result", "done"} <= offered:
        return "Pass what its result() returns"
    if {"put", "tree"} <= offered:
        return "Give a loop the slot itself, or put it with its own put()"
    if {"__dlpack__", "__cuda_array_interface__"} & offered:
        return (
            "An array that is on a device already needs no put; convert one in host memory with numpy.asarray. "
            "Inside a function that is being traced nothing can be put"
        )
    if isinstance(leaf, int | float | complex):
        return "Convert numbers, or a list of them, with numpy.asarray"
    if isinstance(leaf, list | tuple | memoryview) or {"__array__", "__array_interface__"} & offered:
        return "Convert it with numpy.asarray"
    if isroutine(leaf):
        return "Pass what it returns"
    return ""


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise `TypeError` for a dtype whose values are not plain numbers in native byte order."""
    if dtype.hasobject or dtype.kind in "OSUT" or dtype.names is not None or dtype.type is np.void:
        if dtype.kind in "SUT":
            advice = "Text rides along in a list, array.tolist(), or as it is: xferlib.Host(array)"
        elif dtype.kind == "O":
            advice = "Pad rows of different lengths to one array; objects of other kinds stay on the host: xferlib.Host(array)"
        else:
            advice = "Transfer each field by itself: array[name]"
        raise TypeError(f"arrays of dtype {dtype} cannot be transferred: expected numbers. {advice}")
    if not dtype.isnative:
        native = dtype.newbyteorder("=").name
        raise TypeError(f"dtype {dtype} is not in native byte order. Convert it with array.astype({native!r})")


def split(array: Array, nbytes: int) -> Iterator[Array]:
    """Split an array into views of at most `nbytes` bytes each (or one item), in C order."""
    if array.nbytes <= nbytes or array.ndim == 0:
        yield array
        return
    if array.flags.c_contiguous:
        array = array.reshape(-1)
    row_nbytes = array.nbytes // len(array)
    if row_nbytes > nbytes and array.ndim > 1:
        for row in array:
            yield from split(row, nbytes)
        return
    step = max(1, nbytes // row_nbytes)
    for start in range(0, len(array), step):
        yield array[start : start + step]
