"""Tickets: their numbers are posted once, when they are gone, whatever else dies or is interrupted then."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from typing import Any

from tests.core.fakes import on_thread
from tests.pipeline.interrupts import at_line, by_signal
from xferlib.tickets import Returns


def test_a_number_comes_when_the_last_reference_is_gone_and_until_it_is_settled() -> None:
    returns = Returns()
    first, second = returns.ticket(1), returns.ticket(2)
    alias = first
    del first
    assert not returns
    assert returns.unsettled() == []
    del second, alias
    assert returns
    assert returns.unsettled() == returns.unsettled() == [2, 1]
    returns.settled(2)
    returns.settled(2)
    assert returns.unsettled() == [1]
    returns.settled(1)
    assert not returns
    assert returns.unsettled() == []


class Node:
    """Part of a cycle. Its finalizer says what has been posted by then, or brings it back."""

    def __init__(self, returns: Returns, found: list[list[int]], alive: list[Any] | None = None) -> None:
        self.ticket = returns.ticket(5)
        self.me = self
        self.returns = returns
        self.found = found
        self.alive = alive

    def __del__(self) -> None:
        self.found.append(self.returns.unsettled())
        if self.alive is not None:
            self.alive.append(self)


def test_a_ticket_in_a_dead_cycle_is_gone_behind_all_finalizers() -> None:
    returns, found = Returns(), list[list[int]]()
    # All in one collection: the collector may be due at any allocation.
    gc.disable()
    try:
        for _ in range(3):
            Node(returns, found)
        gc.collect()
    finally:
        gc.enable()
    assert found == [[], [], []]
    assert returns.unsettled() == [5, 5, 5]


def test_a_ticket_that_a_finalizer_brings_back_is_not_gone() -> None:
    returns, alive = Returns(), list[Any]()
    Node(returns, [], alive)
    gc.collect()
    assert returns.unsettled() == []
    alive[0].me = None
    alive.clear()
    assert returns.unsettled() == [5]


def use(returns: Returns, entered: list[int], numbers: itertools.count[int]) -> None:
    number = next(numbers)
    ticket = returns.ticket(number)
    entered.append(number)
    del ticket
    returns.unsettled()


def test_an_interrupt_in_front_of_any_line_loses_no_number() -> None:
    numbers = itertools.count()
    for line in itertools.count(1):
        returns, entered = Returns(), list[int]()
        if not at_line(line, ("xferlib/tickets.py", "test_ticket_interrupts.py"), lambda: use(returns, entered, numbers)):  # noqa: B023
            break
        assert set(entered) <= set(returns.unsettled())
    assert line > 8


def test_real_signals_lose_no_number() -> None:
    rng = random.Random(1)
    returns, entered, numbers = Returns(), list[int](), itertools.count()

    def endlessly() -> None:
        while True:
            use(returns, entered, numbers)

    for _ in range(300):
        by_signal(rng.uniform(10e-6, 200e-6), endlessly)
        assert set(entered) <= set(returns.unsettled())
        for number in returns.unsettled():
            returns.settled(number)
        entered.clear()


def test_waiting_ends_with_a_ticket_with_a_call_and_with_time() -> None:
    returns = Returns()
    began = time.monotonic()
    returns.wait(0.05)
    assert time.monotonic() - began >= 0.05
    tickets = [returns.ticket(3)]
    for end in (tickets.clear, lambda: returns.put(-1)):
        entered = threading.Event()

        def wait() -> None:
            entered.set()  # noqa: B023
            returns.wait(100)

        waiting = on_thread(wait)
        entered.wait(10)
        end()
        waiting.result(10)
    assert 3 in returns.unsettled()
