"""Pageable memory of every size, moved as a user moves it who reads no further than the first example.

Question: how near to the link's rate does pageable memory come with default arguments, by one call and in a loop, 4 KiB to 1 GiB?

Isolated: the default. The user pins, borrows and names nothing, and the stager is as it opens. Memory that exists before the clock
starts is touched. There are six labels:

"call": `put(array)` to a new device array; `get(array).result()` into host memory of xferlib's own, which its pool has after the
first round, as it has in a program that lets go of its results. "call, out=": `get(array, out=)` into pageable memory. The clock
runs from the call until the bytes are there; the limit and the peers are waited for in the same way, call by call.

"loop, kept by the source": `for batch in xferlib.prefetch(batches, stager)` over arrays that come in turn, again and again. "loop,
rewrites=False": the same, with the promise that they are never written to. "loop, made anew": each batch is an array that nothing
else refers to. These arrays are made before the clock starts, as far as 8 GiB go, and giving them away takes no time. The device
reads every batch once, for its checksum, and writes as much; there is no other compute. Peers: their calls in the same loop, and on
a thread that is two batches ahead.

"loop" to the host: `for result in xferlib.drain(results, stager)`, each computed from one of two arrays. Peers: their calls two
results late, or on a thread.

Method: by call as in `pageable`, five samples of some milliseconds, each right behind one that is not timed; every byte compared.
A loop is half a second long, 2000 steps at most, in passes of a thousand; five samples, three from 256 MiB on; peers run a fifth
as many steps, but at least eight. In a brief run a loop is a fifth of a second long, with three samples, and peers run a third of
theirs. The loop's start and end are in the clock, and so are, to the host, the looks at some bytes of each result. The limit is
the bare copy of pinned memory, by call or in a row. A loop of small batches cannot be held to that limit, since its steps take
the host longer: `details` has `compute_seconds`, of a step without any copy, and `over_bound`, over the longer of both.

Command: python benchmarks/run.py --case sizes --backend jax --json --resume
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import xferlib
from benchmarks import memory, ours, pipeline, records, sources
from benchmarks.arena import SHIFTS, STEP, Arena
from benchmarks.bench import LIMIT, Bench, Case, ways_of
from benchmarks.harness import Timing, time_bandwidth
from benchmarks.pipeline import Alone, Pipe
from benchmarks.records import Record
from benchmarks.steps import Bytes, Compute
from benchmarks.ways import Call, Direction, Peer, Way
from xferlib import Stager

__all__ = ["CASE"]

NAME = "sizes"
PEERS = ("cuda", "cupy", "torch", "numba", "jax", "numpy")
SIZES = tuple(size << 10 for size in (16 << 10, 64 << 10, 256 << 10, 1 << 10, 64, 4 << 10, 4, 1 << 20))
"""In the order in which they are measured: what is asked for most comes first, in case that the time runs out."""
QUICK_SIZES = (4 << 10, 1 << 20)
LARGE = 256 << 20
SAMPLES, LARGE_SAMPLES, QUICK_SAMPLES, QUICK_CALLS = 5, 3, 2, 3
CALL_SECONDS = 0.0015
"""How long a sample of calls lasts in a brief run: each call is waited for, so the sample's end weighs nothing."""
LOOP_SECONDS, BRIEF_LOOP_SECONDS = 0.5, 0.2
BRIEF_SHARE = 1 / 3
"""Of the steps that a peer makes otherwise: there are many peers, and most take several times as long."""
FEWEST_STEPS, MOST_STEPS, QUICK_STEPS = 24, 2000, 12
PASS = 1000
"""Steps whose checksums the device keeps."""
KEPT_NBYTES, FEWEST_BATCHES, MOST_BATCHES = 4 << 30, 4, 32
MADE_NBYTES = 8 << 30
ARENA_NBYTES, QUICK_ARENA_NBYTES = 64 << 20, 4 << 20
"""Room for some calls, each with memory of its own."""
SLOTS = 2
"""Pinned slots, for the bare copy alone."""
BASES = 2
SEED = 59
CALL, CALL_OUT = "call", "call, out="
KEPT: dict[str, bool | None] = {"loop, kept by the source": None, "loop, rewrites=False": False}
"""What `rewrites` is, by label."""
MADE: dict[str, bool | None] = {"loop, made anew": None}
LOOP = "loop"


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Knows which rows are wanted, and makes their records."""

    bench: Bench
    stager: Stager
    """As it opens: what is pinned for the limit is another's."""

    def wanted(self, direction: Direction, nbytes: int, *labels: str) -> bool:
        """Tell whether one of these rows is to be measured."""
        return any((NAME, self.stager.name, direction, nbytes, label) not in self.bench.done for label in labels)

    def say(self, direction: Direction, nbytes: int, *labels: str) -> None:
        self.bench.say(f"{NAME}: {' and '.join(labels)} {direction}, {nbytes} bytes")

    def record(
        self,
        direction: Direction,
        nbytes: int,
        label: str,
        timing: Timing,
        limit: Timing,
        peers: Mapping[str, Timing],
        details: dict[str, Any],
    ) -> Record:
        return records.make(
            self.bench,
            case=NAME,
            backend=self.stager.name,
            direction=direction,
            nbytes=nbytes,
            label=label,
            ours=timing,
            limit=limit,
            peers=peers,
            details={**details, "staging": str(self.stager.staging)},
        )


