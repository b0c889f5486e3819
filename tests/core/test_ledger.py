"""What a stager has in flight, of every kind: who waits for what, and where a wait would never end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.core.fakes import Point, on_thread, succeeds
from xferlib.in_flight import InFlight
from xferlib.latch import note_copy_thread
from xferlib.ledger import Ledger, all_ledgers, reap_all, wait_for_others
from xferlib.pending import Fill, Jobs
from xferlib.protocol import Stream


class Thing:
    """Something that a copy needs."""


class Work(Fill):  # type: ignore[misc]  # Final, but for tests of who is waited for.
    """Another thread's, which keeps something."""

    def __init__(self, kept: object = None, *, holds: bool = True) -> None:
        super().__init__()
        self.owner = 0
        self.kept = kept
        self.holds = holds
        self.waits = 0

    def end(self) -> None:
        self.over = True


class Awaited(Work):  # type: ignore[misc]  # As above.
    """Is over when it is waited for."""

    def wait(self) -> None:
        self.waits += 1
        self.end()


class Records:
    """The part of a backend that Ledger needs."""

    failures = (OSError,)
    name = device = "played"

    def __init__(self) -> None:
        self.h2d: list[Point] = []
        self.d2h: list[Point] = []
        self.retired: list[Stream] = []

    def record_h2d(self) -> Point:
        return self.h2d.pop(0)

    def record_d2h(self) -> Point:
        return self.d2h.pop(0)

    def retire(self, streams: Iterable[Stream]) -> Point:
        self.retired += streams
        return Point(reached=True)


Plays = Callable[[Records], Ledger]


@pytest.fixture
def ledger() -> Iterator[Plays]:
    """Make what is in flight of a stager, and close it behind the test: whatever is open is looked at by every stager."""
    made: list[Ledger] = []

    def play(backend: Records) -> Ledger:
        made.append(Ledger(backend))  # type: ignore[arg-type]  # only the part that records is played
        return made[-1]

    yield play
    for each in made:
        each.close()


def test_a_thread_that_makes_the_copies_waits_for_none_to_make_room(ledger: Plays) -> None:
    """It is a finalizer that asks there. What is done makes room all the same."""
    backend = Records()
    pending, done, others = Point(), Point(reached=True), Point()
    backend.h2d, backend.d2h = [pending, others], [done]
    own, other = ledger(backend), ledger(backend)
    own.h2d.add(1, ())
    own.d2h.add(1, ())
    other.h2d.add(1, ())
    work = Work()
    own.jobs.add(work)

    def wait() -> list[bool]:
        note_copy_thread()
        return [own.wait_oldest(), own.wait_oldest(), wait_for_others(own, lambda entry: True, lambda job: True)]

    assert on_thread(wait).result(10) == [True, False, False]
    assert (pending.synchronized, others.synchronized, work.waits) == (0, 0, 0)
    work.end()


def test_what_is_done_makes_room_before_anything_is_waited_for(ledger: Plays) -> None:
    backend = Records()
    pending, done = Point(), Point(reached=True)
    backend.h2d, backend.d2h = [pending], [done]
    both = ledger(backend)
    thing = Thing()
    alive = weakref.ref(thing)
    both.h2d.add(1, ())
    both.d2h.add(1, (), (), thing)
    del thing
    assert both.wait_oldest()
    assert alive() is None
    assert pending.synchronized == 0


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_what_is_waited_for_may_be_of_either_direction(ledger: Plays, direction: str) -> None:
    backend = Records()
    point = Point()
    getattr(backend, direction).append(point)
    both = ledger(backend)
    getattr(both, direction).add(1, ())
    assert both.wait_oldest()
    assert point.synchronized == 1
    assert not both.wait_oldest()


def test_every_stager_is_made_to_look(ledger: Plays) -> None:
    stagers, things = [], [Thing() for _ in range(3)]
    alive = [weakref.ref(thing) for thing in things]
    while things:
        backend = Records()
        backend.h2d = [Point(reached=True)]
        stagers.append(ledger(backend))
        stagers[-1].h2d.add(1, (), (), things.pop(0))
    assert [each for each in all_ledgers() if each in stagers] == stagers
    assert reap_all()
    assert [ref() for ref in alive] == [None] * 3


