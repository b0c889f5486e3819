"""Garbage of others whose finalizers transfer and wait, collected at any line of a pipeline, on whatever thread: nothing hangs."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import on_thread, until
from tests.pipeline.passes import PASSES, Pass
from tests.pipeline.steps import PATIENCE

CORE = Path(xferlib.__file__).parent
FOLDERS = {CORE, CORE / "pipeline"}
FILES = {
    "background.py",
    "source_thread.py",
    "prefetch.py",
    "drain.py",
    "drained.py",
    "stream_map.py",
    "latch.py",
    "failed.py",
    "report.py",
    "phase_timer.py",
    "output_writer.py",
    "memory_estimate.py",
}


class Garbage:
    """A reference cycle whose finalizer does something."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.me = self
        self.act = act

    def __del__(self) -> None:
        self.act()


@contextmanager
def collected_at_every_line(act: Callable[[], object]) -> Iterator[list[str]]:
    """Have garbage collected before every line of the pipelines that any thread runs; give the file of each."""
    seen: list[str] = []
    inside = threading.local()

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        name = Path(frame.f_code.co_filename)
        if name.parent not in FOLDERS or name.name not in FILES:
            return None
        if event == "line" and not getattr(inside, "acting", False):
            inside.acting = True
            seen.append(name.name)
            Garbage(act)
            gc.collect(0)
            inside.acting = False
        return trace

    before = sys.gettrace(), threading.gettrace()
    gc.disable()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])
        gc.enable()


@PASSES
@pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")
def test_finalizers_that_transfer_and_wait_run_anywhere_in_a_pipeline(
    make: Callable[[xferlib.Stager], Pass], stager: xferlib.Stager
) -> None:
    array, there = np.zeros(100, np.uint8), stager.put(np.zeros(100, np.uint8)).result()
    finished: list[bool] = []

    def act() -> None:
        stager.put(array).result()
        stager.get(there).result()
        finished.append(True)

    run = make(stager)
    with collected_at_every_line(act) as seen:
        run()
    assert "latch.py" in seen

    def have_all_finished() -> bool:
        # Those that came up while another thread collected. It may still do so, and then this does nothing.
        gc.collect()
        return len(finished) == len(seen)

    assert until(have_all_finished)


def take_while_finalizers_take(loop: Any, count: int) -> tuple[list[int], list[str]]:
    """Take from a loop while finalizers on the same thread take from it, too; return the numbers, and what finalizers were told."""
    taken: list[int] = []
    told: list[str] = []
    consumer = threading.current_thread()

    def act() -> None:
        if threading.current_thread() is not consumer or len(taken) > count // 2:
            return
        try:
            taken.append(int(next(loop)[0]))
        except RuntimeError as error:
            told.append(str(error))

    with collected_at_every_line(act):
        while len(taken) < count:
            taken.append(int(next(loop)[0]))
    return taken, told


@pytest.mark.parametrize("depth", [1, 3])
def test_a_finalizer_that_takes_from_the_prefetch_it_interrupts_takes_what_is_next(depth: int, stager: xferlib.Stager) -> None:
    with xferlib.prefetch([np.full(3, number) for number in range(40)], stager, depth) as loop:
        taken, told = on_thread(lambda: take_while_finalizers_take(loop, 36)).result(PATIENCE)
    assert sorted(taken) == list(range(len(taken)))
    assert told == []


@pytest.mark.parametrize("asks", [next, lambda loop: loop.bill], ids=["next", "bill"])
def test_a_finalizer_does_not_wait_for_ever_for_a_loop_that_waits_for_what_was_stopped_by_it(
    monkeypatch: pytest.MonkeyPatch, stager: xferlib.Stager, asks: Callable[[Any], object]
) -> None:
    monkeypatch.setattr("xferlib.uninterrupted.FINALIZER_SECONDS", 0.05)
    stopped, told = threading.Lock(), list[str]()

    def source() -> Iterator[Any]:
        with stopped:
            yield np.zeros(3)

    def act() -> None:
        with pytest.raises(xferlib.XferError, match="a finalizer that the garbage collector runs has waited long"):
            asks(loop)
        told.append("refused")

    with stopped:
        loop = xferlib.prefetch(source(), stager)
        Garbage(act)
        gc.collect()
    assert told == ["refused"]
    assert len(list(loop)) == 1


def test_a_finalizer_that_takes_from_the_drain_whose_taking_it_interrupts_takes_what_is_next(stager: xferlib.Stager) -> None:
    with xferlib.Drain(stager, 40) as drain:
        for number in range(40):
            drain.submit(np.full(3, number))
        taken, told = on_thread(lambda: take_while_finalizers_take(drain.results(), 36)).result(PATIENCE)
    assert sorted(taken) == list(range(len(taken)))
    assert told == []


@pytest.mark.parametrize("depth", [1, 3])
def test_a_finalizer_that_takes_from_the_drained_loop_it_interrupts_is_refused(depth: int, stager: xferlib.Stager) -> None:
    with xferlib.drain([np.full(3, number) for number in range(40)], stager, depth) as loop:
        taken, told = on_thread(lambda: take_while_finalizers_take(loop, 36)).result(PATIENCE)
    assert sorted(taken) == list(range(len(taken)))
    assert "inside its own next" in told[0]
