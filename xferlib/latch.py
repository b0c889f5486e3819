"""A point that one thread reaches and others wait for, which an interrupt leaves whole.

`threading.Event` and `threading.Condition` are written in Python: an interrupt (Ctrl-C) inside their `wait` or `set` may leave
their lock held for ever, and hang whoever comes next. Here every change is one call of C or one assignment.
"""

from __future__ import annotations

import threading
import time
from _thread import allocate_lock
from typing import Final, final

__all__ = ["SLICE_SECONDS", "Latch", "is_copy_thread", "note_copy_thread"]

SLICE_SECONDS: Final = 0.05
"""How long is waited at a time: a signal that comes a moment before a thread waits does not wake it."""


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
        """Let everybody pass who waits, or comes. Twice is fine."""
        self._open = True
        try:
            # Whoever waits takes it, and hands it on.
            self._lock.release()
        except RuntimeError:
            # It is open already, or somebody who passed has not handed it on yet, and will.
            return

    def wait(self, timeout: float | None = None) -> bool:
        """Block, without the GIL, until it is open, or for so many seconds. Returns whether it is open."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._open:
            slice_seconds = SLICE_SECONDS
            if deadline is not None:
                slice_seconds = min(slice_seconds, deadline - time.monotonic())
                if slice_seconds <= 0:
                    return False
            if self._lock.acquire(timeout=slice_seconds):
                # Interrupted here, those behind see the flag at the end of their slice.
                self._lock.release()
        return True


class _Thread(threading.local):
    copying = False
    """Of the class: to look for an attribute that is not there takes ten times as long, and every transfer asks."""


_thread = _Thread()


def note_copy_thread() -> None:
    """Note that the calling thread makes copies, and that others, it among them, would wait for ever if it waited for one."""
    _thread.copying = True


def is_copy_thread() -> bool:
    """Tell whether the calling thread noted that. Only a finalizer, which the collector runs on any thread, asks on such a one."""
    return _thread.copying
