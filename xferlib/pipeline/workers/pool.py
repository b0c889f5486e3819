"""The worker processes of one ring: start them, assign tasks, listen, replace those that have ended.

Each has a socket of its own, so a killed one breaks no other's. What became of a task is the run's business.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, final

from xferlib.errors import WorkerDiedError
from xferlib.pipeline.workers.messages import Task
from xferlib.pipeline.workers.process import Answer, Worker, ended
from xferlib.uninterrupted import uninterrupted

__all__ = ["Exit", "WakeupFd", "WorkerPool"]

AHEAD = 2
"""Tasks that one worker has at most: the one it fills, and the next, so that it need not wait for the consumer in between."""
MOST_FAILED_STARTS = 8
"""Workers in a row that may be killed before they have started."""
EXIT_SECONDS = 1.0
"""Seconds from a worker's last word to its end."""


@final
class WakeupFd:
    """Wakes whoever waits for `number` to be readable. Any thread, also a finalizer."""

    def __init__(self) -> None:
        self.number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A number that is closed may be somebody else's by the time it is written to. Reentrant, as a finalizer may come in here.
        self._lock = threading.RLock()

    def wake(self) -> None:
        """Have it readable. Does nothing if it is closed."""
        with self._lock:
            if self.number >= 0:
                os.eventfd_write(self.number, 1)

    def clear(self) -> None:
        """Have it not readable until it is woken again."""
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


class Exit(NamedTuple):
    """A worker that has ended: what it may have been filling, and the tasks it had not begun."""

    words: str
    lost: Task | None
    waiting: tuple[Task, ...]


@final
class WorkerPool:
    """Worker processes. One thread at a time, the one that has `lock`; they are started and ended where no interrupt comes.

    If `torn` is true, a thread was interrupted while it had the lock: then nothing here is known to be whole, and `mend` must
    follow.
    """

    def __init__(self, start: Callable[[], Worker], changing: AbstractContextManager[object]) -> None:
        """`changing`: reentrant, and held while processes are started or ended: an interrupt may leave another thread at that."""
        self.lock = threading.RLock()
        """Reentrant only so that `reentered` can tell who has it: nobody comes in twice."""
        self.torn = False
        self.wakeup = WakeupFd()
        self._start = start
        self._workers: list[Worker] = []
        self._changing = changing
        self._closed = False
        self._failed_starts = 0
        self._cannot_start: str | None = None

    @property
    def reentered(self) -> bool:
        """Whether the calling thread has the lock already, and so is a finalizer now, or what takes the next task."""
        return self.lock._is_owned()  # type: ignore[attr-defined,no-any-return]  # As `threading.Condition` asks.

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that live, as far as is known."""
        return tuple(worker.pid for worker in self._workers)

    def start_up_to(self, count: int) -> None:
        """Have at least so many workers. Raises `WorkerDiedError` if they do not get through their start."""
        words, self._cannot_start = self._cannot_start, None
        if words is not None:
            raise WorkerDiedError(
                f"a worker process could not start: it {words}. What it said stands on stderr. "
                'A program that uses workers starts below: if __name__ == "__main__"'
            )
        if len(self._workers) < count:
            uninterrupted(self._start_up_to, count)

    def pick(self, count: int) -> Worker | None:
        """Return the one of the first `count` workers that has least to do; None if all have enough."""
        able = [worker for worker in self._workers[:count] if worker.ready and not worker.gone and len(worker.assigned) < AHEAD]
        return min(able, key=lambda worker: len(worker.assigned), default=None)

    def flush(self) -> None:
        """Send what had no room before."""
        for worker in self._workers:
            if worker.channel.pending:
                worker.channel.flush()

    def listen(self, timeout: float | None) -> list[Answer | Exit]:
        """Wait until a worker has answered, taken in more, or ended, `wakeup` is woken, or so many seconds have passed."""
        asked = select.poll()
        asked.register(self.wakeup.number, select.POLLIN)
        by_number: dict[int, Worker] = {}
        exits: set[int] = set()
        for worker in self._workers:
            speaks, ends = worker.channel.fileno(), worker.exit_file.fileno()
            if speaks >= 0:
                by_number[speaks] = worker
                asked.register(speaks, select.POLLIN | select.POLLOUT * worker.channel.pending)
            by_number[ends] = worker
            exits.add(ends)
            asked.register(ends, select.POLLIN)
        touched: dict[int, Worker] = {}
        dead: set[int] = set()
        for number, _ in asked.poll(None if timeout is None else timeout * 1e3):
            if number == self.wakeup.number:
                self.wakeup.clear()
                continue
            worker = by_number[number]
            touched[worker.pid] = worker
            if number in exits:
                dead.add(worker.pid)
        return [heard for pid, worker in touched.items() for heard in self._heard(worker, dead=pid in dead)]

    def taken(self) -> set[int]:
        """Return the slots that workers may write."""
        return {task.slot for worker in self._workers for task in worker.assigned}

    def mend(self) -> None:
        """Kill all workers: what they and their parent know of each other was cut by an interrupt."""
        uninterrupted(self._terminate, 0.0)

    def close(self, timeout: float) -> None:
        """End all workers; kill those that do not within so many seconds. On a thread that no interrupt comes to. Twice is fine."""
        self._closed = True
        self._terminate(timeout)
        self.wakeup.close()

    def forget(self) -> None:
        """Let go of everything in a forked child: the workers are the parent's."""
        # It may have been forked in the middle of a step: nothing is to be mended here, and nobody would do it.
        self.lock, self.torn, self._closed = threading.RLock(), False, True
        for worker in self._workers:
            worker.disconnect()
            worker.exit_file.close()
        self._workers = []
        number, self.wakeup.number = self.wakeup.number, -1
        if number >= 0:
            os.close(number)

    def _heard(self, worker: Worker, *, dead: bool) -> list[Answer | Exit]:
        worker.channel.flush()
        # What a dead worker has said still counts: its batch is there.
        heard: list[Answer | Exit] = [*worker.answers()]
        if worker.ready:
            self._failed_starts = 0
        if worker.gone or dead:
            heard.append(self._take_out(worker))
        return heard

    def _start_up_to(self, count: int) -> None:
        with self._changing:
            self._start_missing(count)

    def _start_missing(self, count: int) -> None:
        while not self._closed and len(self._workers) < count:
            self._workers.append(self._start())

    def _take_out(self, worker: Worker) -> Exit:
        code = uninterrupted(self._terminate_one, worker)
        words = ended(code)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_FAILED_STARTS or (code is not None and code >= 0):
                self._cannot_start = words
        lost = worker.assigned.popleft() if worker.assigned else None
        return Exit(f"worker {worker.pid} {words}", lost, tuple(worker.assigned))

    def _terminate_one(self, worker: Worker) -> int | None:
        with self._changing:
            # If not, the caller was interrupted, and all were killed since.
            code = worker.terminate(EXIT_SECONDS) if worker in self._workers else None
            self._workers = self._others(worker)
            return code

    def _others(self, worker: Worker) -> list[Worker]:
        return [other for other in self._workers if other is not worker]

    def _terminate(self, timeout: float) -> None:
        with self._changing:
            self._terminate_all(timeout)

    def _terminate_all(self, timeout: float) -> None:
        for worker in self._workers:
            worker.disconnect()
        deadline = time.monotonic() + timeout
        while self._workers:
            self._workers[-1].terminate(max(0.0, deadline - time.monotonic()))
            self._workers.pop()
