"""The worker processes of one ring: start them, order, listen, replace the dead.

Each has a socket of its own, so a killed one breaks no other's. What became of a task is the run's business.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, final

from xferlib.pipeline.workers.executor import Executor
from xferlib.pipeline.workers.failures import WorkerDiedError
from xferlib.pipeline.workers.messages import Reply
from xferlib.pipeline.workers.process import Assignment, Worker, ended

__all__ = ["Answer", "Bell", "Crew", "Death"]

AHEAD = 2
"""Orders that one worker has at most: the one it fills, and the next, so that it need not wait for the consumer in between."""
STILLBORN = 8
"""Workers in a row that may be killed before they have started."""
DYING = 1.0
"""Seconds from a worker's last word to its end."""


@final
class Bell:
    """Wakes whoever waits for `number` to be readable. Any thread, but no finalizer."""

    def __init__(self) -> None:
        self.number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A number that is closed may be somebody else's by the time it is written to.
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Have it readable. Nothing, if it is closed."""
        with self._lock:
            if self.number >= 0:
                os.eventfd_write(self.number, 1)

    def hush(self) -> None:
        """Be silent until rung again."""
        try:
            os.eventfd_read(self.number)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the descriptor back. Twice is fine."""
        with self._lock:
            number, self.number = self.number, -1
            if number >= 0:
                os.close(number)


@final
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
    """Worker processes. One thread at a time, the one that has `lock`; what starts and ends them runs on the executor.

    If `cut` is true, a thread was interrupted while it had the lock: then nothing here is known to be whole, and `mend` must
    follow.
    """

    def __init__(self, start: Callable[[], Worker], executor: Executor) -> None:
        self.lock = threading.Lock()
        self.cut = False
        self.bell = Bell()
        self._start = start
        self._executor = executor
        self._workers: list[Worker] = []
        self._stillborn = 0
        self._cannot_start: str | None = None

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
        if len(self._workers) < count:
            self._executor.call(partial(self._enlist, count))

    def pick(self, count: int) -> Worker | None:
        """Return the one of the first `count` workers that has least to do; None if all have enough."""
        able = [worker for worker in self._workers[:count] if worker.ready and not worker.gone and len(worker.assigned) < AHEAD]
        return min(able, key=lambda worker: len(worker.assigned), default=None)

    def flush(self) -> None:
        """Send what had no room before."""
        for worker in self._workers:
            if worker.channel.pending:
                worker.channel.flush()

    def listen(self, timeout: float | None) -> list[Answer | Death]:
        """Wait until a worker has answered, taken in more, or ended, the bell has rung, or so many seconds have passed."""
        asked = select.poll()
        asked.register(self.bell.number, select.POLLIN)
        by_number: dict[int, Worker] = {}
        deaths: set[int] = set()
        for worker in self._workers:
            talks, dies = worker.channel.fileno(), worker.death.fileno()
            if talks >= 0:
                by_number[talks] = worker
                asked.register(talks, select.POLLIN | select.POLLOUT * worker.channel.pending)
            by_number[dies] = worker
            deaths.add(dies)
            asked.register(dies, select.POLLIN)
        touched: dict[int, Worker] = {}
        dead: set[int] = set()
        for number, _ in asked.poll(None if timeout is None else timeout * 1e3):
            if number == self.bell.number:
                self.bell.hush()
                continue
            worker = by_number[number]
            touched[worker.pid] = worker
            if number in deaths:
                dead.add(worker.pid)
        return [heard for pid, worker in touched.items() for heard in self._heard(worker, dead=pid in dead)]

    def taken(self) -> set[int]:
        """Return the slots that workers may write."""
        return {assignment.order.slot for worker in self._workers for assignment in worker.assigned}

    def mend(self) -> None:
        """Kill all workers: what they and their parent know of each other was cut by an interrupt."""
        self._executor.call(partial(self._dismiss, 0))

    def close(self, patience: float) -> None:
        """End all workers; kill those that do not within so many seconds. On the executor. Twice is fine."""
        self._dismiss(patience)
        self.bell.close()

    def forget(self) -> None:
        """Let go of everything in a forked child: the workers are the parent's."""
        # It may have been forked in the middle of a step: nothing is to be mended here, and nobody would do it.
        self.lock, self.cut = threading.Lock(), False
        for worker in self._workers:
            worker.hang_up()
            worker.death.close()
        self._workers = []
        number, self.bell.number = self.bell.number, -1
        if number >= 0:
            os.close(number)

    def _heard(self, worker: Worker, *, dead: bool) -> list[Answer | Death]:
        worker.channel.flush()
        # What a dead worker has said still counts: its batch is there.
        heard: list[Answer | Death] = [Answer(*answer) for answer in worker.replies()]
        if worker.ready:
            self._stillborn = 0
        if worker.gone or dead:
            heard.append(self._bury(worker))
        return heard

    def _enlist(self, count: int) -> None:
        while len(self._workers) < count:
            self._workers.append(self._start())

    def _bury(self, worker: Worker) -> Death:
        code = self._executor.call(partial(self._end, worker))
        words = ended(code)
        if not worker.ready:
            self._stillborn += 1
            if self._stillborn >= STILLBORN or (code is not None and code >= 0):
                self._cannot_start = words
        lost = worker.assigned.popleft() if worker.assigned else None
        return Death(f"worker {worker.pid} {words}", lost, tuple(worker.assigned))

    def _end(self, worker: Worker) -> int | None:
        code = worker.end(DYING)
        self._workers.remove(worker)
        return code

    def _dismiss(self, patience: float) -> None:
        for worker in self._workers:
            worker.hang_up()
        deadline = time.monotonic() + patience
        while self._workers:
            self._workers[-1].end(max(0.0, deadline - time.monotonic()))
            self._workers.pop()
