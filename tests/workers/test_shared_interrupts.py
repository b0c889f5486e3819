"""An interrupt of whatever a shared ring does: no lock is held, no slot and no process is lost, and it can be closed, twice."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import xferlib
from tests.core.fakes import on_thread
from tests.pipeline.interrupts import at_line, by_signal
from tests.pipeline.steps import busy, until
from tests.workers import fills
from tests.workers.conftest import descriptors, first
from xferlib.pipeline.workers.pool import WorkerPool
from xferlib.pipeline.workers.process import Worker
from xferlib.pipeline.workers.shared_ring import SharedRing

SHARED = (
    "xferlib/uninterrupted.py",
    *(f"workers/{name}.py" for name in ("channel", "pool", "memory", "process", "shared_ring", "run", "slots")),
)
SPEC = (64, np.int64)
ALARMS = int(os.environ.get("XFERLIB_ALARMS", "12"))
"""Each costs a process."""
pytestmark = pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")


def footprint(stager: xferlib.Stager) -> tuple[Counter[str], int, int, int]:
    """Return what this process has: descriptors, children, mappings of ours, and pins."""
    gc.collect()
    stager.trim()
    calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # Of the host backend only.
    mappings = Path("/proc/self/maps").read_text().count("/memfd:xferlib")
    return descriptors(), len(psutil.Process().children()), mappings, calls.pins - calls.unpins


def is_whole(ring: SharedRing) -> bool:
    """Pass batches through the ring, all slots of which are held at once."""
    run = ring.run(fills.number, range(10), workers=1)

    def batches() -> list[int]:
        kept = [next(run) for _ in range(ring.slots)]
        got = [first(batch) for batch in kept]
        kept.clear()
        return got + [first(batch) for batch in run]

    return on_thread(batches).result(40) == list(range(10))


def judge(ring: SharedRing, before: Any) -> None:
    assert not ring._pool.reentered
    assert not busy(ring._pool.lock)
    assert is_whole(ring)
    assert len(ring.pids) == len(psutil.Process().children()) - before[1]


@pytest.fixture
def before(stager: xferlib.Stager) -> Any:
    resource_tracker.ensure_running()
    return footprint(stager)


def epoch(ring: SharedRing) -> None:
    """Run epochs, for ever, each of them right."""
    for start in itertools.count(0, 1000):
        run = ring.run(fills.number, range(start, start + 1000), workers=1)
        for expected, batch in enumerate(run, start):
            assert first(batch) == expected


def test_real_signals_lose_no_slot_and_no_worker(stager: xferlib.Stager, before: Any) -> None:
    rng = random.Random(1)
    with SharedRing(stager, SPEC, slots=3) as ring:
        for number in range(ALARMS):
            # Inside the start of a worker, or while batches come.
            by_signal(rng.uniform(0.0005, 0.01) if number % 3 else rng.uniform(0.5, 1.0), partial(epoch, ring))
            judge(ring, before)
    ring.close()
    del ring
    until(lambda: footprint(stager) == before)


def test_a_signal_inside_the_start_of_a_worker_loses_no_process(
    stager: xferlib.Stager, before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Worker._start

    def interrupted(worker: Worker) -> None:
        start(worker)
        os.kill(os.getpid(), signal.SIGALRM)

    with SharedRing(stager, SPEC, slots=3) as ring:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "_start", interrupted)
            by_signal(100.0, partial(next, ring.run(fills.number, range(3), workers=1)))
        judge(ring, before)
    ring.close()
    del ring
    until(lambda: footprint(stager) == before)


def test_an_interrupt_in_front_of_a_line_of_an_epoch_loses_no_slot_and_no_worker(stager: xferlib.Stager, before: Any) -> None:
    rng = random.Random(1)

    def short(ring: SharedRing) -> None:
        assert [first(batch) for batch in ring.run(fills.number, range(4), workers=1)] == [0, 1, 2, 3]

    with SharedRing(stager, SPEC, slots=2) as ring:
        for _ in range(ALARMS):
            assert at_line(rng.randrange(1, 250), SHARED, partial(short, ring))
            judge(ring, before)
    ring.close()
    del ring
    until(lambda: footprint(stager) == before)


def test_a_run_that_was_interrupted_says_so(stager: xferlib.Stager) -> None:
    with SharedRing(stager, SPEC, slots=2) as ring:
        run = ring.run(fills.number, range(10), workers=1)
        assert first(next(run)) == 0
        assert at_line(12, ("workers/run.py",), lambda: next(run))
        with pytest.raises(RuntimeError, match="interrupted"):
            next(run)
        with pytest.raises(RuntimeError, match="interrupted"):
            list(run)
        assert is_whole(ring)


def opened_and_closed(stager: xferlib.Stager) -> None:
    ring = SharedRing(stager, SPEC, slots=2)
    ring.close()
    ring.close()


def test_an_interrupt_of_making_or_closing_a_ring_leaves_nothing(stager: xferlib.Stager, before: Any) -> None:
    for line in itertools.count(1):
        if not at_line(line, SHARED, lambda: opened_and_closed(stager)):
            break
        until(lambda: footprint(stager) == before)
    assert line > 30


def test_an_interrupt_of_closing_leaves_a_ring_that_can_be_closed(stager: xferlib.Stager, before: Any) -> None:
    for line in itertools.count(1):
        ring = SharedRing(stager, SPEC, slots=2)
        cut = at_line(line, SHARED, ring.close)
        for _ in range(2):
            on_thread(ring.close).result(20)
        with pytest.raises(xferlib.ClosedError):
            ring.run(fills.number, [1])
        del ring
        until(lambda: footprint(stager) == before)
        if not cut:
            break
    assert line > 10


def test_what_an_interrupted_ring_had_still_to_take_is_not_taken(
    stager: xferlib.Stager, before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], object]] = []

    def cut_off(call: Callable[[], object]) -> object:
        if not late:
            late.append(call)
            raise KeyboardInterrupt
        return call()

    monkeypatch.setattr("xferlib.pipeline.workers.shared_ring.uninterrupted", cut_off)
    with pytest.raises(KeyboardInterrupt):
        SharedRing(stager, SPEC, slots=2)
    with pytest.raises(xferlib.ClosedError):
        late.pop()()
    assert footprint(stager) == before


def test_what_could_not_be_closed_is_closed_when_the_ring_is_dropped(
    stager: xferlib.Stager, before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = WorkerPool.close
    refused: list[int] = []

    def refuse(pool: WorkerPool, timeout: float) -> None:
        if not refused:
            refused.append(pool.wakeup.number)
            raise OSError("not now")
        close(pool, timeout)

    monkeypatch.setattr(WorkerPool, "close", refuse)
    ring = SharedRing(stager, SPEC, slots=2)
    with pytest.raises(OSError, match="not now"):
        ring.close()
    assert refused
    del ring
    until(lambda: footprint(stager) == before)


class Saved:
    """Part of a cycle that dies with a ring, a run and a batch. Its finalizer keeps the batch."""

    def __init__(self, parts: list[Any], kept: list[Any]) -> None:
        self.parts = parts
        self.me = self
        self.kept = kept

    def __del__(self) -> None:
        self.kept.append(self.parts[-1])


def test_a_batch_that_outlives_its_ring_touches_no_descriptor_of_others(stager: xferlib.Stager, before: Any) -> None:
    kept: list[Any] = []
    ring = SharedRing(stager, SPEC, slots=2)
    run = ring.run(fills.number, [7], workers=1)
    Saved([ring, run, next(run)], kept)
    del ring, run
    gc.collect()
    assert first(kept[0]) == 7
    # All but the memory that the batch lies in.
    until(lambda: footprint(stager)[1:] == (before[1], before[2] + 1, before[3]))
    foreign = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(16)]
    kept.clear()
    gc.collect()
    for number in foreign:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(number)
        os.close(number)
    until(lambda: footprint(stager) == before)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_ring_that_dies_in_a_cycle_is_closed(stager: xferlib.Stager, before: Any, order: tuple[int, ...]) -> None:
    ring = SharedRing(stager, SPEC, slots=2)
    run = ring.run(fills.number, [7], workers=1)
    parts = [ring, run, [next(run)]]
    knot: list[Any] = [parts[index] for index in order]
    knot.append(knot)
    del ring, run, parts, knot
    until(lambda: footprint(stager) == before)
