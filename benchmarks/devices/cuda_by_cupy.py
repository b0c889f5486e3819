"""The device of the CuPy backend: CuPy arrays, and the bare calls of the CUDA runtime on streams of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, final

import cupy
import numpy as np

from benchmarks import memory
from benchmarks.computes.cupy_steps import CupySteps
from benchmarks.devices.link import link
from benchmarks.peers import OPENERS
from benchmarks.steps import Bytes, Compute
from benchmarks.ways import Call, Device, Direction, Opener, Shards, Way

__all__ = ["open_device"]

SPIN_NANOSECONDS = 20_000
OWN = "own stream"
SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""


def open_device() -> Device:
    """Return device 0."""
    return _CudaDevice()


@final
class _CudaDevice:
    peers: Final[Mapping[str, Opener]] = {name: OPENERS[name] for name in ("cupy", "torch", "jax", "numba", "cuda")}
    in_place: Final = True
    streams: Final[Sequence[str]] = ("default stream", OWN)

    def __init__(self) -> None:
        self._device = cupy.cuda.Device(0)
        self._device.use()
        self.name: Final[str] = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        self._streams: dict[Direction, Any] = {
            "h2d": cupy.cuda.Stream(non_blocking=True),
            "d2h": cupy.cuda.Stream(non_blocking=True),
        }
        self._event = cupy.cuda.Event(disable_timing=True)

    def machine(self) -> dict[str, str]:
        return {"gpu": self.name, "link": link(self._device.pci_bus_id)}

    def versions(self) -> dict[str, str]:
        runtime = cupy.cuda.runtime
        return {"cuda runtime": _dotted(runtime.runtimeGetVersion()), "cuda driver": _dotted(runtime.driverGetVersion())}

    def empty(self, nbytes: int) -> Any:
        return cupy.empty(nbytes, np.uint8)

    def upload(self, values: Bytes) -> Any:
        array = cupy.empty(values.shape, values.dtype)
        array.set(values)
        self.synchronize()
        return array

    def invert(self, source: Any, out: Any) -> None:
        cupy.invert(_wide(source), out=_wide(out))

    def inverted(self, source: Any) -> Any:
        array = ~source
        self.synchronize()
        return array

    def cut(self, array: Any, ends: tuple[int, ...]) -> Sequence[Any]:
        return memory.pieces(array, ends)

    def equal(self, left: Any, right: Any) -> bool:
        # Numba's arrays may know no DLPack.
        foreign = hasattr(right, "__dlpack__") and not isinstance(right, cupy.ndarray)
        mine = cupy.from_dlpack(right) if foreign else cupy.asarray(right)
        return bool(cupy.array_equal(_wide(left), _wide(mine)))

    def synchronize(self) -> None:
        self._device.synchronize()

    def wait(self, arrays: Sequence[Any]) -> None:
        cupy.cuda.get_current_stream().synchronize()

    def raw(self, direction: Direction) -> Way:
        stream = self._streams[direction]
        copy = cupy.cuda.runtime.memcpyAsync

        def bind(source: Any, target: Any) -> Call:
            return partial(copy, *_arguments(direction, source, target), stream.ptr)

        return Way(name="memcpyAsync", direction=direction, bind=bind, synchronize=lambda _: stream.synchronize())

    def floors(self, direction: Direction) -> Sequence[Way]:
        stream, event = self._streams[direction], self._event
        copy, record = cupy.cuda.runtime.memcpyAsync, cupy.cuda.runtime.eventRecord

        def bind(source: Any, target: Any) -> Call:
            arguments = (*_arguments(direction, source, target), stream.ptr)
            mark = (event.ptr, stream.ptr)

            def call() -> None:
                copy(*arguments)
                record(*mark)

            return call

        way = Way(name="memcpyAsync + eventRecord", direction=direction, bind=bind, synchronize=lambda _: stream.synchronize())
        return (way,)

    def shards(self) -> Sequence[Shards]:
        return ()

    def busy(self) -> AbstractContextManager[Call] | None:
        return _busy()

    def compute(self, nbytes: int, stream: str) -> Compute:
        return CupySteps(nbytes, own_stream=stream == OWN)


@contextmanager
def _busy() -> Iterator[Call]:
    kernel = cupy.RawKernel(SPIN, "spin")
    arguments = ((1,), (1,), (np.int64(SPIN_NANOSECONDS),))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        # The first launch compiles and loads.
        kernel(*arguments)
        stream.synchronize()
        yield partial(kernel, *arguments)
        stream.synchronize()


def _arguments(direction: Direction, source: Any, target: Any) -> tuple[int, int, int, int]:
    if direction == "h2d":
        return target.data.ptr, source.ctypes.data, source.nbytes, cupy.cuda.runtime.memcpyHostToDevice
    return target.ctypes.data, source.data.ptr, source.nbytes, cupy.cuda.runtime.memcpyDeviceToHost


def _wide(array: Any) -> Any:
    """View bytes as words where they divide evenly: to compare a GiB then takes an eighth of the temporary memory."""
    return array.view(np.uint64) if array.nbytes % 8 == 0 else array


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
