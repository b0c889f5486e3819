"""The device of the Numba backend: Numba's device arrays, and the bare calls of the CUDA driver on streams of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, final

import numpy as np

from benchmarks import memory
from benchmarks.computes.numba_steps import GRID, NumbaSteps, kernels, load
from benchmarks.devices import bare
from benchmarks.peers import OPENERS
from benchmarks.steps import Bytes, Compute
from benchmarks.ways import Call, Device, Direction, Opener, Shards, Way

__all__ = ["open_device"]

SPIN_ROUNDS = 4000
"""Some ten microseconds."""
OWN = "own stream"


def open_device() -> Device:
    """Return device 0."""
    return _NumbaDevice()


@final
class _NumbaDevice:
    peers: Final[Mapping[str, Opener]] = {name: OPENERS[name] for name in ("cupy", "torch", "jax", "numba", "cuda")}
    in_place: Final = True
    streams: Final[Sequence[str]] = ("default stream", OWN)

    def __init__(self) -> None:
        self._cuda = load()
        self._copies = bare.CudaCopies()
        self.name: Final[str] = self._copies.device_name
        self._found = self._cuda.to_device(np.zeros(1, np.uint32))

    def machine(self) -> dict[str, str]:
        return self._copies.machine()

    def versions(self) -> dict[str, str]:
        return self._copies.versions()

    def empty(self, nbytes: int) -> Any:
        return self._cuda.device_array(nbytes, np.uint8)

    def upload(self, values: Bytes) -> Any:
        array = self._cuda.to_device(values)
        self.synchronize()
        return array

    def invert(self, source: Any, out: Any) -> None:
        kernels().invert[GRID](_wide(source), _wide(out))

    def inverted(self, source: Any) -> Any:
        array = self.empty(source.nbytes)
        self.invert(source, array)
        self.synchronize()
        return array

    def cut(self, array: Any, ends: tuple[int, ...]) -> Sequence[Any]:
        return memory.pieces(array, ends)

    def equal(self, left: Any, right: Any) -> bool:
        mine = self._cuda.as_cuda_array(right)
        if mine.nbytes != left.nbytes:
            return False
        self._found.copy_to_device(np.zeros(1, np.uint32))
        kernels().differ[GRID](_wide(left), _wide(mine), self._found)
        return not self._found.copy_to_host()[0]

    def synchronize(self) -> None:
        self._copies.synchronize_all()

    def wait(self, arrays: Sequence[Any]) -> None:
        self._cuda.default_stream().synchronize()

    def raw(self, direction: Direction) -> Way:
        return bare.way(self._copies, direction, _address)

    def floors(self, direction: Direction) -> Sequence[Way]:
        name = f"{self._copies.name} + cuEventRecord"
        return (bare.way(self._copies, direction, _address, name=name, copy=self._copies.copy_and_mark),)

    def shards(self) -> Sequence[Shards]:
        return ()

    def busy(self) -> AbstractContextManager[Call] | None:
        return self._busy()

    def compute(self, nbytes: int, stream: str) -> Compute:
        return NumbaSteps(self._copies, nbytes, own_stream=stream == OWN)

    @contextmanager
    def _busy(self) -> Iterator[Call]:
        sinks = self._cuda.device_array(GRID[0] * GRID[1], np.uint32)
        spin = kernels().spin[GRID]

        def launch() -> None:
            spin(sinks, SPIN_ROUNDS)

        # The first launch compiles and loads.
        launch()
        self.synchronize()
        yield launch
        self.synchronize()


def _address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def _wide(array: Any) -> Any:
    """View bytes as words where they divide evenly."""
    return array.view(np.uint64) if array.nbytes % 8 == 0 else array
