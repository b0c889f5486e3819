"""One worker process, as its parent sees it.

It is started and ended where no interrupt comes; the rest is the iterating thread's.
"""

from __future__ import annotations

import io
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from typing import NamedTuple, final

from xferlib.pipeline.workers.channel import Channel
from xferlib.pipeline.workers.messages import Begin, Ready, Reply, Task

__all__ = ["Answer", "Worker", "ended", "watch"]


class Answer(NamedTuple):
    """What a worker said to a task."""

    task: Task
    reply: Reply


@final
class Worker:
    """A spawned process, and the socket to it.

    `assigned` has the tasks that it was sent and has not answered, oldest first: the first is the one it may be filling now.
    """

    def __init__(self, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
        ours, theirs = socket.socketpair()
        self.ready = False
        self.assigned: deque[Task] = deque()
        self._run = -1
        self._process = get_context("spawn").Process(
            target=target, args=(os.getpid(), *arguments, theirs), name="xferlib-worker", daemon=True
        )
        with theirs:
            try:
                self._start()
            except Exception:
                ours.close()
                raise
        self.channel = Channel(ours)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.exit_file = io.FileIO(watch(self.pid, self._process.sentinel))
        """Readable when the process has ended."""

    def _start(self) -> None:
        # Until the process can ignore Ctrl-C, that would end it with a traceback of its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def gone(self) -> bool:
        """Whether one side has hung up. The process may be dead, or about to be."""
        return self.channel.over

    def assign(self, begin: Begin, task: Task) -> None:
        """Send a task, without waiting. If the worker is gone, `assigned` says what is left undone."""
        self.assigned.append(task)
        if self._run != begin.run:
            self.channel.send(begin)
            self._run = begin.run
        self.channel.send(task)

    def answers(self) -> list[Answer]:
        """Return what it has answered since, without waiting."""
        answered: list[Answer] = []
        for reply in self.channel.receive():
            if isinstance(reply, Ready):
                self.ready = True
            else:
                answered.append(Answer(self.assigned.popleft(), reply))
        return answered

    def disconnect(self) -> None:
        """Let it end when it has finished what it is doing. Twice is fine."""
        self.channel.close()

    def terminate(self, timeout: float) -> int | None:
        """Hang up, wait so many seconds for it to end, kill it if it does not, and return its exit code, if anybody knows it."""
        self.disconnect()
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        # Refused where somebody else has waited for the process.
        with suppress(ValueError):
            self._process.close()
        self.exit_file.close()
        return code


def watch(pid: int, sentinel: int) -> int:
    """Return a new descriptor that is readable when a process has ended. Raises `ProcessLookupError` if it ended long ago.

    `sentinel` is the end of a pipe whose other end that process has. It serves where the system knows no descriptors of processes.
    Those are better, since no other process can hold them open.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return os.dup(sentinel)


def ended(code: int | None) -> str:
    """Say in words how a process ended."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"left with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
