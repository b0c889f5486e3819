"""Native handles that are used again when nobody refers to them any more. For backends, which own them for the whole process.

A handle is an object, and whoever uses it refers to that object: an event, a local variable, a list of what is free. So nothing is
given back, nothing has a finalizer, and an interrupt or a cycle of garbage can neither lose a handle nor give it to two users.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

__all__ = ["unreferenced"]

T = TypeVar("T")


def unreferenced(owned: list[T]) -> Iterator[T]:
    """Return the objects in the list to which nobody refers but the list.

    Give the result to one call in C, such as `deque.extend`: no other thread, no finalizer and no interrupt comes between then.
    """
    return itertools.compress(owned, map(_ALONE.__eq__, _references(owned)))


def _references(owned: list[Any]) -> Iterator[int]:
    return map(sys.getrefcount, owned)


def _references_to_one_alone() -> int:
    """Count, since what the interpreter adds while it goes through a list is its own affair."""
    counts: list[int] = []
    owned = [object()]
    list(itertools.compress(owned, map(counts.append, _references(owned))))
    return counts[0]


_ALONE = _references_to_one_alone()
