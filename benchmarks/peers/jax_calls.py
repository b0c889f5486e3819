"""JAX's calls: `device_put` of a NumPy array, `np.asarray` of a JAX array and `copy_to_host_async` ahead of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, final

import numpy as np

from benchmarks.steps import Bytes, Compute, Drain, Feed
from benchmarks.ways import Call, Direction, Kind, Peer, Way

__all__ = ["open_peer"]

SHARE = 0.2
"""The share of the steps of a pipeline that are measured for ours."""
FEW = 0.02
"""The same for frames: JAX brings them forty times slower."""


def open_peer(platform: str = "cuda") -> Peer:
    """Import JAX. Raises `ModuleNotFoundError` without it, `RuntimeError` if it finds no device of that platform."""
    # By default JAX would take three quarters of the device's memory for itself. No effect where JAX is in use already.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = import_module("jax")
    return _JaxCalls(jax, jax.devices(platform)[0])


@final
class _JaxCalls:
    def __init__(self, jax: Any, device: Any) -> None:
        self._jax = jax
        self._device = device

    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if direction == "d2h":
            return (self._asarray(),)
        if kind == "pinned":
            return ()
        return (self._device_put(),)

    def feeds(self, kind: Kind, compute: Compute) -> Sequence[Feed]:
        if compute.handle is not None:
            return ()
        put = partial(self._jax.device_put, device=self._device)
        return (Feed(name="jax device_put", start=put, use=lambda array: array, share=SHARE),)

    def drains(self, kind: Kind, compute: Compute) -> Sequence[Drain]:
        if compute.handle is not None:
            return ()

        def ahead(output: Any, _: Bytes) -> Any:
            output.copy_to_host_async()
            return output

        return (
            Drain(name="np.asarray", start=lambda output, _: np.asarray(output), finish=lambda values: values, share=FEW),
            Drain(name="copy_to_host_async", start=ahead, finish=np.asarray, share=FEW),
        )

    def _device_put(self) -> Way:
        def bind(source: Any, _: Any) -> Call:
            return partial(self._jax.device_put, source, self._device)

        return Way(
            name="jax device_put",
            direction="h2d",
            bind=bind,
            synchronize=lambda arrays: self._jax.block_until_ready(list(arrays)),
            result=lambda arrays: arrays,
            keep=None,
            trees=True,
        )

    def _asarray(self) -> Way:
        """Into memory that JAX allocates, and keeps with the array."""

        def bind(source: Any, _: Any) -> Call:
            if not isinstance(source, self._jax.Array):
                # Another framework's array: JAX's over the same memory.
                numpy = self._jax.numpy
                source = (numpy.from_dlpack if hasattr(source, "__dlpack__") else numpy.asarray)(source)
            return partial(np.asarray, source)

        return Way(
            name="np.asarray, a view" if self._device.platform == "cpu" else "np.asarray",
            direction="d2h",
            bind=bind,
            synchronize=lambda _: None,
            result=lambda values: values,
            keep=None,
            waits=True,
            once=True,
        )
