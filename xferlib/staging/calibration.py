"""Measuring the shape of the ring on this machine: how many threads copy how fast, through chunks of which size.

Ordinary memory stands in for pinned memory and nothing is sent, so nothing here can wait for a device. What is measured is the part
that differs between machines; the link takes what it is given.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import TypeAlias, final

import numpy as np

from xferlib.memory.limits import available_memory
from xferlib.staging.crew import Crew
from xferlib.staging.job import Job
from xferlib.staging.parts import cut, lay
from xferlib.staging.profile import StagingProfile

__all__ = ["measured_profile"]

THREADS = (1, 2, 3, 4, 6, 8)
"""More than eight gain nothing on any machine seen: a link is full before."""
CHUNKS = (4 << 20, 2 << 20, 1 << 20)
"""Larger ones first: a link and a busy interpreter gain by fewer steps, which is not measured here."""
NBYTES = 192 << 20
"""Bytes copied to measure one shape: some milliseconds, so that waking the threads weighs little, and whole rounds of the largest
chunks for every number of threads."""
LITTLE = 48 << 20
"""Where the process may use so little memory that the other would be missed: rougher."""
LEAST_ROUNDS, MOST_ROUNDS = 2, 6
ROUNDS_SECONDS = 0.15
"""After which no further round begins."""
MOST_OF_IT = 0.97
"""Of the best rate: the first number of threads that gets there is taken. More than fill the link let batches of a pipeline be
copied as fast as they are wanted; one that gains nothing only stands in the program's way."""
ENOUGH = 0.8
"""Of the best rate: the first size of a chunk that gets there is taken."""
HAND_OFFS = 15
LEAST_HAND_OFF, MOST_HAND_OFF = 2 << 20, 8 << 20

Shape: TypeAlias = tuple[int, int]
"""Threads, and bytes of a chunk."""


@cache
def measured_profile() -> StagingProfile:
    """Measure, once in a process: in a fraction of a second."""
    cores = len(os.sched_getaffinity(0))
    counts = [count for count in THREADS if count <= max(1, cores - 1)]
    bench = _Bench(counts[-1])
    try:
        rates = bench.rates([(count, CHUNKS[0]) for count in counts])
        threads, _ = _first(rates, MOST_OF_IT)
        _, chunk_nbytes = _first(bench.rates([(threads, size) for size in CHUNKS]), ENOUGH)
        delay = bench.delay()
    finally:
        bench.close()
    # Twice there and back, and as much again for an interpreter that many threads want.
    worth = int(4 * delay * rates[1, CHUNKS[0]]) // 4096 * 4096
    return StagingProfile(threads, chunk_nbytes, min(max(worth, LEAST_HAND_OFF), MOST_HAND_OFF))


def _first(rates: dict[Shape, float], share: float) -> Shape:
    best = max(rates.values())
    return next(shape for shape, rate in rates.items() if rate >= share * best)


@final
class _Bench:
    """Memory to copy, chunks to copy it into, and threads."""

    def __init__(self, threads: int) -> None:
        self._source = np.ones(NBYTES if available_memory() > 20 * NBYTES else LITTLE, np.uint8)
        self._chunks = [np.ones(CHUNKS[0], np.uint8) for _ in range(2 * threads)]
        self._crew = Crew("calibration")
        self._member = object()

    def close(self) -> None:
        """End the threads."""
        self._crew.dismiss(self._member)

    def rates(self, shapes: Sequence[Shape]) -> dict[Shape, float]:
        """Return the bytes per second of each shape at best, in turns: what else the machine does hits all of them alike."""
        best = dict.fromkeys(shapes, float("inf"))
        end = time.perf_counter() + ROUNDS_SECONDS
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and time.perf_counter() > end:
                break
            for shape in shapes:
                best[shape] = min(best[shape], self._seconds(*shape))
        return {shape: self._source.nbytes / seconds for shape, seconds in best.items()}

    def delay(self) -> float:
        """Return the seconds that it takes to get help."""
        seconds = []
        for _ in range(HAND_OFFS):
            call = _Call()
            start = time.perf_counter()
            self._crew.ask(self._member, call, 1)
            call.came.wait()
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    def _seconds(self, threads: int, chunk_nbytes: int) -> float:
        chunks = deque(chunk[:chunk_nbytes] for chunk in self._chunks[: 2 * threads])

        def loop(job: Job, leading: bool) -> None:
            while (part := job.claim()) is not None:
                chunk = chunks.popleft()
                lay(part, chunk[: part.nbytes])
                chunks.append(chunk)

        parts = cut(0, self._source, largest=chunk_nbytes, ways=1)
        start = time.perf_counter()
        job = Job(parts, loop)
        if threads > 1:
            self._crew.ask(self._member, job, threads - 1)
        job.run()
        return time.perf_counter() - start


@final
class _Call:
    """Tells when a helper has come."""

    def __init__(self) -> None:
        self.came = threading.Event()

    def help(self) -> None:
        self.came.set()

    def lead(self) -> None:
        self.came.set()
