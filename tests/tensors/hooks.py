"""The hooks of the host backend, for tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from xferlib_host.conformance import Gate, TestHost

from xferlib.conformance import Hold
from xferlib.protocol import HostStager

__all__ = ["TensorHooks", "open_tensors"]


def open_tensors() -> Any:
    """Return the backend, or skip: nobody need have torch to try the rest."""
    pytest.importorskip("torch")
    from tests.tensors.backend import TensorStager

    return TensorStager()


def as_tensor(values: np.ndarray) -> Any:
    from tests.tensors import backend

    return backend.as_tensor(values)


def as_numpy(tensor: Any) -> Any:
    from tests.tensors import backend

    return backend.as_numpy(tensor)


class TensorHooks(TestHost):
    def open(self) -> HostStager[Any]:
        stager: HostStager[Any] = open_tensors()
        return stager

    def from_numpy(self, values: np.ndarray) -> Any:
        return as_tensor(values.copy())

    def to_numpy(self, array: Any) -> np.ndarray:
        return super().to_numpy(as_numpy(array))

    @contextmanager
    def held_array(self, stager: HostStager[Any], values: np.ndarray) -> Iterator[Gate]:
        with super().held_array(stager, values) as gate:
            gate.array = as_tensor(gate.array)
            yield gate

    def read_later(self, array: Any, hold: Hold) -> Callable[[], np.ndarray]:
        return super().read_later(as_numpy(array), hold)

    def write(self, array: Any, values: np.ndarray) -> None:
        super().write(as_numpy(array), values)

    def layouts(self, values: np.ndarray) -> Iterable[tuple[str, Any]]:
        tensor = as_tensor(values.copy())
        yield "Fortran order", tensor.T.contiguous().T
        yield "every other row of a longer one", tensor.repeat_interleave(2, 0)[::2]

    def aliases(self, array: Any) -> Iterable[tuple[str, Any]]:
        import torch

        yield "slice", array[1:]
        yield "strided", array[::2]
        yield "reshaped", array.reshape(2, -1)
        yield "other dtype", array.view(torch.uint8)
        yield "detached", array.detach()
        yield "NumPy and back", torch.from_numpy(array.numpy())
        yield "dlpack", torch.from_dlpack(array)
