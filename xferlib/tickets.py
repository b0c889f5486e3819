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
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import MethodType
from typing import Any, Generic, TypeVar, final

import numpy as np

__all__ = ["Alive", "Returns", "ticket"]

T = TypeVar("T")

_OBJECT = np.dtype(object)
_EMPTY = np.empty
POST_LOOK_SECONDS = 0.0001
"""How often a waiting thread looks whether something was posted."""


@final
class _Ticket:
    """Calls what it has as `__del__` when it is gone."""

    # An attribute, not a method: so no Python code runs. An interrupt at its entry would cut it off, and the post would be lost.
    __slots__ = ("__del__",)


def ticket(post: Callable[[T], object], value: T) -> object:
    """Return an object; `post(value)` is called when the last reference to it is gone. `post` is the `put` of a `SimpleQueue`."""
    told: Any = _Ticket()
    # Binding a method to the value takes less time than making a `partial`, but nothing can be bound to None.
    told.__del__ = partial(post, value) if value is None else MethodType(post, value)
    # An array's elements are not visited by the collector, so what is inside cannot be part of what it finds unreachable.
    hidden: Any = _EMPTY((), _OBJECT)
    hidden[()] = told
    return hidden


@final
class Alive(Generic[T]):
    """Objects for as long as they live, in the order in which they came. Any thread.

    `weakref.WeakSet` runs a function written in Python when one of them goes. An interrupt that came there would be reported and
    forgotten, and a program that was told to end would go on.
    """

    __slots__ = ("_next", "_references")

    def __init__(self) -> None:
        self._next = itertools.count().__next__
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, thing: T) -> None:
        """Note an object, once."""
        number = self._next()
        # The callback is given the reference, which is what `pop` returns if there is no such number any more.
        self._references[number] = weakref.ref(thing, partial(self._references.pop, number))

    def clear(self) -> None:
        """Forget them all."""
        self._references.clear()

    def __iter__(self) -> Iterator[T]:
        # Listed in one call: others may come and go meanwhile.
        found = [reference() for reference in list(self._references.values())]
        return iter([thing for thing in found if thing is not None])


@final
class Returns:
    """The tickets of one table: which rows nobody holds any more. Any thread."""

    def __init__(self) -> None:
        self._posted: SimpleQueue[int] = SimpleQueue()
        self.put = self._posted.put
        """Tickets post with this: `ticket(returns.put, number)` does the same as the method `ticket`, in one step less."""
        self.nothing_new = self._posted.empty
        """Whether nothing was posted since somebody looked."""
        # It can go on after it has raised `Empty`. No number is None, which would end it.
        self._taken = iter(self._posted.get_nowait, None)
        self._unsettled: deque[int] = deque()

    def ticket(self, number: int) -> object:
        """Return an object that names a row; the number is posted when the last reference to the object is gone.

        Make it before the row is entered: whatever happens then, the row is given back.
        """
        return ticket(self.put, number)

    def wait(self, seconds: float) -> None:
        """Block until something is posted, or so many seconds have passed.

        It looks again and again: before Python 3.13, `SimpleQueue.get` with a timeout sometimes never comes back, if another thread
        takes what has woken it.
        """
        until = time.monotonic() + seconds
        while self.nothing_new() and time.monotonic() < until:
            time.sleep(POST_LOOK_SECONDS)

    def __bool__(self) -> bool:
        return not self._posted.empty() or bool(self._unsettled)

    def pending(self) -> deque[int]:
        """Return the numbers that were posted and not settled, oldest first, each to be taken out when it is settled.

        For a table that settles on one thread at a time.
        """
        unsettled = self._unsettled
        try:
            # One call, which an interrupt does not cut: a number that is taken out of one container is in the other.
            unsettled.extend(itertools.islice(self._taken, self._posted.qsize()))
        except Empty:
            # Another thread takes them, too, and has left fewer.
            return unsettled
        return unsettled

    def unsettled(self) -> list[int]:
        """Return the numbers that were posted and not settled yet, oldest first. Each comes again until `settled`. Any thread."""
        return list(self._unsettled if self.nothing_new() else self.pending())

    def settled(self, number: int) -> None:
        """Forget a number. Twice is fine."""
        with suppress(ValueError):
            self._unsettled.remove(number)
