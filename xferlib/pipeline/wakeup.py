"""Waiting for another thread to change something, without a lock.

An interrupt may come anywhere in here, and a finalizer may run anywhere in here and come back: nothing is held that they could
meet. Whoever waits looks at the state again after every wake, so a wake too many does no harm.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

__all__ = ["Wakeup"]


@final
class Wakeup:
    """Threads that wait for changes, and threads that tell of changes. Any number of each."""

    def __init__(self) -> None:
        self._sleepers: deque[SimpleQueue[None]] = deque()

    def wait(self, reached: Callable[[], object], seconds: float | None = None) -> bool:
        """Sleep until `reached()` is true, or so many seconds have passed; return whether it is true.

        It is called on the calling thread, each time that somebody calls `wake`.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while not reached():
            sleeper: SimpleQueue[None] = SimpleQueue()
            self._sleepers.append(sleeper)
            # Again: it may have changed before anybody could know of the sleeper.
            if reached():
                break
            try:
                sleeper.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                return bool(reached())
        return True

    def wake(self) -> None:
        """Let all who wait look again. Called after the change. Never blocks."""
        for sleeper in self._sleepers.copy():
            # In this order an interrupt in between leaves one that is woken twice, and none that sleeps on.
            sleeper.put(None)
            try:
                self._sleepers.remove(sleeper)
            except (ValueError, IndexError):
                # Another thread was faster.
                continue
