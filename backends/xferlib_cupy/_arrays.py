"""CuPy arrays over the backend's own memory, and the memory of the user's arrays.

Nothing is copied here except what is not contiguous. Nothing is ordered here: the caller does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import cupy
import numpy as np
from cupy.cuda import MemoryPointer, UnownedMemory, runtime

from xferlib.protocol import DeviceRange
from xferlib_cupy._device import Device
from xferlib_cupy._streams import Streams

__all__ = ["CupyArray", "check_array", "check_dtype", "contiguous", "copies"]

CupyArray: TypeAlias = Any
"""`cupy.ndarray`: CuPy ships no types."""

BUILT_IN = "?bhilqBHILQefdFD"
OF_NUMPY, OF_ANOTHER_PACKAGE = 1, 2
"""`dtype.isbuiltin`."""
ALIGNMENT = 256
"""Bytes, as CuPy's own."""
ANY_TO_ANY = 4
"""The driver looks where memory is: an array may be a view of memory of the host."""
SHARED_NBYTES = 4 << 20
"""Copies of fewer bytes share memory."""
LARGEST_SHARED_NBYTES = 64 << 20


def check_dtype(dtype: np.dtype[Any], ordinal: int) -> None:
    """Raise `TypeError` unless CuPy's arrays can have this dtype. Asks CuPy, no device."""
    # A dtype that was read from a file, or whose byte order was set, is not built-in itself; only its type tells.
    if dtype.char in BUILT_IN and np.dtype(dtype.type).isbuiltin == OF_NUMPY:
        return
    if dtype.isbuiltin == OF_ANOTHER_PACKAGE and not dtype.hasobject and _can_hold(dtype, ordinal):
        return
    raise TypeError(f"CuPy {cupy.__version__} has no arrays of dtype {dtype}. {_advice(dtype)}")


def check_array(array: object, ordinal: int) -> None:
    """Raise `TypeError` unless this is a CuPy array, `ValueError` unless it is on this device."""
    if not isinstance(array, cupy.ndarray):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"expected a cupy.ndarray, got {kind}. Wrap arrays of other GPU libraries with cupy.from_dlpack(array)")
    if array.data.device_id != ordinal:
        found = array.data.device_id
        raise ValueError(f"the array is on cuda:{found}, this stager on cuda:{ordinal}. Open another with device={found}")


def contiguous(array: CupyArray, stream: object | None, streams: Streams, device: Device) -> CupyArray:
    """Return a copy in C order, made by CuPy on the stream.

    It comes from CuPy's pool, which gives memory out again as soon as it is dropped. That is safe here, since the core keeps it
    until the copy that reads it is done.
    """
    if np.dtype(array.dtype.type).isbuiltin != OF_NUMPY:
        # CuPy can hold such items but has no kernel that copies them.
        array = array.view(f"u{array.dtype.itemsize}")
    return device.here(_in_order, array, streams.current_as(stream))


def copies(arrays: Sequence[CupyArray], stream: Any, handle: int) -> list[DeviceRange]:
    """Return where copies in C order are, made on the stream, of which this is the handle. Their memory is out of CuPy's pool.

    Smaller ones share memory, and none is an array: a state has thousands, and the caller waits here.
    """
    with stream:
        return _copied(arrays, handle)


def _copied(arrays: Sequence[CupyArray], handle: int) -> list[DeviceRange]:
    sizes = [array.nbytes for array in arrays]
    shares = [0 < nbytes < SHARED_NBYTES and array._c_contiguous for array, nbytes in zip(arrays, sizes, strict=True)]
    left = sum([_room(nbytes) for nbytes, small in zip(sizes, shares, strict=True) if small])
    copy, new = runtime.memcpyAsync, tuple.__new__
    sources: list[DeviceRange] = []
    shared: Any = None
    address = free = 0
    for array, nbytes, small in zip(arrays, sizes, shares, strict=True):
        if small:
            room = _room(nbytes)
            if room > free:
                # Not all at once: between the arrays of a program there may be no place for that.
                free = min(left, LARGEST_SHARED_NBYTES)
                shared = cupy.cuda.alloc(free)
                address = shared.ptr
            copy(address, array.data.ptr, nbytes, ANY_TO_ANY, handle)
            sources.append(new(DeviceRange, (address, nbytes, shared, None)))
            address, free, left = address + room, free - room, left - room
        elif nbytes and array._c_contiguous:
            memory = cupy.cuda.alloc(nbytes)
            copy(memory.ptr, array.data.ptr, nbytes, ANY_TO_ANY, handle)
            sources.append(new(DeviceRange, (memory.ptr, nbytes, memory, None)))
        else:
            made = _copy(array)
            sources.append(new(DeviceRange, (made.data.ptr, nbytes, made, None)))
    return sources


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _copy(array: CupyArray) -> CupyArray:
    if np.dtype(array.dtype.type).isbuiltin != OF_NUMPY:
        # As above.
        return array.view(f"u{array.dtype.itemsize}").copy("C").view(array.dtype)
    return array.copy("C")


def _in_order(array: CupyArray, stream: Any) -> CupyArray:
    with stream:
        return cupy.ascontiguousarray(array)


def _can_hold(dtype: np.dtype[Any], ordinal: int) -> bool:
    try:
        array = cupy.ndarray((0,), dtype, MemoryPointer(UnownedMemory(0, 0, None, ordinal), 0))
    except (TypeError, ValueError, KeyError):
        return False
    return bool(array.dtype == dtype)


def _advice(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "fc":
        return "Convert to float64 or complex128 first: array.astype(...)"
    if dtype.kind in "mM":
        return "Transfer its integers: array.view('int64')"
    if dtype.isbuiltin == OF_ANOTHER_PACKAGE:
        return f"Take CuPy 14.1 or newer, or transfer its bytes: array.view('u{dtype.itemsize}')"
    return "Transfer booleans, integers, floats or complex numbers"
