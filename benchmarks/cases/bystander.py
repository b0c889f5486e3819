"""A Python training thread beside staging at full speed, against the same thread by itself and beside pinned memory.

Question: do threads that stage pageable memory disturb the thread that trains? They need cores and memory bandwidth. A program that
pins its batches needs neither, so the cost of staging to the training thread is what it costs beyond that.

Isolated: the step time of the calling thread. There are two kinds of steps, neither with a transfer. A "training step" is what a
training loop does on the host: some Python, the launch of a step of ten milliseconds on the device, the wait for the step before. A
"Python step" never rests: half a millisecond of Python and small NumPy arrays, each of which gives up the interpreter and wants it
back. Nothing suffers more from other threads. Beside either kind, a thread puts one batch after another and waits for each. Each
kind runs with the interpreter's default switch interval of 5 ms and with 1 ms: a thread that waits for the interpreter, and was not
quick enough when it was free, looks again after that time.

Method: quiet turns, turns beside pageable and turns beside pinned batches, one after the other, six of each, of a second. `seconds`
are the steps beside staging; the limit is the quiet step, so `of_limit` is quiet median over staging median. `details` has the
medians and 99th percentiles of all three, their ratios, by how much the ratio grows beside either, the rates of both, and a
histogram (steps by the upper end of their bin in us, eight bins to an octave). The batch that the last put of each turn left on the
device is compared.

Command: python benchmarks/run.py --case bystander --backend jax --json
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from benchmarks import ours, pipeline, records
from benchmarks.bench import Bench, Case
from benchmarks.harness import Timing
from benchmarks.memory import empty_pageable
from benchmarks.records import Record
from benchmarks.steps import Bytes, Compute
from benchmarks.ways import Corrupted, Device
from xferlib import Stager

__all__ = ["CASE"]

NAME = "bystander"
NBYTES, QUICK_NBYTES = 256 << 20, 1 << 20
BATCHES = 4
TURNS, QUICK_TURNS = 6, 2
TURN_SECONDS, QUICK_TURN_SECONDS = 1.0, 0.1
WORDS = 4000
"""The words of a Python step; a training step has a tenth of them."""
INTERVALS = {"": 5e-3, ", switch interval 1 ms": 1e-3}
"""Seconds for which a thread that waits for the interpreter sleeps before it looks again; the key is added to the label."""
COMPUTE_SECONDS, QUICK_COMPUTE_SECONDS = 10e-3, 1e-3
COMPUTE_NBYTES = 1 << 20
MOST_ROUNDS = 1 << 20
SIDE = 48
PRODUCTS = 60
BINS_PER_OCTAVE = 8
SEED = 31

Step: TypeAlias = Callable[[], None]


@dataclass
class _Staging:
    """What the thread that puts has done, and the error that ended it."""

    batches: Sequence[Bytes]
    nbytes: int = 0
    seconds: float = 0.0
    error: Exception | None = None
    last: tuple[Any, Any] = (None, None)
    """The latest batch and its device array."""
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def gbps(self) -> float:
        return round(self.nbytes / self.seconds / 1e9, 3)


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per kind of step and switch interval."""
    nbytes = QUICK_NBYTES if bench.quick else NBYTES
    turns, seconds = bench.count(QUICK_TURNS, TURNS), QUICK_TURN_SECONDS if bench.quick else TURN_SECONDS
    compute = bench.device.compute(COMPUTE_NBYTES, bench.device.streams[0])
    with bench.open_stager() as stager, compute.current():
        pageable = pipeline.random_batches(empty_pageable, nbytes, BATCHES, SEED)
        pinned = pipeline.random_batches(partial(stager.empty_pinned, dtype=np.uint8), nbytes, BATCHES, SEED)
        kinds = (("training step", _training_step(bench, compute)), ("Python step", _python_step()))
        for (kind, step), (how, interval) in itertools.product(kinds, INTERVALS.items()):
            label = f"{kind} beside staging{how}"
            bench.say(f"{NAME}: {label}, {turns} turns of {seconds} s, quiet, staging, pinned")
            quiet = Timing()
            beside = {"staging": (Timing(), _Staging(pageable)), "pinned": (Timing(), _Staging(pinned))}
            with _switching(interval):
                _steps(step, seconds)
                for _, staging in beside.values():
                    _stage_beside(bench.device, stager, step, seconds, _Staging(staging.batches))
                for _ in range(turns):
                    bench.effort.between()
                    quiet.add(_steps(step, seconds))
                    for timing, staging in beside.values():
                        timing.add(_stage_beside(bench.device, stager, step, seconds, staging))
            yield _record(bench, stager, label, quiet, beside, nbytes)


