"""A training loop on batches of the loaders that JAX programs use, and on xferlib's, with the same data and the same step.

Question: how long is a step whose batches come from Flax's `prefetch_to_device`, Grain's `device_put`, PyTorch's
`DataLoader(pin_memory=True, num_workers=4)`, or `xferlib.prefetch`, where the transfer is the limit and where compute is?

Isolated: the way from host memory to the device. Six batches of random bytes, as large as 64 or 256 MiB of images, are there before
the clock starts, and nobody decodes or collates: in pageable memory for whoever reads them in this process, in anonymous shared
memory that worker processes have mapped for those that have workers. One jitted step for all, a checksum of the batch and matrix
products of a static length: a quarter of the bare copy ("transfer-bound") or twice it ("compute-bound"). Each loader is at its
best. Flax is two batches ahead, and its batches have a leading axis of one device. Grain has whole batches as items and the two
prefetching threads of `grain.experimental.device_put`. PyTorch has whole batches as items, from workers that are already running;
they are copied to the device on a stream of its own and handed to JAX by DLPack, which overlaps better than a PyTorch model on the
stream of the copies would. PyTorch runs once more with tensors that lie in shared memory beforehand, so that its workers copy
nothing. Ours: from the same pageable memory ("pageable"), from prepared pinned slots ("pinned slots"), and from a `SharedRing` into
whose slots four workers copy every batch anew ("4 workers").

Method: a sample is 40 steps of ours or 16 of a peer's from the middle of an endless loop, after six that are not timed; three
samples, contenders in turn. The limit is the longer of compute alone and the bare copy of pinned memory, measured before and after;
in the workers' record, `writers_seconds` says how long the workers take for a batch that nobody moves, and `over_limit` how many
times as long as the longer of that and the limit a step takes. Every step's checksum is compared. All of ours stand beside the same
peers: `details` names the `best_peer`, whose step is `best_peer_over_ours` times as long as ours, median over the samples. With
other backends ours are alone, since the peers give JAX arrays.

Command: python benchmarks/run.py --case loaders --backend jax --json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any, TypeAlias

import numpy as np

import xferlib
from benchmarks import memory, ours, pipeline, records
from benchmarks.bench import Bench, Case
from benchmarks.harness import Timing
from benchmarks.mapped import Mapped, mapped
from benchmarks.peers.loaders import OPENERS, Loader, Work
from benchmarks.pipeline import Alone, Pipe, Result
from benchmarks.records import Record
from benchmarks.steps import Compute
from xferlib import SharedRing, Stager

__all__ = ["CASE"]

NAME = "loaders"
REGIMES = {"transfer-bound": 0.25, "compute-bound": 2.0}
"""Compute over copy."""
BRIEF_REGIMES = ("transfer-bound",)
SIZES, QUICK_SIZES = (256 << 20, 64 << 20), (1 << 20,)
BATCHES = 6
RING_SLOTS = 10
"""Two for each worker (one that it fills, and one that waits for its turn), and two on their way."""
WORKERS, QUICK_WORKERS = 4, 2
WARM = 6
STEPS, QUICK_STEPS = 40, 12
SAMPLES, QUICK_SAMPLES = 3, 2
SHARE = 0.4
"""The share of our steps that is measured for a peer."""
ENDLESS = sys.maxsize
SEED = 47
Source: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """Everything that the loops over batches of one size share."""

    compute: Compute
    nbytes: int
    expected: Sequence[int]
    """Checksums of the batches: to sum them up on the host takes longer than a sample."""
    alone: Alone
    tuned: int
    """Rounds of compute that take as long as the copy."""
    mine: dict[str, Source]
    writers: Callable[[int], float]
    """Seconds a batch of the workers alone, over so many batches."""
    peers: Sequence[Loader]


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per size, regime and source of ours."""
    sizes = QUICK_SIZES if bench.quick else SIZES
    with bench.open_stager(pinned_limit=(BATCHES + RING_SLOTS + 1) * max(sizes) + (256 << 20)) as stager:
        for nbytes in sizes:
            bench.say(f"{NAME}: {nbytes} bytes, preparing")
            with ExitStack() as end:
                loop = _prepare(bench, stager, nbytes, end)
                with loop.compute.current():
                    for regime in BRIEF_REGIMES if bench.brief else REGIMES:
                        bench.say(f"{NAME}: {nbytes} bytes, {regime}")
                        yield from _measure(bench, stager, loop, regime)
            del loop
            stager.trim()


