"""What `report()` says, on a clock that the test turns, and where the time of a thread goes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import held, on_thread
from tests.pipeline.steps import PATIENCE, PutBy, Source, batch, h2d, part, until
from xferlib.pipeline import phase_timer as clock_module
from xferlib.pipeline.phase_timer import PhaseTimer
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
    clock = PhaseTimer()
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
    assert clock.since({"a": 1}) == {"a": 2, "b": 3}
    clock.move(2, "a", "c")
    clock.move(9, "b", "c")
    assert clock.read() == {"a": 1, "b": 0, "c": 5}


def test_a_slow_source_is_called_so(stager: xferlib.Stager, time: Time) -> None:
    asked = threading.Semaphore(0)

    def source() -> Iterator[Any]:
        for number in range(5):
            assert asked.acquire(timeout=PATIENCE)
            time.now += 2
            yield batch(number)

    batches = xferlib.prefetch(source(), stager, 1)
    for _ in range(5):
        # The consumer waits before the source has it: all of that time is a wait.
        taker = on_thread(lambda: next(batches))
        until(lambda: batches._background._shared.takers)
        asked.release()
        taker.result(PATIENCE)
    report = batches.report()
    batches.close()
    assert report.bound == "source"
    assert report.batches == 5
    assert report.seconds == report.parts["source"] == report.parts["wait"] == 8
    assert str(report).startswith("source-bound: batches come too slowly")
    assert "4 batches in 8.000 s, after a first one that took 2.000 s and is not counted" in str(report)


def test_a_slow_consumer_is_called_compute(stager: xferlib.Stager, time: Time) -> None:
    batches = xferlib.prefetch((batch(number) for number in range(6)), stager, 2)
    for _ in itertools.islice(batches, 4):
        until(lambda: len(batches._background._shared.items) == 2 and part(batches) == "place")
        time.now += 3
    report = batches.report()
    batches.close()
    assert report.bound == "compute"
    assert report.parts["place"] == report.parts["work"] == 9
    assert "waiting for the consumer 9.000 s (100%)" in str(report)


def test_what_the_first_batch_pays_for_all_is_left_out(stager: xferlib.Stager, time: Time) -> None:
    """The first put measures and page-locks, the first step compiles."""
    put: list[int] = []
    asked = threading.Event()

    def slow_once(tree: Any) -> xferlib.Transfer:
        if not put:
            assert asked.wait(PATIENCE)
            time.now += 100
        put.append(1)
        return stager.put(tree)

    def settled(batches: xferlib.Prefetch, count: int) -> None:
        until(lambda: len(put) == count and part(batches) in ("place", None))

    batches = xferlib.Prefetch((batch(number) for number in range(6)), PutBy(slow_once, device_waits=lambda: len(put)))
    taker = on_thread(lambda: next(batches))
    until(lambda: batches._background._shared.takers)
    asked.set()
    taker.result(PATIENCE)
    settled(batches, 3)
    time.now += 50
    first = batches.report()
    for number, _ in enumerate(batches, 1):
        settled(batches, min(number + 3, 6))
        time.now += 3
    report = batches.report()
    assert (first.bound, first.batches, first.seconds) == ("nothing yet", 1, 0)
    assert str(first) == "one batch was taken, and the first tells nothing of the others"
    assert (report.bound, report.batches, report.seconds) == ("compute", 6, 15)
    assert report.parts == {**dict.fromkeys(report.parts, 0), "work": 15, "place": report.parts["place"]}
    assert "after a first one that took 150.000 s" in str(report)
    assert "3 puts waited on the device" in str(report)


def test_what_the_first_result_pays_for_all_is_left_out(stager: xferlib.Stager, time: Time) -> None:
    def results() -> Iterator[Any]:
        for number in range(5):
            time.now += 100 if number == 0 else 1
            yield np.zeros(3)

    loop = xferlib.drain(results(), stager, 1)
    next(loop)
    assert loop.report().bound == "nothing yet"
    for _ in loop:
        pass
    report = loop.report()
    assert (report.bound, report.batches, report.seconds, report.parts["launch"]) == ("source", 5, 3, 3)
    assert "4 results in 3.000 s, after a first one that took 101.000 s and is not counted" in str(report)


def test_copies_that_were_late_before_the_second_batch_do_not_count(stager: xferlib.Stager) -> None:
    with Stream() as stream, held(h2d(stager)) as gate:
        batches = xferlib.prefetch([batch(number) for number in range(3)], stager, 2)
        until(lambda: len(batches._background._shared.items) == 2)
        next(batches)
        assert batches._late == 1
        gate.set()
        until(lambda: all(end.done() for end in batches._starter._recent))
        list(batches)
    stream.close()
    assert "; 0 came out of the queue before the copy was done" in str(batches.report())


def test_a_batch_that_was_not_there_when_it_was_asked_for_is_no_late_copy(stager: xferlib.Stager) -> None:
    def take() -> None:
        # Its copy cannot be done yet. The stream waits for it, and not this thread.
        with Stream() as stream:
            next(batches)
        streams.append(stream)

    streams: list[Stream] = []
    source = Source(1, stop_at=0)
    with held(h2d(stager)) as gate:
        batches = xferlib.prefetch(source, stager)
        taker = on_thread(take)
        until(lambda: batches._background._shared.takers)
        source.gate.set()
        taker.result(PATIENCE)
        gate.set()
    streams[0].close()
    assert next(batches, None) is None
    assert batches._late == 0


@pytest.mark.parametrize("make", [xferlib.prefetch, xferlib.drain])
def test_a_loop_that_is_asked_behind_its_close_reports_no_more_time(make: Any, stager: xferlib.Stager, time: Time) -> None:
    loop = make([np.zeros(3)] * 5, stager)
    for _ in range(2):
        next(loop)
        time.now += 1
    loop.close()
    first = loop.report()
    with pytest.raises(xferlib.ClosedError):
        next(loop)
    time.now += 5
    assert loop.report() == first


def test_slow_copies_are_called_so(stager: xferlib.Stager, time: Time) -> None:
    slot = stager.empty_pinned(4, np.int64)
    with Stream() as stream, held(h2d(stager)) as gate:
        batches = xferlib.prefetch([slot] * 4, stager, 1)
        next(batches)
        until(lambda: part(batches) == "read")
        taker = on_thread(lambda: next(batches))
        until(lambda: batches._background._shared.takers)
        time.now += 4
        gate.set()
        taker.result(PATIENCE)
        report = batches.report()
        assert report.bound == "copy"
        assert report.parts["read"] == report.parts["wait"] == 4
        batches.close()
    stream.close()


def prefetched(**seconds: float) -> Any:
    taker: dict[str, float] = {name: seconds.pop(name) for name in ("wait", "work") if name in seconds}
    return of_prefetch(
        batches=11,
        late=int(seconds.pop("late", 0)),
        taker=taker,
        first=7,
        reader_waits=int(seconds.pop("reader_waits", 0)),
        thread=seconds,
    )


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        ({"wait": 9, "work": 1, "source": 9.5, "place": 0.2, "copy": 0.3}, "source"),
        # The source and the putting add up on one thread: the larger part is what would help.
        ({"wait": 9, "work": 1, "source": 7.4, "start": 2.6}, "source"),
        ({"wait": 9, "work": 1, "source": 5, "start": 5}, "source"),
        ({"wait": 9, "work": 1, "source": 5.1, "start": 2.6, "read": 2.3}, "source"),
        ({"wait": 9, "work": 1, "source": 4.9, "start": 2.6, "read": 2.5}, "copy"),
        ({"wait": 9, "work": 1, "source": 1, "start": 8, "place": 1}, "copy"),
        # The copies run beside it: it waits for them only if they take longer.
        ({"wait": 9, "work": 1, "source": 4, "copy": 6}, "copy"),
        ({"wait": 9, "work": 1, "source": 7.4, "copy": 2.6}, "copy"),
        ({"wait": 9, "work": 1, "source": 8.9, "slot": 1.1}, "copy"),
        ({"wait": 9, "work": 1, "source": 9.1, "slot": 0.4, "copy": 0.5}, "source"),
        # Whoever waits is not who is waited for.
        ({"wait": 0, "work": 10, "source": 4, "place": 6}, "compute"),
        ({"wait": 0, "work": 10, "source": 6, "place": 4}, "compute"),
        ({"wait": 2, "work": 8, "source": 9, "place": 1}, "source"),
        ({"wait": 1, "work": 9, "source": 1, "start": 7, "place": 2}, "compute"),
        ({"wait": 9, "work": 1, "source": 1, "copy": 9, "reader_waits": 5}, "compute"),
        ({"wait": 9, "work": 1, "source": 1, "copy": 9, "reader_waits": 4}, "copy"),
    ],
)
def test_the_verdict_names_who_never_waits(seconds: dict[str, float], bound: str) -> None:
    assert prefetched(**seconds).bound == bound


def test_a_consumer_that_waits_as_well_is_told_of_depth() -> None:
    uneven = prefetched(wait=4, work=6, source=5, place=5)
    assert uneven.bound == "compute"
    assert "though it waits for them, too" in uneven.words[0]
    assert uneven.words[0].endswith("which a greater depth= may even out")
    assert prefetched(wait=0.5, work=9.5, source=4, place=6).words[0].endswith("wait for the consumer")
    # There device_limit is what to raise, and the report says that.
    assert "depth=" not in str(prefetched(wait=9, work=1, source=1, copy=9, reader_waits=5))


def test_a_report_says_what_it_cannot_see() -> None:
    assert "unseen here" in str(prefetched(wait=10, work=0.1, source=0, copy=10))
    assert "unseen here" in str(prefetched(wait=10, work=0.1, source=10))
    assert "unseen here" not in str(prefetched(wait=6, work=4, source=0, copy=10))
    assert "unseen here" not in str(prefetched(work=0, place=10))
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
    assert of_drain(batches=3, late=1, taker=taker, first=0).bound == bound


def test_a_stream_looks_behind_the_prefetch_only_where_that_waits() -> None:
    slow_sink = of_drain(batches=3, late=0, taker={"work": 9}, first=0)
    slow_fn = of_drain(batches=3, late=0, taker={"launch": 9}, first=0)
    waiting = prefetched(work=10, place=10)
    assert of_stream(prefetched(wait=10, source=10), slow_sink).bound == "source"
    assert of_stream(prefetched(wait=10, copy=10), slow_sink).bound == "copy"
    assert of_stream(waiting, slow_sink).bound == "consumer"
    assert of_stream(waiting, slow_fn).bound == "compute"
    assert "in: compute-bound" in str(of_stream(waiting, slow_sink))


def test_one_batch_and_one_put_are_said_as_one() -> None:
    one = of_prefetch(batches=2, late=0, taker={"wait": 1.0, "work": 0.1}, thread={"copy": 1.0}, first=0.1, reader_waits=1)
    assert "\n1 batch in 1.100 s, " in str(one)
    assert "\n1 put waited on the device" in str(one)
    out = of_drain(batches=2, late=1, taker={"wait": 1.0}, first=0.1)
    assert "\n1 result in 1.000 s, " in str(out)


def test_a_verdict_on_a_moment_says_that_it_may_change() -> None:
    brief = prefetched(wait=0.09, work=0.01, source=0.1)
    assert brief.bound == "source"
    assert brief.words[-1].endswith("take more batches")
    assert "take more batches" not in str(prefetched(wait=0.9, work=0.1, source=1))
    parts = {"launch": 0.0, "wait": 0.1, "work": 0.0}
    assert of_drain(batches=5, late=4, taker=parts, first=1).words[-1].endswith("take more batches")
    assert "take more batches" not in str(of_drain(batches=5, late=4, taker={**parts, "wait": 1.0}, first=1))
