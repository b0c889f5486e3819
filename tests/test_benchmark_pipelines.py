"""The pipelines of the benchmarks: wrong bytes end them, compute is tuned to the copy, and the bound is the longer of the two."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

# Last: what is installed comes before the clone.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import memory, pipeline, sources
from benchmarks.arena import Arena, Batch, fitted
from benchmarks.devices import open_device
from benchmarks.pipeline import Alone, Pipe
from benchmarks.steps import Drain, Feed
from benchmarks.ways import Corrupted, Device
from xferlib.pipeline.unshared import is_unshared


class NoWriting:
    """The host's device, but as if its arrays could not be written to."""

    in_place = False

    def __init__(self) -> None:
        self._device = open_device("host")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def test_what_writes_is_given_a_new_array_with_wrong_bytes() -> None:
    device = cast("Device", NoWriting())
    arena = Arena.allocate(device, 4 * 64, memory.empty_pageable)
    way = fitted(device.raw("h2d"), device)
    batch = Batch(way, arena, nbytes=64, count=4, index=1)
    batch.kept.extend(call() for call in batch.calls)
    batch.verify()
    idle = Batch(replace(way, bind=lambda source, target: lambda: target), arena, nbytes=64, count=4, index=1)
    idle.kept.extend(call() for call in idle.calls)
    with pytest.raises(Corrupted):
        idle.verify()


def test_parts_are_compared_one_after_the_other() -> None:
    arena = Arena.allocate(open_device("host"), 4 * 64, memory.empty_pageable)
    expected = arena.expected("h2d")[:256]
    parts = [expected[:64], expected[64:256]]
    assert arena.equal("h2d", expected, parts)
    assert not arena.equal("h2d", expected, parts[:1])
    assert not arena.equal("h2d", expected, [expected[64:128], expected[64:256]])


def test_a_batch_of_the_step_before_fails_the_loop() -> None:
    compute = open_device("host").compute(4096, "in order")
    batches = pipeline.random_batches(memory.empty_pageable, 4096, 3, 1)
    sound = Feed(name="sound", start=lambda batch: batch.copy(), use=lambda array: array)
    assert pipeline.train(compute, sound, batches, 1, 8) > 0
    kept: list[Any] = [batches[0]]

    def late(batch: Any) -> Any:
        kept.append(batch)
        return kept[-2]

    with pytest.raises(Corrupted, match="'late' said it was done, but the h2d target"):
        pipeline.train(compute, replace(sound, name="late", start=late), batches, 1, 8)


def test_a_steady_loop_leaves_out_the_start_and_wants_more_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = open_device("host").compute(4096, "in order")
    batches = pipeline.random_batches(memory.empty_pageable, 4096, 3, 1)
    expected = pipeline.checksums(compute, batches)
    given: list[int] = []

    def source(count: int) -> Callable[[], Any]:
        def numbered() -> Generator[Any, None, None]:
            for index in range(count):
                given.append(index)
                yield batches[index % 3]

        return lambda: closing(numbered())

    # A second for every batch: the first one counted is the third, which is there when the second of two warm steps ends.
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(perf_counter=lambda: float(len(given))))
    assert pipeline.train_steadily(compute, "sound", source(99), expected, 1, 2, 8) == 10 - 3
    assert given == list(range(10))
    with pytest.raises(RuntimeError, match="'short' gave 9 batches and ended: expected 10"):
        pipeline.train_steadily(compute, "short", source(9), expected, 1, 2, 8)
    with pytest.raises(Corrupted, match="'late' said it was done, but the h2d target"):
        pipeline.train_steadily(compute, "late", source(99), expected[::-1], 1, 2, 8)


@pytest.mark.parametrize("byte", [0, 2000, 4095])
def test_an_output_of_an_earlier_frame_fails_the_drain(byte: int) -> None:
    device = open_device("host")
    compute = device.compute(4096, "in order")
    bases = [(values, values.copy()) for values in pipeline.random_batches(memory.empty_pageable, 4096, 2, 1)]
    targets = [memory.empty_pageable(4096) for _ in range(4)]

    def start(output: Any, target: Any) -> Any:
        stale = target[byte]
        np.copyto(target, output)
        return target, stale

    sound = Drain(name="sound", start=start, finish=lambda pair: cast("Any", pair[0]))
    # Not as many frames as below: the last ones would leave the same bytes.
    assert pipeline.drain(compute, sound, bases, targets, 1, 9) > 0

    def leave(pair: Any) -> Any:
        target, stale = pair
        target[byte] = stale
        return target

    with pytest.raises(Corrupted, match="'stale' said it was done, but the d2h target"):
        pipeline.drain(compute, replace(sound, name="stale", finish=leave), bases, targets, 1, 12)


