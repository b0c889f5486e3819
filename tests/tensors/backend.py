"""The host backend with another face: its device arrays are tensors over the same memory. All that differs is said here."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from xferlib_host import open_stager as open_host

from xferlib.protocol import DeviceBlock, DeviceRange, Event, Stream

__all__ = ["TensorStager", "as_numpy", "as_tensor"]

BRIDGED = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""Dtypes in which no memory can be shared with NumPy, and those of the same size in which it can."""
BITS = {"uint": (8, 16, 32, 64), "int": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
PLAIN = ["bool", *(f"{kind}{bits}" for kind, sizes in BITS.items() for bits in sizes)]
NUMPY: dict[Any, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in PLAIN}
NUMPY |= {dtype: np.dtype(getattr(ml_dtypes, str(dtype).removeprefix("torch."))) for dtype in BRIDGED}
TORCH = {dtype: ours for ours, dtype in NUMPY.items()}


def as_tensor(array: np.ndarray[Any, Any]) -> Any:
    """Return a tensor over the array's memory, which holds the array for as long as anything of torch's reaches the memory."""
    dtype = TORCH[array.dtype]
    if dtype not in BRIDGED:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(NUMPY[BRIDGED[dtype]])).view(dtype)


def as_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """Return an array over the tensor's memory, which holds it likewise."""
    if tensor.dtype not in BRIDGED:
        return tensor.numpy()  # type: ignore[no-any-return]  # torch is not there for the type checker.
    return tensor.view(BRIDGED[tensor.dtype]).numpy().view(NUMPY[tensor.dtype])  # type: ignore[no-any-return]


class TensorStager:
    name = "tensors"

    def __init__(self) -> None:
        self.inner = open_host()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @staticmethod
    def describe(array: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        known = isinstance(array, torch.Tensor) and array.dtype in NUMPY
        return (tuple(array.shape), NUMPY[array.dtype]) if known else None

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        if dtype not in TORCH:
            raise TypeError(f"torch has no {dtype!r}. Convert the array first")

    def as_array(
        self, block: DeviceBlock, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, after: Event, lease: object
    ) -> Any:
        return as_tensor(self.inner.as_array(block, offset, shape, dtype, after=after, lease=lease))

    def as_mapped(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, stream: object | None, lease: object
    ) -> tuple[Any, Stream | None]:
        view, found = self.inner.as_mapped(address, shape, dtype, stream=stream, lease=lease)
        return as_tensor(view), found

    def place(self, array: Any, stream: object | None = None) -> DeviceRange:
        source: DeviceRange = self.inner.place(self._memory(array), stream)
        return source

    def as_source(self, array: Any, stream: object | None = None) -> DeviceRange:
        source: DeviceRange = self.inner.as_source(self._memory(array), stream)
        return source

    def as_target(self, array: Any, stream: object | None = None) -> DeviceRange:
        source: DeviceRange = self.inner.as_target(self._memory(array), stream)
        return source

    def _memory(self, array: Any) -> np.ndarray[Any, Any]:
        if self.describe(array) is None:
            raise TypeError(f"expected a tensor of a dtype that NumPy or ml_dtypes has, got {array!r}. Convert it with to()")
        return as_numpy(array)
