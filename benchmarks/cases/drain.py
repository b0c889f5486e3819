"""The output of every step to the host, against the longer of compute and copy.

Question: how much longer does a step take when its output, of the size of its batch, goes to pinned memory while the next ones run?

Isolated: the way back. Two batches lie on the device; each step computes from one of them an output that differs from those before
in every byte. Its `get(out=)` is issued after the step is launched, and the host reads it two steps late, from four pinned targets
in turn. The compute is that of the case `loop`, tuned to the copy.

Method: as in `loop`, 300 frames a sample at most. Some hundred bytes of every frame are compared as soon as it is said to be there,
and all bytes of the last four at the end. Peers that take forty times as long, as JAX's own calls do, run a fiftieth of the frames.

Command: python benchmarks/run.py --case drain --backend jax --json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from benchmarks import ours, pipeline, records
from benchmarks.bench import Bench, Case
from benchmarks.pipeline import Alone, Pipe
from benchmarks.records import Record
from benchmarks.steps import OUTPUTS, Bytes
from benchmarks.ways import Peer
from xferlib import Stager

__all__ = ["CASE"]

NAME = "drain"
PEERS = ("cupy", "torch", "jax", "numpy")
SIZES = (256 << 20, 64 << 20)
QUICK_SIZES = (1 << 20,)
BASES = 2
FRAMES, QUICK_FRAMES = 300, 12
SAMPLES, QUICK_SAMPLES = 5, 2
SEED = 23


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per size and stream."""
    peers = bench.open_peers(PEERS)
    sizes = QUICK_SIZES if bench.quick else SIZES
    with bench.open_stager(pinned_limit=OUTPUTS * max(sizes) + (64 << 20)) as stager:
        for nbytes in sizes:
            targets = [stager.empty_pinned(nbytes, np.uint8) for _ in range(OUTPUTS)]
            bases = pipeline.random_batches(lambda n: np.empty(n, np.uint8), nbytes, BASES, SEED)
            for stream in bench.streams:
                bench.say(f"{NAME}: {nbytes} bytes, {stream}")
                yield _measure(bench, stager, peers, bases, targets, stream)
            del targets
            stager.trim()


def _measure(
    bench: Bench, stager: Stager, peers: Sequence[Peer], bases: Sequence[Bytes], targets: Sequence[Bytes], stream: str
) -> Record:
    nbytes = targets[0].nbytes
    compute = bench.device.compute(nbytes, stream)
    with compute.current():
        alone = Alone(bench.device, compute, targets, "d2h", count=bench.effort.row(nbytes), repeats=3)
        rounds = pipeline.tune(alone)
        frames = alone.steps(bench.count(QUICK_FRAMES, FRAMES, 60))
        pairs = [(values, bench.device.upload(values)) for values in bases]
        drains = [ours.drain(stager, compute), *(way for peer in peers for way in peer.drains("pinned", compute))]
        pipes = [Pipe(way.name, partial(pipeline.drain, compute, way, pairs, targets, rounds), way.share) for way in drains]
        samples, between = bench.count(QUICK_SAMPLES, SAMPLES, 3), bench.effort.between
        result = pipeline.measure(bench.able_pipes(pipes), alone, steps=frames, samples=samples, between=between)
    timing = result.timings.pop(ours.NAME)
    return records.make(
        bench,
        case=NAME,
        backend=stager.name,
        direction="d2h",
        nbytes=nbytes,
        label=stream,
        ours=timing,
        limit=result.bound,
        peers=result.timings,
        details=result.details(timing, rounds=rounds),
    )


CASE = Case(
    name=NAME, summary="time of a frame whose output goes to the host over the longer of compute and copy", run=run, seconds=30.0
)
