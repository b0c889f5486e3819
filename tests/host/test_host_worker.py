"""The thread that streams and engines are made of: how it is closed."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from functools import partial
from typing import Any

import pytest
from xferlib_host._worker import Worker

from tests.core.fakes import until
from tests.core.points import interrupted_at
from xferlib.errors import ClosedError


class Cut:
    """A queue. An interrupt comes instead of the mark that ends the thread, once."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._is_cut = False

    def put(self, job: Any) -> None:
        if job is None and not self._is_cut:
            self._is_cut = True
            raise KeyboardInterrupt
        self._queue.put(job)


def test_what_runs_last_runs_once_though_closing_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("xferlib-host-test")
    monkeypatch.setattr(worker, "_queue", Cut(worker._queue))
    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        worker.close(lambda: ran.append("last"))
    worker.close(lambda: ran.append("last"))
    assert ran == ["last"]
    assert not worker._thread.is_alive()


class Closing:
    """A queue. Its worker is closed before a job comes in, as by another thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._queue = worker, worker._queue

    def put(self, job: Any) -> None:
        self._worker._queue = self._queue
        self._worker.close()
        self._queue.put(job)


def test_a_job_that_came_too_late_for_its_worker_keeps_neither() -> None:
    worker = Worker("xferlib-host-late")
    worker._queue = Closing(worker)  # type: ignore[assignment]
    with pytest.raises(ClosedError):
        worker.put(partial(worker.drain, 0.0))
    gone = weakref.ref(worker)
    del worker
    gc.collect()
    assert gone() is None


def test_a_thread_whose_start_is_interrupted_at_any_point_leaves_no_error_and_no_thread_behind() -> None:
    """`Thread.start` waits with locks held, which an interrupt loses."""
    for point in itertools.count(1):
        kept: list[Worker] = []
        struck = interrupted_at(point, ("/threading.py", "_worker.py"), lambda: kept.append(Worker("xferlib-host-cut")))  # noqa: B023  # Called in this turn alone.
        kept.clear()
        assert until(lambda: not [thread for thread in threading.enumerate() if thread.name == "xferlib-host-cut"])
        if not struck:
            break
    assert point >= 3
