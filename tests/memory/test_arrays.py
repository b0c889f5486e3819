"""NumPy arrays as memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from xferlib.memory.arrays import address_of, check_dtype, extent, host_array, split


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0),
        np.arange(6.0)[2:],
        np.arange(12.0).reshape(3, 4).T,
        np.array(3.0),
        np.empty((0, 2)),
        np.zeros(3, "datetime64[s]"),
        np.zeros(3, ml_dtypes.bfloat16),
        np.frombuffer(b"12345678", np.uint8),
    ],
)
def test_the_address_is_that_of_the_first_element(array: np.ndarray[Any, Any]) -> None:
    assert address_of(array) == array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f8", "c16", "M8[s]", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_numbers_may_be_transferred(dtype: Any) -> None:
    check_dtype(np.dtype(dtype))


STRINGS = [np.dtypes.StringDType()] if hasattr(np.dtypes, "StringDType") else []
"""From NumPy 2.0 on."""


@pytest.mark.parametrize("dtype", ["O", "S3", "U3", "V8", [("a", "i4")], *STRINGS])
def test_what_is_not_a_number_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match="cannot be transferred: expected numbers"):
        check_dtype(np.dtype(dtype))


def test_foreign_byte_order_is_refused_with_the_cure() -> None:
    with pytest.raises(TypeError, match=r"not in native byte order.*astype\('float32'\)"):
        check_dtype(np.dtype(">f4"))


def test_masked_arrays_are_refused_with_the_cure() -> None:
    with pytest.raises(TypeError, match=r"mask would be lost.*filled"):
        host_array(np.ma.masked_array([1, 2]))


def test_what_is_not_an_array_is_named() -> None:
    with pytest.raises(TypeError, match=r"got builtins\.list\. Convert it with numpy\.asarray"):
        host_array([1, 2])


def test_advice_of_the_caller_s_comes_where_the_kind_tells_nothing() -> None:
    for advice, words in (("", r"got builtins\.set"), ("Try a list", r"got builtins\.set\. Try a list")):
        with pytest.raises(TypeError, match=f"{words}$"):
            host_array({1}, advice=advice)


def test_scalars_become_arrays() -> None:
    assert host_array(np.float32(3)).shape == ()


def test_subclasses_are_seen_as_plain_arrays() -> None:
    class Odd(np.ndarray[Any, Any]):
        pass

    assert type(host_array(np.zeros(3).view(Odd))) is np.ndarray


@pytest.mark.parametrize("shape", [(1000,), (10, 100), (3, 7, 50), (1, 1000), (1000, 1)])
def test_pieces_cover_the_array_in_c_order(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    found = list(split(array, 128))
    assert max(piece.nbytes for piece in found) <= 128
    assert np.concatenate([piece.ravel() for piece in found]).tolist() == array.ravel().tolist()
    assert all(np.shares_memory(piece, array) for piece in found)


WHOLE = np.arange(24 * 30 * 7, dtype=np.uint16).reshape(24, 30, 7)


@pytest.mark.parametrize("nbytes", [2, 100, 512, 5000])
@pytest.mark.parametrize(
    "array",
    [
        WHOLE.T,
        WHOLE[:, ::2],
        WHOLE[::-1],
        WHOLE[::-3, 5:9, ::-1],
        WHOLE.transpose(1, 2, 0),
        np.asfortranarray(WHOLE),
        WHOLE[:, 0, 0],
        np.broadcast_to(WHOLE[0, 0], (50, 7)),
    ],
)
def test_pieces_of_a_view_that_is_not_contiguous_are_bounded_too(array: np.ndarray[Any, Any], nbytes: int) -> None:
    found = list(split(array, nbytes))
    assert max(piece.nbytes for piece in found) <= nbytes
    assert np.concatenate([piece.ravel() for piece in found]).tolist() == array.ravel().tolist()
    assert all(np.shares_memory(piece, array) for piece in found)


def test_an_item_is_not_cut() -> None:
    assert [piece.tolist() for piece in split(np.arange(3.0), 4)] == [[0], [1], [2]]
    assert [piece.shape for piece in split(np.array(3.0), 4)] == [()]


def test_the_extent_of_an_array_is_that_of_all_its_elements() -> None:
    base = np.zeros((6, 8), np.int32)
    start = base.ctypes.data
    cases = [
        (0, 192, base),
        (32, 64, base[1:3]),
        (4, 164, base[:, 1:2]),
        (0, 192, base[::-1, ::-1]),
        (32, 100, base[4:0:-1, 0].reshape(4, 1)),
        (8, 4, base[0, 2:3].reshape(())),
    ]
    for offset, nbytes, array in cases:
        assert extent(array) == (start + offset, nbytes)
    assert extent(base[:0])[1] == 0
