"""Pageable memory, at the size of a batch and of a whole file, against the pinned limit.

Question: how near to the link's rate do arrays come if nobody has page-locked them?

Isolated: first one transfer of 1 GiB, with everything warm. "touched" is from and into memory that is there (`put(into=)`, or
`put()` where device arrays cannot be written to; `get(out=)`), "untouched" is into memory that was mapped outside the clock and is
first written inside. Then a training loop on six pageable batches in turn, prefetched (`prefetch(..., rewrites=False)`; the peers
are asked for the next batch when a step is launched), with compute tuned to the bare copy.

Method: one transfer a sample, right behind one that is not timed; five samples, contenders in turn, every byte compared. The limit
is the bare copy between pinned memory, for the loop the longer of that and compute alone. `details` says how much was page-locked
beside what this case asked for (`pinned_beyond_nbytes`), how many threads staged, through chunks of which size (`staging`), and
what NumPy copies in this memory with several threads (`copy_gbps`): no staging can be faster than reading the source. A loop has 60
steps a sample, each with its checksum.

Command: python benchmarks/run.py --case pageable --backend jax --json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks import memory, ours, pipeline, records
from benchmarks.arena import SHIFTS, STEP, Arena
from benchmarks.bench import LIMIT, Bench, Case, ways_of
from benchmarks.harness import Timing, time_bandwidth
from benchmarks.pipeline import Alone, Pipe
from benchmarks.records import Record
from benchmarks.ways import Direction, Kind, Peer, Way
from xferlib import Stager

__all__ = ["CASE"]

NAME = "pageable"
PEERS = ("cuda", "cupy", "torch", "numba", "jax", "numpy")
NBYTES, QUICK_NBYTES = 1 << 30, 4 << 20
BATCH_SIZES, QUICK_BATCH_SIZES = (256 << 20, 64 << 20), (1 << 20,)
BATCHES = 6
SLOTS = 2
"""Pinned slots, for the bare copy alone."""
STEPS, QUICK_STEPS = 60, 12
SAMPLES, QUICK_SAMPLES = 5, 2
SEED = 43


@dataclass(frozen=True, kw_only=True)
class _Row:
    label: str
    direction: Direction
    kind: Kind
    mine: Way


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per label and direction, then one per batch size and stream."""
    peers = bench.open_peers(PEERS)
    nbytes = QUICK_NBYTES if bench.quick else NBYTES
    # Two pinned arrays for the limit; how much ours pins beside them is one of the figures.
    asked = 2 * nbytes + SHIFTS * STEP
    with bench.open_stager(pinned_limit=2 * asked + (256 << 20)) as stager:
        pinned = Arena.allocate(bench.device, nbytes, lambda n: stager.empty_pinned(n, np.uint8))
        pageable = pinned.with_host(memory.empty_pageable)
        rates = memory.copy_rates(pageable.host_source, pageable.host_target)
        for row in _rows(bench, stager):
            bench.say(f"{NAME}: {row.label} {row.direction}")
            timings = _time(bench, row, peers, pageable, pinned)
            beyond = max(0, stager.stats().pinned_peak_nbytes - asked)
            details = {"pinned_beyond_nbytes": beyond, "copy_gbps": rates, "staging": str(stager.staging)}
            mine, limit = timings.pop(ours.NAME), timings.pop(LIMIT)
            yield _record(bench, stager, row.direction, nbytes, row.label, mine, limit, timings, details)
    del pinned, pageable
    sizes = QUICK_BATCH_SIZES if bench.quick else BATCH_SIZES
    with bench.open_stager(pinned_limit=(SLOTS + BATCHES) * max(sizes) + (256 << 20)) as stager:
        for size in sizes:
            for stream in bench.streams:
                bench.say(f"{NAME}: batches of {size} bytes, {stream}")
                yield _loop(bench, stager, peers, size, stream, rates)


def _rows(bench: Bench, stager: Stager) -> list[_Row]:
    put = ours.into(stager, "h2d", pinned=False) if bench.device.in_place else ours.fresh(stager, keep=None)
    return [
        _Row(label="touched", direction="h2d", kind="pageable", mine=put),
        _Row(label="touched", direction="d2h", kind="pageable", mine=ours.into(stager, "d2h", pinned=False)),
        _Row(label="untouched", direction="d2h", kind="untouched", mine=ours.untouched(stager)),
    ]


def _time(bench: Bench, row: _Row, peers: Sequence[Peer], pageable: Arena, pinned: Arena) -> dict[str, Timing]:
    rivals = [(way,) for way in ways_of(peers, row.kind, row.direction)]
    bare, nbytes = bench.device.raw(row.direction), pageable.nbytes
    contenders = bench.able_contenders((row.mine,), (bare,), rivals, arena=pageable, pinned=pinned, nbytes=nbytes)
    effort = bench.effort if bench.quick else replace(bench.effort, samples=bench.count(QUICK_SAMPLES, SAMPLES, 3))
    return time_bandwidth(contenders, nbytes=nbytes, effort=effort, level=False, warm=True)


def _loop(bench: Bench, stager: Stager, peers: Sequence[Peer], nbytes: int, stream: str, rates: dict[str, float]) -> Record:
    batches = pipeline.random_batches(memory.empty_pageable, nbytes, BATCHES, SEED)
    compute = bench.device.compute(nbytes, stream)
    with compute.current():
        slots = pipeline.random_batches(lambda n: stager.empty_pinned(n, np.uint8), nbytes, SLOTS, SEED)
        alone = Alone(bench.device, compute, slots, "h2d", count=bench.effort.row(nbytes), repeats=3)
        rounds = pipeline.tune(alone)
        steps = alone.steps(bench.count(QUICK_STEPS, STEPS, 24))
        feeds = [feed for peer in peers for feed in peer.feeds("pageable", compute)]
        expected = pipeline.checksums(compute, batches)
        pipes = [
            Pipe(
                ours.NAME,
                partial(pipeline.train_on, compute, ours.NAME, ours.source(stager, batches, compute), expected, rounds),
                1.0,
            ),
            *(Pipe(feed.name, partial(pipeline.train, compute, feed, batches, rounds), feed.share) for feed in feeds),
        ]
        samples = bench.count(QUICK_SAMPLES, SAMPLES, 3)
        result = pipeline.measure(bench.able_pipes(pipes), alone, steps=steps, samples=samples, between=bench.effort.between)
    timing = result.timings.pop(ours.NAME)
    details = {**result.details(timing, rounds=rounds), "copy_gbps": rates, "staging": str(stager.staging)}
    return _record(bench, stager, "h2d", nbytes, f"batches, {stream}", timing, result.bound, result.timings, details)


def _record(
    bench: Bench,
    stager: Stager,
    direction: Direction,
    nbytes: int,
    label: str,
    timing: Timing,
    limit: Timing,
    peers: dict[str, Timing],
    details: dict[str, Any],
) -> Record:
    return records.make(
        bench,
        case=NAME,
        backend=stager.name,
        direction=direction,
        nbytes=nbytes,
        label=label,
        ours=timing,
        limit=limit,
        peers=peers,
        details=details,
    )


CASE = Case(
    name=NAME, summary="1 GiB of pageable memory each way, and a training loop from pageable batches", run=run, seconds=75.0
)
