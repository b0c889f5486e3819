"""Events: what they cover, who waits for them, and fences over several streams."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from xferlib_host import Stream
from xferlib_host._stager import NumpyStager
from xferlib_host._stream import AllEvents, CopyError, Event

from tests.host.work import Gate, address, engine_of, raise_error


def test_a_stream_waits_for_a_held_copy_and_then_sees_its_data(stager: NumpyStager, stream: Stream, gate: Gate) -> None:
    source, target, seen = np.arange(8), np.zeros(8, int), np.zeros(8, int)
    stager.h2d.submit(gate.stand)
    stager.copy_h2d(address(target), address(source), source.nbytes)
    resolved = stager.record_h2d().stream_wait(stream)
    assert resolved is not None
    assert resolved.handle == stream.handle
    stream.submit(np.copyto, seen, target)
    fence = stager.retire([resolved])
    assert fence is not None
    assert not fence.done()
    gate.open()
    fence.synchronize()
    assert seen.tolist() == source.tolist()


def test_without_a_current_stream_stream_wait_is_a_host_wait(stager: NumpyStager, gate: Gate) -> None:
    stager.h2d.submit(gate.stand)
    event = stager.record_h2d()
    opener = threading.Thread(target=gate.open_when_arrived)
    opener.start()
    assert event.stream_wait() is None
    assert event.done()
    opener.join()


def test_a_held_direction_leaves_the_other_alone(stager: NumpyStager, direction: str, gate: Gate) -> None:
    held, free = engine_of(stager, direction), engine_of(stager, "d2h" if direction == "h2d" else "h2d")
    held.submit(gate.stand)
    behind = held.record()
    free.record().synchronize()
    assert not behind.done()


def test_an_event_covers_the_copies_of_every_thread_that_returned_before(stager: NumpyStager, gate: Gate) -> None:
    source, target = np.arange(64), np.zeros(64, int)
    stager.h2d.submit(gate.stand)

    def copy(start: int) -> None:
        for index in range(start, 64, 4):
            stager.copy_h2d(address(target) + 8 * index, address(source) + 8 * index, 8)

    threads = [threading.Thread(target=copy, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    event = stager.record_h2d()
    assert not event.done()
    assert not target.any()
    gate.open()
    event.synchronize()
    assert target.tolist() == source.tolist()


def test_order_h2d_holds_later_copies_only(stager: NumpyStager, stream: Stream, gate: Gate) -> None:
    stream.submit(gate.stand)
    before = stager.record_h2d()
    stager.order_h2d(stream.record())
    behind = stager.record_h2d()
    before.synchronize()
    assert not behind.done()
    gate.open()
    behind.synchronize()


def test_retire_joins_streams_and_needs_none(stager: NumpyStager, stream: Stream, gate: Gate) -> None:
    event, idle = stager.record_h2d(), Stream()
    streams = [event.stream_wait(stream), event.stream_wait(idle)]
    stream.submit(gate.stand)
    assert stager.retire([]) is None
    fence = stager.retire(it for it in streams if it is not None)
    assert isinstance(fence, AllEvents)
    idle.synchronize()
    assert not fence.done()
    behind = Stream()
    assert fence.stream_wait(behind) is not None
    assert not behind.record().done()
    gate.open()
    fence.synchronize()
    assert fence.done()
    assert fence.stream_wait() is None
    for each in (idle, behind):
        each.close()


def test_a_fence_over_several_raises_what_any_of_them_raises(stager: NumpyStager) -> None:
    whole = stager.record_h2d()
    stager.d2h.submit(lambda: raise_error(ValueError("the second")))
    fence = AllEvents([whole, stager.record_d2h()])
    for ask in (fence.synchronize, fence.done, fence.stream_wait):
        with pytest.raises(CopyError, match="the second"):
            ask()


def test_a_stream_refuses_to_wait_for_what_has_failed_already(stager: NumpyStager, stream: Stream) -> None:
    stager.h2d.submit(lambda: raise_error(ValueError("before")))
    event = stager.record_h2d()
    with pytest.raises(CopyError):
        event.synchronize()
    with pytest.raises(CopyError, match="before"):
        stream.wait(event)
    stream.synchronize()


def test_retire_covers_work_that_raised(stager: NumpyStager, stream: Stream) -> None:
    resolved = stager.record_h2d().stream_wait(stream)
    assert resolved is not None
    stream.submit(raise_error, ValueError("a reader of the user's"))
    fence = stager.retire([resolved])
    assert fence is not None
    fence.synchronize()
    with pytest.raises(ValueError, match="a reader"):
        stream.synchronize()


def test_an_event_that_was_never_reached_is_not_done() -> None:
    assert not Event().done()
