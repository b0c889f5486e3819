"""Tickets: how a table learns that nobody holds a row of it any more.

A native resource is owned by a table, and users hold tickets that name its rows. A ticket does one thing when it is gone: it posts
its row's number to a queue whose `put` is reentrant by contract. It takes no lock, waits for nothing, calls no framework, and may
be gone on any thread, inside any allocation. Whoever calls next settles what was posted, in ordinary code.

Python runs the finalizers of all objects that become unreachable together, in any order, and each of them may still use the others,
or bring them back (PEP 442). A ticket that was finalized among them would give memory back that such a finalizer still reads. So
tickets are hidden from the garbage collector: they are gone when the last reference is, and never before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, final

import numpy as np

__all__ = ["Returns"]

_OBJECT = np.dtype(object)
NOBODY = -1


@final
class _Ticket:
    """Posts a number when it is gone."""

    __slots__ = ("_number", "_post")

    def __init__(self, post: Callable[[int], None], number: int) -> None:
        self._post = post
        self._number = number

    def __del__(self) -> None:
        self._post(self._number)


@final
class Returns:
    """The tickets of one table: which rows nobody holds any more. Any thread."""

    def __init__(self) -> None:
        self._posted: SimpleQueue[int] = SimpleQueue()
        self._post = self._posted.put
        self._unsettled: dict[int, None] = {}

    def ticket(self, number: int) -> object:
        """Return an object that names a row; the number is posted when the last reference to the object is gone.

        To be made before the row is entered: whatever happens then, the row is given back.
        """
        # An array's elements are not visited by the collector, so what is inside cannot be part of what it finds unreachable.
        hidden: Any = np.empty((), _OBJECT)
        hidden[()] = _Ticket(self._post, number)
        return hidden

    def post(self) -> None:
        """Wake whoever waits, with a number that no row has. Any thread, finalizers too."""
        self._post(NOBODY)

    def wait(self, seconds: float) -> None:
        """Block until a number is posted, or so many seconds have passed."""
        with suppress(Empty):
            # One call, as below: what was taken out of the queue is in the other container, whatever comes in between.
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
        self._unsettled.pop(number, None)
