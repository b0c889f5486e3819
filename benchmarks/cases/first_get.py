"""The first get of a training state, for which the pool has to grow, against the second, which finds the memory there.

Question: what does it cost a training loop to take its state to the host for the first time?

Isolated: the growth of the pinned pool. 300 arrays, 4 GiB together, are on the device; `get(tree)` takes them to memory of
xferlib's own. Before a first get the pool is empty, as in a fresh process except for the driver's own warm-up; the second get finds
the memory that the first has let go of. Meanwhile another thread launches a short step, waits for the step before, and goes on,
since the driver makes launches wait while it locks. No peer makes results in pinned memory of a pool.

Method: three rounds, with a first get and a second in each, from the call until the last byte is there. This is `seconds`; that of
the second get is the limit. Every byte is compared. `details` has the time of the calls themselves, for which the calling loop is
held up, the time until all was page-locked (`idle`), and the steps of the other thread: median and longest, quiet and beside first
gets.

Command: python benchmarks/run.py --case first_get --backend cupy --json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import ours, records
from benchmarks.bench import Bench, Case
from benchmarks.harness import Timing
from benchmarks.records import Record
from benchmarks.short_steps import ShortSteps, figures
from benchmarks.ways import Corrupted
from xferlib import Stager

__all__ = ["CASE"]

NAME = "first_get"
LEAVES, QUICK_LEAVES = 300, 6
NBYTES, QUICK_NBYTES = 4 << 30, 12 << 20
ROUNDS, QUICK_ROUNDS = 3, 2
QUIET_SECONDS, QUICK_QUIET_SECONDS = 1.0, 0.05
MARGIN = 256 << 20
"""Bytes beside the results, for staging."""


def run(bench: Bench) -> Iterator[Record]:
    """Yield one record."""
    count, nbytes = (QUICK_LEAVES, QUICK_NBYTES) if bench.quick else (LEAVES, NBYTES)
    size = nbytes // count // 256 * 256
    sources = [np.full(size, 1 + index % 251, np.uint8) for index in range(count)]
    tree = [bench.device.upload(source) for source in sources]
    first, second = Timing(), Timing()
    calls: dict[str, list[float]] = {"first": [], "second": [], "idle": []}
    steps = ShortSteps(bench)
    with bench.open_stager(pinned_limit=count * size + MARGIN) as stager:
        quiet = steps.beside(lambda: time.sleep(QUICK_QUIET_SECONDS if bench.quick else QUIET_SECONDS))
        beside: list[float] = []
        results: list[Any] = []
        for index in range(bench.count(QUICK_ROUNDS, ROUNDS)):
            bench.effort.between()
            bench.say(f"{NAME}: {count} arrays, round {index + 1}")
            stager.trim()
            beside += steps.beside(lambda: first.add([_get(stager, tree, results, calls["first"], calls["idle"])]))
            _verify(results, sources)
            second.add([_get(stager, tree, results, calls["second"], [])])
            _verify(results, sources)
        details = {
            **{f"{name}_ms": round(1e3 * statistics.median(values), 3) for name, values in calls.items()},
            **{f"quiet_step_{name}_us": value for name, value in figures(quiet).items()},
            **{f"step_beside_{name}_us": value for name, value in figures(beside).items()},
        }
        yield records.make(
            bench,
            case=NAME,
            backend=stager.name,
            direction="d2h",
            nbytes=count * size,
            label=f"{count} arrays",
            ours=first,
            limit=second,
            details=details,
        )


def _get(stager: Stager, tree: list[Any], results: list[Any], calls: list[float], idle: list[float]) -> float:
    """Get, note how long the call took and how long until all is page-locked, and return the seconds until all is there."""
    begin = time.perf_counter()
    transfer = stager.get(tree)
    called = time.perf_counter()
    results += transfer.result()
    done = time.perf_counter()
    stager.idle()
    calls.append(called - begin)
    idle.append(time.perf_counter() - begin)
    return done - begin


def _verify(results: list[Any], sources: list[Any]) -> None:
    """Compare every byte, and let go of the results."""
    if not all(np.array_equal(one, other) for one, other in zip(results, sources, strict=True)):
        raise Corrupted(f"{ours.NAME!r} said it was done, but the d2h target does not hold the source's bytes")
    results.clear()


CASE = Case(
    name=NAME,
    summary="the first get of 4 GiB in 300 arrays, for which the pool has to grow, beside the second",
    run=run,
    seconds=15.0,
)
