"""What is in flight is held: order, letting go, failing events, and finalizers that come back."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.core.fakes import Point, on_thread, succeeds
from tests.core.points import interrupted_at
from xferlib.in_flight import REAP_EVERY_TRANSFERS, REAP_FROM_NBYTES, Entry, InFlight, let_go
from xferlib.latch import note_copy_thread
from xferlib.protocol import DeviceRange


class Thing:
    """Something that a copy needs."""


class Comes:
    """Something whose finalizer is foreign code."""

    def __init__(self, back: Callable[[], object]) -> None:
        self._back = back

    def __del__(self) -> None:
        self._back()


def queue_of(*points: Point) -> InFlight:
    left = list(points)
    return InFlight(lambda: left.pop(0), (OSError,))


def test_an_entry_is_held_until_its_event_is_done() -> None:
    point = Point()
    queue = queue_of(point)
    thing = Thing()
    alive = weakref.ref(thing)
    assert queue.add(REAP_FROM_NBYTES, (), (), thing).event is point
    del thing
    queue.reap()
    assert alive() is not None
    point.reached = True
    queue.reap()
    assert alive() is None
    assert queue.nbytes == REAP_FROM_NBYTES


@pytest.mark.parametrize("done", range(6))
def test_exactly_what_is_done_is_let_go(done: int) -> None:
    points = [Point() for _ in range(5)]
    queue = queue_of(*points)
    things = [Thing() for _ in points]
    alive = [weakref.ref(thing) for thing in things]
    while things:
        queue.add(1, (), (), things.pop(0))
    for point in points[:done]:
        point.reached = True
    queue.reap()
    assert [ref() is None for ref in alive] == [index < done for index in range(5)]


def test_what_is_done_of_many_is_found_with_few_questions() -> None:
    """Each costs as much as starting a small copy does."""
    for done in range(201):
        points = [Point() for _ in range(200)]
        queue = queue_of(*points)
        for _ in points:
            queue.add(1, ())
        for number, point in enumerate(points):
            point.reached, point.asked = number < done, 0
        queue.reap()
        assert len(queue.entries()) == 200 - done
        # Three of the oldest, one near the end, and then by halves.
        assert sum(point.asked for point in points) <= 3 + len(points).bit_length()


def reached_up_to(queue: InFlight, points: list[Point], done: int) -> int:
    """Let the first points be reached, look, and return how many questions that took."""
    for number, point in enumerate(points):
        point.reached, point.asked = number < done, 0
    queue.reap()
    assert [entry.event for entry in queue.entries()] == points[done:]
    return sum(point.asked for point in points)


@pytest.mark.parametrize("at_once", [1, 2])
def test_where_hundreds_are_under_way_a_look_that_finds_one_or_two_takes_three_questions(at_once: int) -> None:
    points = [Point() for _ in range(300)]
    queue = queue_of(*points)
    for _ in points:
        queue.add(1, ())
    looks = range(at_once, 200, at_once)
    assert {reached_up_to(queue, points, done) for done in looks} == {3}
    assert reached_up_to(queue, points, looks[-1]) == 1


@pytest.mark.parametrize("left", [1, 2])
def test_where_all_are_done_but_the_newest_a_look_takes_few_questions(left: int) -> None:
    points = [Point() for _ in range(REAP_EVERY_TRANSFERS)]
    queue = queue_of(*points)
    for _ in points:
        queue.add(1, ())
    assert reached_up_to(queue, points, REAP_EVERY_TRANSFERS - left) <= 5


def test_a_look_goes_through_hundreds_of_entries_only_when_several_are_done() -> None:
    points = [Point() for _ in range(300)]
    queue = queue_of(*points)
    for _ in points:
        queue.add(1, ())
    listed: list[list[Entry]] = []
    entries = queue.entries
    queue.entries = lambda: listed.append(entries()) or listed[-1]  # type: ignore[func-returns-value, method-assign]
    for done in (0, 1, 3):
        for point in points[:done]:
            point.reached = True
        assert queue.reap() == bool(done)
    assert listed == []
    for point in points[:10]:
        point.reached = True
    assert queue.reap()
    assert len(listed) == 1


@pytest.mark.parametrize("count", [3, 4, 9])
def test_what_is_not_done_is_held_where_another_thread_lets_go_of_some_meanwhile(count: int) -> None:
    class Takes(Point):
        def done(self) -> bool:
            if self.asked == 0:
                queue.wait_oldest()
            return super().done()

    points = [Point(reached=True), Point(reached=True), Takes(reached=True), *(Point() for _ in range(count - 3))]
    queue = queue_of(*points)
    for _ in points:
        queue.add(1, ())
    assert queue.reap()
    assert [entry.event for entry in queue.entries()] == points[3:]


def test_a_table_that_another_thread_adds_to_meanwhile_is_looked_at_as_a_whole() -> None:
    class Changes(dict[int, Entry]):
        values_asked = 0

        def values(self) -> Any:
            self.values_asked += 1
            return self._cut() if self.values_asked == 1 else super().values()

        def _cut(self) -> Iterator[Entry]:
            yield next(iter(super().values()))
            raise RuntimeError("dictionary changed size during iteration")

    points = [Point(reached=number < 2) for number in range(5)]
    queue = queue_of(*points)
    for _ in points:
        queue.add(1, ())
    queue.table = Changes(queue.table)
    assert queue.reap()
    assert [entry.event for entry in queue.entries()] == points[2:]


def test_small_transfers_are_asked_about_only_now_and_then() -> None:
    points = [Point(reached=True) for _ in range(REAP_EVERY_TRANSFERS)]
    queue = queue_of(*points)
    for _ in range(REAP_EVERY_TRANSFERS - 1):
        queue.add(1, ())
    assert sum(point.asked for point in points) == 0
    queue.add(1, ())
    assert not queue.wait_oldest()


def test_the_one_that_has_just_started_is_not_asked_about() -> None:
    points = [Point() for _ in range(10 * REAP_EVERY_TRANSFERS)]
    queue = queue_of(*points)
    for point in points:
        queue.add(1, ())
        assert point.asked == 0
        point.reached = True
        queue.reap()


def test_small_transfers_are_asked_about_only_now_and_then_where_as_many_end_as_start() -> None:
    points = [Point() for _ in range(10 * REAP_EVERY_TRANSFERS)]
    queue = queue_of(*points)
    looks = 0
    for number in range(len(points)):
        before = sum(point.asked for point in points)
        # One ends with each that starts, from the tenth on.
        points[max(0, number - 10)].reached = number >= 10
        queue.add(1, ())
        looks += sum(point.asked for point in points) > before
    assert looks == 10


def test_who_has_looked_is_not_made_to_look_again() -> None:
    points = [Point(), Point()]
    queue = queue_of(*points)
    queue.add(REAP_FROM_NBYTES, (), reaped=True)
    assert points[0].asked == 0
    queue.add(REAP_FROM_NBYTES, ())
    assert points[0].asked == 1


def test_a_large_transfer_asks_about_those_before_it_and_not_about_itself() -> None:
    points = [Point() for _ in range(3)]
    queue = queue_of(*points)
    queue.add(REAP_FROM_NBYTES, ())
    assert points[0].asked == 0
    points[0].reached = True
    queue.add(REAP_FROM_NBYTES, ())
    assert [point.asked for point in points] == [1, 0, 0]
    assert [entry.event for entry in queue.entries()] == points[1:2]
    points[1].reached = points[2].reached = True
    queue.add(REAP_FROM_NBYTES, ())
    assert queue.reap()
    assert not queue.entries()


def test_a_failed_copy_is_let_go_too() -> None:
    queue = queue_of(Point(error=OSError("broken")), Point())
    queue.add(1, ())
    queue.add(1, ())
    assert queue.wait_oldest()
    assert queue.wait_oldest()
    assert not queue.wait_oldest()


def test_waiting_for_the_oldest_waits_for_nothing_else() -> None:
    points = [Point(), Point()]
    queue = queue_of(*points)
    queue.add(1, ())
    queue.add(1, ())
    assert queue.wait_oldest()
    assert [point.synchronized for point in points] == [1, 0]


def test_what_is_let_go_may_run_finalizers_that_add_and_wait() -> None:
    points = [Point(reached=True) for _ in range(3)]
    queue = queue_of(*points)
    queue.add(1, (), (), Comes(lambda: (queue.add(REAP_FROM_NBYTES, ()), queue.wait_oldest())))
    queue.add(REAP_FROM_NBYTES, ())
    assert not queue.wait_oldest()


def test_a_failed_record_holds_what_it_was_given_no_longer_and_nothing_else_is_lost() -> None:
    points = [Point()]
    queue = queue_of(*points)
    thing = Thing()
    alive = weakref.ref(thing)
    queue.add(1, (), (), thing)
    del thing
    with pytest.raises(IndexError):
        queue.add(1, ())
    queue.reap()
    assert alive() is not None


def test_quiesce_waits_and_swallows_the_failure_of_the_copy() -> None:
    point = Point(error=OSError("broken"))
    queue_of(point).quiesce(None)
    assert point.synchronized == 1


def test_quiesce_does_not_wait_on_a_thread_that_makes_the_copies() -> None:
    """A finalizer whose start fails there would wait for itself."""
    point, thing = Point(), Thing()
    queue, alive = queue_of(point), weakref.ref(thing)

    def fail(thing: Thing) -> None:
        note_copy_thread()
        assert queue.quiesce(thing)

    on_thread(partial(fail, thing)).result(10)
    del thing
    queue.reap()
    assert alive() is not None
    point.reached = True
    queue.reap()
    assert alive() is None


def test_quiesce_keeps_memory_for_ever_if_nobody_can_say_when_the_copy_ends() -> None:
    def record() -> Point:
        raise OSError("no event")

    queue = InFlight(record, (OSError,))
    thing = Thing()
    alive = weakref.ref(thing)
    queue.quiesce(thing)
    del thing
    queue.reap()
    gc.collect()
    assert alive() is not None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_quiesce_keeps_memory_for_ever_whatever_is_raised(error: type[BaseException]) -> None:
    def record() -> Point:
        raise error("no event")

    queue = InFlight(record, (OSError,))
    thing = Thing()
    alive = weakref.ref(thing)
    with pytest.raises(error):
        queue.quiesce(thing)
    del thing
    queue.reap()
    gc.collect()
    assert alive() is not None


def test_quiesce_that_is_interrupted_once_holds_memory_until_nobody_uses_it() -> None:
    point, thing, interrupts = Point(), Thing(), iter([KeyboardInterrupt])

    def record() -> Point:
        for interrupt in interrupts:
            raise interrupt
        return point

    queue, alive = InFlight(record, (OSError,)), weakref.ref(thing)
    with pytest.raises(KeyboardInterrupt):
        queue.quiesce(thing)
    del thing
    queue.reap()
    assert alive() is not None
    point.reached = True
    queue.reap()
    assert alive() is None


def test_quiesce_that_is_interrupted_behind_its_entry_keeps_nothing_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    point, thing = Point(), Thing()
    queue, alive = queue_of(point), weakref.ref(thing)
    add = InFlight.add

    def interrupted(*arguments: Any, **named: Any) -> None:
        add(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(InFlight, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.quiesce(thing)
    del thing
    point.reached = True
    queue.reap()
    assert alive() is None


def test_what_quiesce_keeps_is_held_as_it_waits_and_is_nothing_that_a_copy_reads() -> None:
    """Other threads ask meanwhile who uses what."""

    class Looks(Point):
        def synchronize(self) -> None:
            found.extend(queue.entries())
            super().synchronize()

    found: list[Entry] = []
    thing = Thing()
    queue = queue_of(Looks())
    assert queue.quiesce(thing)
    (entry,) = found
    assert entry.keepalive is thing
    assert not entry.uses_device(DeviceRange(0, 1 << 40, None))
    assert not entry.uses_host(0, 1 << 40)


@pytest.mark.parametrize("interrupts", [0, 1])
def test_what_a_copy_uses_is_in_use_behind_an_interrupt_of_quiesce(interrupts: int) -> None:
    """It is asked for by whoever would write it again, or unlock it, as long as the copy goes on."""

    class Interrupted(Point):
        def synchronize(self) -> None:
            raise KeyboardInterrupt

    point, array, left = Interrupted(), np.zeros(10, np.uint8), iter([KeyboardInterrupt] * interrupts)

    def record() -> Point:
        for interrupt in left:
            raise interrupt
        return point

    queue = InFlight(record, (OSError,))
    with pytest.raises(KeyboardInterrupt):
        queue.quiesce(None, (array,), (DeviceRange(1 << 40, 10, None),))
    (entry,) = queue.entries()
    assert entry.uses_host(array.ctypes.data + 9, 1)
    assert entry.uses_device(DeviceRange((1 << 40) + 9, 1, None))
    point.reached = True
    queue.reap()
    assert not queue.busy


def test_wherever_quiesce_is_interrupted_behind_its_entry_what_a_copy_uses_is_in_use() -> None:
    array, target = np.zeros(10, np.uint8), DeviceRange(1 << 40, 10, None)

    class Pending(Point):
        def synchronize(self) -> None:
            """Come back at once, and be reached by nobody."""

    for number in itertools.count(2):
        queue = InFlight(Pending, (OSError,))
        cut = interrupted_at(number, ("xferlib/in_flight.py",), lambda: queue.quiesce(array, (array,), (target,)))  # noqa: B023
        assert any(entry.uses_host(array.ctypes.data, 1) and entry.uses_device(target) for entry in queue.entries())
        assert not queue._stuck
        if not cut:
            break
    # The newest interpreters let an interrupt in at fewer points.
    assert number > 4


def test_a_forked_child_lets_go_of_nothing_that_was_in_flight_in_its_parent() -> None:
    succeeds(
        """
        import gc, os
        from tests.core.fakes import Point
        from xferlib.in_flight import InFlight
        class Thing:
            def __del__(self):
                freed.append(None)
        def record():
            if broken:
                raise OSError
            return Point()
        freed, broken = [], []
        queue = InFlight(record, (OSError,))
        queue.add(1, (), (), Thing())
        broken.append(None)
        assert not queue.quiesce(Thing())
        child = os.fork()
        if child == 0:
            gone = not queue.busy
            del queue
            gc.collect()
            os._exit(0 if gone and not freed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert queue.busy and not freed
        """
    )


def test_what_uses_memory_is_found_by_every_byte_of_it() -> None:
    queue = queue_of(*(Point() for _ in range(5)))

    def source(start: int, stop: int) -> DeviceRange:
        return DeviceRange(start, stop - start, None)

    def users(start: int, stop: int) -> list[int]:
        return [entry.asked // 2 for entry in queue.entries() if entry.uses_device(source(start, stop))]

    for sources in ([source(100, 200)], [source(150, 160)], [source(0, 10), source(190, 300)], [source(300, 400)], []):
        queue.add(1, (), sources)
    assert users(120, 195) == [0, 1, 2]
    assert users(160, 190) == [0]
    assert users(10, 100) == []
    assert users(199, 300) == [0, 2]
    assert users(399, 400) == [3]
    assert users(400, 500) == []


def test_what_uses_host_memory_is_found_by_every_byte_of_it() -> None:
    queue = queue_of(Point(), Point())
    array = np.zeros(100, np.uint16)
    queue.add(1, (array[10:20], array[50:60]))
    queue.add(1, ())
    (entry, other), start = queue.entries(), array.ctypes.data
    found = [entry.uses_host(start + 2 * first, 2 * count) for first, count in ((0, 10), (9, 2), (20, 30), (59, 1), (60, 40))]
    assert found == [False, True, False, True, False]
    assert not other.uses_host(start, array.nbytes)


def test_an_event_that_was_recorded_while_another_was_does_not_answer_for_it() -> None:
    """Two threads, or a finalizer inside a start: which was recorded first is not known."""
    outer, inner, later = Point(), Point(reached=True), Point()
    order = [outer, later]

    def record() -> Point:
        point = order.pop(0)
        if point is outer:
            queue._record = lambda: inner
            queue.add(1, (), (), things.pop())
            queue._record = record
        return point

    queue = InFlight(record, (OSError,))
    things = [Thing(), Thing()]
    alive = [weakref.ref(thing) for thing in reversed(things)]
    queue.add(1, (), (), things.pop(0))
    queue.add(1, ())
    queue.reap()
    assert [ref() is None for ref in alive] == [True, False]
    outer.reached, inner.reached = True, True
    queue.reap()
    assert [ref() is None for ref in alive] == [True, True]


def test_one_that_is_done_answers_for_none_that_was_recorded_behind_it_wherever_that_is_listed() -> None:
    """Other threads come between the counting and the listing of one, so those that overlap are listed in any order."""
    queue = queue_of()
    behind = Point()
    # The last was asked for when the third had been recorded, and before the second was.
    for asked, event, recorded in ((0, None, 1), (2, behind, 6), (3, None, 4), (5, None, 7)):
        queue.table[asked] = Entry(asked, event or Point(reached=True), recorded, (), (), None)
    assert queue.reap()
    assert [entry.event for entry in queue.entries()] == [behind]


def test_what_is_done_but_was_recorded_while_another_was_is_let_go_of_by_the_same_look() -> None:
    queue = queue_of()
    for asked, recorded in ((0, 1), (2, 5), (3, 4)):
        queue.table[asked] = Entry(asked, Point(reached=True), recorded, (), (), None)
    assert queue.reap()
    assert queue.entries() == []


def test_a_copy_whose_event_was_recorded_while_another_s_was_is_asked_for_itself() -> None:
    """Of two that overlap nobody knows the order in the stream: that one is done says nothing of the other."""
    events = [Point(reached=True), Point(), Point(reached=True), Point()]
    begun: list[Point] = []

    def record() -> Point:
        event = events[len(begun)]
        begun.append(event)
        if len(begun) == 2:
            # Another thread comes, and is done with it first.
            outer = events[2]
            events[1:3] = [events[1], event]
            flight.add(0, (), (), "inner")
            return outer
        return event

    flight = InFlight(record, (OSError,))
    for name in ("first", "outer", "last"):
        flight.add(0, (), (), name)
        if name == "outer":
            events[3] = Point()
    assert flight.reap()
    assert "inner" in [entry.keepalive for entry in flight.entries()]


def test_only_the_newest_entry_is_let_go_of_by_its_event() -> None:
    points = [Point(reached=True), Point(reached=True)]
    copies = InFlight(iter(points).__next__, ())
    let_go(copies.table, points[0])
    first, second = copies.add(0, ()).event, copies.add(0, ()).event
    let_go(copies.table, first)
    assert len(copies.entries()) == 2
    let_go(copies.table, Point(reached=True))
    assert len(copies.entries()) == 2
    let_go(copies.table, second)
    assert [entry.event for entry in copies.entries()] == [first]
    let_go(copies.table, first)
    assert not copies.busy
