"""Many small arrays to the device in one tree, against one call for each.

Question: how long until a tree of a few, or of hundreds of arrays in pageable memory is on the device and may be used?

Isolated: the price of a leaf. 500 NumPy arrays of 64 KiB, and of 4 KiB, lie one after another in pageable memory that is touched;
likewise 20, 8 and 2 of 4 KiB, as batches have them. The clock runs from the call to the moment when all arrays are done. Ours is
`put(list).value`.

Method: one tree a sample, right behind a tree that is not timed, as in a training loop; 25 samples, with other bytes in each,
contenders in turn. Every leaf is compared on the device afterwards. The limit is one bare copy of as many bytes from pinned memory.
Peers: JAX's `device_put` of the same tree; one call for each leaf of CuPy from pageable memory and of torch from pinned memory of
its own.

Command: python benchmarks/run.py --case leaves --backend jax --json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks import memory, ours, records
from benchmarks.arena import Arena
from benchmarks.bench import LIMIT, Bench, Case, ways_of
from benchmarks.harness import Contender, able, sample, time_bandwidth
from benchmarks.records import Record
from benchmarks.ways import Call, Way
from xferlib import Stager

__all__ = ["CASE"]

NAME = "leaves"
PEERS = ("cupy", "torch", "jax", "numpy")
TREES = ((500, 64 << 10), (500, 4 << 10), (20, 4 << 10), (8, 4 << 10), (2, 4 << 10))
"""How many leaves, and bytes of each."""
QUICK_TREES = ((20, 64 << 10), (20, 4 << 10))
SAMPLES, QUICK_SAMPLES = 25, 3


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per tree."""
    peers = bench.open_peers(PEERS)
    with bench.open_stager() as stager:
        for leaves, size in QUICK_TREES if bench.quick else TREES:
            bench.say(f"{NAME}: {leaves} of {size} bytes")
            mine = _each(ours.value(stager, bench.device.wait, keep=None), leaves)
            rivals = [_each(way, leaves) for way in ways_of(peers, "fresh", "h2d")]
            yield _measure(bench, stager, mine, rivals, leaves * size, f"{leaves} leaves")


def _measure(bench: Bench, stager: Stager, mine: Way, rivals: Sequence[Way], nbytes: int, label: str) -> Record:
    pinned = Arena.allocate(bench.device, nbytes, lambda n: stager.empty_pinned(n, np.uint8))
    pageable = pinned.with_host(memory.empty_pageable)
    own = [pageable if way.empty_pinned is None else pinned.with_host(way.empty_pinned) for way in rivals]
    contenders = [
        Contender(name=ours.NAME, ways=(mine,), arena=pageable, optional=False),
        Contender(name=LIMIT, ways=(bench.device.raw("h2d"),), arena=pinned, optional=False),
        *(Contender(name=way.name, ways=(way,), arena=arena) for way, arena in zip(rivals, own, strict=True)),
    ]
    contenders = able(contenders, bench.absences, partial(sample, nbytes=nbytes, count=1, index=-2))
    effort = replace(bench.effort, samples=bench.count(QUICK_SAMPLES, SAMPLES, 5))
    timings = time_bandwidth(contenders, nbytes=nbytes, effort=effort, level=False, warm=True)
    return records.make(
        bench,
        case=NAME,
        backend=stager.name,
        direction="h2d",
        nbytes=nbytes,
        label=label,
        ours=timings.pop(ours.NAME),
        limit=timings.pop(LIMIT),
        peers=timings,
    )


def _each(way: Way, leaves: int) -> Way:
    """Return the way for a source that is cut into leaves: one call with a list of them, or one call for each."""

    def whole(source: Any, _: Any) -> Call:
        return way.bind(np.split(source, leaves), None)

    def one_by_one(source: Any, _: Any) -> Call:
        calls = [way.bind(leaf, None) for leaf in np.split(source, leaves)]
        return lambda: [call() for call in calls]

    def wait(kept: Sequence[Any]) -> None:
        way.synchronize([leaf for tree in kept for leaf in tree])

    find = way.result
    assert find is not None, "a way to new arrays has results"
    return replace(
        way,
        bind=whole if way.trees else one_by_one,
        synchronize=way.synchronize if way.trees else wait,
        result=lambda returned: list(returned) if way.trees else [find(leaf) for leaf in returned],
        keep=None,
    )


CASE = Case(name=NAME, summary="time until a tree of 2 to 500 small arrays is on the device", run=run, seconds=20.0)
