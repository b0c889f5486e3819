"""Finalizers and interrupts at any moment: what dies in one reference cycle may still be used, and nobody is left waiting."""

from __future__ import annotations

import gc
import signal
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream, open_stager
from xferlib_host._stager import NumpyStager
from xferlib_host._stream import Event
from xferlib_host._worker import Worker

from tests.core.points import Interrupt, interrupted_in
from tests.host.work import SECONDS, Gate, address, until, within
from xferlib.errors import ClosedError


class Last:
    """Runs a function when it is finalized, in a cycle of its own or with others."""

    def __init__(self, act: Any) -> None:
        self.act = act
        self.others: list[Any] = [self]

    def __del__(self) -> None:
        self.act()


@pytest.mark.parametrize("order", ["finalized_first", "finalized_last"])
def test_a_finalizer_may_use_a_stream_that_dies_with_it(order: str) -> None:
    seen: list[int] = []

    def die() -> list[int]:
        # Finalizers run in the order in which the objects were made.
        early = Stream() if order == "finalized_last" else None
        last = Last(lambda: None)
        stream = early or Stream()

        def use(stream: Stream = stream) -> None:
            stream.submit(seen.append, 1)
            stream.synchronize()
            seen.append(2)

        last.act = use
        name = f"xferlib-host-stream-{stream.handle}"
        del early, last, stream, use
        gc.collect()
        # Only now nobody can use it any more.
        until(lambda: name not in {thread.name for thread in threading.enumerate()})
        return [len(seen)]

    within(SECONDS, die)
    assert seen == [1, 2]


def test_a_finalizer_may_use_a_stager_that_dies_with_it() -> None:
    source, target = np.arange(8), np.zeros(8, int)

    def die() -> list[None]:
        stager = open_stager()

        def use(stager: NumpyStager = stager) -> None:
            stager.copy_h2d(address(target), address(source), source.nbytes)
            stager.record_h2d().synchronize()

        last = Last(use)
        del stager, last, use
        gc.collect()
        return [None]

    within(SECONDS, die)
    assert target.tolist() == source.tolist()


def test_a_finalizer_sees_an_event_that_dies_with_it_as_it_is(stager: NumpyStager, gate: Gate) -> None:
    seen: list[bool] = []
    stager.h2d.submit(gate.stand)
    event = stager.record_h2d()
    last = Last(lambda event=event: seen.append(event.done()))
    del event, last
    gc.collect()
    gate.open()
    assert seen == [False]


@pytest.mark.parametrize("method", ["done", "synchronize"])
def test_whoever_asks_an_event_may_be_interrupted_anywhere(method: str) -> None:
    step = 0
    went_on = True
    while went_on:
        event = Event()
        opener = threading.Timer(0 if method == "done" else 0.01, event.reach)
        if method == "synchronize":
            opener.start()
        went_on = interrupted_in(step, getattr(event, method))
        # Reached on another thread, which an interrupted one must not have locked out.
        if method == "done":
            opener.start()
        within(SECONDS, lambda event=event: [event.synchronize()])  # type: ignore[misc]  # A default binds the loop's variable.
        assert event.done()
        opener.join(SECONDS)
        assert not opener.is_alive()
        step += 1
    assert step > 2


def test_a_signal_ends_a_wait_and_the_point_is_reached_all_the_same(stager: NumpyStager, gate: Gate) -> None:
    def raise_interrupt(*_: object) -> None:
        raise Interrupt

    stager.h2d.submit(gate.stand)
    event = stager.record_h2d()
    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        # Nothing else ends the wait: the gate is shut.
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupt):
            event.synchronize()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not event.done()
    gate.open()
    event.synchronize()
    assert event.done()


def test_a_close_that_was_interrupted_anywhere_is_made_again() -> None:
    step = 0
    went_on = True
    while went_on:
        ended: list[int] = []
        worker = Worker(f"test-{step}")
        went_on = interrupted_in(step, lambda: worker.close(lambda: ended.append(1)))  # noqa: B023  (called at once)
        within(SECONDS, lambda: worker.close(lambda: ended.append(2)))  # noqa: B023  (called at once)
        assert len(ended) == 1
        step += 1
    assert step > 5


class Interposed:
    """A queue whose `put` lets something else happen first, as a finalizer would that runs there."""

    def __init__(self, worker: Worker, act: Any) -> None:
        self.inner = worker._queue
        self.act: Any = act

    def put(self, job: Any) -> None:
        act, self.act = self.act, lambda: None
        act()
        self.inner.put(job)


def test_a_finalizer_inside_a_put_may_wait_for_what_another_thread_puts() -> None:
    worker = Worker("interposed")
    ran: list[str] = []

    def elsewhere() -> None:
        ended = threading.Event()
        worker.put(partial(ran.append, "elsewhere"))
        worker.put(ended.set)
        assert ended.wait(SECONDS)

    worker._queue = Interposed(worker, lambda: within(SECONDS, elsewhere))  # type: ignore[assignment]
    within(2 * SECONDS, lambda: worker.put(lambda: ran.append("here")))
    worker.close()
    assert ran == ["elsewhere", "here"]


def test_nobody_waits_for_a_job_that_was_put_as_a_finalizer_closed() -> None:
    worker = Worker("closed meanwhile")
    worker._queue = Interposed(worker, worker.close)  # type: ignore[assignment]
    told: list[str] = []

    def put() -> None:
        with pytest.raises(ClosedError) as caught:
            worker.put(lambda: None)
        told.append(str(caught.value))

    within(SECONDS, put)
    assert "closed" in told[0]
