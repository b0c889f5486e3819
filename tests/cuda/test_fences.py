"""Events behind the work on users' streams, by a framework that notes what it is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest

from xferlib.cuda.fences import LaterEvent, Recorded, StreamFences, Wait
from xferlib.errors import CapabilityError
from xferlib.protocol import Event, Stream


class Failed(Exception):
    """As a framework's error for a status."""


@final
class Framework:
    """Events and streams by their numbers."""

    def __init__(self) -> None:
        self.capturing: set[int] = set()
        self.reached: set[int] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.fences = StreamFences(
            record=self.record,
            is_capturing=lambda handle: handle in self.capturing,
            find=lambda stream: Stream(int(str(stream)), stream),
            wait=lambda stream, event: self.calls.append(("user waits", stream, event)),
            failure=Failed,
        )

    def record(self, handle: int) -> Recorded:
        assert handle not in self.capturing
        self.calls.append(("record", handle))
        return Point(self, handle)

    def retire(self, *handles: int) -> Any:
        return self.fences.retire(tuple(Stream(handle, None) for handle in handles))


@final
class Point:
    """As a framework's event."""

    def __init__(self, framework: Framework, handle: int) -> None:
        self.framework = framework
        self.handle = handle

    def done(self) -> bool:
        return self.handle in self.framework.reached

    def synchronize(self) -> None:
        self.framework.calls.append(("synchronize", self.handle))

    def stream_wait(self, stream: object | None = None) -> Stream:
        raise AssertionError("nobody asks for it here")

    def enqueue_wait(self, wait: Wait, handle: Any) -> None:
        wait(handle, self.handle)


@pytest.fixture
def framework() -> Framework:
    return Framework()


def test_no_streams_are_no_event(framework: Framework) -> None:
    assert framework.retire() is None
    assert framework.calls == []


def test_the_event_of_one_stream_is_the_frameworks_own(framework: Framework) -> None:
    assert type(framework.retire(16)) is Point
    assert framework.calls == [("record", 16)]


def test_the_default_stream_of_some_thread_is_waited_for_by_the_one_of_all_threads(framework: Framework) -> None:
    legacy, per_thread = 1, 2
    framework.retire(per_thread)
    assert framework.calls == [("record", legacy)]
    framework.capturing.add(legacy)
    assert type(framework.retire(per_thread)) is LaterEvent


def test_a_stream_that_is_captured_is_recorded_once_after_the_capture(framework: Framework) -> None:
    framework.capturing.add(16)
    event = framework.retire(16)
    assert [event.done() for _ in range(3)] == [False] * 3
    with pytest.raises(Failed) as raised:
        event.synchronize()
    assert raised.value.args == ("cuEventSynchronize", 900)
    for name_it in (event.stream_wait, lambda stream: event.enqueue_wait(framework.calls.append, stream)):
        with pytest.raises(CapabilityError, match="stream 0x10 is being captured"):
            name_it(17)
    assert framework.calls == []
    framework.capturing.clear()
    assert not event.done()
    framework.reached.add(16)
    assert event.done()
    event.synchronize()
    assert event.stream_wait(17) == (17, 17)
    assert framework.calls == [("record", 16), ("synchronize", 16), ("user waits", 17, 16)]


def test_several_are_reached_when_all_are_and_each_is_waited_for(framework: Framework) -> None:
    framework.capturing.add(18)
    event = framework.retire(16, 17, 18)
    framework.reached.add(17)
    assert not event.done()
    framework.capturing.clear()
    framework.reached.add(18)
    # Those that are done are not asked, or waited for, again.
    assert not event.done()
    own: list[tuple[int, int]] = []
    event.enqueue_wait(lambda stream, point: own.append((stream, point)), 7)
    assert own == [(7, 16)]
    framework.calls.clear()
    assert event.stream_wait(19) == (19, 19)
    event.synchronize()
    assert framework.calls == [("user waits", 19, 16), ("synchronize", 16)]
    framework.reached.add(16)
    assert event.done()
    framework.calls.clear()
    event.synchronize()
    event.enqueue_wait(lambda *_: own.append((0, 0)), 7)
    assert framework.calls == []
    assert own == [(7, 16)]


def test_what_is_done_is_not_waited_for_again_and_nothing_else_is_left_out(framework: Framework) -> None:
    event = framework.retire(16, 17, 18)
    framework.reached.add(18)
    assert not event.done()
    framework.calls.clear()
    event.synchronize()
    assert sorted(framework.calls) == [("synchronize", 16), ("synchronize", 17)]


def test_what_waits_for_all_waits_for_each(framework: Framework) -> None:
    event: Event = framework.retire(16, 17)
    framework.calls.clear()
    event.synchronize()
    assert sorted(framework.calls) == [("synchronize", 16), ("synchronize", 17)]


@pytest.mark.parametrize("ask", [lambda event: event.done(), lambda event: event.stream_wait(17)], ids=["done", "stream_wait"])
def test_a_failure_of_the_framework_passes_through(framework: Framework, ask: Callable[[Any], object]) -> None:
    framework.capturing.add(16)
    event = framework.retire(16)

    def fail(handle: int) -> Recorded:
        raise Failed("record", 1)

    framework.capturing.clear()
    framework.fences.record = fail
    with pytest.raises(Failed):
        ask(event)
    framework.fences.record = framework.record
    assert not event.done()
    assert framework.calls == [("record", 16)]
