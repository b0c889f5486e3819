"""Numba's arrays over our memory, and how users' arrays lie in memory: Numba's own, and any others with the array interface.

Nothing is copied or ordered here.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from xferlib_numba._device import Device
from xferlib_numba._module import Numba

__all__ = ["Lay", "NumbaArray", "as_array", "check_device", "check_dtype", "look", "reach"]

NumbaArray: TypeAlias = Any
"""`DeviceNDArray`: Numba ships no types."""

MEMORY_TYPE, DEVICE_ORDINAL = 2, 9
HOST = 1


class Lay(NamedTuple):
    """How an array lies in memory."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...] | None
    """In bytes; None: contiguous in C order."""
    stream: object | None
    """The stream that the array names: the work that produces the array is on it."""
    read_only: bool


def check_dtype(dtype: np.dtype[Any], numba: Numba) -> None:
    """Raise `TypeError` unless Numba has a type for the dtype: an array that no kernel takes is of no use."""
    try:
        numba.from_dtype(dtype)
    except Exception as error:
        # The error's class depends on the version, and it is no TypeError.
        advice = f"array.view('u{dtype.itemsize}')" if dtype.itemsize in (1, 2, 4, 8) else "array.astype(...)"
        raise TypeError(f"{numba.distribution} has no arrays of dtype {dtype}. Transfer other numbers: {advice}") from error


def as_array(
    device: Device, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, stream: object, lease: object
) -> NumbaArray:
    """Return an array over the memory. Every view of it holds the lease, as the owner of its memory pointer."""
    strides, nbytes = _c_strides(shape, dtype.itemsize)
    numba = device.numba
    if not nbytes:
        # Numba asks for a context here, and would make one current for good, perhaps another device's.
        return device.here(numba.array, shape, strides, dtype, stream, None)
    pointer = numba.driver.binding.CUdeviceptr(address)
    memory = numba.driver.MemoryPointer(device.numba_context, pointer, nbytes, owner=lease)
    return numba.array(shape, strides, dtype, stream, memory)


def look(array: Any, numba: Numba) -> Lay:
    """Return how a device array lies: Numba's, or any with `__cuda_array_interface__`. Raises `TypeError` for anything else."""
    if isinstance(array, numba.array):
        # Its interface would name the default stream by 0, and dtypes that NumPy does not have by their size.
        strides = None if array.is_c_contiguous() else array.strides
        address = array.gpu_data.device_pointer_value or 0
        return Lay(address, array.nbytes, array.shape, array.dtype.itemsize, strides, array.stream, False)
    found: Any = getattr(array, "__cuda_array_interface__", None)
    if not isinstance(found, dict):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"expected a Numba device array or an object with __cuda_array_interface__, got {kind}")
    if found.get("mask") is not None:
        raise TypeError("masked arrays cannot be transferred: the mask would be lost. Transfer the data and the mask separately")
    shape, itemsize = tuple(found["shape"]), np.dtype(found["typestr"]).itemsize
    strides, nbytes = _c_strides(shape, itemsize)
    given = found.get("strides")
    given = None if given is None or not nbytes or not _differ(shape, given, strides) else tuple(given)
    address, read_only = found["data"]
    if found.get("stream") == 0:
        raise ValueError("the array's __cuda_array_interface__ names stream 0, which the interface forbids: it means two streams")
    return Lay(address or 0, nbytes, shape, itemsize, given, found.get("stream"), bool(read_only))


def reach(lay: Lay) -> tuple[int, int]:
    """Return where the elements of an array that is not in C order lie, from the first byte to the last."""
    steps = [(length - 1) * stride for length, stride in zip(lay.shape, lay.strides or (), strict=True)] if lay.nbytes else []
    return lay.address + sum(step for step in steps if step < 0), sum(map(abs, steps)) + lay.itemsize


def check_device(address: int, device: Device) -> None:
    """Raise `ValueError` unless memory is on this device, `TypeError` if the driver does not know it. Asks the driver."""
    found = device.asked(DEVICE_ORDINAL, address)
    if found is None:
        raise TypeError(f"the array's address {address:#x} is not known to CUDA. Pass an array that is alive, on a GPU")
    # Page-locked host memory is every device's, whichever was current when it was locked.
    if found != device.ordinal and device.asked(MEMORY_TYPE, address) != HOST:
        raise ValueError(f"the array is on cuda:{found}, this stager on cuda:{device.ordinal}. Open another with device={found}")


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], int]:
    """Return the strides of an array that is contiguous in C order, and its size in bytes."""
    if len(shape) == 1:
        return (itemsize,), shape[0] * itemsize
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides)), step


def _differ(shape: tuple[int, ...], given: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    # The stride of an axis of one element is never used.
    return any(length > 1 and a != b for length, a, b in zip(shape, given, strides, strict=True))
