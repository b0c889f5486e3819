"""Host time of a call that starts a transfer of 64 bytes, or of 4 KiB, against the bare runtime calls.

Question: what does a call cost the host when the bytes cost nothing? It bounds how small batches may be.

Isolated: the host side. The clock surrounds each single call; the synchronization comes after every 50 calls, outside the clock.
`put(into=)` and `get(out=)` have their target, `put()` makes a new device array from memory that earlier puts gave back, and
`put().value` also makes the current stream wait. What a call returned is dropped inside the clock of a later call.

Method: pinned memory, contenders in turn, chunk by chunk; every chunk is poisoned before and verified after. The limit is the bare
asynchronous copy; an event record beside it is the least that a transfer needs if its end can be asked for. Peers are the calls
that their users make, from pinned memory of their own where that matters to them. Each call has arrays of its own; labels with
"same array" repeat one call on one array, the cheapest case there is. Labels with "busy" repeat it with a short kernel launched on
the current stream before each call: the device is running, and the caches are those of a loop.

Command: python benchmarks/run.py --case overhead --backend cupy --json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks import ours, records
from benchmarks.arena import Arena, fitted
from benchmarks.bench import Bench, Case, ways_of
from benchmarks.harness import Contender, Timing, able, time_calls
from benchmarks.records import Record
from benchmarks.ways import Bytes, Direction, Way
from xferlib import Stager

__all__ = ["CASE"]

NAME = "overhead"
PEERS = ("cupy", "torch", "numba", "jax", "numpy")
NBYTES = 64
PAGE = 4096
KEPT = 2
"""Fresh arrays that a caller holds at a time."""
BUSY_SHARE = 5
"""For so many chunks without a kernel there is one chunk with a kernel before each call."""
NEW_SHARE = 3
"""Where every call needs a new array, made outside the clock, there is one chunk for so many elsewhere."""


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record per call of ours, alone and, where the device can be kept busy, inside a loop with a kernel."""
    peers = bench.open_peers(PEERS)
    with bench.open_stager() as stager:
        to_device = [*ways_of(peers, "pinned", "h2d"), *ways_of(peers, "fresh", "h2d")]
        yield from _direction(bench, stager, "h2d", _puts(bench, stager), to_device)
        yield from _direction(bench, stager, "d2h", _gets(stager), ways_of(peers, "pinned", "d2h"))
        yield from _direction(bench, stager, "h2d", _puts(bench, stager), to_device, nbytes=PAGE)


def _puts(bench: Bench, stager: Stager) -> dict[str, Way]:
    into = {"put(into=)": ours.into(stager, "h2d", pinned=True)} if bench.device.in_place else {}
    return {
        **into,
        "put()": ours.fresh(stager, keep=KEPT),
        "put().value": ours.value(stager, bench.device.wait, keep=KEPT),
    }


def _gets(stager: Stager) -> dict[str, Way]:
    return {"get(out=)": ours.into(stager, "d2h", pinned=True)}


def _direction(
    bench: Bench, stager: Stager, direction: Direction, labels: dict[str, Way], rivals: Sequence[Way], nbytes: int = NBYTES
) -> Iterator[Record]:
    raw = bench.device.raw(direction)
    mine = {**labels, raw.name: raw}
    effort = bench.effort
    if not bench.device.in_place:
        effort = replace(effort, chunks=-(-effort.chunks // NEW_SHARE))
    contenders = [_contender(bench, stager, name, way, nbytes, optional=False) for name, way in mine.items()]
    contenders += [_contender(bench, stager, way.name, way, nbytes) for way in [*bench.device.floors(direction), *rivals]]
    once = replace(effort, chunks=1)
    contenders = able(contenders, bench.absences, lambda one: time_calls([one], nbytes=nbytes, effort=once))
    report = partial(_records, bench, stager, direction, nbytes, list(labels), raw.name)
    bench.say(f"{NAME}: {direction}, {nbytes} bytes, {len(contenders)} calls")
    yield from report(time_calls(contenders, nbytes=nbytes, effort=effort), "")
    if nbytes == NBYTES:
        again = [one for one in contenders if not any(way.once for way in one.ways)]
        yield from report(time_calls(again, nbytes=nbytes, effort=replace(effort, same=True)), ", same array")
    busy = bench.device.busy()
    if busy is None:
        return
    bench.say(f"{NAME}: {direction}, {nbytes} bytes, busy")
    fewer = replace(effort, chunks=-(-effort.chunks // BUSY_SHARE))
    with busy as launch:
        timings = time_calls(contenders, nbytes=nbytes, effort=fewer, before=launch)
    yield from report(timings, ", busy")


def _contender(bench: Bench, stager: Stager, name: str, way: Way, nbytes: int, *, optional: bool = True) -> Contender:
    arena = Arena.allocate(bench.device, nbytes * bench.effort.chunk, way.empty_pinned or partial(_empty_pinned, stager))
    way = fitted(way, bench.device)
    bounded = way if way.result is None else replace(way, keep=KEPT)
    return Contender(name=name, ways=(bounded,), arena=arena, optional=optional)


def _empty_pinned(stager: Stager, nbytes: int) -> Bytes:
    return stager.empty_pinned(nbytes, np.uint8)


def _records(
    bench: Bench,
    stager: Stager,
    direction: Direction,
    nbytes: int,
    labels: Sequence[str],
    limit: str,
    timings: dict[str, Timing],
    suffix: str,
) -> Iterator[Record]:
    peers = {name: timing for name, timing in timings.items() if name not in labels}
    for label in labels:
        yield records.make(
            bench,
            case=NAME,
            backend=stager.name,
            direction=direction,
            nbytes=nbytes,
            label=label + suffix,
            ours=timings[label],
            limit=timings[limit],
            peers=peers,
        )


CASE = Case(name=NAME, summary="host time of a call that starts a transfer of 64 bytes, or of 4 KiB", run=run, seconds=15.0)
