"""Handles that are used again when nobody refers to them any more."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

from xferlib.handles import unreferenced


class Holder:
    """Something that holds others, perhaps in a cycle."""

    def __init__(self, *held: Any) -> None:
        self.held = held
        self.me = self


def handles(count: int) -> list[int]:
    """Return numbers each of which is an object of its own, as handles of a driver are."""
    return [int(str(10**12 + number)) for number in range(count)]


def found(owned: list[int]) -> list[int]:
    # A copy of each: to find it again must not be to refer to it.
    return [number - 10**12 for number in unreferenced(owned)]


def test_a_handle_is_free_when_nobody_but_the_list_refers_to_it() -> None:
    owned = handles(4)
    held: deque[Any] = deque([owned[1]])
    holder = Holder(owned[2])
    assert found(owned) == [0, 3]
    held.clear()
    assert found(owned) == [0, 1, 3]
    del holder
    # In a cycle, and not collected yet: a finalizer may still use it.
    assert found(owned) == [0, 1, 3]
    gc.collect()
    assert found(owned) == [0, 1, 2, 3]


def test_a_handle_that_was_taken_up_again_is_not_free() -> None:
    owned, free = handles(3), deque[int]()
    free.extend(unreferenced(owned))
    free.extend(unreferenced(owned))
    assert list(free) == owned
    taken = free.pop()
    free.extend(unreferenced(owned))
    assert len(free) == 2
    assert taken is owned[2]