def run(bench: Bench) -> Iterator[Record]:
    """Yield, size by size, a record per call and one per loop."""
    sizes = bench.sizes or (QUICK_SIZES if bench.quick else SIZES)
    peers = bench.open_peers(PEERS)
    arena = QUICK_ARENA_NBYTES if bench.quick else ARENA_NBYTES
    room = SLOTS * max(*sizes, arena) + SHIFTS * STEP
    with bench.open_stager() as stager, bench.open_stager(pinned_limit=2 * room + (64 << 20)) as other:
        rows = _Rows(bench=bench, stager=stager)
        pin = partial(other.empty_pinned, dtype=np.uint8)
        for nbytes in sizes:
            yield from _calls(rows, peers, nbytes, max(nbytes, arena), pin)
            yield from _loops(rows, peers, nbytes, pin)
            stager.trim()
            other.trim()


def _calls(rows: _Rows, peers: Sequence[Peer], nbytes: int, arena_nbytes: int, pin: Callable[[int], Bytes]) -> Iterator[Record]:
    mine: list[tuple[str, Way]] = [
        (CALL, ours.fresh(rows.stager, keep=None)),
        (CALL, ours.made(rows.stager)),
        (CALL_OUT, ours.into(rows.stager, "d2h", pinned=False)),
    ]
    wanted = [(label, way) for label, way in mine if rows.wanted(way.direction, nbytes, label)]
    if not wanted:
        return
    pinned = Arena.allocate(rows.bench.device, arena_nbytes, pin)
    pageable = pinned.with_host(memory.empty_pageable)
    for label, way in wanted:
        rows.say(way.direction, nbytes, label)
        timings = _time(rows.bench, way, _rivals(peers, way.direction, label), pageable, pinned, nbytes)
        timing, limit = timings.pop(ours.NAME), timings.pop(LIMIT)
        yield rows.record(way.direction, nbytes, label, timing, limit, timings, {})


def _rivals(peers: Sequence[Peer], direction: Direction, label: str) -> list[Way]:
    """Return the calls that their users make: any to the device; to the host those that take an array or make one, as ours does."""
    ways = {way.name: way for kind in ("pageable", "new") for way in ways_of(peers, kind, direction)}
    return [way for way in ways.values() if direction == "h2d" or (way.result is None) is (label == CALL_OUT)]


def _time(bench: Bench, mine: Way, rivals: Sequence[Way], pageable: Arena, pinned: Arena, nbytes: int) -> dict[str, Timing]:
    contenders = bench.able_contenders(
        (_waited(mine),),
        (_waited(bench.device.raw(mine.direction)),),
        [(_waited(way),) for way in rivals],
        arena=pageable,
        pinned=pinned,
        nbytes=nbytes,
    )
    effort = replace(bench.effort, samples=bench.count(QUICK_CALLS, SAMPLES, 3))
    if bench.brief:
        effort = replace(effort, sample_seconds=CALL_SECONDS)
    return time_bandwidth(contenders, nbytes=nbytes, effort=effort, level=False, warm=True)


def _waited(way: Way) -> Way:
    """Return the way with calls that wait until their bytes are there."""

    def bind(source: Any, target: Any) -> Call:
        start = way.bind(source, target)

        def call() -> object:
            returned = start()
            way.synchronize((returned,))
            return returned

        return call

    return replace(way, bind=bind, synchronize=lambda _: None, waits=True)


def _loops(rows: _Rows, peers: Sequence[Peer], nbytes: int, pin: Callable[[int], Bytes]) -> Iterator[Record]:
    puts = [labels for labels in (KEPT, MADE) if rows.wanted("h2d", nbytes, *labels)]
    gets = rows.wanted("d2h", nbytes, LOOP)
    if not puts and not gets:
        return
    compute = rows.bench.device.compute(nbytes, rows.bench.device.streams[0])
    with compute.current():
        slots = pipeline.random_batches(pin, nbytes, SLOTS, SEED)
        if puts:
            yield from _to_device(rows, peers, compute, slots, puts)
        if gets:
            yield from _to_host(rows, peers, compute, slots)


