"""The device of the JAX backend: JAX arrays, and bare copies from and to the memory they lie in; on CUDA, or on the CPU.

JAX arrays cannot be written to, so every transfer to the device that is measured here makes a new array or is given one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import memory
from benchmarks.computes.jax_steps import JaxSteps
from benchmarks.devices import bare
from benchmarks.devices.jax_shards import open_shards
from benchmarks.peers import OPENERS, jax_calls
from benchmarks.steps import Bytes, Compute
from benchmarks.ways import Call, Device, Direction, Opener, Shards, Way

__all__ = ["open_device"]

SIDE = 512
PRODUCTS = 4
"""Of matrices of that side: some ten microseconds."""
OTHERS = ("cupy", "torch", "numba", "cuda")


def open_device() -> Device:
    """Return JAX's first local device."""
    return _JaxDevice(jax.local_devices()[0])


@partial(jax.jit, static_argnames="ends")
def _cut(array: Any, ends: tuple[int, ...]) -> list[Any]:
    # Compiled whole: one slice at a time would be compiled for each place.
    return memory.pieces(array, ends)


_same: Any = jax.jit(jnp.array_equal)


def _shortly(matrix: Any) -> Any:
    for _ in range(PRODUCTS):
        matrix = matrix @ matrix
    return matrix


@final
class _JaxDevice:
    in_place: Final = False
    streams: Final[Sequence[str]] = ("in order",)

    def __init__(self, device: Any) -> None:
        self._device = device
        on_cpu = device.platform == "cpu"
        self.peers: Final[Mapping[str, Opener]] = {
            "jax": partial(jax_calls.open_peer, device.platform),
            **({} if on_cpu else {name: OPENERS[name] for name in OTHERS}),
        }
        self._copies: bare.Bare = bare.CpuCopies() if on_cpu else bare.CudaCopies()
        self.name: Final[str] = self._copies.device_name

    def machine(self) -> dict[str, str]:
        return self._copies.machine()

    def versions(self) -> dict[str, str]:
        return self._copies.versions()

    def empty(self, nbytes: int) -> Any:
        return jax.block_until_ready(jax.device_put(jnp.zeros(nbytes, np.uint8), self._device))

    def upload(self, values: Bytes) -> Any:
        # A copy: on the CPU `device_put` may keep the memory it is given.
        return jax.block_until_ready(jax.device_put(jnp.array(values, copy=True), self._device))

    def invert(self, source: Any, out: Any) -> None:
        raise TypeError("JAX arrays cannot be written to; the benchmarks make new ones, as `in_place` says")

    def inverted(self, source: Any) -> Any:
        return jax.block_until_ready(~source)

    def cut(self, array: Any, ends: tuple[int, ...]) -> Sequence[Any]:
        pieces: list[Any] = _cut(array, ends)
        return pieces

    def equal(self, left: Any, right: Any) -> bool:
        # Numba's arrays may know no DLPack.
        foreign = hasattr(right, "__dlpack__") and not isinstance(right, jax.Array)
        mine = jnp.from_dlpack(right) if foreign else jnp.asarray(right)
        return bool(_same(left, mine))

    def synchronize(self) -> None:
        self._copies.synchronize_all()

    def wait(self, arrays: Sequence[Any]) -> None:
        jax.block_until_ready(list(arrays))

    def raw(self, direction: Direction) -> Way:
        return bare.way(self._copies, direction, _address)

    def floors(self, direction: Direction) -> Sequence[Way]:
        if not isinstance(self._copies, bare.CudaCopies):
            return ()
        name = f"{self._copies.name} + cuEventRecord"
        return (bare.way(self._copies, direction, _address, name=name, copy=self._copies.copy_and_mark),)

    def shards(self) -> Sequence[Shards]:
        return open_shards()

    def busy(self) -> AbstractContextManager[Call] | None:
        return self._busy()

    def compute(self, nbytes: int, stream: str) -> Compute:
        return JaxSteps(self._device)

    @contextmanager
    def _busy(self) -> Iterator[Call]:
        matrix = jax.device_put(jnp.zeros((SIDE, SIDE), jnp.bfloat16), self._device)
        shortly, latest = jax.jit(_shortly), [matrix]

        def launch() -> None:
            latest[0] = shortly(matrix)

        launch()
        jax.block_until_ready(latest)
        yield launch
        jax.block_until_ready(latest)


def _address(array: Any) -> int:
    """Return where a finished array lies."""
    return int(array.block_until_ready().unsafe_buffer_pointer())
