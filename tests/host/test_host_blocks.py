"""Blocks, and the arrays that are made over them: alignment, dtypes, leases."""

from __future__ import annotations

import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from xferlib_host._stager import NumpyStager

from tests.host.work import Lease, address

DTYPES = ["?", "i1", "u8", "f2", "f8", "g", "c16", "M8[us]", "m8[s]", ">i4"]
EXTENSIONS = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4]


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 1 << 20])
def test_blocks_are_aligned_and_writable_to_the_last_byte(stager: NumpyStager, nbytes: int) -> None:
    blocks = [stager.alloc_device(nbytes) for _ in range(4)]
    for number, block in enumerate(blocks):
        assert block.address % 256 == 0
        assert block.nbytes == nbytes
        assert block.ready is None
        stager.as_array(block, 0, (nbytes,), np.dtype("u1"), after=stager.record_h2d(), lease=None)[:] = number
    for number, block in enumerate(blocks):
        array = stager.as_array(block, 0, (nbytes,), np.dtype("u1"), after=stager.record_h2d(), lease=None)
        assert (array == number).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (3, 4)])
@pytest.mark.parametrize("dtype", [*DTYPES, *EXTENSIONS], ids=lambda dtype: str(np.dtype(dtype)))
def test_arrays_lie_in_the_block_and_every_view_keeps_the_lease(stager: NumpyStager, dtype: Any, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(dtype)
    stager.check_dtype(dtype)
    block, lease = stager.alloc_device(512), Lease()
    gone = weakref.ref(lease)
    array = stager.as_array(block, 256, shape, dtype, after=stager.record_h2d(), lease=lease)
    del lease
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    if array.size:
        assert address(array) == block.address + 256
        array[...] = 1
        assert (array == np.ones(shape, dtype)).all()
    view: Any = array.reshape(-1).view(np.uint8)
    del array
    assert gone() is not None
    view = np.asarray(memoryview(view))[::2]
    assert gone() is not None
    del view
    assert gone() is None


@pytest.mark.parametrize("dtype", ["O", "S3", "U2", "V4", [("a", "i4")], ("f4", (2,)), [("a", "O")]], ids=str)
def test_dtypes_that_are_no_numbers_are_refused(stager: NumpyStager, dtype: Any) -> None:
    with pytest.raises(TypeError, match="moves numbers, bools and dates"):
        stager.check_dtype(np.dtype(dtype))