def _to_device(
    rows: _Rows, peers: Sequence[Peer], compute: Compute, slots: Sequence[Bytes], wanted: Iterable[Mapping[str, bool | None]]
) -> Iterator[Record]:
    nbytes = slots[0].nbytes
    count = max(FEWEST_BATCHES, min(MOST_BATCHES, KEPT_NBYTES // nbytes))
    batches = pipeline.random_batches(memory.empty_pageable, nbytes, count, SEED)
    expected = pipeline.checksums(compute, batches)
    alone = _alone(rows.bench, compute, slots, "h2d")
    for labels in wanted:
        give = sources.anew(batches) if labels is MADE else sources.kept(batches)
        mine, rivals = _feeds(rows.stager, peers, compute, labels, give, expected)
        most = MADE_NBYTES // nbytes if labels is MADE else MOST_STEPS
        yield from _measure(rows, "h2d", nbytes, mine, rivals, alone, most=most)


def _to_host(rows: _Rows, peers: Sequence[Peer], compute: Compute, slots: Sequence[Bytes]) -> Iterator[Record]:
    nbytes = slots[0].nbytes
    # Not the slots: bare copies write to them.
    values = pipeline.random_batches(memory.empty_pageable, nbytes, BASES, SEED)
    bases = [(one, rows.bench.device.upload(one)) for one in values]
    mine, rivals = _drains(rows.stager, peers, compute, bases)
    yield from _measure(rows, "d2h", nbytes, mine, rivals, _alone(rows.bench, compute, slots, "d2h"))


def _alone(bench: Bench, compute: Compute, slots: Sequence[Bytes], direction: Direction) -> Alone:
    return Alone(bench.device, compute, slots, direction, count=min(PASS, bench.effort.row(slots[0].nbytes)), repeats=1)


def _feeds(
    stager: Stager,
    peers: Sequence[Peer],
    compute: Compute,
    labels: Mapping[str, bool | None],
    give: Callable[[int], Iterator[Bytes]],
    expected: Sequence[int],
) -> tuple[list[Pipe], list[Pipe]]:
    """Return the loops of ours, one for each label and named so, and those of the peers."""

    def pipe(name: str, bring: Callable[[Iterator[Bytes]], Any], share: float) -> Pipe:
        def train(steps: int) -> float:
            batches = give(steps)
            return pipeline.train_on(compute, name, lambda _: bring(batches), expected, 0, steps)

        return Pipe(name, partial(_passes, train), share)

    mine = [pipe(label, partial(ours.prefetched, stager, compute, rewrites=rewrites), 1.0) for label, rewrites in labels.items()]
    feeds = [feed for peer in peers for feed in peer.feeds("new", compute)]
    in_line = [pipe(feed.name, partial(sources.in_line, feed), feed.share) for feed in feeds]
    ahead = [pipe(f"{feed.name}, thread", partial(sources.ahead, feed), feed.share) for feed in feeds]
    return mine, in_line + ahead


def _drains(
    stager: Stager, peers: Sequence[Peer], compute: Compute, bases: Sequence[tuple[Bytes, Any]]
) -> tuple[list[Pipe], list[Pipe]]:
    """Return the loop of ours, and those of the peers."""

    def drain(outputs: Iterable[Any]) -> Iterable[Bytes]:
        return xferlib.drain(outputs, stager, stream=compute.stream)

    # Nobody writes to the targets.
    targets = [memory.empty_pageable(bases[0][0].nbytes)]
    rivals = [
        Pipe(way.name, partial(_passes, partial(pipeline.drain, compute, way, bases, targets, 0)), way.share)
        for peer in peers
        for way in peer.drains("new", compute)
    ]
    return [Pipe(LOOP, partial(_passes, partial(pipeline.drain_on, compute, LOOP, drain, bases, 0)), 1.0)], rivals


def _passes(run_steps: Callable[[int], float], steps: int) -> float:
    """Run so many steps, no more at a time than can be verified, and return their seconds."""
    return sum(run_steps(min(PASS, steps - done)) for done in range(0, steps, PASS))


def _measure(
    rows: _Rows,
    direction: Direction,
    nbytes: int,
    mine: Sequence[Pipe],
    rivals: Sequence[Pipe],
    alone: Alone,
    *,
    most: int = MOST_STEPS,
) -> Iterator[Record]:
    """Yield the record of each of ours."""
    rows.say(direction, nbytes, *(pipe.name for pipe in mine))
    _, *present = rows.bench.able_pipes([mine[0], *rivals])
    if rows.bench.brief:
        present = [pipe._replace(share=pipe.share * BRIEF_SHARE) for pipe in present]
    # The first time compiles, or grows a pool.
    alone.measure()
    longest = max(max(pair) for pair in alone.measure())
    seconds = BRIEF_LOOP_SECONDS if rows.bench.brief else LOOP_SECONDS
    steps = QUICK_STEPS if rows.bench.quick else max(FEWEST_STEPS, min(MOST_STEPS, int(seconds / longest)))
    samples = rows.bench.count(QUICK_SAMPLES, LARGE_SAMPLES if nbytes >= LARGE else SAMPLES, 3)
    between = rows.bench.effort.between
    result = pipeline.measure([*mine, *present], alone, steps=min(steps, most), samples=samples, between=between)
    timings = {pipe.name: result.timings.pop(pipe.name) for pipe in mine}
    for label, timing in timings.items():
        details = result.details(timing, rounds=0)
        yield rows.record(direction, nbytes, label, timing, result.copies, result.timings, details)


CASE = Case(
    name=NAME,
    summary="pageable memory with default arguments, 4 KiB to 1 GiB, by call and in a loop, each way",
    run=run,
    seconds=150.0,
    resumes=True,
)
