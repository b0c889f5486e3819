"""Tickets: posted once, when the last reference is gone, whatever else dies with it and whatever interrupts it."""

from __future__ import annotations

import gc

from tests.interrupts import interrupted
from xferlib.tickets import Returns


class Holder:
    """Part of a reference cycle."""

    def __init__(self, ticket: object) -> None:
        self.ticket: object | None = ticket
        self.me = self


class Asking(Holder):
    """Looks, in its finalizer, whether a ticket that dies with it has been posted."""

    def __init__(self, ticket: object, returns: Returns, seen: list[list[int]]) -> None:
        super().__init__(ticket)
        self.returns, self.seen = returns, seen

    def __del__(self) -> None:
        self.seen.append(self.returns.unsettled())


def test_a_number_comes_again_until_it_is_settled() -> None:
    returns = Returns()
    tickets = [returns.ticket(number) for number in range(3)]
    assert not returns
    del tickets[1]
    assert returns
    assert returns.unsettled() == [1]
    del tickets[1]
    assert returns.unsettled() == [1, 2]
    returns.settled(1)
    returns.settled(1)
    assert returns.unsettled() == [2]
    returns.settled(2)
    assert not returns
    assert returns.unsettled() == []


def test_a_ticket_in_a_cycle_is_not_posted_before_the_finalizers_that_may_still_use_it() -> None:
    returns = Returns()
    seen: list[list[int]] = []
    others = [Holder(returns.ticket(0))]
    asking = Asking(returns.ticket(1), returns, seen)
    others[0].me = asking
    asking.me = others[0]
    del others, asking
    assert returns.unsettled() == []
    gc.collect()
    assert seen == [[]]
    assert sorted(returns.unsettled()) == [0, 1]


def test_a_ticket_that_a_finalizer_brings_back_is_not_posted() -> None:
    returns = Returns()
    kept: list[object] = []

    class Lazarus(Holder):
        def __del__(self) -> None:
            kept.append(self.ticket)

    Lazarus(returns.ticket(7))
    gc.collect()
    assert returns.unsettled() == []
    kept.clear()
    assert returns.unsettled() == [7]


def test_no_interrupt_keeps_a_ticket_from_being_posted() -> None:
    returns = Returns()
    rows: dict[int, None] = {}
    numbers = iter(range(10**9))

    def work() -> None:
        for number in numbers:
            ticket = returns.ticket(number)
            rows[number] = None
            del ticket

    interrupted(work, 500)
    assert set(rows) <= set(returns.unsettled())
