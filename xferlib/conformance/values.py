"""The arrays that the laws move, and what it means that two are the same: dtype, shape and every bit.

Values are patterns of bytes that differ in every byte from one seed to the next, and are never all zero. So memory that was not
written, or was written by another transfer, cannot pass for the right one.
"""

from __future__ import annotations

import importlib.util
from typing import Any, TypeAlias

import numpy as np

__all__ = [
    *("DTYPES", "LARGE", "SHAPES", "SIZES", "SMALL", "Array"),
    *("assert_same", "bytes_of", "dtype_named", "others", "pattern", "words"),
]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

SMALL = 4 << 10
"""Bytes: small enough to share memory with others, wherever memory is shared."""
LARGE = (3 << 20) + 12
"""Bytes: several MiB, so that no driver takes a short cut through a buffer of its own; and not a power of two."""
SIZES = {"small": SMALL, "large": LARGE}

SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (3, 5, 2), (257, 3))

_EXTENSIONS = ("bfloat16", "float8_e4m3fn", "float8_e5m2") if importlib.util.find_spec("ml_dtypes") else ()
DTYPES = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    *_EXTENSIONS,
)


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype; dtypes that NumPy lacks come from ml_dtypes."""
    if name in _EXTENSIONS:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))  # type: ignore[no-any-return]  # getattr knows no type
    return np.dtype(name)


def pattern(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Array:
    """Return an array in C order whose bytes are a pattern of prime period; for bool, only bytes that are a bool."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    cycle = ((np.arange(251) * 7 + seed * 29) % 251 + 1).astype(np.uint8)
    raw = np.resize(cycle, nbytes) if nbytes else cycle[:0]
    if dtype == np.bool_:
        raw = (raw + np.uint8(seed)) % np.uint8(2)
    return raw.view(dtype).reshape(shape)


def words(seed: int, nbytes: int = SMALL) -> Array:
    """Return a pattern as a one-dimensional array of int32."""
    return pattern((nbytes // 4,), np.dtype(np.int32), seed)


def bytes_of(values: Array) -> Array:
    """Return the bytes of an array in C order, as an array of one dimension."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def others(values: Array) -> Array:
    """Return values of the same dtype that differ in every element, bool included."""
    return (bytes_of(values) ^ np.uint8(1)).view(values.dtype).reshape(values.shape)


def assert_same(got: Array, want: Array) -> None:
    """Assert that two host arrays agree in dtype, shape and every bit; NaN is no exception."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.tobytes() == want.tobytes():
        return
    got_bytes, want_bytes = (np.frombuffer(array.tobytes(), np.uint8) for array in (got, want))
    wrong = np.flatnonzero(got_bytes != want_bytes)
    first = int(wrong[0])
    raise AssertionError(
        f"{wrong.size} of {want.nbytes} bytes differ, the first at {first}: {got_bytes[first]} instead of {want_bytes[first]}"
    )
