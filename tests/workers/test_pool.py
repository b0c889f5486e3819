"""How many workers may be killed before they have started, played with workers that are no processes; and what comes too late."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.core.fakes import on_thread
from xferlib.errors import WorkerDiedError
from xferlib.pipeline.workers.pool import MOST_FAILED_STARTS, WorkerPool


class Played:
    """A worker that has ended, or that has got through its start and lives."""

    def __init__(self, *, ready: bool) -> None:
        self.pid = 1
        self.ready = ready
        self.gone = not ready
        self.assigned: deque[Any] = deque()
        self.channel = self

    def flush(self) -> None: ...

    def disconnect(self) -> None: ...

    def answers(self) -> list[Any]:
        return []

    def terminate(self, timeout: float) -> int:
        return -9


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(lambda: pytest.fail("nobody is to be started"), threading.RLock())
    with closing(pool.wakeup):
        yield pool


def hear(pool: WorkerPool, *, ready: bool) -> None:
    worker: Any = Played(ready=ready)
    pool._workers.append(worker)
    pool._heard(worker, dead=not ready)


def test_a_pool_gives_up_when_so_many_in_a_row_do_not_get_through_their_start(pool: WorkerPool) -> None:
    for _ in range(MOST_FAILED_STARTS - 1):
        hear(pool, ready=False)
        pool.start_up_to(0)
    hear(pool, ready=False)
    with pytest.raises(WorkerDiedError, match="could not start: it was killed by SIGKILL"):
        pool.start_up_to(0)


def test_those_before_one_that_has_started_do_not_count(pool: WorkerPool) -> None:
    for _ in range(MOST_FAILED_STARTS):
        hear(pool, ready=False)
        hear(pool, ready=True)
        pool.start_up_to(0)


def test_what_was_asked_for_before_an_interrupt_starts_nobody_behind_the_end(pool: WorkerPool) -> None:
    pool.close(0)
    pool.start_up_to(1)
    assert not pool.pids


def test_a_worker_that_was_ended_meanwhile_is_not_ended_twice(pool: WorkerPool) -> None:
    ends: list[float] = []
    worker: Any = Played(ready=False)
    worker.terminate = ends.append
    pool._workers.append(worker)
    pool.mend()
    pool._heard(worker, dead=True)
    assert len(ends) == 1


def test_the_end_waits_for_a_start_under_way_and_ends_that_worker() -> None:
    ends: list[float] = []
    worker: Any = Played(ready=True)
    worker.terminate = ends.append
    begun, gate = threading.Event(), threading.Event()

    def start() -> Any:
        begun.set()
        assert gate.wait(20)
        return worker

    pool = WorkerPool(start, threading.RLock())
    starting = on_thread(lambda: pool.start_up_to(1))
    assert begun.wait(20)
    ending = on_thread(lambda: pool.close(0))
    with pytest.raises(TimeoutError):
        ending.result(0.05)
    gate.set()
    starting.result(20)
    ending.result(20)
    assert ends
    assert not pool.pids
