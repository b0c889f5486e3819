"""JAX's call to the device: `device_put` of a pageable NumPy array."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, final

import cupy

from benchmarks.ways import Call, Direction, Kind, Peer, Way

__all__ = ["open_peer"]


def open_peer() -> Peer:
    """Import JAX. Raises `ModuleNotFoundError` without it, `RuntimeError` if it finds no CUDA device."""
    # By default it would take three quarters of the device's memory for itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = import_module("jax")
    return _JaxCalls(jax, jax.devices("cuda")[0])


@final
class _JaxCalls:
    def __init__(self, jax: Any, device: Any) -> None:
        self._jax = jax
        self._device = device

    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if kind != "pageable" or direction != "h2d":
            return ()
        return (
            Way(
                name="jax device_put",
                direction=direction,
                bind=self._bind,
                synchronize=lambda arrays: self._jax.block_until_ready(list(arrays)),
                result=cupy.from_dlpack,
                keep=None,
            ),
        )

    def _bind(self, source: Any, _: Any) -> Call:
        return partial(self._jax.device_put, source, self._device)
