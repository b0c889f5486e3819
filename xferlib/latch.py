"""A point that one thread reaches and others wait for. An interrupt leaves it whole. And what else threads owe each other:
to give way, to take what has failed for over, and not to wait for copies on a thread that makes them.

`threading.Event` and `threading.Condition` are written in Python: an interrupt (Ctrl-C) inside their `wait` or `set` may leave
their lock held for ever, and hang whoever comes next. Here every change is one call of C or one assignment.
"""

from __future__ import annotations

import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
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
    """Shut until `open`, then open for good. Any thread may call any method."""

    __slots__ = ("_lock", "_open")

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self._open = False

    def is_open(self) -> bool:
        """Tell whether `open` was called."""
        return self._open

    def open(self) -> None:
        """Let whoever waits now, or comes later, pass. Twice is fine."""
        self._open = True
        try:
            # Whoever waits takes it, and hands it on.
            self._lock.release()
        except RuntimeError:
            # It is open already, or a thread that has passed will still hand it on.
            return

    def wait(self, timeout: float | None = None) -> bool:
        """Block, without the GIL, until it is open, or for so many seconds. Returns whether it is open."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._open:
            seconds = WAIT_SECONDS
            if deadline is not None:
                seconds = min(seconds, deadline - time.monotonic())
                if seconds <= 0:
                    return False
            if self._lock.acquire(timeout=seconds):
                # If this is interrupted here, those that still wait see the flag when they look again.
                self._lock.release()
        return True


class _Thread(threading.local):
    copying = False
    """An attribute of the class: looking for one that is not there takes ten times as long, and every transfer asks."""


_thread = _Thread()


def note_copy_thread() -> None:
    """Note that the calling thread makes copies: if it waited for one, it and others would wait for ever."""
    _thread.copying = True


def is_copy_thread() -> bool:
    """Tell whether the calling thread noted that. On such a thread only a finalizer asks: the collector runs it on any thread."""
    return _thread.copying
