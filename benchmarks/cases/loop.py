"""A training loop from pinned memory, against the longer of its compute and its copies.

Question: how much of a step is lost when the next batch is put after the step was launched, as most programs do it?

Isolated: the transfer path. Six prepared pinned slots, more than are ever in flight, hold different bytes, so nothing has to be
filled and no batch comes twice in a row. In each step the batch of the last `put` is used, compute is launched on it, the next
`put` is issued, and the host waits for the compute of the step before. Compute is arithmetic of a length that was tuned to the
copy: matrix products (CuPy, and JAX in one jitted step of static length) or a kernel (Numba); on the default stream, and on a
stream of its own that does not stop for the default one. On the host backend compute and copies take turns, since there is no
device.

Method: a sample is 500 steps in one go, fewer if they would take more than four seconds; five samples. The limit of a step is the
longer of compute alone and the bare copy alone, medians of what was measured before and after the sample. Peers run in the same
order of events, in turn with ours, with a fifth as many steps. Every step takes a checksum of its batch on the device; all of them
are compared after the clock has stopped.

Command: python benchmarks/run.py --case loop --backend jax --json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from benchmarks import ours, pipeline, records
from benchmarks.bench import Bench, Case
from benchmarks.pipeline import Alone, Pipe
from benchmarks.records import Record
from benchmarks.steps import Bytes, Compute, Feed
from benchmarks.ways import Peer
from xferlib import Stager

__all__ = ["CASE"]

NAME = "loop"
PEERS = ("cupy", "torch", "jax", "numpy")
SIZES = (256 << 20, 64 << 20)
QUICK_SIZES = (1 << 20,)
SLOTS = 6
STEPS, QUICK_STEPS = 500, 12
SAMPLES, QUICK_SAMPLES = 5, 2
SEED = 11


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per size and stream."""
    peers = bench.open_peers(PEERS)
    sizes = QUICK_SIZES if bench.quick else SIZES
    with bench.open_stager(pinned_limit=SLOTS * max(sizes) + (64 << 20)) as stager:
        for nbytes in sizes:
            slots = pipeline.random_batches(lambda n: stager.empty_pinned(n, np.uint8), nbytes, SLOTS, SEED)
            for stream in bench.streams:
                bench.say(f"{NAME}: {nbytes} bytes, {stream}")
                yield _measure(bench, stager, peers, slots, stream)
            del slots
            stager.trim()


def _measure(bench: Bench, stager: Stager, peers: Sequence[Peer], slots: Sequence[Bytes], stream: str) -> Record:
    nbytes = slots[0].nbytes
    compute = bench.device.compute(nbytes, stream)
    with compute.current():
        alone = Alone(bench.device, compute, slots, "h2d", count=bench.effort.row(nbytes), repeats=3)
        rounds = pipeline.tune(alone)
        steps = alone.steps(bench.count(QUICK_STEPS, STEPS, 60))
        feeds = [ours.feed(stager, compute), *(feed for peer in peers for feed in peer.feeds("pinned", compute))]
        pipes = bench.able_pipes([_pipe(compute, feed, slots, rounds) for feed in feeds])
        samples = bench.count(QUICK_SAMPLES, SAMPLES, 3)
        result = pipeline.measure(pipes, alone, steps=steps, samples=samples, between=bench.effort.between)
    timing = result.timings.pop(ours.NAME)
    return records.make(
        bench,
        case=NAME,
        backend=stager.name,
        direction="h2d",
        nbytes=nbytes,
        label=stream,
        ours=timing,
        limit=result.bound,
        peers=result.timings,
        details=result.details(timing, rounds=rounds),
    )


def _pipe(compute: Compute, feed: Feed, batches: Sequence[Bytes], rounds: int) -> Pipe:
    return Pipe(feed.name, partial(pipeline.train, compute, feed, batches, rounds), feed.share)


CASE = Case(
    name=NAME, summary="step time of a training loop from pinned slots over the longer of compute and copy", run=run, seconds=30.0
)
