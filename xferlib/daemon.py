"""The threads of the process that serve all stagers: each is there once, sleeps while nothing is to be done, and ends at exit."""

from __future__ import annotations

import atexit
import os
import threading
import time
from _thread import get_ident, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, final

from xferlib.latch import Latch

__all__ = ["Daemon", "end_daemons", "report"]

END_SECONDS = 1.0
"""How long the end of the interpreter waits for what such threads have begun. They may be held by compute, for ever."""
AGAIN_SECONDS = 0.01
"""Until such a thread goes on behind an error of its own: others are to have the interpreter, whatever comes again and again."""

T = TypeVar("T")


@final
class Daemon(Generic[T]):
    """A thread that takes from `inbox` what is to be done, by `run`, which returns once it is `over`. None only wakes it.

    In a forked child there is no such thread: what was in the inbox is the parent's, and the next stager starts another.
    """

    def __init__(self, name: str, run: Callable[[], None], forget: Callable[[], object] = bool) -> None:
        """`forget` is called in a forked child, too."""
        self.inbox: SimpleQueue[T | None] = SimpleQueue()
        self.over = False
        """The interpreter ends: nothing new is begun."""
        self._name = name
        self._run = run
        self._forgotten = forget
        self._ident = 0
        self._ended = Latch()
        self._started = False
        self._serving: dict[None, object] = {}
        """Has an entry once a thread serves."""
        _daemons.append(self)
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Start the thread, if it does not run. Called when a stager is opened, where no interrupt comes: a finalizer could not.

        Raises `RuntimeError` if there can be no more threads: the next stager tries again.
        """
        if self.over or self._started:
            return
        # Two stagers that are opened at once start two, and the second ends at once. Neither may rely on the other, which may be
        # refused.
        start_new_thread(self._serve, ())
        self._started = True

    def is_here(self) -> bool:
        """Tell whether this is the calling thread, and so whether the caller is a finalizer on it."""
        return get_ident() == self._ident

    def end(self) -> None:
        """Let it end, whatever is left to do; `wait_ended` waits for that."""
        self.over = True
        self.inbox.put(None)

    def wait_ended(self, seconds: float) -> None:
        """Wait for what it has begun, but no longer than so."""
        if self._started:
            self._ended.wait(seconds)

    def _serve(self) -> None:
        mine = object()
        if self._serving.setdefault(None, mine) is not mine:
            return
        self._ident = get_ident()
        try:
            threading.current_thread().name = self._name
            while not self.over:
                # Nothing may end this thread: whoever counts on it would wait for ever, and what it gives back would stay taken.
                try:
                    self._run()
                except BaseException as error:
                    report(error)
                    time.sleep(AGAIN_SECONDS)
        finally:
            self._ended.open()

    def _forget(self) -> None:
        self._started = False
        self._serving.clear()
        self._ident, self._ended, self.inbox = 0, Latch(), SimpleQueue()
        self._forgotten()


_daemons: list[Daemon[Any]] = []
"""All of the process."""


def end_daemons() -> None:
    """End all that there are, whatever is left to do. At exit, before modules are taken apart. Twice is fine.

    Waits for what they have begun, for all of them together: a thread that comes out of a framework's C++ when there is no
    interpreter any more ends the process by SIGABRT.
    """
    told = [daemon for daemon in _daemons if not daemon.over]
    for daemon in told:
        daemon.end()
    deadline = time.monotonic() + END_SECONDS
    for daemon in told:
        daemon.wait_ended(max(0.0, deadline - time.monotonic()))


atexit.register(end_daemons)


def report(error: BaseException) -> None:
    """Report an error as those of threads are. Raises nothing."""
    with suppress(BaseException):
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread())))
