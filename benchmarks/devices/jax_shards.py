"""Several of JAX's devices, or one of them, between which the rows of batches and of files are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import xferlib_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers.state_calls import State
from benchmarks.steps import Bytes
from benchmarks.ways import Shards

__all__ = ["open_shards"]

_differ: Any = jax.jit(lambda left, right: jnp.any(left != right))


def open_shards() -> Sequence[Shards]:
    """Return JAX's first local device, and all of them; nothing where there is one."""
    devices = jax.local_devices()
    return (_JaxShards(devices[:1]), _JaxShards(devices)) if len(devices) > 1 else ()


@final
class _JaxShards:
    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.count = len(devices)
        self._sharding = NamedSharding(Mesh(np.array(devices), ("rows",)), PartitionSpec("rows"))
        self.peers: dict[str, Callable[[Iterable[Bytes]], Iterator[Any]]] = {"jax device_put": self._put_ahead}
        self.loaders: dict[str, Callable[[Path], State]] = {"safetensors.numpy, jax.device_put": self._put_from_file}

    def place(self, batch: Bytes) -> Any:
        return jax.block_until_ready(jax.device_put(batch, self._sharding))

    def prefetched(self, batches: Iterable[Bytes]) -> AbstractContextManager[Iterator[Any]]:
        return xferlib_jax.prefetch(batches, self._sharding)

    def load(self, path: Path) -> State:
        found: State = xferlib_jax.load(path, self._sharding)
        return found

    def differ(self, batch: Any, expected: Any) -> Any:
        return _differ(batch, expected)

    def _put_ahead(self, batches: Iterable[Bytes]) -> Iterator[Any]:
        # It returns before the bytes are there: one more is on its way while the loop has the last.
        return (array for array, _ in pairwise(self._put_each(batches)))

    def _put_each(self, batches: Iterable[Bytes]) -> Iterator[Any]:
        for batch in batches:
            yield jax.device_put(batch, self._sharding)
        yield None

    def _put_from_file(self, path: Path) -> State:
        from safetensors.numpy import load_file

        found: State = jax.block_until_ready(jax.device_put(load_file(path), self._sharding))
        return found
