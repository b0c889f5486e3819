"""What the host backend has beyond the laws: streams, engines that fail for good, tables of memory, threads that end.

Gates decide every order; the only time limits are those after which a hang counts as a failure.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from xferlib_host import Stream, open_stager
from xferlib_host._engine import Engine
from xferlib_host._memory import Calls, MemoryCallError
from xferlib_host._stager import NumpyStager
from xferlib_host._stream import AllEvents, CopyError, Event

from xferlib.errors import BackendUnavailableError, ClosedError
from xferlib.protocol import HostStager, Opener

SECONDS = 30.0


class Gate:
    """Something to stand behind. `arrived` tells that the work in front of the gate has come to it."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._opened = threading.Event()

    def stand(self) -> None:
        self.arrived.set()
        if not self._opened.wait(SECONDS):
            raise TimeoutError("nobody opened the gate")

    def open(self) -> None:
        self._opened.set()

    def open_when_arrived(self) -> None:
        self.arrived.wait(SECONDS)
        self.open()


class Lease:
    """Something that can be seen to be dropped."""


def raise_error(error: BaseException) -> None:
    raise error


@pytest.fixture
def stager() -> Iterator[NumpyStager]:
    stager = open_stager()
    yield stager
    stager.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def stream(gate: Gate) -> Iterator[Stream]:
    stream = Stream()
    yield stream
    gate.open()
    stream.close()


