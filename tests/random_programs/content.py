"""What arrays hold: bytes that follow from who they are, so that the model knows every byte and keeps none of them.

A `Content` names the bytes of one array: whose they are, which writing of them, and what views were taken since. Contents of two
arrays, or of two writings of one, differ in nearly every byte. Nothing of the library's is asked.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np

__all__ = ["Array", "Content", "Wrong", "assert_holds", "dtype_named", "fill", "raw"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

LARGEST, LARGE = 256 << 20, 17 << 20
"""Bytes of one array, at most; and of nearly all of them."""
PLACES = 1 << 18
STEP = 16
EXTENSIONS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


class Wrong(AssertionError):
    """Raised where the library broke a promise."""


@final
@dataclass(frozen=True)
class Content:
    """The bytes of one array. `views` are applied to the whole one after the other: see `viewed`."""

    owner: str
    version: int
    dtype: str
    shape: tuple[int, ...]
    views: tuple[str, ...] = ()

    def array(self) -> Array:
        """Return the values, in an array that may not be written."""
        dtype = dtype_named(self.dtype)
        nbytes = math.prod(self.shape) * dtype.itemsize
        whole = raw(f"{self.owner}@{self.version}", nbytes, booleans=dtype == np.bool_).view(dtype).reshape(self.shape)
        return functools.reduce(viewed, self.views, whole)

    def next(self) -> Content:
        """Return what the same array holds when it is written once more."""
        return replace(self, version=self.version + 1)

    def view(self, how: str) -> Content:
        return replace(self, views=(*self.views, how))


def viewed(array: Any, how: str) -> Any:
    """Return a view of an array of NumPy's, or of whoever slices like it."""
    return {
        "same": lambda: array,
        "tail": lambda: array[1:],
        "steps": lambda: array[::2],
        "backwards": lambda: array[::-1],
        "turned": lambda: array.T,
    }[how]()


def raw(key: str, nbytes: int, *, booleans: bool = False) -> Array:
    """Return the bytes that belong to a key."""
    start = zlib.crc32(key.encode()) % PLACES * STEP
    most = LARGE if nbytes <= LARGE else LARGEST
    return (_zeros_and_ones(most) if booleans else _noise(most))[start : start + nbytes]


def fill(array: Array, content: Content) -> None:
    """Write the content into an array of any layout, byte for byte."""
    # As integers where there are some: what copies floats one by one may change those that are no numbers.
    same = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(array.dtype.itemsize, np.complex128)
    array.view(same)[...] = content.array().view(same)


def assert_holds(got: Array, content: Content, what: str) -> None:
    """Raise `Wrong` unless an array has the content's dtype, shape and bytes."""
    want = content.array()
    if got.dtype != want.dtype or got.shape != want.shape:
        raise Wrong(f"{what}: {got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}")
    got_bytes, want_bytes = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (got, want))
    if not np.array_equal(got_bytes, want_bytes):
        wrong = np.flatnonzero(got_bytes != want_bytes)
        raise Wrong(
            f"{what}: {wrong.size} of {want.nbytes} bytes are wrong, bytes {wrong[0]} to {wrong[-1]}; "
            f"expected {want_bytes[wrong[0]]} of {content}, got {got_bytes[wrong[0]]}"
        )


@functools.cache
def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype; those that NumPy does not have come from ml_dtypes."""
    if name in EXTENSIONS:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))  # type: ignore[no-any-return]  # getattr knows no type
    return np.dtype(name)


@functools.cache
def _noise(most: int) -> Array:
    noise = np.random.default_rng(13).integers(0, 256, most + PLACES * STEP, np.uint8)
    noise.flags.writeable = False
    return noise


@functools.cache
def _zeros_and_ones(most: int) -> Array:
    booleans = _noise(most) & np.uint8(1)
    booleans.flags.writeable = False
    return booleans
