"""The loop: read, H2D, compute and D2H, all four at once, as `stream_map` runs them.

The source gives slots that some threads fill, in order. The device work is the function. The results are copied into the file.
Before the clock starts, a few batches are rehearsed, compute is tuned, and H2D, compute and D2H are measured alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt

from xferlib.cli.demo.source import FrameSource
from xferlib.pipeline.ring import Ring, Slot
from xferlib.pipeline.stream_map import stream_map
from xferlib.stager import Stager
from xferlib.workload import EdgeJob, EdgeSpec

__all__ = ["Loop", "Timings", "ahead", "median_seconds", "tuned"]

S = TypeVar("S")
T = TypeVar("T")
Array = npt.NDArray[Any]

SAMPLES, FEWEST_SAMPLES = 7, 3
ENOUGH_SECONDS = 1.0
"""Of a burst that takes longer by itself, one sample must do."""
MOST_ROUNDS = 1000


class Timings(NamedTuple):
    """What the clock said. For read: the time its threads were at work, not waiting, over the number of threads."""

    total_seconds: float
    read_seconds: float


@final
@dataclass(frozen=True)
class Loop:
    """The loop over batches of one spec. The thread that calls has entered the job."""

    stager: Stager
    ring: Ring
    """Of `depth` + `threads` slots."""
    job: EdgeJob
    spec: EdgeSpec
    """It has `depth` + 1 slots: one result is under way, and `depth` are behind it, when the next one is launched."""
    source: FrameSource
    readers: Executor
    """Of `threads` threads. It ends behind the ring, whose end wakes those that wait for a slot."""
    threads: int
    depth: int

    def run(self, frames: int, *, rounds: int, out: Array, progress: Callable[[int], object] = lambda frames: None) -> Timings:
        """Stream the first `frames` frames into `out`. What any stage raises, or Ctrl-C, ends it and is raised here.

        `progress(frames)` is told of the frames that are there, on this thread.
        """
        reads: list[float] = []
        number = itertools.count()

        def fill(start: int) -> Slot:
            slot = self.ring.acquire()
            slot.rows = min(self.spec.frames, frames - start)
            began = time.perf_counter()
            self.source.read(start, slot.tree[: slot.rows])
            reads.append(time.perf_counter() - began)
            return slot

        def edges(batch: Any) -> Any:
            return self.job.launch(batch, next(number) % self.spec.slots, rounds=rounds)

        starts = range(0, frames, self.spec.frames)
        began = time.perf_counter()
        # More than there are readers, for whoever is done to find work; no more than there are slots beside that of the prefetch:
        # slots are not had in order, and the oldest batch must not wait for one that is filled and waits for the oldest.
        filled = ahead(self.readers, fill, starts, self.ring.slots - 1)
        with stream_map(edges, filled, self.stager, self.depth, out=out) as results:
            for result in results:
                progress(len(result))
            total = time.perf_counter() - began
        # Otherwise a failure on the device after its last result was read would be silent.
        self.job.synchronize()
        return Timings(total, sum(reads) / self.threads)

    def alone(self, rounds: int | None) -> tuple[int, dict[str, float]]:
        """Return seconds per full batch of H2D, compute and D2H with nothing else running, and the rounds of blur.

        `rounds=None`: as many as make compute take about as long as H2D, at least 1. Each stage is measured as it runs in the loop:
        several batches are started back to back and waited for once.
        """
        stager, job, count = self.stager, self.job, self.spec.slots
        slots = [self.ring.acquire() for _ in range(count)]
        self.source.read(0, slots[0].tree)
        for slot in slots[1:]:
            slot.tree[:] = slots[0].tree
        batch = stager.put(slots[0].tree).value
        out = np.zeros((count, self.spec.frames, self.spec.height, self.spec.width), np.uint8)

        def h2d() -> None:
            [stager.put(slot.tree) for slot in slots][-1].synchronize()

        def compute(rounds: int) -> list[Any]:
            launched = [job.launch(batch, index, rounds=rounds) for index in range(count)]
            job.synchronize()
            return launched

        results = compute(1)

        def d2h() -> None:
            [stager.get(result, out=edges) for result, edges in zip(results, out, strict=True)][-1].synchronize()

        seconds = {"h2d": median_seconds(h2d)}
        if rounds is None:
            rounds = tuned(compute, seconds["h2d"])
        seconds |= {"compute": median_seconds(lambda: compute(rounds)), "d2h": median_seconds(d2h)}
        for slot in slots:
            slot.release()
        return rounds, {name: burst / count for name, burst in seconds.items()}


def tuned(compute: Callable[[int], object], goal: float) -> int:
    """Return the rounds of blur with which compute takes so many seconds, at least 1."""
    once = median_seconds(lambda: compute(1))
    if once >= goal:
        # More would be measured for nothing, and on a CPU they take long.
        return 1
    more = median_seconds(lambda: compute(5))
    return min(MOST_ROUNDS, 1 + round(4 * (goal - once) / (more - once))) if more > once else 1


def ahead(pool: Executor, work: Callable[[S], T], items: Iterable[S], count: int) -> Iterator[T]:
    """Iterate `work` of every item, in order. At most `count` items are worked on at once, or done and not yet taken."""
    under_way: deque[Future[T]] = deque()
    for item in items:
        if len(under_way) == count:
            yield under_way.popleft().result()
        under_way.append(pool.submit(work, item))
    while under_way:
        yield under_way.popleft().result()


def median_seconds(burst: Callable[[], object]) -> float:
    """Return the median of several bursts, of fewer if they are slow, after one that warms up."""
    warm = _seconds(burst)
    fewest = 1 if warm > ENOUGH_SECONDS else FEWEST_SAMPLES
    samples: list[float] = []
    while len(samples) < SAMPLES and (len(samples) < fewest or sum(samples) < ENOUGH_SECONDS):
        samples.append(_seconds(burst))
    return statistics.median(samples)


def _seconds(burst: Callable[[], object]) -> float:
    began = time.perf_counter()
    burst()
    return time.perf_counter() - began
