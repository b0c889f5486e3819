"""Bandwidth through `Stager.put` and `Stager.get`, against the bare runtime call.

Question: how much of the link between host and device is left to users when they go through xferlib?

Isolated: the transfer path. Data is in place, memory is touched, and what is pinned was pinned outside the clock. Three labels:
"pinned" and "pageable" write into a target that is there (`put(into=)`, `get(out=)`), from or into that kind of host memory;
"fresh" is a `put` from pinned memory that makes a new device array, for 64 MiB and up. Where device arrays cannot be written to, as
in JAX, every `put` makes a new one: "fresh" then comes in every size, and "pageable, new array" is what it says.

Method: transfers back to back, from 4 KiB to 1 GiB; h2d, d2h, and both started together (bytes of both over the wall clock). Each
transfer of a sample has its own source and target. The limit is the bare asynchronous copy on streams of its own between pinned
memory, measured in turn with xferlib, for pageable memory too. (On the host backend it is one NumPy copy after another in the
calling thread, which the backend's two workers may beat.) Peers are the calls that their users make. Calls that block the caller,
as all do from pageable memory, cannot move both directions at once and are absent there. See `harness.py` for the clock, `arena.py`
for the proof.

Command: python benchmarks/run.py --case link --backend cupy --json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks import memory, ours, records
from benchmarks.arena import SHIFTS, STEP, Arena
from benchmarks.bench import LIMIT, Bench, Case
from benchmarks.harness import Contender, time_bandwidth
from benchmarks.records import Record
from benchmarks.ways import Bytes, Direction, Kind, Peer, Way
from xferlib import Stager

__all__ = ["CASE"]

NAME = "link"
PEERS = ("cupy", "torch", "jax", "numpy")
PEERS_TO_NEW_ARRAYS = ("torch", "jax")
SIZES = tuple(4**power << 10 for power in range(1, 11))
BRIEF_SIZES = (4 << 10, 1 << 20, 64 << 20, 1 << 30)
QUICK_SIZES = (4 << 10, 64 << 10, 1 << 20)
LARGE = 16 << 20
LARGE_SAMPLE_SECONDS = 0.04
QUICK_ARENA = 4 << 20
FRESH_FROM = 64 << 20
DIRECTIONS: tuple[tuple[Direction, ...], ...] = (("h2d",), ("d2h",), ("h2d", "d2h"))


@dataclass(frozen=True, kw_only=True)
class _Lap:
    """One row: what is measured at one size."""

    kind: Kind
    directions: tuple[Direction, ...]
    arena: Arena
    nbytes: int
    new: bool = False
    """Whether ours makes a new device array."""

    @property
    def label(self) -> str:
        return f"{self.kind}, new array" if self.new and self.kind == "pageable" else self.kind

    @property
    def direction(self) -> str:
        return "both" if len(self.directions) == 2 else self.directions[0]


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per label, size and direction."""
    sizes = QUICK_SIZES if bench.quick else BRIEF_SIZES if bench.brief else SIZES
    nbytes = QUICK_ARENA if bench.quick else max(sizes)
    peers = bench.open_peers(PEERS if bench.device.in_place else PEERS_TO_NEW_ARRAYS)
    # Two pinned arenas, and as much again for pageable transfers of a whole sample in each direction.
    with bench.open_stager(pinned_limit=4 * (nbytes + SHIFTS * STEP) + (64 << 20)) as stager:
        pinned = Arena.allocate(bench.device, nbytes, partial(_empty_pinned, stager))
        pageable = pinned.with_host(memory.empty_pageable)
        for size in sizes:
            laps = _laps if bench.device.in_place else _laps_to_new_arrays
            for lap in laps(pinned, pageable, size, fresh=bench.quick or size >= FRESH_FROM):
                if bench.brief and lap.kind == "pageable":
                    # It has two cases of its own.
                    continue
                yield _measure(bench, stager, _contenders(bench, stager, peers, lap, pinned), lap)


