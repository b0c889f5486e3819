"""Waiting for another thread: for a change that it tells of, or for a point that it reaches. Three smaller rules between threads
are in here, too: when one gives way, that what has failed is over, and that a thread which makes copies must not wait for them.

`threading.Event` and `threading.Condition` are written in Python: an interrupt (Ctrl-C) inside their `wait` or `set` may leave
their lock held for ever, and hang whoever comes next. Here nothing is held: an interrupt may come anywhere, and a finalizer may run
anywhere in here and come back. Whoever waits looks again after every wake, so a wake too many does no harm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, final

__all__ = ["WAIT_SECONDS", "Latch", "Turn", "give_way", "is_copy_thread", "is_over", "note_copy_thread"]

WAIT_SECONDS: Final = 0.05
"""How long a thread waits at a time: a signal that comes a moment before the wait does not wake it."""

GIVE_WAY_SECONDS: Final = 20e-6
"""What is asked for. With what the system adds it is enough for a thread that waits for the interpreter to wake up."""
TURN_SECONDS = 25e-6
"""A tenth of a short training step."""


def give_way() -> None:
    """Let other threads have the interpreter, in the middle of work on thousands of arrays or of a call that maps much memory.

    Else a thread that launches work would wait for it, up to 5 ms each time that it asks for it. To release it for a moment is not
    enough: whoever waits has to wake up first.
    """
    time.sleep(GIVE_WAY_SECONDS)


def is_over(done: Callable[[], bool], failures: type[Exception] | tuple[type[Exception], ...] = Exception) -> bool:
    """Tell whether something is done, or has failed: whoever holds the transfer is told of that. Other errors are raised."""
    try:
        return done()
    except failures:
        return True


@final
class Turn:
    """How long a thread of ours has had the interpreter for work on thousands of arrays. By the clock: how many arrays that are
    depends on the machine, and on the framework that is asked about each."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def end_if_long(self) -> None:
        """Give way, if there was work for as long as others may be made to wait. Called between two arrays."""
        if time.perf_counter() - self._began >= TURN_SECONDS:
            give_way()
            self._began = time.perf_counter()


@final
class Latch:
    """Shut until `open`, then open for good. Any thread may call any method.

    For changes that come again and again, `wait_for` and `wake`: some threads tell of changes, and others wait for theirs.
    """

    __slots__ = ("_open", "_sleepers")

    def __init__(self) -> None:
        self._open = False
        self._sleepers: list[SimpleQueue[None]] = []

    def is_open(self) -> bool:
        """Tell whether `open` was called."""
        return self._open

    def open(self) -> None:
        """Let whoever waits now, or comes later, pass. Twice is fine."""
        self._open = True
        if self._sleepers:
            self.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Block, without the GIL, until it is open, or for so many seconds. Returns whether it is open."""
        return self._open or self.wait_for(self.is_open, timeout)

    def wait_for(self, reached: Callable[[], object], seconds: float | None = None) -> bool:
        """Block, without the GIL, until `reached()` is true, or for so many seconds. Returns whether it is true.

        It is called on the calling thread, each time that somebody calls `wake`, and now and then.
        """
        if reached():
            return True
        sleeper: SimpleQueue[None] = SimpleQueue()
        try:
            return self._sleep(sleeper, reached, None if seconds is None else time.monotonic() + seconds)
        finally:
            # Perhaps nobody ever wakes those that wait here, and they are interrupted again and again.
            with suppress(ValueError):
                self._sleepers.remove(sleeper)

    def _sleep(self, sleeper: SimpleQueue[None], reached: Callable[[], object], until: float | None) -> bool:
        # Before the look: it may have changed before anybody could know of the sleeper.
        self._sleepers.append(sleeper)
        while not reached():
            left = WAIT_SECONDS if until is None else min(WAIT_SECONDS, until - time.monotonic())
            if left <= 0:
                return False
            try:
                sleeper.get(timeout=left)
            except Empty:
                continue
            # Whoever woke it has taken it out, or is about to.
            self._sleepers.append(sleeper)
        return True

    def wake(self) -> None:
        """Let all who wait look again. Called after the change. Never blocks."""
        for sleeper in self._sleepers.copy():
            # In this order an interrupt in between leaves one that is woken twice, and none that sleeps on.
            sleeper.put(None)
            try:
                self._sleepers.remove(sleeper)
            except ValueError:
                # Another thread was faster.
                continue


class _Thread(threading.local):
    copying = False
    """An attribute of the class: looking for one that is not there takes ten times as long, and every transfer asks."""


_thread = _Thread()


def note_copy_thread() -> None:
    """Note that the calling thread makes copies: if it waited for one, it and others would wait for ever."""
    _thread.copying = True


def is_copy_thread() -> bool:
    """Tell whether the calling thread makes copies (`note_copy_thread`).

    On such a thread only a finalizer asks: the collector runs it on any thread.
    """
    return _thread.copying
