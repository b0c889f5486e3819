"""Tickets: posted once, when the last reference is gone, whatever the garbage collector and its finalizers do."""

from __future__ import annotations

import gc
import sys
import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest

from tests.core.fakes import on_thread, succeeds
from xferlib.tickets import Alive, Returns, ticket

kept: list[Any] = []


class Cyclic:
    """Garbage in a reference cycle, with a finalizer that looks at what it holds, and may bring it back."""

    def __init__(self, returns: Returns, number: int, seen: list[list[int]], *, comes_back: bool = False) -> None:
        self.me = self
        self.ticket = returns.ticket(number)
        self._returns = returns
        self._seen = seen
        self._comes_back = comes_back

    def __del__(self) -> None:
        self._seen.append(self._returns.unsettled())
        if self._comes_back:
            kept.append(self)


def test_a_ticket_posts_its_number_when_the_last_reference_is_gone() -> None:
    returns = Returns()
    first = returns.ticket(1)
    second, alias = first, returns.ticket(2)
    assert not returns
    del first
    assert returns.unsettled() == []
    del second
    assert returns.unsettled() == [1]
    del alias
    assert returns.unsettled() == [1, 2]


def test_what_was_not_settled_comes_again() -> None:
    returns = Returns()
    for number in range(4):
        returns.ticket(number)
    assert returns.unsettled() == [0, 1, 2, 3]
    returns.settled(1)
    returns.settled(1)
    assert returns.unsettled() == [0, 2, 3]
    for number in (0, 2, 3):
        assert returns
        returns.settled(number)
    assert not returns


def test_numbers_that_another_thread_has_taken_meanwhile_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    returns = Returns()
    returns.ticket(0)

    class Posted:
        """Says how many there were before another thread took one of two."""

        def empty(self) -> bool:
            return False

        def qsize(self) -> int:
            return 2

    monkeypatch.setattr(returns, "_posted", Posted())
    assert returns.unsettled() == [0]


def test_a_finalizer_of_the_same_cycle_finds_the_row_still_held() -> None:
    returns, seen = Returns(), list[list[int]]()
    Cyclic(returns, 7, seen)
    gc.collect()
    assert seen == [[]]
    assert returns.unsettled() == [7]


def test_a_row_that_a_finalizer_brings_back_is_held_until_it_is_gone_again() -> None:
    returns, seen = Returns(), list[list[int]]()
    Cyclic(returns, 7, seen, comes_back=True)
    gc.collect()
    (back,) = kept
    assert returns.unsettled() == []
    kept.clear()
    back.me = None
    del back
    assert returns.unsettled() == [7]


def test_the_collector_knows_nothing_of_a_ticket() -> None:
    assert not gc.is_tracked(ticket(SimpleQueue[int]().put, 1))


def test_a_wait_ends_in_time_though_another_thread_takes_what_was_posted() -> None:
    returns = Returns()
    ended: list[int] = []
    over = threading.Event()

    def wait() -> None:
        while not over.is_set():
            returns.wait(0.0001)
            ended.append(1)

    waiting = threading.Thread(target=wait)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        waiting.start()
        for _ in range(2000):
            for _ in range(20):
                returns.put(-1)
                returns.pending().clear()
            before = len(ended)
            deadline = time.monotonic() + 30
            while len(ended) == before:
                assert time.monotonic() < deadline, "it waits for ever"
                time.sleep(0)
    finally:
        over.set()
        returns.put(-1)
        sys.setswitchinterval(interval)
        waiting.join(30)


def test_tickets_end_on_any_thread_while_others_settle() -> None:
    returns = Returns()
    tickets = {number: returns.ticket(number) for number in range(2000)}
    settled: list[int] = []

    def drop(start: int) -> None:
        for number in range(start, 2000, 2):
            del tickets[number]

    def settle() -> None:
        while len(settled) < 1000:
            for number in returns.unsettled():
                returns.settled(number)
                settled.append(number)

    for future in [on_thread(lambda start=start: drop(start)) for start in range(2)]:  # type: ignore[misc]  # A default binds.
        future.result(20)
    on_thread(settle).result(20)
    while returns:
        for number in returns.unsettled():
            returns.settled(number)
            settled.append(number)
    assert sorted(settled) == list(range(2000))


@pytest.mark.parametrize("how", ["drop", "unsettled"])
def test_no_interrupt_loses_a_number(how: str) -> None:
    """A signal whose handler raises, as Ctrl-C's does, thousands of times, at any moment."""
    succeeds(f"""
        import random, signal
        from xferlib.tickets import Returns
        class Interrupt(BaseException): pass
        armed = False
        def handler(*_):
            if armed: raise Interrupt
        signal.signal(signal.SIGALRM, handler)
        rng, returns, hits, seen = random.Random(1), Returns(), 0, set()
        made = 0
        while hits < 600:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 6e-5))
                while True:
                    if {how!r} == "drop":
                        made += 1
                        returns.ticket(made)
                    else:
                        returns.unsettled()
            except Interrupt:
                armed = False
                hits += 1
            if {how!r} == "unsettled":
                for _ in range(5):
                    made += 1
                    returns.ticket(made)
        last = returns.unsettled()
        # One may not have been made: its number was drawn, and the call interrupted before.
        missing = made - len(last)
        assert missing <= (hits if {how!r} == "drop" else 0), (missing, made)
        if {how!r} == "drop":
            import gc
            live = [o for o in gc.get_objects() if type(o).__name__ == "_Ticket"]
            assert not live, len(live)
    """)


class Plain:
    """Something that may be referred to weakly."""


def test_what_is_alive_is_found_in_its_order_until_it_goes() -> None:
    alive: Alive[Plain] = Alive()
    things = [Plain() for _ in range(4)]
    for thing in things:
        alive.add(thing)
    assert list(alive) == things
    del things[1], thing
    assert list(alive) == things
    # Whoever goes through them may drop some meanwhile.
    for number, found in enumerate(alive):
        assert found is not None
        if number == 0:
            things.pop()
        del found
    assert list(alive) == things
    alive.clear()
    things.clear()
    assert list(alive) == []
    assert not alive._references


def test_no_python_runs_when_something_alive_goes() -> None:
    """An interrupt at the entry of a function would be reported and forgotten there."""
    alive: Alive[Plain] = Alive()
    things = [Plain() for _ in range(100)]
    for thing in things:
        alive.add(thing)
    del thing
    called: list[str] = []

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        things.clear()
    finally:
        sys.setprofile(None)
    assert called == []
    assert not alive._references


def test_what_comes_and_goes_while_they_are_listed_disturbs_nobody() -> None:
    alive: Alive[Plain] = Alive()
    things = [Plain() for _ in range(5)]
    for thing in things:
        alive.add(thing)
    del thing

    def trace(frame: Any, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith("xferlib/tickets.py"):
            return None
        frame.f_trace_opcodes = True
        # As another thread might, between any two instructions.
        for _ in range(2):
            things.append(Plain())
            alive.add(things[-1])
        del things[1:2]
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = list(alive)
    finally:
        sys.settrace(before)
    assert found[0] is things[0]
    assert len(things) >= 8
    assert list(alive) == things
    assert None not in found
