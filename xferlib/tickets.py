"""Tickets: how a table learns that nobody holds a row of it any more.

A native resource is owned by a table, and users hold tickets that name its rows. When the last reference to a ticket is gone, the
row's number is posted to a queue whose `put` is reentrant by contract. No Python runs for that, so no lock is taken, nothing is
waited for, and no interrupt gets in between: one that is raised in a finalizer ends it, and is swallowed. It may be on any thread,
inside any allocation. Whoever calls next settles what was posted, in ordinary code.

Python runs the finalizers of all objects that become unreachable together, in any order, and each of them may still use the others,
or bring them back (PEP 442). A ticket that was finalized among them would give memory back that such a finalizer still reads. So
tickets are nothing that the garbage collector tracks: they are gone when the last reference is, and never before.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import suppress
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, final

import numpy as np

__all__ = ["Returns"]

Ticket: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_BYTE = np.dtype(np.uint8)
_NUMBER = attrgetter("number")


@final
class _Watch(weakref.ref[Ticket]):
    """Is posted, by its callback, when a ticket is gone; in time only while somebody keeps it."""

    __slots__ = ("number",)

    number: int


@final
class Returns:
    """The tickets of one table: which rows nobody holds any more. Any thread."""

    def __init__(self) -> None:
        self._posted: SimpleQueue[_Watch] = SimpleQueue()
        self._post = self._posted.put
        self._watches: dict[int, _Watch] = {}
        self._unsettled: dict[int, None] = {}

    def ticket(self, number: int) -> object:
        """Return an object that names a row; the number, which no other ticket has, is posted when the last reference is gone.

        To be made before the row is entered: whatever happens then, the row is given back.
        """
        # The cheapest thing there is that can be watched and that the collector does not track.
        ticket = np.empty(0, _BYTE)
        watch = _Watch(ticket, self._post)
        watch.number = number
        self._watches[number] = watch
        return ticket

    def __bool__(self) -> bool:
        return bool(self._unsettled) or not self._posted.empty()

    def unsettled(self) -> list[int]:
        """Return the numbers that were posted and not settled yet, oldest first. Each comes again until `settled`."""
        with suppress(Empty):
            # One call, which an interrupt does not cut: taken out of one container, each number is in the other.
            self._unsettled.update(zip(map(_NUMBER, iter(self._posted.get_nowait, None)), itertools.repeat(None)))
        return list(self._unsettled)

    def settled(self, number: int) -> None:
        """Forget a number. Twice is fine."""
        self._watches.pop(number, None)
        self._unsettled.pop(number, None)
