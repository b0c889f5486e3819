"""Sources and waits for the pipelines' tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import xferlib
from xferlib.pipeline.memory_estimate import tree_nbytes

PATIENCE = 20.0
"""Seconds after which a wait for something that must come is a failure."""


def until(reached: Callable[[], object]) -> None:
    """Wait for something that is bound to come."""
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.0005)


def batch(number: int, rows: int = 4) -> dict[str, Any]:
    return {"x": np.full((rows, 8), number, np.float32), "label": np.arange(rows) + number}


def number_of(tree: Any) -> int:
    """Return which batch it is; all of it must be."""
    values = set(np.asarray(tree["x"]).ravel().tolist())
    assert len(values) == 1
    (value,) = values
    assert tree["label"][0] == value
    return int(value)


class Source:
    """Batches, and how many were asked for. `stop_at`: the number before whose batch it waits for `gate`."""

    def __init__(self, count: int, *, stop_at: int | None = None) -> None:
        self.count = count
        self.stop_at = stop_at
        self.gate = threading.Event()
        self.stopped = threading.Event()
        self.closed = threading.Event()
        self.asked = 0
        self.thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.thread = threading.current_thread()
        try:
            for number in range(self.count):
                self.asked += 1
                if number == self.stop_at:
                    self.stopped.set()
                    assert self.gate.wait(PATIENCE)
                yield batch(number)
        finally:
            self.closed.set()


def busy(lock: Any) -> bool:
    """Tell whether another thread has the lock."""
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


@dataclass
class PutBy:
    """Puts each batch by a function: what a `Prefetch` is made of, for tests that play a part of it."""

    start: Callable[[Any], Any]
    take: Callable[[Any], Any] = lambda transfer: transfer.value
    device_waits: Callable[[], int] = lambda: 0
    rewrites: bool = True

    def put(self, batch: Any, *, unshared: bool) -> Any:
        return self.start(batch)

    def in_place(self, batch: Any) -> bool:
        return False

    def nbytes(self, batch: Any) -> int:
        return tree_nbytes(batch)

    def check_room(self, batch: Any, depth: int, count: int) -> None:
        return


def part(pipeline: xferlib.Prefetch) -> str | None:
    """Return what the thread of a prefetch is doing."""
    return pipeline._background.clock.phase


def thread_of(pipeline: xferlib.Prefetch) -> threading.Thread:
    return pipeline._background._thread


def h2d(stager: xferlib.Stager) -> Any:
    """Return the copy engine of one direction of a host stager."""
    return stager.backend.h2d  # type: ignore[attr-defined]  # Of the host backend only.


def d2h(stager: xferlib.Stager) -> Any:
    return stager.backend.d2h  # type: ignore[attr-defined]  # Of the host backend only.