def test_what_is_closed_is_looked_at_by_no_other_stager(ledger: Plays) -> None:
    one, other = ledger(Records()), ledger(Records())
    one.close()
    assert one not in all_ledgers()
    assert other in all_ledgers()


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_of_other_stagers_one_copy_after_another_is_waited_for_and_none_of_one_s_own(ledger: Plays, direction: str) -> None:
    points = [Point() for _ in range(4)]
    concerned = set(points[:3])
    stagers = []
    for point in points:
        backend = Records()
        getattr(backend, direction).append(point)
        stagers.append(ledger(backend))
        getattr(stagers[-1], direction).add(1, ())
    own = stagers[1]

    def waited() -> list[int]:
        return [point.synchronized for point in points]

    assert wait_for_others(own, lambda entry: entry.event in concerned, lambda job: False)
    assert waited() == [1, 0, 0, 0]
    assert wait_for_others(own, lambda entry: entry.event in concerned, lambda job: False)
    assert waited() == [1, 0, 1, 0]
    # Of what is left one is its own, and the other is no concern of anybody's.
    assert not wait_for_others(own, lambda entry: entry.event in concerned, lambda job: False)
    assert waited() == [1, 0, 1, 0]


def test_one_look_lets_go_of_what_is_done_of_every_kind(ledger: Plays) -> None:
    backend = Records()
    backend.h2d, backend.d2h = [Point(reached=True)], [Point(reached=True)]
    both = ledger(backend)
    things: list[Any] = [Thing(), Thing(), Thing(), np.zeros(3)]
    alive = [weakref.ref(thing) for thing in things]
    both.h2d.add(1, (), (), things[0])
    both.d2h.add(1, (), (), things[1])
    work = Work(things[2])
    both.jobs.add(work)
    work.end()
    view, ticket = both.views.lease(things[3])
    view.stream = Stream(7, None)
    things.clear()
    del work, view, ticket
    assert [ref() is None for ref in alive] == [False] * 4
    assert both.reap()
    assert [ref() is None for ref in alive] == [True] * 4
    assert not both.reap()


def test_behind_the_close_a_view_that_goes_lets_its_memory_go_and_nobody_is_asked(ledger: Plays) -> None:
    backend = Records()
    both = ledger(backend)
    memory = np.zeros(3)
    alive = weakref.ref(memory)
    view, ticket = both.views.lease(memory)
    view.stream = Stream(7, None)
    both.close()
    del memory, view, ticket
    assert not both.views.settle()
    assert alive() is None
    assert backend.retired == []


def test_a_block_that_is_filled_is_not_waited_for_by_its_own_thread() -> None:
    jobs, mine = Jobs(), Fill()
    jobs.add(mine)
    assert jobs.busy
    assert not jobs.wait_oldest()
    jobs.wait_all()
    other = on_thread(jobs.wait_oldest)
    mine.over = True
    assert other.result(10)


def test_a_thread_in_the_middle_of_a_fill_waits_for_no_other_fill_to_make_room() -> None:
    """Its finalizer may put, and so may the other's: each would wait for the other."""
    jobs, mine, others = Jobs(), Fill(), Awaited()
    jobs.add(mine)
    jobs.add(others)
    assert not jobs.wait_oldest()
    assert others.waits == 0
    # A thread that fills nothing waits for either.
    waiting = on_thread(jobs.wait_oldest)
    mine.over = True
    assert waiting.result(10)
    others.over = False
    assert jobs.wait_oldest()
    assert others.waits >= 1


def test_a_thread_in_the_middle_of_a_fill_waits_for_all_others_before_it_unlocks() -> None:
    """Copies out of memory that the other has pinned are in flight by nothing but its fill until it is over."""
    jobs, others = Jobs(), Awaited()
    jobs.add(Fill())
    jobs.add(others)
    jobs.wait_all()
    assert others.waits == 1


def test_waiting_for_all_ends_under_traffic_that_never_ends(ledger: Plays) -> None:
    class Busy(Point):
        def synchronize(self) -> None:
            # Another thread starts the next transfer while this one is waited for.
            assert len(started) < 100, "waits for transfers that were started after the call"
            add()
            super().synchronize()

    started: list[Busy] = []

    def record() -> Busy:
        started.append(Busy())
        return started[-1]

    backend = Records()
    both = ledger(backend)
    both.h2d = InFlight(record, (OSError,))

    def add() -> None:
        both.h2d.add(1, ())

    add()
    add()
    last = started[-1]
    both.wait_all()
    assert last.reached


def test_jobs_are_waited_for_in_order() -> None:
    jobs = Jobs()
    first, second = Work(), Work()
    jobs.add(second)
    jobs.add(first)
    waiting = on_thread(jobs.wait_all)
    for work in (first, second):
        assert jobs.under_way()[0] is work
        assert not waiting.done()
        work.end()
    waiting.result(10)
    assert not jobs.wait_oldest()


def test_who_waits_for_the_oldest_job_is_told_whether_there_was_one() -> None:
    jobs = Jobs()
    both = Awaited(), Awaited()
    for work in both:
        jobs.add(work)
    assert jobs.wait_oldest()
    assert [work.waits for work in both] == [1, 0]
    assert jobs.wait_oldest()
    assert not jobs.wait_oldest()
    assert [work.waits for work in both] == [1, 1]


