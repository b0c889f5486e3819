"""The worker processes of one ring: start them, order, listen, replace the dead.

Each has a pipe of its own, so a killed one breaks no other's. What became of a task is the run's business.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, final

from xferlib.pipeline.shared.failures import WorkerDiedError
from xferlib.pipeline.shared.messages import Reply
from xferlib.pipeline.shared.process import Assignment, Worker, ended
from xferlib.pipeline.shared.slots import Bell

__all__ = ["Answer", "Crew", "Death"]

AHEAD = 2
"""Orders that one worker has at most: the one it fills, and the next, so that it need not wait for the consumer in between."""
STILLBORN = 8
"""Workers in a row that may be killed before they have started."""
DYING = 1.0
"""Seconds from a worker's last word to its end."""


class Answer(NamedTuple):
    """What a worker said to an order."""

    assignment: Assignment
    reply: Reply


class Death(NamedTuple):
    """A worker that has ended: what it may have been filling, and the orders it had not begun."""

    words: str
    lost: Assignment | None
    waiting: tuple[Assignment, ...]


@final
class Crew:
    """Worker processes. One thread at a time, the one that has `lock`."""

    def __init__(self, start: Callable[[], Worker], bell: Bell) -> None:
        self.lock = threading.Lock()
        self._start = start
        self._workers: list[Worker] = []
        self._bell = bell
        self._stillborn = 0
        self._cannot_start: str | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(bell.number, selectors.EVENT_READ, None)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that live, as far as is known."""
        return tuple(worker.pid for worker in self._workers)

    def enlist(self, count: int) -> None:
        """Have at least so many workers. Raises `WorkerDiedError` if they do not get through their start."""
        words, self._cannot_start = self._cannot_start, None
        if words is not None:
            raise WorkerDiedError(
                f"a worker process could not start: it {words}. What it said stands on stderr. "
                'A program that uses workers starts below: if __name__ == "__main__"'
            )
        while len(self._workers) < count:
            worker = self._start()
            self._workers.append(worker)
            self._selector.register(worker.connection.fileno(), selectors.EVENT_READ, worker)
            self._selector.register(worker.death, selectors.EVENT_READ, worker)

    def pick(self, count: int) -> Worker | None:
        """Return the one of so many workers that has least to do; None if all have enough."""
        able = [worker for worker in self._workers[:count] if worker.ready and not worker.gone and len(worker.assigned) < AHEAD]
        return min(able, key=lambda worker: len(worker.assigned), default=None)

    def listen(self, timeout: float | None) -> list[Answer | Death]:
        """Wait until a worker has answered or ended, the bell has rung, or so many seconds have passed."""
        heard: list[Answer | Death] = []
        touched: dict[int, Worker] = {}
        dead: set[int] = set()
        for key, _ in self._selector.select(timeout):
            worker = key.data
            if worker is None:
                self._bell.hush()
                continue
            touched[worker.pid] = worker
            if key.fd == worker.death:
                dead.add(worker.pid)
        for pid, worker in touched.items():
            # What a dead worker has said still counts: its batch is there.
            heard += [Answer(*answer) for answer in worker.replies()]
            if worker.ready:
                self._stillborn = 0
            if worker.gone or pid in dead:
                heard.append(self._bury(worker))
        return heard

    def taken(self) -> set[int]:
        """Return the slots that workers may write."""
        return {assignment.order.slot for worker in self._workers for assignment in worker.assigned}

    def dismiss(self, patience: float) -> None:
        """End all workers; kill those that do not within so many seconds."""
        for worker in self._workers:
            self._unregister(worker)
            worker.hang_up()
        deadline = time.monotonic() + patience
        while self._workers:
            self._workers.pop().end(max(0.0, deadline - time.monotonic()))

    def close(self, patience: float) -> None:
        """As `dismiss`, and for good. Twice is fine."""
        self.dismiss(patience)
        self._selector.close()

    def forget(self) -> None:
        """Let go of everything in a forked child: the workers are the parent's."""
        self.lock = threading.Lock()
        self._selector.close()
        for worker in self._workers:
            worker.hang_up()
            os.close(worker.death)
        self._workers = []

    def _bury(self, worker: Worker) -> Death:
        self._unregister(worker)
        self._workers.remove(worker)
        code = worker.end(DYING)
        words = ended(code)
        if not worker.ready:
            self._stillborn += 1
            if self._stillborn >= STILLBORN or (code is not None and code >= 0):
                self._cannot_start = words
        lost = worker.assigned.popleft() if worker.assigned else None
        return Death(f"worker {worker.pid} {words}", lost, tuple(worker.assigned))

    def _unregister(self, worker: Worker) -> None:
        for number in [key.fd for key in self._selector.get_map().values() if key.data is worker]:
            self._selector.unregister(number)
