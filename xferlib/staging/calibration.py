"""Measuring the shape of the ring on this machine: how many threads copy how fast, through chunks of which size.

Ordinary memory stands in for pinned memory and nothing is sent, so nothing here can wait for a device. What is measured is the part
that differs between machines; the link takes what it is given.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from functools import cache
from statistics import median
from typing import final

import numpy as np

from xferlib.staging.crew import Crew
from xferlib.staging.job import Job
from xferlib.staging.parts import cut, lay
from xferlib.staging.profile import StagingProfile

__all__ = ["measured_profile"]

THREADS = (1, 2, 3, 4, 6, 8)
"""More than eight gain nothing on any machine seen: a link is full before."""
CHUNKS = (4 << 20, 2 << 20, 1 << 20)
"""Larger ones first: a link and a busy interpreter gain by fewer steps, which is not measured here."""
NBYTES = 96 << 20
"""Bytes copied to measure one shape, some milliseconds: whole rounds of the largest chunks for every number of threads."""
ROUNDS = 3
ENOUGH = 0.8
"""Of the best rate: the first that gets there is taken. The last threads add more contention than speed, and starve the program."""
HAND_OFFS = 15
LEAST_HAND_OFF, MOST_HAND_OFF = 2 << 20, 8 << 20


@cache
def measured_profile() -> StagingProfile:
    """Measure, once in a process: in a fraction of a second."""
    cores = len(os.sched_getaffinity(0))
    source = np.ones(NBYTES, np.uint8)
    crew = Crew("calibration")
    member = object()
    try:
        rates = {count: _rate(crew, member, source, count, CHUNKS[0]) for count in THREADS if count <= max(1, cores - 1)}
        threads = _first(rates)
        sizes = {size: _rate(crew, member, source, threads, size) for size in CHUNKS}
        delay = _delay(crew, member)
    finally:
        crew.dismiss(member)
    # Twice there and back, and as much again for an interpreter that many threads want.
    worth = int(4 * delay * rates[1]) // 4096 * 4096
    return StagingProfile(threads, _first(sizes), min(max(worth, LEAST_HAND_OFF), MOST_HAND_OFF))


def _first(rates: dict[int, float]) -> int:
    best = max(rates.values())
    return next(value for value, rate in rates.items() if rate >= ENOUGH * best)


def _rate(crew: Crew, member: object, source: np.ndarray[tuple[int], np.dtype[np.uint8]], threads: int, chunk_nbytes: int) -> float:
    """Return bytes per second."""
    chunks = deque(np.ones(chunk_nbytes, np.uint8) for _ in range(2 * threads))

    def loop(job: Job, leading: bool) -> None:
        while (part := job.claim()) is not None:
            chunk = chunks.popleft()
            lay(part, chunk[: part.nbytes])
            chunks.append(chunk)

    best = float("inf")
    for _ in range(ROUNDS + 1):
        parts = cut(0, source, largest=chunk_nbytes, ways=1)
        start = time.perf_counter()
        job = Job(parts, loop)
        if threads > 1:
            crew.ask(member, job, threads - 1)
        job.run()
        best = min(best, time.perf_counter() - start)
    return source.nbytes / best


@final
class _Call:
    """Tells when a helper has come."""

    def __init__(self) -> None:
        self.came = threading.Event()

    def help(self) -> None:
        self.came.set()

    def lead(self) -> None:
        self.came.set()


def _delay(crew: Crew, member: object) -> float:
    """Return the seconds that it takes to get help."""
    seconds = []
    for _ in range(HAND_OFFS):
        call = _Call()
        start = time.perf_counter()
        crew.ask(member, call, 1)
        call.came.wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds)
