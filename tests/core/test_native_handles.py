"""Tickets that post when the last reference is gone, and handles that are used again when nobody refers to them."""

from __future__ import annotations

import gc
import sys
from collections import deque
from queue import SimpleQueue
from typing import Any

from xferlib.tickets import ticket, unreferenced


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


def test_a_ticket_posts_once_when_its_last_reference_is_gone() -> None:
    posted: SimpleQueue[int] = SimpleQueue()
    first = ticket(posted.put, 7)
    second = [first]
    del first
    assert posted.empty()
    del second
    assert posted.get_nowait() == 7
    assert posted.empty()


def test_a_ticket_in_a_cycle_posts_after_every_finalizer_of_it() -> None:
    posted: SimpleQueue[int] = SimpleQueue()
    seen: list[bool] = []

    class Last(Holder):
        def __del__(self) -> None:
            seen.append(posted.empty())

    before = Last()
    holder = Last(ticket(posted.put, 7), before)
    before.held = (holder,)
    del before, holder
    gc.collect()
    assert seen == [True, True]
    assert posted.get_nowait() == 7


def test_the_end_of_a_ticket_runs_no_python_code_that_an_interrupt_could_cut() -> None:
    posted: SimpleQueue[int] = SimpleQueue()
    held = [ticket(posted.put, 7)]
    entered: list[str] = []
    sys.setprofile(lambda frame, event, argument: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        held.clear()
    finally:
        sys.setprofile(None)
    assert posted.get_nowait() == 7
    assert entered == []
