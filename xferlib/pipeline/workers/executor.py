"""An executor of one thread: it takes from the system, and gives back, what a ring needs: processes, descriptors, page-locks.

Python raises an interrupt (Ctrl-C, whatever a signal's handler raises) on the main thread alone, and the result of the call that
has just ended is lost: there may be a process that nobody knows of. Here nothing is lost. An interrupt ends the waiting, the work
goes on, and what is asked for next comes after it. What nobody has closed is closed here, too: no finalizer has anything to do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar, final

import numpy as np

__all__ = ["Executor"]

T = TypeVar("T")


@final
class Executor:
    """Calls one thing after the other. Any thread may ask. It refers to nobody who asks.

    `dropped`: called on the thread, at its end, when nobody is left who could ask for anything.
    """

    def __init__(self, dropped: Callable[[], None]) -> None:
        self._asked: SimpleQueue[_Work[Any] | None] = SimpleQueue()
        self._dropped = dropped
        self._over = False

    def start(self) -> object:
        """Start the thread, and return what its user is to hold: when that is gone, the thread ends. See `tickets`."""
        ticket = np.empty(0, np.uint8)
        watching = weakref.ref(ticket, partial(self._asked.put, None))
        # The thread holds the weak reference: it must not die with the user.
        threading.Thread(target=_serve, args=(self._asked, self._dropped, watching), name="xferlib-workers", daemon=True).start()
        return ticket

    def call(self, work: Callable[[], T]) -> T:
        """Have something called, wait for it, and return what it returns or raise what it raises."""
        if self._over:
            return work()
        outcome: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()
        self._asked.put(_Work(work, outcome))
        value, error = outcome.get()
        if error is None:
            return value  # type: ignore[return-value]  # Of one of the pairs.
        try:
            raise error
        finally:
            # Its traceback leads to this frame, and back.
            del error

    def end(self) -> None:
        """Let the thread end; from now on the caller does everything. Twice is fine."""
        self._over = True
        self._asked.put(None)


class _Work(NamedTuple, Generic[T]):
    call: Callable[[], T]
    outcome: SimpleQueue[tuple[T, None] | tuple[None, BaseException]]


def _serve(asked: SimpleQueue[_Work[Any] | None], dropped: Callable[[], None], watching: object) -> None:
    while (work := asked.get()) is not None:
        try:
            work.outcome.put((work.call(), None))
        except BaseException as error:
            work.outcome.put((None, error))
        # What was called must not live until something else is.
        del work
    dropped()
