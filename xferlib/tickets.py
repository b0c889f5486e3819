"""Tickets: how a table learns that nobody holds a row of it any more.

A native resource is owned by a table, and users hold tickets that name its rows. When a ticket is gone, one thing happens: its
number is posted to a queue whose `put` is reentrant by contract. No lock is taken, nothing is waited for, no framework is called,
and it may happen on any thread, inside any allocation. Whoever calls next settles what was posted, in ordinary code.

Python runs the finalizers of all objects that become unreachable together, in any order, and each of them may still use the others,
or bring them back (PEP 442). A ticket that was finalized among them would give memory back that such a finalizer still reads. So
tickets are hidden from the garbage collector: they are gone when the last reference is, and never before. And a `__del__` is Python
code, at whose beginning an interrupt may be raised, and ignored: nothing would be posted. So what posts is the callback of a weak
reference, and that is the queue's own `put`: no line of Python is run.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, final

import numpy as np

__all__ = ["Returns"]

_NOBODY = -1
"""No row has this number."""


@final
class Returns:
    """The tickets of one table: which rows nobody holds any more. Any thread."""

    def __init__(self) -> None:
        self._posted: SimpleQueue[int] = SimpleQueue()
        self._watching: dict[int, weakref.ref[Any]] = {}
        self._unsettled: dict[int, None] = {}

    def ticket(self, number: int) -> object:
        """Return an object that names a row; the number is posted when the last reference to the object is gone.

        To be made before the row is entered: whatever happens then, the row is given back.
        """
        # The collector does not know of arrays, so it cannot find one unreachable, nor its weak references.
        ticket = np.empty(0, np.uint8)
        # Called with the reference as well, which `put` takes for an argument that it ignores.
        self._watching[number] = weakref.ref(ticket, partial(self._posted.put, number))
        return ticket

    def post(self) -> None:
        """Wake whoever waits."""
        self._posted.put(_NOBODY)

    def wait(self, seconds: float) -> None:
        """Block until something is posted, or so many seconds have passed."""
        with suppress(Empty):
            # One call, as below.
            self._unsettled.update(zip(map(self._posted.get, (True,), (seconds,)), itertools.repeat(None)))

    def __bool__(self) -> bool:
        return bool(self._unsettled) or not self._posted.empty()

    def unsettled(self) -> list[int]:
        """Return the numbers that were posted and not settled yet, oldest first. Each comes again until `settled`."""
        with suppress(Empty):
            # One call, which an interrupt does not cut: taken out of one container, each number is in the other.
            self._unsettled.update(zip(iter(self._posted.get_nowait, None), itertools.repeat(None)))
        return list(self._unsettled)

    def settled(self, number: int) -> None:
        """Forget a number. Twice is fine."""
        self._watching.pop(number, None)
        self._unsettled.pop(number, None)
