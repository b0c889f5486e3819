"""Compute in JAX: one jitted step with a loop of matrix products whose length is known when it is compiled.

A loop whose length only the device knows would be driven from the host, and nothing else would run beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.steps import Bytes

__all__ = ["JaxSteps"]

SIDE = 4096
"""Large products: launching many small ones would take the host longer than the device needs for them."""
SIDE_ON_CPU = 64


def _step(batch: Any, tag: Any, weights: Any, rounds: int) -> tuple[Any, Any]:
    total = batch.astype(jnp.uint32).sum()
    end = lax.fori_loop(0, rounds, lambda _, product: (product @ weights) * weights.dtype.type(0.1), weights)
    # Zero times a product may be NaN, as far as the compiler knows, so it does not leave out the loop.
    return total + (end[0, 0] * 0).astype(jnp.uint32), batch ^ tag


@final
class JaxSteps:
    """The checksum is the sum of the bytes, modulo 2**32. Outputs are new arrays, and stay intact."""

    stream: Final = None
    handle: Final = None

    def __init__(self, device: Any) -> None:
        side = SIDE_ON_CPU if device.platform == "cpu" else SIDE
        self._step = jax.jit(_step, static_argnames="rounds")
        self._weights = jax.device_put(jnp.full((side, side), 1e-4, jnp.bfloat16), device)
        # On the device beforehand: otherwise JAX would transfer a number in every step.
        self._tags = [jax.device_put(jnp.uint8(tag), device) for tag in range(256)]
        jax.block_until_ready((self._weights, self._tags))

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def adopt(self, array: Any) -> Any:
        return array

    def step(self, batch: Any, rounds: int, tag: int) -> tuple[Any, Any]:
        mark, output = self._step(batch, self._tags[tag], self._weights, rounds=rounds)
        return mark, output

    def wait(self, mark: Any) -> None:
        mark.block_until_ready()

    def checksums(self, marks: Sequence[Any]) -> list[int]:
        return [int(mark) for mark in marks]

    def checksum(self, values: Bytes) -> int:
        return int(values.sum(dtype=np.uint64)) % (1 << 32)