def test_who_waits_for_pinned_memory_waits_for_a_job_that_holds_some() -> None:
    jobs = Jobs()
    without, holding = Awaited(holds=False), Awaited()
    jobs.add(without)
    jobs.add(holding)
    assert jobs.wait_oldest(pinned=True)
    assert [without.waits, holding.waits] == [0, 1]
    assert not jobs.wait_oldest(pinned=True)
    assert jobs.wait_oldest()


def test_who_waits_for_all_jobs_waits_for_each() -> None:
    jobs = Jobs()
    several = [Awaited() for _ in range(3)]
    for work in several:
        jobs.add(work)
    jobs.wait_all()
    assert [work.waits for work in several] == [1, 1, 1]


def test_a_job_that_is_over_is_let_go_of_by_the_next_look() -> None:
    jobs = Jobs()
    first = Work(Thing())
    kept = weakref.ref(first.kept)
    jobs.add(first)
    first.end()
    del first
    assert kept() is not None
    assert jobs.reap()
    assert kept() is None


def test_who_looks_is_told_whether_a_job_was_over() -> None:
    jobs = Jobs()
    work = Work()
    jobs.add(work)
    assert not jobs.reap()
    work.end()
    assert jobs.reap()
    assert not jobs.reap()


class Meanwhile(Work):  # type: ignore[misc]  # As above.
    """Calls, the first time that it is asked."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._calls = [call]

    def reached(self) -> bool:
        if self._calls:
            self._calls.pop()()
        return super().reached()


def test_a_job_that_comes_while_others_are_looked_through_is_held() -> None:
    jobs = Jobs()
    late = Work()
    first = Meanwhile(lambda: jobs.add(late))
    jobs.add(first)
    jobs.reap()
    assert set(jobs.under_way()) == {first, late}


def test_a_job_that_another_thread_lets_go_of_meanwhile_is_let_go_of_once() -> None:
    jobs = Jobs()
    first, told = Work(), list[bool]()
    second = Meanwhile(lambda: told.append(jobs.reap()))
    jobs.add(first)
    first.end()
    jobs.add(second)
    jobs.reap()
    assert told == [True]
    assert jobs.under_way() == [second]
    assert not jobs.reap()


def test_a_pin_that_dies_in_the_collector_inside_a_start_does_not_hang() -> None:
    """The collector may run anywhere, so also where this thread holds a lock of the core."""
    succeeds(
        """
        import gc, warnings, numpy as np, xferlib
        from tests.core.fakes import tampered
        warnings.simplefilter("ignore")
        inner = xferlib.registry.open_backend("host")
        def record():
            gc.collect()
            return inner.record_h2d()
        gc.disable()
        with xferlib.stager(tampered(inner=inner, record_h2d=record)) as s:
            x = s.empty_pinned(8, "u1")
            pin = s.pin(np.zeros(8))
            s.put(x).synchronize()
            cycle = [pin]
            cycle.append(cycle)
            del cycle, pin
            s.put(x).synchronize()
        """
    )


def test_a_finalizer_that_stages_while_the_pool_is_full_does_not_hang() -> None:
    succeeds(
        """
        import gc, numpy as np, xferlib
        from tests.core.fakes import tampered
        inner = xferlib.registry.open_backend("host")
        def copy(dst, src, nbytes):
            gc.collect()
            inner.copy_h2d(dst, src, nbytes)
        class Last:
            def __init__(self):
                self.me = self
            def __del__(self):
                try:
                    s.put(np.ones(4096))
                except xferlib.AllocationError as error:
                    seen.append(error)
        seen = []
        gc.disable()
        with xferlib.stager(tampered(inner=inner, copy_h2d=copy), pinned_limit=32768) as s:
            keep = s.empty_pinned(16384, "u1")
            Last()
            assert (s.put(np.full(2048, 7.0)).result() == 7).all()
            del keep
            assert (s.put(np.full(2048, 8.0)).result() == 8).all()
        assert len(seen) == 1
        """
    )


def test_a_finalizer_that_puts_inside_a_start_does_not_hang() -> None:
    succeeds(
        """
        import gc, numpy as np, xferlib
        from tests.core.fakes import tampered
        inner = xferlib.registry.open_backend("host")
        def record():
            gc.collect()
            return inner.record_h2d()
        class Last:
            def __init__(self):
                self.me = self
            def __del__(self):
                seen.append(s.put(np.ones(3)).value.tolist())
        seen = []
        gc.disable()
        with xferlib.stager(tampered(inner=inner, record_h2d=record)) as s:
            Last()
            s.put(np.zeros(8)).synchronize()
        assert seen == [[1, 1, 1]]
        """
    )
