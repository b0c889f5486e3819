"""The user's arrays as DLPack capsules, and where their memory lies. A state has thousands of arrays, and a save asks for each.

While a capsule lives, the memory stays. Nothing is copied here, and nothing waits but the stream that is named.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from xferlib.protocol import DeviceRange
from xferlib_jax._arrays import nbytes_of
from xferlib_jax._capsule import LAYOUT, MOST_SHAPES, NAME, pointer
from xferlib_jax._reading import Readings

__all__ = ["Export", "Tensor", "address_in_order", "exported", "exporter", "found_together"]

Export: TypeAlias = Callable[..., Any]
"""`export(array, stream=None)` returns a capsule, as `array.__dlpack__(stream=stream)` does."""

# The head of a DLManagedTensor: data, ndim, shape, strides, byte offset.
_HEAD = struct.Struct("<QxxxxxxxxixxxxQQQ")
_WORD = 8
# What `ctypes.string_at` does, without its frame.
_read = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(("PyBytes_FromStringAndSize", ctypes.pythonapi))


class Tensor(NamedTuple):
    """What a capsule says of memory. `strides`: bytes, or None where it lies in C order."""

    address: int
    strides: tuple[int, ...] | None


def exporter(device: Any) -> Export:
    """Return what exports arrays of a device: the call that the public one ends in, if it gives the same.

    The public one asks each array for its device and much else that was checked before: that takes four times as long.
    """
    try:
        from jaxlib import _jax

        call = _jax.buffer_to_dlpack_managed_tensor

        def privately(array: Any, stream: int | None = None) -> Any:
            # Not the array itself: JAX ends the process if that is deleted while its capsule lives.
            return call(array.addressable_data(0), stream=stream)

        with jax.ensure_compile_time_eval():
            array = jax.device_put(np.arange(8, dtype=np.int32), device).block_until_ready()
        if exported(privately(array)) == exported(array.__dlpack__()):
            return privately
    except Exception:  # The call may be gone, or take other arguments; each version says so in its own way.
        return _publicly
    return _publicly


def _publicly(array: Any, stream: int | None = None) -> Any:
    return array.__dlpack__(stream=stream)


def address_in_order(capsule: Any, shape: tuple[int, ...]) -> int | None:
    """Return where the tensor of this shape in a capsule lies, if that is evidently in C order. None: `exported` tells."""
    data, ndim, _, strides, offset = _HEAD.unpack(_read(pointer(capsule, NAME), _HEAD.size))
    if ndim < 2 or not strides or _read(strides, ndim * _WORD) == _steps_in_order(shape):
        address: int = data + offset
        return address
    return None


def found_together(arrays: Sequence[Any], export: Export, stream: int | None, readings: Readings) -> list[DeviceRange] | None:
    """Return the memory of arrays that were checked, held by one reading. None: one of them is perhaps not in C order."""
    capsules: list[Any] = []
    # First: if one of them cannot be exported, JAX is still told to let go of those before it.
    reading = readings.make(list(arrays), capsules)
    capsules.extend([export(array, stream=stream) for array in arrays])
    addresses = [address_in_order(capsule, array.shape) for capsule, array in zip(capsules, arrays, strict=True)]
    if None in addresses:
        return None
    return [DeviceRange(address, nbytes_of(array), reading) for address, array in zip(addresses, arrays, strict=True)]  # type: ignore[arg-type]  # None was looked for.


def exported(capsule: Any) -> Tensor:
    """Return where, and how, the tensor in a capsule that nobody has imported lies."""
    data, _, _, ndim, _, bits, lanes, shape, strides, offset, _, _ = LAYOUT.unpack(_read(pointer(capsule, NAME), LAYOUT.size))
    if ndim < 2 or not strides:
        return Tensor(data + offset, None)
    lengths, steps = ((ctypes.c_int64 * ndim).from_address(where)[:] for where in (shape, strides))
    expected, in_order = 1, True
    for length, step in zip(reversed(lengths), reversed(steps), strict=True):
        in_order = in_order and (length <= 1 or step == expected)
        expected *= length
    itemsize = bits * lanes // 8
    return Tensor(data + offset, None if in_order or expected == 0 else tuple(step * itemsize for step in steps))


@functools.lru_cache(maxsize=MOST_SHAPES)
def _steps_in_order(shape: tuple[int, ...]) -> bytes:
    """Return the strides of C order, in elements, for a shape, in the form that structs have."""
    steps = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    # For an array without elements they may be longer than a word.
    return b"".join(reversed([(step % (1 << 8 * _WORD)).to_bytes(_WORD, sys.byteorder) for step in steps]))
