"""How long H2D, compute and D2H of a batch take alone, and how many rounds of blur make compute last as long as H2D.

Each is measured as it runs in the pipeline: several batches started back to back, waited for once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from xferlib.cli.demo.pipeline import Pipeline

__all__ = ["Alone", "measure", "tune"]

SAMPLES = 7
FEWEST_SAMPLES = 3
ENOUGH_SECONDS = 1.0
MOST_ROUNDS = 1000


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Seconds per full batch, with nothing else running."""

    h2d: float
    compute: float
    d2h: float


def measure(pipeline: Pipeline, *, rounds: int) -> Alone:
    """Measure the three stages on what is in the slots. The thread has entered the job."""
    return Alone(h2d=_h2d(pipeline), compute=_compute(pipeline, rounds), d2h=_d2h(pipeline))


def tune(pipeline: Pipeline) -> int:
    """Return the rounds that make compute about as long as H2D, at least 1."""
    goal, once = _h2d(pipeline), _compute(pipeline, 1)
    if once >= goal:
        return 1
    extra = 4
    each = (_compute(pipeline, 1 + extra) - once) / extra
    return min(MOST_ROUNDS, 1 + round((goal - once) / each)) if each > 0 else 1


def _h2d(pipeline: Pipeline) -> float:
    def burst() -> None:
        transfers = [pipeline.stager.put(slot) for slot in pipeline.slots]
        transfers[-1].synchronize()

    return _median(burst) / len(pipeline.slots)


def _compute(pipeline: Pipeline, rounds: int) -> float:
    frames = pipeline.stager.put(pipeline.slots[0]).value
    pipeline.job.synchronize()

    def burst() -> None:
        for index in range(len(pipeline.outputs)):
            pipeline.job.launch(frames, index, rounds=rounds)
        pipeline.job.synchronize()

    return _median(burst) / len(pipeline.outputs)


def _d2h(pipeline: Pipeline) -> float:
    frames = pipeline.stager.put(pipeline.slots[0]).value
    results = [pipeline.job.launch(frames, index, rounds=1) for index in range(len(pipeline.outputs))]
    pipeline.job.synchronize()

    def burst() -> None:
        transfers = [pipeline.stager.get(result, out=out) for result, out in zip(results, pipeline.outputs, strict=True)]
        transfers[-1].synchronize()

    return _median(burst) / len(pipeline.outputs)


def _median(burst: Callable[[], None]) -> float:
    """Return the median of several bursts after one that warms up; of fewer where they are slow."""
    burst()
    samples: list[float] = []
    while len(samples) < SAMPLES and (len(samples) < FEWEST_SAMPLES or sum(samples) < ENOUGH_SECONDS):
        began = time.perf_counter()
        burst()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)
