"""What `report()` says, on a clock that the test turns, and where the time of a thread goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import held
from tests.pipeline.steps import batch, h2d, part, until
from xferlib.pipeline import clock as clock_module
from xferlib.pipeline.report import of_drain, of_prefetch, of_stream


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    stopped = Time()
    monkeypatch.setattr(clock_module, "time", stopped)
    return stopped


def test_a_clock_adds_up_by_part(time: Time) -> None:
    clock = xferlib.Clock()
    time.now = 5
    clock.turn("a")
    time.now = 7
    assert clock.turn("b") == 2
    time.now = 10
    assert clock.read() == {"a": 2, "b": 3}
    clock.turn("a")
    time.now = 11
    clock.stop()
    time.now = 20
    assert clock.read() == {"a": 3, "b": 3}
    clock.move(2, "a", "c")
    clock.move(9, "b", "c")
    assert clock.read() == {"a": 1, "b": 0, "c": 5}


def test_a_slow_source_is_called_so(stager: xferlib.Stager, time: Time) -> None:
    def source() -> Iterator[Any]:
        for number in range(5):
            time.now += 2
            yield batch(number)

    batches = xferlib.prefetch(source(), stager, 1)
    list(batches)
    report = batches.report()
    assert report.bound == "source"
    assert report.batches == 5
    assert report.parts["source"] >= 8
    assert str(report).startswith("source-bound: batches come too slowly")
    assert "5 batches in" in str(report)


def test_a_slow_consumer_is_called_compute(stager: xferlib.Stager, time: Time) -> None:
    batches = xferlib.prefetch((batch(number) for number in range(6)), stager, 2)
    for _ in itertools.islice(batches, 4):
        until(lambda: part(batches) == "place")
        time.now += 3
    report = batches.report()
    batches.close()
    assert report.bound == "compute"
    assert report.parts["place"] == report.parts["work"] == 12
    assert "waiting for the consumer 12.000 s (100%)" in str(report)


def test_slow_copies_are_called_so(stager: xferlib.Stager, time: Time) -> None:
    slot = stager.empty_pinned(4, np.int64)
    with Stream() as stream, held(h2d(stager)) as gate:
        batches = xferlib.prefetch([slot] * 4, stager, 1)
        next(batches)
        until(lambda: part(batches) == "copy")
        time.now += 4
        gate.set()
        next(batches)
        report = batches.report()
        assert report.bound == "copy"
        assert report.parts["copy"] == 4
        batches.close()
    stream.close()


def prefetched(**seconds: float) -> Any:
    taker: dict[str, float] = {name: seconds.pop(name) for name in ("wait", "work") if name in seconds}
    return of_prefetch(
        batches=10,
        late=int(seconds.pop("late", 0)),
        taker=taker,
        thread=seconds,
        reader_waits=int(seconds.pop("reader_waits", 0)),
        notes=(),
    )


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        ({"wait": 9, "work": 1, "source": 9.5, "place": 0.2, "copy": 0.3}, "source"),
        ({"wait": 9, "work": 1, "source": 4, "copy": 6}, "copy"),
        ({"wait": 9, "work": 1, "source": 4, "slot": 6}, "copy"),
        ({"wait": 9, "work": 1, "source": 1, "start": 8, "place": 1}, "copy"),
        ({"wait": 0, "work": 10, "source": 4, "place": 6}, "compute"),
        ({"wait": 9, "work": 1, "source": 1, "copy": 9, "reader_waits": 8}, "compute"),
    ],
)
def test_the_verdict_names_who_never_waits(seconds: dict[str, float], bound: str) -> None:
    assert prefetched(**seconds).bound == bound


def test_a_report_says_what_it_cannot_see() -> None:
    assert "unseen here" in str(prefetched(wait=10, work=0.1, source=0, copy=10))
    assert "unseen here" not in str(prefetched(wait=6, work=4, source=0, copy=10))
    assert "device_limit was reached" in str(prefetched(wait=10, work=0.1, copy=10, reader_waits=8))


def test_nothing_taken_is_said(stager: xferlib.Stager) -> None:
    with xferlib.prefetch([], stager) as batches:
        assert (batches.report().bound, str(batches.report())) == ("nothing yet", "no batch was taken yet")
    assert str(xferlib.drain([], stager).report()) == "no result was taken yet"
    assert str(xferlib.stream_map(len, [], stager).report()) == "no result was taken yet"


@pytest.mark.parametrize(
    ("taker", "bound"),
    [
        ({"launch": 1, "wait": 8, "work": 1}, "device"),
        ({"launch": 8, "wait": 0.1, "work": 1}, "source"),
        ({"launch": 1, "wait": 0.1, "work": 8}, "consumer"),
    ],
)
def test_a_drain_says_who_is_waited_for(taker: dict[str, float], bound: str) -> None:
    assert of_drain(batches=3, late=1, taker=taker, notes=()).bound == bound


def test_a_stream_looks_behind_the_prefetch_only_where_that_waits() -> None:
    slow_sink = of_drain(batches=3, late=0, taker={"work": 9}, notes=())
    slow_fn = of_drain(batches=3, late=0, taker={"launch": 9}, notes=())
    waiting = prefetched(work=10, place=10)
    assert of_stream(prefetched(wait=10, source=10), slow_sink).bound == "source"
    assert of_stream(prefetched(wait=10, copy=10), slow_sink).bound == "copy"
    assert of_stream(waiting, slow_sink).bound == "consumer"
    assert of_stream(waiting, slow_fn).bound == "compute"
    assert "in: compute-bound" in str(of_stream(waiting, slow_sink))
