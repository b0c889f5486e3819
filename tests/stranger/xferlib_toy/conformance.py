"""The toy's hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from xferlib.conformance import Direction, StagerConformance
from xferlib.protocol import HostStager
from xferlib_toy import Queue, ToyArray, open_stager

SECONDS = 20.0


class Gate:
    """Holds queues shut: what is behind it in them cannot run."""

    stream = None  # Toy arrays order themselves.

    def __init__(self, *queues: Queue) -> None:
        self.queue = queues[0]
        self.array: Any = None
        self._open = threading.Event()
        for queue in queues:
            queue.run(self._open.wait, SECONDS)
        self._passed = [queue.record() for queue in queues]

    @property
    def held(self) -> bool:
        return not self._open.is_set() and not any(point.future.done() for point in self._passed)

    def release(self) -> None:
        self._open.set()


@contextmanager
def gate(*queues: Queue) -> Iterator[Gate]:
    shut = Gate(*queues)
    try:
        yield shut
    finally:
        shut.release()
        for point in shut._passed:
            point.synchronize()


class TestToy(StagerConformance):
    def open(self) -> HostStager[Any]:
        return open_stager()

    def from_numpy(self, values: np.ndarray) -> ToyArray:
        return ToyArray(values.copy(), None, None)

    def to_numpy(self, array: ToyArray) -> np.ndarray:
        if array.ready is not None:
            array.ready.synchronize()
        return array.values.copy()

    @contextmanager
    def hold_compute(self, stager: HostStager[Any]) -> Iterator[Gate]:
        compute = Queue()
        with gate(compute) as shut:
            yield shut
        compute.close()

    def hold_copies(self, stager: Any, direction: Direction = "both") -> Any:
        return gate(*([stager.h2d, stager.d2h] if direction == "both" else [getattr(stager, direction)]))

    @contextmanager
    def held_array(self, stager: HostStager[Any], values: np.ndarray) -> Iterator[Gate]:
        with self.hold_compute(stager) as shut:
            produced = np.zeros_like(values)
            shut.queue.run(np.copyto, produced, values.copy())
            shut.array = ToyArray(produced, shut.queue.record(), None)
            yield shut

    def read_later(self, array: ToyArray, hold: Any) -> Callable[[], np.ndarray]:
        seen = np.empty_like(array.values)
        if array.ready is not None:
            hold.queue.run(array.ready.synchronize)
        hold.queue.run(np.copyto, seen, array.values)
        hold.queue.run(lambda lease: None, array.lease)
        read = hold.queue.record()

        def values() -> np.ndarray:
            read.synchronize()
            return seen

        return values

    @contextmanager
    def break_copies(self, stager: Any) -> Iterator[None]:
        for queue in (stager.h2d, stager.d2h):
            queue.run(lambda: 1 / 0)
        yield

    def memory_calls(self, stager: Any) -> int:
        calls: int = stager.memory_calls
        return calls

    def aliases(self, array: ToyArray) -> Iterator[tuple[str, ToyArray]]:
        yield "slice", ToyArray(array.values[1:], array.ready, array.lease)
