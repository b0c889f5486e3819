"""Native handles that are used again when nobody refers to them any more. For backends, which own them for the whole process.

A handle is an object, or lies in one. Whoever uses it refers to that object: an event, a local variable, a list of free ones. So
nothing has to be given back, and nothing has a finalizer. An interrupt or a cycle of garbage can neither lose a handle nor give it
to two users.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, final

__all__ = ["Handles", "Keep", "unreferenced"]

T = TypeVar("T")
Keep: TypeAlias = Callable[[Iterable[T]], None]

FIRST = 64
"""Handles. A search goes through all of them, even to find one that is free, so there are many more than are mostly in use."""
_IS_ONE = partial(operator.is_not, None)
"""True for every handle, to count them. Not a Python function: other threads could run between its steps."""


@final
class Handles(Generic[T]):
    """Handles of one kind on one device, in use or free. Never destroyed, since their users outlive stagers.

    Any thread, without a lock. `create(keep, count)` makes `count` handles, each an object of its own, and gives them to `keep` in
    one call that no interrupt cuts; or it raises.
    """

    __slots__ = ("_create", "_owned", "free")

    def __init__(self, create: Callable[[Keep[T], int], object]) -> None:
        self._create = create
        self._owned: list[T] = []
        self.free: deque[T] = deque()
        """Some of the free handles; the others are looked for when these are gone. Whoever is done with a handle that nobody else
        uses may append it; it is found anyway."""

    def __len__(self) -> int:
        """Return how many there are: at most four times as many as one thread ever used at once, or the first few. Several threads
        may add as many more as they make at the same time."""
        return len(self._owned)

    def take(self) -> T:
        """Return one that nobody uses. It is in use while anybody refers to it."""
        try:
            return self.free.pop()
        except IndexError:
            return self._more()

    def _more(self) -> T:
        """Find those that are free, make more if they are less than half, and return one."""
        free, owned = self.free, self._owned
        while True:
            # They are counted first: otherwise handles that other threads make meanwhile would look as if they were in use.
            count = len(owned)
            free.extend(unreferenced(owned))
            # Mostly there are enough, and that is seen at once.
            if (count == 0 or 2 * len(free) < count) and self._is_short_of(count):
                self._create(owned.extend, max(FIRST, count))
                free.extend(unreferenced(owned))
            # Other threads may have taken them all.
            with suppress(IndexError):
                return free.pop()

    def _is_short_of(self, count: int) -> bool:
        """Tell whether less than half of so many are free. One call counts, so that what others take meanwhile does not look
        taken."""
        free = sum(itertools.chain(map(len, (self.free,)), map(_IS_ONE, unreferenced(self._owned))))
        return count == 0 or 2 * free < count


def unreferenced(owned: list[T]) -> Iterator[T]:
    """Return the objects in the list to which nobody refers but the list.

    Give the result to one call in C, such as `deque.extend`: then no other thread, no finalizer and no interrupt comes in between.
    """
    return itertools.compress(owned, map(operator.eq, _references(owned), itertools.repeat(_ALONE)))


def _references(owned: list[Any]) -> Iterator[int]:
    return map(sys.getrefcount, owned)


def _references_to_one_alone() -> int:
    """Count them, since how many the interpreter adds while it goes through a list is its own affair."""
    counts: list[int] = []
    owned = [object()]
    list(itertools.compress(owned, map(counts.append, _references(owned))))
    return counts[0]


_ALONE = _references_to_one_alone()
