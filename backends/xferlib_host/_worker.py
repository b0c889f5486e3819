"""A thread that runs jobs strictly in the order in which they were put.

Invariant: a job whose `put` raised nothing is run, after everything that any thread put before it has ended. Streams and copy
engines are made of this. They decide what an exception means; a job never raises.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias, final

from xferlib.errors import ClosedError
from xferlib.tickets import Alive, ticket
from xferlib.uninterrupted import uninterrupted

__all__ = ["Job", "Worker"]

Job: TypeAlias = Callable[[], Any]

_EXIT_SECONDS = 2.0


@final
class Worker:
    """Owns the thread, which ends at `close()` or, when nobody can put a job any more, after the last one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        # No finaliser: the finalisers of others in the same reference cycle may still put jobs, and wait for them.
        self._end: object = ticket(self._queue.put, None)
        self._open = True
        self._pid = os.getpid()
        # The thread is given the queue and not the worker, which it would keep alive.
        self._thread = threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True)
        # `Thread.start` cut off by an interrupt leaves a lock held, or an error in its place.
        uninterrupted(self._thread.start)
        _WORKERS.add(self)

    @property
    def open(self) -> bool:
        return self._open

    def put(self, job: Job) -> None:
        """Queue the job behind all that was put before. Never waits for a job.

        Raises `ClosedError` after `close()`. If another thread closes at the same time, the job may be run all the same.
        """
        # No lock: a finaliser that runs in here may wait for what another thread puts.
        if self._open:
            self._queue.put(job)
            if self._open:
                return
            # Closed meanwhile, perhaps by a finaliser: the job may lie behind the mark that ends the thread, so nobody may wait for
            # it.
        raise ClosedError(f"{self._name!r} is closed and runs nothing any more. Open a new one")

    def close(self, last: Job | None = None) -> None:
        """Let the jobs that were put end, then the thread. Twice is fine; a job may call it, and then nothing is waited for.

        `last` is run behind all other jobs, by the first call only.
        """
        if os.getpid() != self._pid:
            return  # A forked child has no thread.
        # No call stands between the two, so no interrupt and no other thread does: `last` is run once.
        first, self._open = self._open, False
        if first and last is not None:
            self._queue.put(last)
        self._queue.put(None)
        # A job that came too late may refer to this, and the collector does not see that a ticket keeps the queue.
        self._end = None
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def drain(self, seconds: float) -> None:
        """Wait until the jobs that were put have ended, but no longer than this."""
        if not self._thread.is_alive():
            return
        ended = threading.Event()
        self._queue.put(ended.set)
        ended.wait(seconds)


def _run(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # What the job refers to must not live on until the next one comes.


_WORKERS: Alive[Worker] = Alive()


def _drain_all() -> None:
    """Let running jobs end before the interpreter frees the memory under them: a copy would crash the process as it exits.

    A job that waits for something, perhaps for ever, is left behind: the process ends in any case.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    for worker in _WORKERS:
        worker.drain(max(0.0, deadline - time.monotonic()))


atexit.register(_drain_all)
