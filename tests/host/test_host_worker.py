"""The thread that streams and engines are made of: how it is closed."""

from __future__ import annotations

from typing import Any

import pytest
from xferlib_host._worker import Worker


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
