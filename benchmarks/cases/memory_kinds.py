"""What the kind of host memory does to the way to the device: pinned, write-combined, pageable, mapped, and unified beside it.

Question: which memory should a source be in, and when is no copy the better copy?

Isolated: the memory. One size, 64 MiB, and one direction, to the device, into an array that is there (a new one where arrays never
change). "pinned", "write-combined" and "pageable" are `put` from such memory. "mapped" is a kernel that reads host memory in place,
by `stager.mapped`, and writes its inverse to the device array: the same bytes cross the link as in the other rows. Its peer
"unified" is the same kernel on unified memory that the host wrote last, in pages that each run has for itself.

Method: as in `link`, with the same limit, the bare copy from pinned memory. Filling is outside the clock: write-combined memory is
filled at the rate of the memory, and the CPU reads it a hundred times slower, which does not show here.

Command: python benchmarks/run.py --case memory_kinds --backend cupy --json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import memory, ours, records
from benchmarks.arena import SHIFTS, STEP, Arena
from benchmarks.bench import LIMIT, Bench, Case, ways_of
from benchmarks.harness import time_bandwidth
from benchmarks.records import Record
from benchmarks.ways import Bytes, Call, Way
from xferlib import Stager

__all__ = ["CASE"]

NAME = "memory_kinds"
PEERS = ("cupy", "torch", "jax", "numba", "numpy")
NBYTES = 64 << 20
QUICK_NBYTES = 1 << 20
ARENAS = 8
"""Room for so many: two arenas with a source and a target each, as much again for the mapped ones, and some to spare."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One row."""

    label: str
    arena: Arena
    way: Way
    peers: Sequence[Way] = ()


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per kind of memory that the backend has."""
    nbytes = QUICK_NBYTES if bench.quick else NBYTES
    with bench.open_stager(pinned_limit=ARENAS * (nbytes + SHIFTS * STEP) + (64 << 20)) as stager:
        pinned = Arena.allocate(bench.device, nbytes, partial(_empty_pinned, stager, write_combined=False))
        for kind in _kinds(bench, stager, pinned):
            yield _measure(bench, stager, kind, pinned)


def _empty_pinned(stager: Stager, nbytes: int, *, write_combined: bool) -> Bytes:
    return stager.empty_pinned(nbytes, np.uint8, write_combined=write_combined)


def _kinds(bench: Bench, stager: Stager, pinned: Arena) -> Iterator[_Kind]:
    peers = bench.open_peers(PEERS)
    put = ours.into(stager, "h2d", pinned=False) if bench.device.in_place else ours.fresh(stager, keep=None)
    yield _Kind(label="pinned", arena=pinned, way=put, peers=ways_of(peers, "pinned", "h2d"))
    if stager.capabilities.write_combined:
        combined = pinned.with_host(partial(_empty_pinned, stager, write_combined=True))
        yield _Kind(label="write-combined", arena=combined, way=put)
    pageable = pinned.with_host(memory.empty_pageable)
    yield _Kind(label="pageable", arena=pageable, way=put, peers=ways_of(peers, "pageable", "h2d"))
    if stager.capabilities.mapped and bench.device.in_place:
        yield _Kind(label="mapped", arena=pinned, way=_mapped(bench, stager), peers=_unified(bench))


def _mapped(bench: Bench, stager: Stager) -> Way:
    def bind(source: Bytes, target: Any) -> Call:
        inverse = stager.empty_pinned(source.shape, np.uint8)
        memory.invert(source, inverse)
        return partial(bench.device.invert, stager.mapped(inverse), target)

    return Way(name=ours.NAME, direction="h2d", bind=bind, synchronize=lambda _: bench.device.synchronize(), keep=None)


def _unified(bench: Bench) -> tuple[Way, ...]:
    if "cupy" not in bench.device.peers:
        return ()
    try:
        from benchmarks.peers.managed_calls import managed_read
    except ImportError as error:
        bench.absences.add("unified", error)
        return ()
    return (managed_read(bench.device),)


def _measure(bench: Bench, stager: Stager, kind: _Kind, pinned: Arena) -> Record:
    nbytes = pinned.nbytes
    bench.say(f"{NAME}: {kind.label}, {nbytes} bytes")
    contenders = bench.able_contenders(
        (kind.way,), (bench.device.raw("h2d"),), [(way,) for way in kind.peers], arena=kind.arena, pinned=pinned, nbytes=nbytes
    )
    timings = time_bandwidth(contenders, nbytes=nbytes, effort=bench.effort, level=False)
    return records.make(
        bench,
        case=NAME,
        backend=stager.name,
        direction="h2d",
        nbytes=nbytes,
        label=kind.label,
        ours=timings.pop(ours.NAME),
        limit=timings.pop(LIMIT),
        peers=timings,
    )


CASE = Case(
    name=NAME,
    summary="64 MiB to the device from pinned, write-combined, pageable, mapped and unified memory",
    run=run,
    seconds=3.0,
)
