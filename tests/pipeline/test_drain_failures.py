"""What a `Drain` tells of results that failed, to whom, and what it refuses behind its end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import held, on_thread
from tests.core.points import lost_copies
from tests.pipeline.failing import Lost, failing_copies, outcomes
from tests.pipeline.steps import PATIENCE, d2h, until
from xferlib.stager import Stager


def test_the_results_of_a_drain_come_once(stager: xferlib.Stager) -> None:
    with xferlib.Drain(stager, 3) as drain:
        results = drain.results()
        for number in range(2):
            drain.submit(np.full(3, number))
        drain.fail(Lost())
        drain.end()
        assert outcomes(results) == [0, 1, "Lost"]
        assert next(results, None) is None
        with pytest.raises(xferlib.ClosedError, match="spent"):
            iter(results)
    # All was taken before it was closed.
    assert next(results, None) is None


def test_a_drain_that_is_closed_with_results_left_says_so(stager: xferlib.Stager) -> None:
    with xferlib.Drain(stager, 3) as drain:
        results = drain.results()
        drain.submit(np.zeros(3))
        drain.submit(np.zeros(3))
        drain.end()
        next(results)
    with pytest.raises(xferlib.ClosedError, match="everything was taken"):
        next(results)


@pytest.mark.parametrize("has_out", [False, True], ids=["pool", "out"])
def test_an_interrupt_at_any_point_waits_for_a_copy_that_has_begun(
    has_out: bool, stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        with xferlib.drain([np.ones(3)], stager, out=np.zeros(3) if has_out else None) as loop:
            list(loop)

    assert lost_copies(monkeypatch, "get", d2h(stager), ("pipeline/drain.py", "pipeline/drained.py"), run) > 10


@pytest.mark.parametrize("has_out", [False, True], ids=["pool", "out"])
def test_a_copy_that_a_signals_handler_has_lost_is_waited_for(
    has_out: bool, stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a handler raises may be an ordinary exception, as those of time limits are."""
    get, idle = Stager.get, Stager.idle
    started: list[Any] = []

    def lost(stager: Stager, tree: Any, **options: Any) -> Any:
        started.append(get(stager, tree, **options))
        raise TimeoutError

    def made_idle(stager: Stager) -> None:
        gate.set()
        idle(stager)

    monkeypatch.setattr(Stager, "get", lost)
    monkeypatch.setattr(Stager, "idle", made_idle)
    with held(d2h(stager)) as gate, xferlib.drain([np.ones(3)], stager, out=np.zeros(3) if has_out else None) as loop:
        with pytest.raises(TimeoutError):
            next(loop)
        assert started[0].done()


def test_a_result_that_is_refused_does_not_wait_for_others(stager: xferlib.Stager) -> None:
    array = stager.put(np.ones(3), borrow=True).value
    with held(d2h(stager)):
        transfer = stager.get(array)
        with xferlib.drain([np.ones(3)], stager, out=np.zeros(2)) as loop, pytest.raises(ValueError, match="out is full"):
            next(loop)
        assert not transfer.done()


class Noted:
    """A transfer that says when it has been waited for."""

    def __init__(self, transfer: xferlib.Transfer) -> None:
        self.waited_for = threading.Event()
        self._transfer = transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def synchronize(self) -> None:
        try:
            self._transfer.synchronize()
        finally:
            self.waited_for.set()


def test_a_drain_tells_of_the_first_failure_when_all_is_done() -> None:
    gate = threading.Event()
    with xferlib.stager(failing_copies("d2h", {1, 2})) as stager, xferlib.Drain(stager, 4) as drain:
        for number in range(4):
            if number == 3:
                d2h(stager).submit(lambda: gate.wait(PATIENCE))
            drain.submit(np.full(3, number))
        pending: deque[Any] = drain._pending
        pending[2] = third = Noted(pending[2])
        last = pending[3]
        told = on_thread(drain.synchronize)
        until(lambda: third.waited_for.is_set() or told.done())
        assert not told.done()
        gate.set()
        with pytest.raises(xferlib.TransferError, match="copy 1 is lost"):
            told.result(PATIENCE)
        assert last.done()
        drain.end()
        assert outcomes(drain.results()) == [0, "TransferError", "TransferError", 3]


def test_a_drain_into_arrays_goes_on_behind_a_copy_that_failed() -> None:
    backend = failing_copies("d2h", {1})
    with xferlib.stager(backend) as stager:
        out = stager.empty_pinned((4, 3), np.int64)
        with xferlib.Drain(stager, 1, out=out) as drain:
            for number in range(4):
                drain.submit(np.full(3, number))
            drain.end()
            assert outcomes(drain.results()) == [0, "TransferError", 2, 3]
        assert out[:, 0].tolist() == [0, 1, 2, 3]


def test_a_failure_that_nobody_took_is_told_at_the_end_of_the_block() -> None:
    with xferlib.stager(failing_copies("d2h", {0, 2})) as stager:
        out = stager.empty_pinned((4, 3), np.int64)

        def fill(drain: xferlib.Drain, *, take: bool) -> None:
            with drain:
                results = drain.results()
                drain.submit(np.zeros(3, np.int64))
                if take:
                    with pytest.raises(xferlib.TransferError):
                        next(results)
                drain.submit(np.ones(3, np.int64))

        fill(xferlib.Drain(stager, 3, out=out), take=True)
        assert out[:2, 0].tolist() == [0, 1]
        drain = xferlib.Drain(stager, 3, out=out)
        with pytest.raises(xferlib.TransferError, match="lost"):
            fill(drain, take=False)
        with pytest.raises(xferlib.ClosedError):
            drain.submit(np.ones(3, np.int64))


def test_a_block_that_drops_results_tells_nothing_of_them() -> None:
    with xferlib.stager(failing_copies("d2h", {0})) as stager, xferlib.Drain(stager, 3) as drain:
        drain.submit(np.zeros(3))


def test_an_error_that_was_told_is_held_by_nobody(stager: xferlib.Stager) -> None:
    with xferlib.Drain(stager, 3) as drain:
        drain.fail(Lost())
        gc.disable()
        try:
            next(drain.results())
        except Lost as error:
            held = weakref.ref(error)
        finally:
            gc.enable()
        assert held() is None


def test_a_result_that_is_refused_takes_no_rows(stager: xferlib.Stager) -> None:
    out = np.zeros((3, 4))
    with xferlib.Drain(stager, 1, out=out) as drain:
        drain.submit(np.full(4, 1.0))
        with pytest.raises(ValueError, match="dtype") as caught:
            drain.submit(np.full(4, 2, np.int32))
        # Its stager is open.
        assert not [note for note in getattr(caught.value, "__notes__", ()) if "closed" in note]
        drain.submit(np.full(4, 3.0))
        drain.synchronize()
    assert out[:, 0].tolist() == [1, 3, 0]
