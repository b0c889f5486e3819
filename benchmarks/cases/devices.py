"""Pageable batches, and a file, for all devices of the machine together, against one of them.

Question: how many times as fast as one device do all of them get a batch of which each has a part?

Isolated: the devices' sharing of threads, memory and buses. Four batches of random bytes lie in pageable memory, which the source
keeps. A loop with default arguments only takes them: the rows of each are divided between all devices, or all are for one. "load":
the arrays of a `.safetensors` file of 4 GiB in the system's cache, divided likewise. With `--size` other sizes, of both. The limit
is what one device takes, divided by the number of devices, so `of_limit` times `devices` is how many times as fast all are.

Method: five samples in turn, of as many batches as half a second has at the rate of one link, behind one that is not timed; three
loads. Each batch is compared on the devices, inside the loop, and what came of it is looked at when the clock has stopped. Every
byte of the first load is compared. The peers: `device_put` of the whole batch over all devices, one batch ahead, and of the file's
arrays. There is no row where the framework has one device, or divides nothing.

Command: python benchmarks/run.py --case devices --backend jax --json
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import memory, ours, pipeline, records, states
from benchmarks.bench import Bench, Case
from benchmarks.harness import Timing
from benchmarks.peers.state_calls import State, open_format
from benchmarks.records import Record
from benchmarks.steps import Bytes
from benchmarks.ways import Corrupted, Shards

__all__ = ["CASE"]

NAME = "devices"
SIZES, QUICK_SIZES = (256 << 20, 64 << 20, 16 << 20), (1 << 20,)
FILE_NBYTES, QUICK_FILE_NBYTES = 4 << 30, 12 << 20
QUICK_LEAVES = 6
BATCHES = 4
SAMPLES, QUICK_SAMPLES = 5, 2
LOADS, QUICK_LOADS = 3, 2
SAMPLE_SECONDS, USUAL_RATE = 0.5, 50e9
FEWEST, MOST, QUICK_STEPS = 8, 300, 6
SEED = 61


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record for each size of a batch, and one for the file."""
    bench.effort.between()
    shards = bench.device.shards()
    if not shards:
        bench.absences.add(NAME, LookupError("one device, or a framework that divides no arrays"))
        return
    for nbytes in bench.sizes or (QUICK_SIZES if bench.quick else SIZES):
        yield _batches(bench, nbytes, *shards)
    for nbytes in bench.sizes or (QUICK_FILE_NBYTES if bench.quick else FILE_NBYTES,):
        yield _file(bench, nbytes, *shards)


def _batches(bench: Bench, nbytes: int, one: Shards, every: Shards) -> Record:
    bench.say(f"{NAME}: {nbytes} bytes over {every.count}")
    batches = pipeline.random_batches(memory.empty_pageable, nbytes, BATCHES, SEED)
    steps = QUICK_STEPS if bench.quick else min(MOST, max(FEWEST, round(SAMPLE_SECONDS * USUAL_RATE / nbytes)))

    placed = {shards: [shards.place(batch) for batch in batches] for shards in (one, every)}

    def timed(shards: Shards, way: Callable[[Iterable[Bytes]], AbstractContextManager[Iterator[Any]]]) -> Callable[[int], float]:
        return lambda _: _loop(bench, shards, way(islice(cycle(batches), steps)), placed[shards], steps) / steps

    peers = {name: partial(_bare, way) for name, way in every.peers.items()}
    contenders = {
        ours.NAME: timed(every, every.prefetched),
        "one": timed(one, one.prefetched),
        **{name: timed(every, way) for name, way in peers.items()},
    }
    timings = _in_turn(bench, contenders, bench.count(QUICK_SAMPLES, SAMPLES))
    return _record(bench, nbytes, "batches", every, timings, steps)


def _bare(way: Callable[[Iterable[Bytes]], Iterator[Any]], batches: Iterable[Bytes]) -> AbstractContextManager[Iterator[Any]]:
    return nullcontext(way(batches))


def _loop(bench: Bench, shards: Shards, loop: AbstractContextManager[Iterator[Any]], expected: Sequence[Any], steps: int) -> float:
    """Take all batches, wait for the last of them, and return the seconds. Raises `Corrupted`."""
    with loop as arriving:
        begin = perf_counter()
        differ = [shards.differ(batch, right) for batch, right in zip(arriving, cycle(expected), strict=False)]
        bench.device.wait(differ)
        seconds = perf_counter() - begin
    if len(differ) != steps or any(differ):
        raise Corrupted(f"a batch of {NAME!r} said it was done, but the h2d target does not hold the source's bytes")
    return seconds


def _file(bench: Bench, nbytes: int, one: Shards, every: Shards) -> Record:
    count = QUICK_LEAVES if bench.quick else states.leaves_of(nbytes)
    size = states.split(nbytes, count) // every.count * every.count
    bench.say(f"{NAME}: a file of {count * size} bytes over {every.count}")
    with tempfile.TemporaryDirectory(dir=states.folder_with(2 * nbytes)) as place:
        path = Path(place) / "state.safetensors"
        open_format("safetensors").write(path, {str(index): states.source(index, size) for index in range(count)})

        def timed(name: str, load: Callable[[Path], State]) -> Callable[[int], float]:
            def once(index: int) -> float:
                begin = perf_counter()
                found = load(path)
                seconds = perf_counter() - begin
                if index < 0:
                    states.verify(name, "h2d", ((key, np.asarray(array)) for key, array in found.items()), count, size)
                return seconds

            return once

        contenders = {
            ours.NAME: timed(ours.NAME, every.load),
            "one": timed(ours.NAME, one.load),
            **{name: timed(name, load) for name, load in every.loaders.items()},
        }
        timings = _in_turn(bench, contenders, bench.count(QUICK_LOADS, LOADS))
    return _record(bench, count * size, "load", every, timings, 1)


def _in_turn(bench: Bench, contenders: dict[str, Callable[[int], float]], rounds: int) -> dict[str, Timing]:
    """Return the seconds of each. The first round is not timed; a peer that cannot run it is left out."""
    timings = {name: Timing() for name in contenders}
    for index in range(-1, rounds):
        bench.effort.between()
        for name in list(timings):
            try:
                seconds = contenders[name](index)
            except Corrupted:
                raise
            except Exception as error:
                if name in (ours.NAME, "one"):
                    raise
                bench.absences.add(name, error)
                del timings[name]
                continue
            if index >= 0:
                timings[name].add([seconds])
    return timings


def _record(bench: Bench, nbytes: int, label: str, every: Shards, timings: dict[str, Timing], steps: int) -> Record:
    mine, one = timings.pop(ours.NAME), timings.pop("one")
    mine.count = steps
    limit = Timing(values=[value / every.count for value in one.values], rounds=[value / every.count for value in one.rounds])
    return records.make(
        bench,
        case=NAME,
        backend="jax",
        direction="h2d",
        nbytes=nbytes,
        label=label,
        ours=mine,
        limit=limit,
        peers=timings,
        details={"devices": every.count, "times_one": round(every.count * mine.share_of(limit), 4)},
    )


CASE = Case(name=NAME, summary="a batch, and a file, divided between all devices, against one", run=run, seconds=25.0)