@pytest.fixture(params=["h2d", "d2h"])
def direction(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine_of(stager: NumpyStager, direction: str) -> Engine:
    return stager.h2d if direction == "h2d" else stager.d2h


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def within(seconds: float, what: Callable[[], Any]) -> Any:
    """Return what the call returns on another thread; fail if it does not end in time."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(what()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "the call did not end, or raised"
    return results[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Opening.


def test_the_stager_is_what_the_protocol_asks_for() -> None:
    opener: Opener = open_stager
    stager: HostStager[Any] = opener()
    assert (stager.name, stager.on_gpu, stager.fallback) == ("host", False, True)
    assert stager.device.startswith("host memory (")
    assert not stager.capabilities.pinned
    assert stager.capabilities.register
    assert stager.capabilities.streams
    assert stager.capabilities.put_into
    stager.close()


def test_another_device_than_0_is_refused_with_what_to_type() -> None:
    with pytest.raises(BackendUnavailableError, match=r"no device 3.*Use device=0$"):
        open_stager(device=3)


# Streams.


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


# Events and engines.


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


def test_a_failure_stays_and_spares_what_was_recorded_before(stager: NumpyStager, direction: str) -> None:
    engine = engine_of(stager, direction)
    source, target = np.arange(4), np.zeros(4, int)
    before = engine.record()
    engine.submit(lambda: raise_error(OSError("the link is down")))
    engine.copy(address(target), address(source), source.nbytes)
    events = [engine.record(), engine.record()]
    for event in events:
        for ask in (event.synchronize, event.done, event.stream_wait):
            with pytest.raises(CopyError, match=r"OSError\('the link is down'\)") as caught:
                ask()
            assert isinstance(caught.value, stager.failures)
            assert isinstance(caught.value.__cause__, OSError)
    assert before.done()
    assert not target.any()


def test_one_failed_direction_leaves_the_other_whole(stager: NumpyStager, direction: str) -> None:
    broken, whole = engine_of(stager, direction), engine_of(stager, "d2h" if direction == "h2d" else "h2d")
    broken.submit(lambda: raise_error(ValueError()))
    with pytest.raises(CopyError):
        broken.record().synchronize()
    whole.record().synchronize()


def test_an_engine_that_waits_for_a_failed_event_fails(stager: NumpyStager) -> None:
    stager.d2h.submit(lambda: raise_error(ValueError("inside")))
    stager.order_h2d(stager.record_d2h())
    with pytest.raises(CopyError, match="inside"):
        stager.record_h2d().synchronize()


def test_a_copy_that_fails_behind_a_waiting_stream_comes_out_of_the_stream(stager: NumpyStager, stream: Stream, gate: Gate) -> None:
    stager.h2d.submit(gate.stand)
    stager.h2d.submit(lambda: raise_error(ValueError("late")))
    stager.record_h2d().stream_wait(stream)
    gate.open()
    with pytest.raises(CopyError, match="late"):
        stream.synchronize()


def test_asking_a_failed_event_again_and_again_piles_up_no_traceback(stager: NumpyStager) -> None:
    stager.h2d.submit(lambda: raise_error(ValueError()))
    event = stager.record_h2d()
    errors = []
    for _ in range(3):
        with pytest.raises(CopyError) as caught:
            event.synchronize()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3


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


def test_retire_covers_work_that_raised(stager: NumpyStager, stream: Stream) -> None:
    resolved = stager.record_h2d().stream_wait(stream)
    assert resolved is not None
    stream.submit(raise_error, ValueError("a reader of the user's"))
    fence = stager.retire([resolved])
    assert fence is not None
    fence.synchronize()
    with pytest.raises(ValueError, match="a reader"):
        stream.synchronize()


def test_close_ends_the_threads_and_events_outlive_it() -> None:
    before = set(threading.enumerate())
    stager = open_stager()
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"xferlib-host-h2d", "xferlib-host-d2h"}
    assert all(thread.daemon for thread in started)
    event = stager.record_h2d()
    stager.close()
    assert not any(thread.is_alive() for thread in started)
    assert event.done()
    with pytest.raises(ClosedError, match=r"'xferlib-host-h2d' is closed"):
        stager.copy_h2d(0, 0, 1)


def test_a_stager_that_is_dropped_ends_its_threads() -> None:
    before = set(threading.enumerate())
    stager = open_stager()
    started = set(threading.enumerate()) - before
    del stager
    gc.collect()
    for thread in started:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in started)


# Memory.


def test_pinned_memory_is_known_at_both_ends_until_it_is_freed(stager: NumpyStager) -> None:
    start = stager.alloc_pinned(10_000)
    assert start % 4096 == 0
    assert stager.is_pinned(start, 10_000)
    assert stager.is_pinned(start + 9_999, 1)
    assert not stager.is_pinned(start + 1, 10_000)
    assert not stager.is_pinned(start - 1, 2)
    stager.free_pinned(start)
    assert not stager.is_pinned(start, 1)
    with pytest.raises(MemoryCallError, match="Free what alloc_pinned returned, once"):
        stager.free_pinned(start)


def test_memory_is_pinned_in_place_once(stager: NumpyStager) -> None:
    array = np.zeros(1000, np.uint8)
    start = address(array)
    assert not stager.is_pinned(start, 1000)
    stager.pin(start, 1000)
    assert stager.is_pinned(start, 1000)
    assert stager.is_pinned(start + 500, 500)
    for offset, nbytes in ((0, 1000), (999, 5), (-5, 6), (-5, 2000), (10, 1)):
        with pytest.raises(MemoryCallError, match="Unpin it first"):
            stager.pin(start + offset, nbytes)
    stager.pin(start + 1000, 1)
    stager.unpin(start + 1000)
    stager.unpin(start)
    assert not stager.is_pinned(start, 1)
    with pytest.raises(MemoryCallError, match="once"):
        stager.unpin(start)
    stager.pin(start, 1000)
    stager.unpin(start)


def test_pinned_memory_may_not_be_pinned_again(stager: NumpyStager) -> None:
    start = stager.alloc_pinned(4096)
    with pytest.raises(MemoryCallError, match="is pinned already"):
        stager.pin(start + 100, 8)
    stager.free_pinned(start)


def test_every_call_is_counted_and_refused_ones_are_not(stager: NumpyStager) -> None:
    first, second = stager.alloc_pinned(1), stager.alloc_pinned(1)
    stager.free_pinned(first)
    stager.pin(10, 5)
    with pytest.raises(MemoryCallError):
        stager.pin(12, 1)
    blocks = [stager.alloc_device(100) for _ in range(3)]
    del blocks[0]
    assert stager.memory.calls() == Calls(2, 1, 1, 0, 3, 1)
    blocks.clear()
    stager.unpin(10)
    stager.free_pinned(second)
    assert stager.memory.calls() == Calls(2, 2, 1, 1, 3, 3)


def test_memory_that_the_system_does_not_have_is_one_of_the_failures(stager: NumpyStager) -> None:
    for allocate in (stager.alloc_pinned, stager.alloc_device):
        with pytest.raises(MemoryCallError, match="Ask for less") as caught:
            allocate(1 << 60)
        assert isinstance(caught.value, stager.failures)
    assert sum(stager.memory.calls()) == 0


def test_memory_outlives_close() -> None:
    stager = open_stager()
    pinned, block, pageable = stager.alloc_pinned(100), stager.alloc_device(100), np.zeros(100)
    stager.pin(address(pageable), 800)
    lease = Lease()
    gone = weakref.ref(lease)
    array = stager.as_array(block, 0, (25,), np.dtype("f4"), after=stager.record_h2d(), lease=lease)
    del lease, block
    stager.close()
    array[:] = 3
    assert array.sum() == 75
    stager.free_pinned(pinned)
    stager.unpin(address(pageable))
    assert gone() is not None
    assert stager.memory.calls().device_frees == 0
    del array
    assert gone() is None
    assert stager.memory.calls() == Calls(1, 1, 1, 1, 1, 1)


def test_a_block_may_outlive_its_stager_and_be_freed_on_any_thread() -> None:
    stager = open_stager()
    blocks = [stager.alloc_device(100)]
    memory = stager.memory
    stager.close()
    del stager
    thread = threading.Thread(target=blocks.clear)
    thread.start()
    thread.join()
    assert memory.calls().device_frees == 1


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 1 << 20])
def test_blocks_are_aligned_and_writable_to_the_last_byte(stager: NumpyStager, nbytes: int) -> None:
    blocks = [stager.alloc_device(nbytes) for _ in range(4)]
    for number, block in enumerate(blocks):
        assert block.address % 256 == 0
        assert block.nbytes == nbytes
        assert block.ready is None
        stager.as_array(block, 0, (nbytes,), np.dtype("u1"), after=stager.record_h2d(), lease=None)[:] = number
    for number, block in enumerate(blocks):
        array = stager.as_array(block, 0, (nbytes,), np.dtype("u1"), after=stager.record_h2d(), lease=None)
        assert (array == number).all()


DTYPES = ["?", "i1", "u8", "f2", "f8", "g", "c16", "M8[us]", "m8[s]", ">i4"]
EXTENSIONS = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (3, 4)])
@pytest.mark.parametrize("dtype", [*DTYPES, *EXTENSIONS], ids=lambda dtype: str(np.dtype(dtype)))
def test_arrays_lie_in_the_block_and_every_view_keeps_the_lease(stager: NumpyStager, dtype: Any, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(dtype)
    stager.check_dtype(dtype)
    block, lease = stager.alloc_device(512), Lease()
    gone = weakref.ref(lease)
    array = stager.as_array(block, 256, shape, dtype, after=stager.record_h2d(), lease=lease)
    del lease
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    if array.size:
        assert address(array) == block.address + 256
        array[...] = 1
        assert (array == np.ones(shape, dtype)).all()
    view: Any = array.reshape(-1).view(np.uint8)
    del array
    assert gone() is not None
    view = np.asarray(memoryview(view))[::2]
    assert gone() is not None
    del view
    assert gone() is None


@pytest.mark.parametrize("dtype", ["O", "S3", "U2", "V4", [("a", "i4")], ("f4", (2,)), [("a", "O")]], ids=str)
def test_dtypes_that_are_no_numbers_are_refused(stager: NumpyStager, dtype: Any) -> None:
    with pytest.raises(TypeError, match="moves numbers, bools and dates"):
        stager.check_dtype(np.dtype(dtype))


# Arrays of the caller's.


@pytest.mark.parametrize("wrong", [[1.0], 3.0, None, b"bytes", np.float64(1), np.ma.masked_array([1, 2], [True, False])])
def test_what_is_not_a_numpy_array_is_refused(stager: NumpyStager, wrong: Any) -> None:
    for call in (stager.as_source, stager.as_target):
        with pytest.raises(TypeError, match="are NumPy arrays without a mask"):
            call(wrong)


def test_an_array_of_objects_is_never_read_as_bytes(stager: NumpyStager) -> None:
    for call in (stager.as_source, stager.as_target):
        with pytest.raises(TypeError, match=r"dtype\('O'\)"):
            call(np.array([None, 1]))


def test_without_a_stream_a_source_has_nothing_to_wait_for(stager: NumpyStager, stream: Stream, gate: Gate) -> None:
    stream.submit(gate.stand)
    array = np.arange(6.0)
    source = stager.as_source(array)
    assert (source.address, source.nbytes) == (address(array), 48)
    assert source.keepalive is array
    stager.record_d2h().synchronize()


@pytest.mark.parametrize("current", [True, False], ids=["current", "given"])
def test_a_source_waits_for_its_stream_and_a_target_too(stager: NumpyStager, stream: Stream, gate: Gate, current: bool) -> None:
    array = np.zeros(3)
    stream.submit(gate.stand)
    if current:
        with stream:
            stager.as_source(array)
            stager.as_target(array)
    else:
        stager.as_source(array, stream)
        stager.as_target(array, stream)
    later = Gate()
    stream.submit(later.stand)
    events = [stager.record_h2d(), stager.record_d2h()]
    gate.arrived.wait(SECONDS)
    assert not any(event.done() for event in events)
    gate.open()
    # Reached with the later gate shut: only what had been enqueued is waited for.
    for event in events:
        event.synchronize()
    later.open()


@pytest.mark.parametrize(
    "view", [lambda a: a[::2], lambda a: a[::-1], lambda a: a.reshape(4, 5).T, lambda a: a.reshape(4, 5)[:, 1:3]]
)
def test_a_view_that_is_not_contiguous_is_copied_on_its_stream(
    stager: NumpyStager, stream: Stream, gate: Gate, view: Callable[[Any], Any]
) -> None:
    array, out = np.zeros(20), np.empty(20)
    stream.submit(gate.stand)
    stream.submit(np.copyto, array, np.arange(20.0))
    source = stager.as_source(view(array), stream)
    stager.copy_d2h(address(out), source.address, source.nbytes)
    event = stager.record_d2h()
    gate.open()
    event.synchronize()
    expected = view(np.arange(20.0))
    assert out[: expected.size].tolist() == expected.ravel().tolist()


def test_without_a_stream_a_view_that_is_not_contiguous_is_copied_at_once(stager: NumpyStager) -> None:
    array, out = np.arange(20.0), np.empty(10)
    source = stager.as_source(array[::2])
    array[:] = -1
    stager.copy_d2h(address(out), source.address, source.nbytes)
    stager.record_d2h().synchronize()
    assert out.tolist() == list(range(0, 20, 2))


def test_a_target_that_cannot_be_written_in_place_is_refused(stager: NumpyStager) -> None:
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="is read-only"):
        stager.as_target(frozen)
    with pytest.raises(ValueError, match=r"strides \(16,\), not C order"):
        stager.as_target(np.zeros(8)[::2])
    assert stager.as_source(frozen).nbytes == 32


def test_a_source_that_is_refused_leaves_the_engine_alone(stager: NumpyStager, stream: Stream, gate: Gate) -> None:
    stream.submit(gate.stand)
    with pytest.raises(TypeError):
        stager.as_source(np.array([None]), stream)
    with pytest.raises(ValueError, match="not C order"):
        stager.as_target(np.zeros(8)[::2], stream)
    stager.record_d2h().synchronize()
    stager.record_h2d().synchronize()


def test_nothing_is_ever_lost_and_a_sweep_finds_nothing(stager: NumpyStager) -> None:
    block = stager.alloc_device(1)
    stager.sweep()
    assert not stager.lost(block)


def test_an_event_that_was_never_reached_is_not_done() -> None:
    assert not Event().done()


# Ends of processes.


def run(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_process_ends_though_a_direction_is_held_for_ever() -> None:
    assert (
        run(
            "import threading\n"
            "from xferlib_host import Stream, open_stager\n"
            "stager, stream = open_stager(), Stream()\n"
            "stager.h2d.submit(threading.Event().wait)\n"
            "stream.submit(threading.Event().wait)\n"
            "print('end')\n"
        )
        == "end\n"
    )


def test_a_process_that_ends_lets_started_copies_end_first() -> None:
    assert (
        run(
            "import threading\n"
            "from xferlib_host import open_stager\n"
            "stager, started = open_stager(), threading.Event()\n"
            "def job():\n"
            "    started.set()\n"
            "    total = sum(range(1_000_000))\n"
            "    print('copied', flush=True)\n"
            "stager.h2d.submit(job)\n"
            "started.wait()\n"
        )
        == "copied\n"
    )


def test_a_forked_child_ends_by_itself() -> None:
    assert (
        run(
            "import os, sys, warnings\n"
            "warnings.simplefilter('ignore', DeprecationWarning)\n"
            "from xferlib_host import Stream, open_stager\n"
            "stager, stream = open_stager(), Stream()\n"
            "block, pinned = stager.alloc_device(100), stager.alloc_pinned(100)\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    stager.free_pinned(pinned)\n"
            "    stager.close()\n"
            "    stream.close()\n"
            "    sys.exit(7)\n"
            "_, status = os.waitpid(child, 0)\n"
            "stager.record_h2d().synchronize()\n"
            "print(os.waitstatus_to_exitcode(status))\n"
        )
        == "7\n"
    )
