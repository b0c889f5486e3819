"""Closing a loop from another thread, in the middle of a step: what comes out has no gap, and what was started is waited for."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import on_thread
from tests.pipeline.steps import PATIENCE, until


class Between:
    """A stager in whose first get something happens once the copy is started."""

    def __init__(self, stager: xferlib.Stager, happen: Callable[[], object]) -> None:
        self.transfers: list[xferlib.Transfer] = []
        self.stats = stager.stats
        self._stager = stager
        self._happen = happen

    def get(self, tree: Any, **named: Any) -> xferlib.Transfer:
        self.transfers.append(self._stager.get(tree, **named))
        on_thread(self._happen).result(PATIENCE)
        return self.transfers[-1]


@pytest.mark.parametrize("out", [None, np.zeros((3, 4))], ids=["pinned", "into arrays"])
def test_a_result_that_is_submitted_while_another_thread_closes_is_given_to_nobody(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch, out: Any
) -> None:
    drain = xferlib.Drain(stager, 3, out=out)
    results = drain.results()
    drain.submit(np.zeros(4))
    between = Between(stager, drain.close)
    monkeypatch.setattr(drain, "_stager", between)
    with pytest.raises(xferlib.ClosedError):
        drain.submit(np.ones(4))
    assert drain.pending == 0
    assert not drain._flying
    assert between.transfers[-1].done()
    with pytest.raises(xferlib.ClosedError):
        next(results)


class Landed:
    """A transfer under way; when it has been waited for, something happens, once."""

    def __init__(self, transfer: xferlib.Transfer, happen: Callable[[], object]) -> None:
        self._transfer = transfer
        self._happen = happen

    def synchronize(self) -> None:
        self._transfer.synchronize()
        happen, self._happen = self._happen, lambda: None
        on_thread(happen).result(PATIENCE)


def test_submitting_into_given_arrays_while_another_thread_closes_is_told(stager: xferlib.Stager) -> None:
    out = np.zeros((3, 4))
    drain = xferlib.Drain(stager, 1, out=out)
    drain.submit(np.ones((1, 4)))
    flying: deque[Any] = drain._flying
    flying[0] = Landed(flying[0], drain.close)
    with pytest.raises(xferlib.ClosedError):
        drain.submit(np.ones((1, 4)))
    assert not flying
    assert out.tolist() == [[1] * 4, [0] * 4, [0] * 4]


def test_a_loop_that_another_thread_closes_while_it_starts_a_result_says_so(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = xferlib.drain((np.full(4, number) for number in itertools.count()), stager, 2)
    assert next(loop)[0] == 0
    start, closed = loop._drain.start, threading.Event()

    def late(tree: Any, stream: object | None = None) -> None:
        if not closed.is_set():
            on_thread(loop.close).result(PATIENCE)
            closed.set()
        start(tree, stream)

    monkeypatch.setattr(loop._drain, "start", late)
    with pytest.raises(xferlib.ClosedError, match="this loop was closed"):
        next(loop)
    assert closed.is_set()


class Overtaken(deque[Any]):
    """The queue of an iterator that another thread closes when the taker has one item of it, and before it sees that."""

    close: Callable[[], object]

    def popleft(self) -> Any:
        item = super().popleft()
        on_thread(self.close).result(PATIENCE)
        return item


def test_a_taker_that_a_closing_thread_overtakes_gets_nothing_from_behind_a_gap(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = xferlib.prefetch([np.full(4, number) for number in range(9)], stager, 3, rewrites=False)
    assert next(loop)[0] == 0
    shared = loop._background._shared
    until(lambda: len(shared.items) == 3)
    overtaken = Overtaken(shared.items)
    overtaken.close = loop._background.close
    monkeypatch.setattr(shared, "items", overtaken)
    with pytest.raises(xferlib.ClosedError, match="before its end"):
        next(loop)
    loop.close()


@pytest.mark.parametrize("loop", ["prefetch", "slots", "drain", "out", "stream_map"])
def test_a_loop_whose_stager_was_closed_before_its_end_says_so(loop: str) -> None:
    with xferlib.stager("host") as stager, xferlib.Ring(stager, ((3,), np.float64), slots=3) as ring:
        arrays = (np.zeros(3) for _ in range(20))
        loops: dict[str, Callable[[], Any]] = {
            "prefetch": lambda: xferlib.prefetch(arrays, stager),
            "slots": lambda: xferlib.prefetch((ring.acquire() for _ in range(20)), stager),
            "drain": lambda: xferlib.drain(arrays, stager),
            "out": lambda: xferlib.drain(arrays, stager, out=np.zeros((60, 3))),
            "stream_map": lambda: xferlib.stream_map(np.negative, arrays, stager),
        }
        taking = loops[loop]()
        next(taking)
        stager.close()
        with pytest.raises(xferlib.ClosedError, match="this stager is closed") as caught:
            for _ in taking:
                pass
        assert [note for note in caught.value.__notes__ if "the stager of this loop was closed, with stager.close() or" in note]
        taking.close()
