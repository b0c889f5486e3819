"""Arrays of any strides are copied to one piece of memory as NumPy copies them."""

from __future__ import annotations

import random
from ctypes import c_int64
from typing import Any

import numpy as np
import pytest

from xferlib.engine.native import OK, library

WRONG = -6


def gathered(array: np.ndarray[Any, Any]) -> tuple[int, bytes]:
    """Return the status, and the bytes, behind which nothing was written."""
    memory, found = np.full(array.nbytes + 64, 0xA5, np.uint8), array.ctypes
    shape, strides = found.shape_as(c_int64), found.strides_as(c_int64)
    status = library().xe_gather(memory.ctypes.data, found.data, array.ndim, shape, strides, array.itemsize)
    assert (memory[array.nbytes :] == 0xA5).all()
    return status, memory[: array.nbytes].tobytes()


@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16, 24])
def test_any_layout_comes_out_in_c_order(itemsize: int) -> None:
    dice = random.Random(itemsize)
    for _ in range(100):
        shape = [dice.randint(1, 5) for _ in range(dice.randint(1, 5))]
        whole = np.frombuffer(dice.randbytes(int(np.prod(shape)) * itemsize), f"V{itemsize}").reshape(shape)
        array = whole.transpose(dice.sample(range(whole.ndim), whole.ndim))
        array = array[tuple([slice(None, None, dice.choice([1, 1, -1, 2, -2, 3])) for _ in shape])]
        if dice.random() < 0.2:
            array = np.broadcast_to(array, (3, *array.shape))
        assert gathered(array) == (OK, array.tobytes()), (array.shape, array.strides)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_of_nothing_nothing_is_read(shape: tuple[int, ...]) -> None:
    assert gathered(np.empty(shape)) == (OK, b"")


def test_what_no_array_has_is_refused() -> None:
    numbers = (c_int64 * 65)(*([1] * 65))
    for axes in (-1, 65):
        assert library().xe_gather(None, None, axes, numbers, numbers, 1) == WRONG