def _empty_pinned(stager: Stager, nbytes: int) -> Bytes:
    return stager.empty_pinned(nbytes, np.uint8)


def _laps(pinned: Arena, pageable: Arena, nbytes: int, *, fresh: bool) -> Iterator[_Lap]:
    for directions in DIRECTIONS:
        yield _Lap(kind="pinned", directions=directions, arena=pinned, nbytes=nbytes)
    if fresh:
        yield _Lap(kind="fresh", directions=("h2d",), arena=pinned, nbytes=nbytes, new=True)
    for directions in DIRECTIONS:
        yield _Lap(kind="pageable", directions=directions, arena=pageable, nbytes=nbytes)


def _laps_to_new_arrays(pinned: Arena, pageable: Arena, nbytes: int, *, fresh: bool) -> Iterator[_Lap]:
    """Yield the rows where device arrays cannot be written to: every `put` makes a new array, at every size."""
    yield _Lap(kind="pinned", directions=("d2h",), arena=pinned, nbytes=nbytes)
    yield _Lap(kind="fresh", directions=("h2d",), arena=pinned, nbytes=nbytes, new=True)
    yield _Lap(kind="fresh", directions=("h2d", "d2h"), arena=pinned, nbytes=nbytes, new=True)
    for directions in DIRECTIONS:
        yield _Lap(kind="pageable", directions=directions, arena=pageable, nbytes=nbytes, new="h2d" in directions)


def _contenders(bench: Bench, stager: Stager, peers: Sequence[Peer], lap: _Lap, pinned: Arena) -> list[Contender]:
    mine = tuple(_our_way(stager, lap, direction) for direction in lap.directions)
    bare = tuple(bench.device.raw(direction) for direction in lap.directions)
    return bench.able_contenders(mine, bare, _rivals(peers, lap), arena=lap.arena, pinned=pinned, nbytes=lap.nbytes)


def _our_way(stager: Stager, lap: _Lap, direction: Direction) -> Way:
    if direction == "h2d" and lap.new:
        return ours.fresh(stager, keep=None)
    return ours.into(stager, direction, pinned=lap.kind != "pageable")


def _rivals(peers: Sequence[Peer], lap: _Lap) -> list[tuple[Way, ...]]:
    kinds: dict[Direction, Kind] = {"h2d": lap.kind, "d2h": "pinned" if lap.kind == "fresh" else lap.kind}
    by_direction = [[peer.ways(kinds[direction], direction) for peer in peers] for direction in lap.directions]
    if len(by_direction) == 1:
        return [(way,) for ways in by_direction[0] for way in ways]
    if lap.kind == "pageable":
        return []
    pairs = [pair for puts, gets in zip(*by_direction, strict=True) for pair in zip(puts, gets, strict=False)]
    return [pair for pair in pairs if not any(way.waits for way in pair)]


def _measure(bench: Bench, stager: Stager, contenders: Sequence[Contender], lap: _Lap) -> Record:
    bench.say(f"{NAME}: {lap.label} {lap.direction}, {lap.nbytes} bytes")
    effort = bench.effort
    if lap.nbytes >= LARGE and lap.kind != "pageable":
        # The first start and the last wait cost tens of microseconds in all, which must not count in the link's figure.
        effort = replace(effort, sample_seconds=max(effort.sample_seconds, LARGE_SAMPLE_SECONDS))
    timings = time_bandwidth(contenders, nbytes=lap.nbytes, effort=effort, level=lap.kind != "pageable")
    return records.make(
        bench,
        case=NAME,
        backend=stager.name,
        direction=lap.direction,
        nbytes=lap.nbytes,
        label=lap.label,
        ours=timings.pop(ours.NAME),
        limit=timings.pop(LIMIT),
        peers=timings,
    )


CASE = Case(name=NAME, summary="bandwidth each way and both at once, pinned and pageable, 4 KiB to 1 GiB", run=run, seconds=45.0)