def test_drained_outputs_come_in_order_and_all_of_them() -> None:
    compute = open_device("host").compute(4096, "in order")
    bases = [(values, values.copy()) for values in pipeline.random_batches(memory.empty_pageable, 4096, 2, 1)]
    assert pipeline.drain_on(compute, "sound", lambda outputs: (one.copy() for one in outputs), bases, 0, 9) > 0
    with pytest.raises(RuntimeError, match="'short' gave 3 outputs and ended: expected 9"):
        pipeline.drain_on(compute, "short", lambda outputs: islice(outputs, 3), bases, 0, 9)
    with pytest.raises(Corrupted, match="'late' said it was done, but the d2h target"):
        pipeline.drain_on(compute, "late", lambda outputs: islice(outputs, 1, 5), bases, 0, 4)


def test_nobody_else_refers_to_batches_that_are_made_anew() -> None:
    batches = pipeline.random_batches(memory.empty_pageable, 4096, 2, 1)
    anew, kept = sources.anew(batches)(3), sources.kept(batches)(3)
    for index in range(3):
        box = [next(anew)]
        assert is_unshared(box)
        assert np.array_equal(box[0], batches[index % 2])
        assert not is_unshared([next(kept)])
    assert list(anew) == list(kept) == []


def test_a_thread_is_two_batches_ahead_of_the_loop() -> None:
    batches = pipeline.random_batches(memory.empty_pageable, 64, 6, 1)
    started: list[int] = []
    feed = Feed(name="counted", start=lambda batch: started.append(len(started)), use=lambda _: len(started))
    with sources.in_line(feed, batches) as arrays:
        assert list(arrays) == [1, 2, 3, 4, 5, 6]
    started.clear()
    with sources.ahead(feed, batches) as arrays:
        for index, _ in enumerate(arrays):
            assert len(started) <= index + 1 + sources.AHEAD
    assert started == list(range(6))


def test_a_loop_that_is_left_ends_the_thread_of_its_feed() -> None:
    feed = Feed(name="sound", start=lambda batch: batch, use=lambda array: array)
    batches = pipeline.random_batches(memory.empty_pageable, 64, 6, 1)
    with sources.ahead(feed, batches) as arrays:
        assert next(arrays) is batches[0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("benchmark-feed")]


class Clockwork:
    """Compute that takes 3 ms and another millisecond for every 10 rounds, beside a copy of 5 ms."""

    rounds = 0
    bound = 0.0

    def copy_seconds(self) -> float:
        return 0.005

    def compute_seconds(self, rounds: int) -> float:
        return 0.003 + 0.0001 * rounds

    def measure(self) -> list[tuple[float, float]]:
        return [(self.compute_seconds(self.rounds), self.copy_seconds())]


def test_compute_is_tuned_to_the_copy() -> None:
    alone = Clockwork()
    assert pipeline.tune(cast("Alone", alone)) == 20
    assert alone.rounds == 20
    assert alone.bound == pytest.approx(0.005)


def test_the_bound_is_the_longer_of_compute_and_copy() -> None:
    alone = Clockwork()
    alone.rounds = 70
    pipes = [Pipe("ours", lambda steps: steps * 0.020, 1.0), Pipe("slow", lambda steps: steps * 0.040, 0.5)]
    result = pipeline.measure(pipes, cast("Alone", alone), steps=100, samples=3)
    assert result.bound.values == pytest.approx([0.010] * 3)
    assert result.timings["ours"].share_of(result.bound) == pytest.approx(0.5)
    assert result.timings["slow"].count == 50
    details = result.details(result.timings["ours"], rounds=70)
    assert (details["over_bound"], details["verified_steps"]) == (pytest.approx(2.0), 300)