@contextmanager
def _switching(interval: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _python_step() -> Step:
    weights = np.full((SIDE, SIDE), 1 / SIDE)
    values = np.ones((SIDE, SIDE))

    def step() -> None:
        nonlocal values
        _count(WORDS)
        for _ in range(PRODUCTS):
            values = np.tanh(values @ weights) + 1e-3

    return step


def _training_step(bench: Bench, compute: Compute) -> Step:
    batch = bench.device.upload(np.ones(COMPUTE_NBYTES, np.uint8))
    rounds = _rounds(compute, batch, QUICK_COMPUTE_SECONDS if bench.quick else COMPUTE_SECONDS)
    under_way = compute.step(batch, rounds, 1)

    def step() -> None:
        nonlocal under_way
        _count(WORDS // 10)
        before, under_way = under_way, compute.step(batch, rounds, 1)
        compute.wait(before[0])

    return step


def _rounds(compute: Compute, batch: Any, seconds: float) -> int:
    """Return the number of rounds with which a step takes about so long."""
    rounds = 1
    while True:
        # The first time compiles.
        for _ in range(2):
            begin = time.perf_counter()
            compute.wait(compute.step(batch, rounds, 1)[0])
            taken = time.perf_counter() - begin
        if taken >= seconds / 2 or rounds >= MOST_ROUNDS:
            return max(1, round(rounds * seconds / taken))
        rounds *= 2


def _count(words: int) -> None:
    counts: dict[int, int] = {}
    for word in range(words):
        counts[word % 97] = counts.get(word % 97, 0) + word


def _steps(step: Step, seconds: float) -> list[float]:
    """Train for so long and return the seconds of each step."""
    clock, found = time.perf_counter, []
    end = clock() + seconds
    begin = clock()
    while begin < end:
        step()
        now = clock()
        found.append(now - begin)
        begin = now
    return found


def _stage_beside(device: Device, stager: Stager, step: Step, seconds: float, staging: _Staging) -> list[float]:
    """Train beside a thread that puts. Raises what the thread raised."""
    staging.stop.clear()
    thread = threading.Thread(target=_stage, args=(stager, staging), name="benchmark-staging")
    thread.start()
    try:
        found = _steps(step, seconds)
    finally:
        staging.stop.set()
        thread.join()
    if staging.error is not None:
        raise staging.error
    batch, array = staging.last
    if not device.equal(device.upload(batch), array):
        raise Corrupted(f"{ours.NAME!r} said it was done, but the h2d target does not hold the source's bytes")
    return found


def _stage(stager: Stager, staging: _Staging) -> None:
    try:
        count = 0
        begin = time.perf_counter()
        while not (staging.stop.is_set() and count):
            batch = staging.batches[count % len(staging.batches)]
            array = stager.put(batch).result()
            count += 1
        staging.seconds += time.perf_counter() - begin
        staging.nbytes += count * batch.nbytes
        staging.last = (batch, array)
    except Exception as error:
        staging.error = error


def _record(
    bench: Bench, stager: Stager, label: str, quiet: Timing, beside: Mapping[str, tuple[Timing, _Staging]], nbytes: int
) -> Record:
    timings = {"quiet": quiet, **{name: timing for name, (timing, _) in beside.items()}}
    tails = {name: _tail(timing.values) for name, timing in timings.items()}
    still = tails["quiet"]["p99_over_median"]
    details: dict[str, Any] = {
        **{f"{name}_{key}": value for name, tail in tails.items() for key, value in tail.items()},
        "growth": round(tails["staging"]["p99_over_median"] / still, 4),
        "pinned_growth": round(tails["pinned"]["p99_over_median"] / still, 4),
        "staging": str(stager.staging),
        **{f"{name}_gbps": staging.gbps for name, (_, staging) in beside.items()},
        "histogram": {name: _histogram(timing.values) for name, timing in timings.items()},
    }
    return records.make(
        bench,
        case=NAME,
        backend=stager.name,
        direction="h2d",
        nbytes=nbytes,
        label=label,
        ours=timings["staging"],
        limit=quiet,
        details=details,
    )


def _tail(values: Sequence[float]) -> dict[str, float]:
    median, p99 = (float(value) for value in np.quantile(values, (0.5, 0.99)))
    return {"median_us": round(median * 1e6, 2), "p99_us": round(p99 * 1e6, 2), "p99_over_median": round(p99 / median, 4)}


def _histogram(values: Sequence[float]) -> dict[str, int]:
    """Return steps by the upper end of their bin, in microseconds."""
    bins = Counter(math.floor(math.log2(value * 1e6) * BINS_PER_OCTAVE) + 1 for value in values)
    return {f"{2 ** (number / BINS_PER_OCTAVE):.1f}": bins[number] for number in sorted(bins)}


CASE = Case(
    name=NAME, summary="step time of a Python thread beside staging of pageable memory, and beside pinned", run=run, seconds=35.0
)