def _prepare(bench: Bench, stager: Stager, nbytes: int, end: ExitStack) -> _Loop:
    workers = QUICK_WORKERS if bench.quick else WORKERS
    batches = pipeline.random_batches(memory.empty_pageable, nbytes, BATCHES, SEED)
    slots = [stager.empty_pinned(nbytes, np.uint8) for _ in batches]
    for slot, batch in zip(slots, batches, strict=True):
        np.copyto(slot, batch)
    shared = end.enter_context(mapped(batches))
    ring = end.enter_context(SharedRing(stager, ((nbytes,), np.uint8), slots=RING_SLOTS))
    peers = _open_peers(bench, Work(batches=batches, mapped=shared, workers=workers, end=end)) if stager.name == "jax" else []
    compute = bench.device.compute(nbytes, bench.device.streams[0])
    with compute.current():
        alone = Alone(bench.device, compute, slots, "h2d", count=max(6, bench.effort.row(nbytes) // 4), repeats=1)
        tuned = pipeline.tune(alone)
    return _Loop(
        compute=compute,
        nbytes=nbytes,
        expected=pipeline.checksums(compute, batches),
        alone=alone,
        tuned=tuned,
        mine={
            "pageable": partial(ours.source(stager, batches, compute), ENDLESS),
            "pinned slots": partial(ours.source(stager, slots, compute), ENDLESS),
            f"{workers} workers": partial(_from_workers, stager, ring, shared, workers, compute),
        },
        writers=partial(_write, ring, shared, workers),
        peers=peers,
    )


def _open_peers(bench: Bench, work: Work) -> list[Loader]:
    loaders: list[Loader] = []
    for name, opener in OPENERS.items():
        try:
            loaders += opener(work)
        except Exception as error:
            bench.absences.add(name, error)
    return loaders


@contextmanager
def _from_workers(stager: Stager, ring: SharedRing, shared: Mapped, workers: int, compute: Compute) -> Iterator[xferlib.Prefetch]:
    run = ring.run(shared.fill, cycle(range(shared.count)), workers=workers)
    with closing(run), xferlib.prefetch(run, stager, rewrites=False, stream=compute.stream) as arrays:
        yield arrays


def _write(ring: SharedRing, shared: Mapped, workers: int, steps: int) -> float:
    """Let the workers fill slots that nobody puts, and return the seconds a batch, from the middle."""
    with closing(ring.run(shared.fill, cycle(range(shared.count)), workers=workers)) as run:
        for _ in islice(run, RING_SLOTS):
            pass
        begin = time.perf_counter()
        for _ in islice(run, steps):
            pass
        return (time.perf_counter() - begin) / steps


def _measure(bench: Bench, stager: Stager, loop: _Loop, regime: str) -> Iterator[Record]:
    rounds = loop.alone.rounds = max(1, round(loop.tuned * REGIMES[regime]))

    def pipe(name: str, source: Source, share: float) -> Pipe:
        return Pipe(name, partial(pipeline.train_steadily, loop.compute, name, source, loop.expected, rounds, WARM), share)

    mine = [pipe(f"{ours.NAME}, {name}", source, 1.0) for name, source in loop.mine.items()]
    rivals = [pipe(loader.name, loader.open, SHARE) for loader in loop.peers]
    _, *present = bench.able_pipes([mine[0], *rivals])
    steps, samples = bench.count(QUICK_STEPS, STEPS, 20), bench.count(QUICK_SAMPLES, SAMPLES)
    sizes = {"steps": loop.alone.steps(steps), "samples": samples}
    result = pipeline.measure([*mine, *present], loop.alone, between=bench.effort.between, **sizes)
    timings = {name: result.timings.pop(one.name) for name, one in zip(loop.mine, mine, strict=True)}
    writers = median(loop.writers(steps) for _ in range(samples))
    for name, timing in timings.items():
        limited = _limited(timing, result, writers) if name.endswith("workers") else {}
        yield records.make(
            bench,
            case=NAME,
            backend=stager.name,
            direction="h2d",
            nbytes=loop.nbytes,
            label=f"{regime}, {name}",
            ours=timing,
            limit=result.bound,
            peers=result.timings,
            details={**result.details(timing, rounds=rounds), **_beside(timing, result), **limited},
        )


def _limited(timing: Timing, result: Result, writers: float) -> dict[str, Any]:
    """Compare with the longest of compute, copy, and those who write the batches."""
    return {"writers_seconds": writers, "over_limit": round(timing.median / max(result.bound.median, writers), 4)}


def _beside(timing: Timing, result: Result) -> dict[str, Any]:
    """Compare with the best of the peers, which `result` has left."""
    if not result.timings:
        return {}
    best = min(result.timings, key=lambda name: result.timings[name].median)
    return {"best_peer": best, "best_peer_over_ours": round(timing.share_of(result.timings[best]), 4)}


CASE = Case(
    name=NAME,
    summary="step time on batches from Flax's, Grain's and PyTorch's loaders and ours, two regimes",
    run=run,
    seconds=75.0,
)
