"""A loop of short steps on another thread, to see what some work does to whoever launches."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import final

import numpy as np

from benchmarks.bench import Bench
from benchmarks.steps import Compute

__all__ = ["COMPUTE_NBYTES", "ShortSteps", "figures"]

COMPUTE_NBYTES = 1 << 20


@final
class ShortSteps:
    """Launches one short step after another, and waits for the one before each time."""

    def __init__(self, bench: Bench) -> None:
        self._compute: Compute = bench.device.compute(COMPUTE_NBYTES, bench.device.streams[0])
        self._batch = bench.device.upload(np.ones(COMPUTE_NBYTES, np.uint8))
        with self._compute.current():
            # The first time compiles.
            self._compute.wait(self._compute.step(self._batch, 0, 1)[0])

    def beside(self, work: Callable[[], object]) -> list[float]:
        """Do some work, and return the seconds of each step that was launched on another thread meanwhile."""
        stop, found, failed = threading.Event(), list[float](), list[Exception]()

        def launch() -> None:
            try:
                with self._compute.current():
                    before = self._compute.step(self._batch, 0, 1)[0]
                    while not stop.is_set():
                        begin = time.perf_counter()
                        mark = self._compute.step(self._batch, 0, 1)[0]
                        self._compute.wait(before)
                        before = mark
                        found.append(time.perf_counter() - begin)
                    self._compute.wait(before)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=launch, name="benchmark-steps")
        try:
            # Inside: whatever interrupts this, the thread ends.
            thread.start()
            work()
        finally:
            stop.set()
            if thread.ident is not None:
                thread.join()
        if failed:
            raise failed[0]
        return found


def figures(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the longest, in microseconds. Nothing of no steps."""
    if not seconds:
        return {}
    most = sorted(seconds)[min(len(seconds) - 1, round(0.99 * len(seconds)))]
    return {
        name: round(1e6 * value, 2)
        for name, value in (("median", statistics.median(seconds)), ("p99", most), ("longest", max(seconds)))
    }
