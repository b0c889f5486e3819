"""How fast memory is page-locked, against one bare allocation of page-locked memory, and how little is locked beyond what is used.

Question: what does pinned memory cost, when it is made and while it is held?

Isolated: the memory; nothing is transferred. "fresh" is `empty_pinned` of 8 GiB that no pool has: mapped, touched, locked.
"touched" is `pin` of 8 GiB of NumPy memory that was written before. Beside both stands the bare call, `cuMemHostAlloc` of as much,
or, where nothing can be locked, ordinary memory that is touched. "random arrays" makes a million arrays of 256 bytes to 8 MiB
(forty thousand in a brief run), each octave equally often, under a limit of 1 GiB, and drops sixteen at random where there is no
room for the next. A time is the mean of a thousand arrays; beside it stands the same for `numpy.empty`, which locks nothing.

Method: three rounds, in turns. Every call's memory is given back before the next call, outside the clock. For the random arrays it
is not: to drop some is part of the work. `details` of "fresh" has how much a request of 65 MiB locks; of "random arrays" the most
that was locked, the share of that which was never in use at a time (`waste_at_peak`), how often the driver was asked, how often
there was no room, and the process's memory before, with the arrays, and after `trim`.

Command: python benchmarks/run.py --case locking --backend cupy --json
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import psutil

from benchmarks import records
from benchmarks.bench import Bench, Case
from benchmarks.devices.bare import Bare, CpuCopies, CudaCopies
from benchmarks.harness import Timing
from benchmarks.records import Record
from xferlib import AllocationError, Stager

__all__ = ["CASE"]

NAME = "locking"
NBYTES, QUICK_NBYTES = 8 << 30, 4 << 20
ODD_NBYTES = 65 << 20
"""A little more than a power of two."""
ROUNDS = 3
ARRAYS, BRIEF_ARRAYS, QUICK_ARRAYS = 1_000_000, 40_000, 2000
"""Forty thousand fill the limit thirty times over."""
CHUNK = 1000
LIMIT, QUICK_LIMIT = 1 << 30, 16 << 20
LEAST = 256
LARGEST_OF_LIMIT = 1 / 128
AT_ONCE = 16
"""Arrays that are dropped where there is no room for the next."""
SEED = 41


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per kind of memory, and one of many arrays."""
    yield from _large(bench, QUICK_NBYTES if bench.quick else NBYTES)
    count = QUICK_ARRAYS if bench.quick else BRIEF_ARRAYS if bench.brief else ARRAYS
    yield _many(bench, count, QUICK_LIMIT if bench.quick else LIMIT)


def _large(bench: Bench, nbytes: int) -> Iterator[Record]:
    fresh, touched, limit = Timing(), Timing(), Timing()
    with bench.open_stager(pinned_limit=nbytes + ODD_NBYTES) as stager:
        bare: Bare = CudaCopies() if stager.capabilities.pinned else CpuCopies()
        details = {"locked_for_65_mib": _locked_for(stager, ODD_NBYTES)}
        stager.trim()
        array = np.empty(nbytes, np.uint8)
        array.fill(1)
        rounds = bench.count(ROUNDS, ROUNDS, 1)
        for index in range(rounds):
            bench.effort.between()
            bench.say(f"{NAME}: {nbytes} bytes, round {index + 1} of {rounds}")
            limit.add([_seconds(lambda: bare.host_alloc(nbytes), lambda free: free())])
            fresh.add([_seconds(lambda: stager.empty_pinned(nbytes, np.uint8))])
            stager.trim()
            if stager.capabilities.register:
                touched.add([_seconds(lambda: stager.pin(array), lambda pin: pin.close())])
        yield _record(bench, stager, "fresh", nbytes, fresh, limit, details)
        if touched.values:
            yield _record(bench, stager, "touched", nbytes, touched, limit, {})


def _locked_for(stager: Stager, nbytes: int) -> int:
    before = stager.stats().pinned_nbytes
    array = stager.empty_pinned(nbytes, np.uint8)
    locked = stager.stats().pinned_nbytes - before
    del array
    return locked


def _seconds(make: Callable[[], Any], undo: Callable[[Any], object] = lambda _: None) -> float:
    begin = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - begin
    undo(made)
    return seconds


def _many(bench: Bench, count: int, limit_nbytes: int) -> Record:
    bench.say(f"{NAME}: {count} random arrays under a limit of {limit_nbytes} bytes")
    limit, ours = Timing(count=CHUNK), Timing(count=CHUNK)
    _fill(lambda nbytes: np.empty(nbytes, np.uint8), count, limit_nbytes, limit)
    process = psutil.Process()
    with bench.open_stager(pinned_limit=limit_nbytes) as stager, _little_garbage():
        before = process.memory_info().rss
        arrays, refused = _fill(lambda nbytes: stager.empty_pinned(nbytes, np.uint8), count, limit_nbytes, ours)
        stats, held = stager.stats(), process.memory_info().rss
        arrays.clear()
        stager.trim()
        details = {
            "arrays": count,
            "pinned_peak_nbytes": stats.pinned_peak_nbytes,
            "waste_at_peak": round(stats.waste_at_peak, 6),
            "page_locks": stats.pool_misses,
            "refused": refused,
            "rss_before": before,
            "rss_with_arrays": held,
            "rss_after_trim": process.memory_info().rss,
            "pinned_after_trim": stager.stats().pinned_nbytes,
        }
        return _record(bench, stager, "random arrays", limit_nbytes, ours, limit, details)


def _fill(empty: Callable[[int], Any], count: int, limit_nbytes: int, timing: Timing) -> tuple[list[Any], int]:
    """Make so many arrays, and return those that are left and how often there was no room."""
    draw = random.Random(SEED)
    octaves = float(np.log2(limit_nbytes * LARGEST_OF_LIMIT / LEAST))
    arrays: list[Any] = []
    made = held = refused = 0
    begin = time.perf_counter()
    while made < count:
        nbytes = int(LEAST * 2 ** draw.uniform(0, octaves))
        array = None
        if held + nbytes <= limit_nbytes:
            with suppress(AllocationError):
                array = empty(nbytes)
        if array is None:
            refused += 1
            for _ in range(min(AT_ONCE, len(arrays))):
                index = draw.randrange(len(arrays))
                arrays[index], arrays[-1] = arrays[-1], arrays[index]
                held -= arrays.pop().nbytes
            continue
        arrays.append(array)
        held += nbytes
        made += 1
        if made % CHUNK == 0:
            now = time.perf_counter()
            timing.add([(now - begin) / CHUNK])
            begin = now
    return arrays, refused


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Hide what lives now from the collector: where there is no room, the search for dropped arrays then looks only at ours."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _record(bench: Bench, stager: Stager, label: str, nbytes: int, ours: Timing, limit: Timing, details: dict[str, Any]) -> Record:
    return records.make(
        bench,
        case=NAME,
        backend=stager.name,
        direction="none",
        nbytes=nbytes,
        label=label,
        ours=ours,
        limit=limit,
        details=details,
    )


CASE = Case(name=NAME, summary="page-locking 8 GiB, and a million arrays of pinned memory", run=run, seconds=15.0)
