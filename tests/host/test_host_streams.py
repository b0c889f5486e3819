"""Streams of the user's: queues of work, each with a thread that ends, and the current one of a thread."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
from xferlib_host import Stream
from xferlib_host._stager import NumpyStager

from tests.host.work import SECONDS, Gate, Lease, raise_error, until, within
from xferlib.errors import ClosedError


def test_submit_runs_in_order_and_does_not_wait(stream: Stream, gate: Gate) -> None:
    seen: list[int] = []
    stream.submit(gate.stand)
    for number in range(100):
        stream.submit(seen.append, number)
    assert seen == []
    gate.open()
    stream.synchronize()
    assert seen == list(range(100))


def test_an_event_is_reached_when_what_was_enqueued_before_it_has_ended(stream: Stream, gate: Gate) -> None:
    before = stream.record()
    stream.submit(gate.stand)
    behind = stream.record()
    before.synchronize()
    assert before.done()
    assert not behind.done()
    gate.open()
    behind.synchronize()
    assert behind.done()


def test_wait_holds_a_stream_and_not_the_caller(stream: Stream, gate: Gate) -> None:
    other = Stream()
    seen: list[str] = []
    stream.submit(gate.stand)
    stream.submit(seen.append, "first")
    other.wait(stream.record())
    other.submit(seen.append, "second")
    assert not other.record().done()
    gate.open()
    other.close()
    assert seen == ["first", "second"]


def test_an_exception_comes_out_of_synchronize_once_and_what_is_behind_runs(stream: Stream) -> None:
    seen: list[str] = []
    stream.submit(raise_error, KeyError("first"))
    stream.submit(raise_error, KeyError("second"))
    stream.submit(seen.append, "behind")
    stream.record().synchronize()
    with pytest.raises(KeyError, match="first"):
        stream.synchronize()
    stream.synchronize()
    assert seen == ["behind"]


def test_even_system_exit_does_not_end_the_thread_of_a_stream(stream: Stream) -> None:
    stream.submit(raise_error, SystemExit(3))
    with pytest.raises(SystemExit):
        stream.synchronize()
    stream.submit(print)
    stream.synchronize()


def test_close_waits_for_the_work_raises_its_exception_and_ends_the_thread(gate: Gate) -> None:
    stream = Stream()
    seen: list[str] = []
    stream.submit(gate.stand)
    stream.submit(seen.append, "done")
    stream.submit(raise_error, KeyError("late"))
    opener = threading.Thread(target=gate.open_when_arrived)
    opener.start()
    with pytest.raises(KeyError, match="late"):
        stream.close()
    opener.join()
    assert seen == ["done"]
    assert f"xferlib-host-stream-{stream.handle}" not in {thread.name for thread in threading.enumerate()}
    stream.close()


def test_a_closed_stream_refuses_work_and_has_nothing_to_wait_for(stager: NumpyStager) -> None:
    stream, event = Stream(), stager.record_h2d()
    resolved = event.stream_wait(stream)
    assert resolved is not None
    stream.close()
    assert stream.closed
    assert "closed" in repr(stream)
    with pytest.raises(ClosedError, match="is closed"):
        stream.submit(print)
    with pytest.raises(ClosedError, match=r"Make a new one with xferlib_host.Stream\(\)$"):
        event.stream_wait(stream)
    with pytest.raises(ClosedError):
        stager.as_source(np.zeros(1), stream)
    assert stream.record().done()
    retired = stager.retire([resolved])
    assert retired is not None
    assert retired.done()


def test_an_event_of_a_stream_that_is_closing_is_not_reached_before_its_work(gate: Gate) -> None:
    stream = Stream()
    stream.submit(gate.stand)
    # Closed by a job of another stream, so that this thread can look while the close is waiting.
    closer = Stream()
    closer.submit(stream.close)
    until(lambda: stream.closed)
    event = stream.record()
    assert not event.done()
    gate.open()
    event.synchronize()
    closer.close()


def test_a_stream_may_be_closed_by_its_own_work(stream: Stream, gate: Gate) -> None:
    seen: list[str] = []
    stream.submit(gate.stand)
    stream.submit(stream.close)
    stream.submit(seen.append, "behind the close")
    end = stream.record()
    gate.open()
    end.synchronize()
    assert stream.closed
    assert seen == ["behind the close"]


def test_a_dropped_stream_does_its_work_and_ends_its_thread(gate: Gate) -> None:
    stream, seen = Stream(), threading.Event()
    name = f"xferlib-host-stream-{stream.handle}"
    (thread,) = (thread for thread in threading.enumerate() if thread.name == name)
    stream.submit(gate.stand)
    stream.submit(seen.set)
    del stream
    gate.open()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert seen.is_set()


def test_a_stream_keeps_nothing_of_work_that_has_ended(stream: Stream) -> None:
    lease = Lease()
    gone = weakref.ref(lease)
    stream.submit(id, lease)
    del lease
    stream.synchronize()
    assert gone() is None


def test_handles_are_unique_and_never_0() -> None:
    streams = [Stream() for _ in range(3)]
    handles = {stream.handle for stream in streams}
    assert len(handles) == 3
    assert 0 not in handles
    for stream in streams:
        stream.close()


def test_the_current_stream_nests_and_belongs_to_the_thread(stager: NumpyStager, stream: Stream) -> None:
    event, inner = stager.record_h2d(), Stream()

    def current() -> object:
        resolved = event.stream_wait()
        return None if resolved is None else resolved.keepalive

    assert current() is None
    with stream:
        assert current() is stream
        with inner, stream:
            assert current() is stream
        with inner:
            assert current() is inner
            assert within(SECONDS, lambda: [current()]) == [None]
        assert current() is stream
    assert current() is None
    inner.close()


@pytest.mark.parametrize("wrong", [0, 7, True, "stream", object()])
def test_what_is_not_a_stream_is_refused_and_the_message_says_what_is(stager: NumpyStager, wrong: object) -> None:
    array = np.zeros(1)
    for call in (stager.record_h2d().stream_wait, lambda it: stager.as_source(array, it), lambda it: stager.as_target(array, it)):
        with pytest.raises(TypeError, match=r"takes an xferlib_host.Stream, or None"):
            call(wrong)
