"""The hooks by which the conformance suite looks at the host backend: `pytest --pyargs xferlib_host.conformance`.

A hold is a job that stands in the queue of a stream, or of a copy engine, until its gate is opened; what is behind it is held.
Readers and expected values are plain NumPy and never the stager's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from xferlib.conformance import Direction, Hold, StagerConformance
from xferlib.protocol import HostStager
from xferlib_host import Stream, open_stager
from xferlib_host._stager import NumpyStager

__all__ = ["Gate", "TestHost", "finished"]

WATCHDOG_SECONDS = 20.0

Array = npt.NDArray[Any]


@final
class Gate:
    """One or several jobs that do not end before `release`, and the `Hold` over what is queued behind them."""

    def __init__(self, submits: Iterable[Callable[[Callable[[], None]], None]], stream: Stream | None = None) -> None:
        self.stream = stream
        self.array: Any = None
        self._opened = threading.Event()
        self._ended: list[threading.Event] = []
        self._overdue = False
        for submit in submits:
            ended = threading.Event()
            self._ended.append(ended)
            submit(lambda ended=ended: self._stand(ended))  # type: ignore[misc]  # A default binds the loop's variable.

    @property
    def held(self) -> bool:
        return not self._opened.is_set() and not any(ended.is_set() for ended in self._ended)

    def release(self) -> None:
        self._opened.set()

    def finish(self) -> None:
        """Release, and wait for the jobs. Raises `TimeoutError` if one of them had been given up."""
        self.release()
        for ended in self._ended:
            ended.wait()
        if self._overdue:
            raise TimeoutError(f"the gate was given up after {WATCHDOG_SECONDS} s: something waited for what it held")

    def _stand(self, ended: threading.Event) -> None:
        if not self._opened.wait(WATCHDOG_SECONDS):
            self._overdue = True
        ended.set()


class TestHost(StagerConformance):
    def open(self) -> HostStager[Any]:
        return open_stager()

    def from_numpy(self, values: np.ndarray) -> Array:
        return values.copy()

    def to_numpy(self, array: Array) -> np.ndarray:
        # The calling thread is its own stream here: it has waited already, if only inside `value`.
        return array.copy()

    @contextmanager
    def hold_compute(self, stager: HostStager[Any]) -> Iterator[Gate]:
        stream = Stream()
        with finished(Gate([stream.submit], stream)) as gate:
            yield gate
        stream.close()

    @contextmanager
    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> Iterator[Gate]:
        backend = cast("NumpyStager", stager)
        engines = {"h2d": [backend.h2d], "d2h": [backend.d2h], "both": [backend.h2d, backend.d2h]}[direction]
        with finished(Gate([engine.submit for engine in engines])) as gate:
            yield gate

    @contextmanager
    def held_array(self, stager: HostStager[Any], values: np.ndarray) -> Iterator[Gate]:
        with self.hold_compute(stager) as gate:
            gate.array = np.zeros_like(values)
            assert gate.stream is not None
            gate.stream.submit(np.copyto, gate.array, values.copy())
            yield gate

    def read_later(self, array: Array, hold: Hold) -> Callable[[], np.ndarray]:
        stream = cast("Stream", hold.stream)
        seen = np.empty(array.shape, array.dtype)
        # Only the address is kept: the question is whether the memory is still the array's when this is read.
        interface = {**array.__array_interface__, "strides": array.strides}
        stream.submit(lambda: np.copyto(seen, np.asarray(_Interface(interface))))
        read = stream.record()

        def values() -> np.ndarray:
            read.synchronize()
            return seen

        return values

    @contextmanager
    def break_copies(self, stager: HostStager[Any]) -> Iterator[None]:
        backend = cast("NumpyStager", stager)
        backend.h2d.submit(_break)
        backend.d2h.submit(_break)
        yield

    def memory_calls(self, stager: HostStager[Any]) -> int:
        return sum(cast("NumpyStager", stager).memory.calls())

    def write(self, array: Array, values: np.ndarray) -> None:
        with Stream() as stream:
            stream.submit(np.copyto, array, values)
            stream.close()

    def current(self, stream: object) -> AbstractContextManager[object]:
        return cast("Stream", stream)

    def layouts(self, values: np.ndarray) -> Iterable[tuple[str, Array]]:
        yield "Fortran order", np.asfortranarray(values)
        yield "backwards", values[::-1, ::-1].copy()[::-1, ::-1]
        yield "columns of a wider one", np.pad(values, ((0, 0), (1, 2)))[:, 1:-2]
        yield "every other row of a longer one", np.repeat(values, 2, axis=0)[::2]

    def aliases(self, array: Array) -> Iterable[tuple[str, Array]]:
        yield "slice", array[1:]
        yield "strided", array[::2]
        yield "backwards", array[::-1]
        yield "reshaped", array.reshape(2, -1)
        yield "other dtype", array.view(np.uint8)
        yield "subclass", array.view(_Subclass)
        yield "buffer", np.asarray(array.data)
        yield "dlpack", np.from_dlpack(array)


class _Subclass(np.ndarray[Any, np.dtype[Any]]):
    """An array type of somebody else's."""


@final
class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


@contextmanager
def finished(gate: Gate) -> Iterator[Gate]:
    """Yield the hold; behind the block it is released, and what it held has ended."""
    try:
        yield gate
    finally:
        gate.finish()


def _break() -> None:
    raise RuntimeError("broken on purpose")
