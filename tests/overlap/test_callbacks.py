"""What is made of CUPTI's callbacks: structures as CUDA's headers declare them, calls inside calls, and the line of the caller."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.core.fakes import WATCHDOG, on_thread
from xferlib.engine.native import gil_library, library
from xferlib.errors import BackendUnavailableError
from xferlib.overlap import callbacks
from xferlib.overlap.callbacks import CallRecording, site_of
from xferlib.overlap.calls import LEGACY, CudaCall
from xferlib.overlap.parameters import PER_THREAD
from xferlib.tracing.library import CallbackData, load

DRIVER, RUNTIME = 1, 2
ENTER, EXIT = 0, 1
CLERK = "xferlib-overlap-calls"
DEVICE, PINNED, PAGEABLE = 0x7000, 0x8000, 0x9000
U32, U64 = ctypes.c_uint32, ctypes.c_uint64
SIX = [("g", U32 * 3), ("b", U32 * 3)]


class Places:
    """Stands for the driver: says which memory an address is in, and which streams are blocking or captured."""

    captured = 99

    def __init__(self) -> None:
        self.contexts: list[int | None] = []

    @contextmanager
    def current(self, context: int | None = None) -> Iterator[None]:
        self.contexts.append(context)
        yield

    def memory(self, address: int) -> str:
        return {DEVICE: "device", PINNED: "pinned"}.get(address & ~0xFFF, "pageable")

    def is_blocking(self, stream: int) -> bool:
        # As XLA's graphs of cuBLAS were, whenever a loop that multiplies matrices was looked at.
        assert stream != self.captured, "the capture is over: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        return stream == 5

    def is_capturing(self, stream: int) -> bool:
        return stream == self.captured


def struct(*fields: tuple[str, Any], **values: Any) -> ctypes.Structure:
    kind = type("Parameters", (ctypes.Structure,), {"_fields_": list(fields)})
    return cast("ctypes.Structure", kind(**values))


def copy(to: int, of: int, nbytes: int, *rest: tuple[str, Any], **values: int) -> ctypes.Structure:
    return struct(("dst", U64), ("src", U64), ("count", U64), *rest, dst=to, src=of, count=nbytes, **values)


class Accepting:
    """Stands for CUPTI: it subscribes whoever asks."""

    def cuptiSubscribe(self, subscriber: Any, *_: object) -> int:  # noqa: N802
        subscriber._obj.value = 7
        return 0

    def cuptiUnsubscribe(self, subscriber: ctypes.c_void_p) -> None:  # noqa: N802
        assert subscriber.value == 7

    def cuptiEnableCallback(self, *_: object) -> None:  # noqa: N802
        """All calls are told."""


@pytest.fixture(autouse=True)
def accepting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(callbacks, "load", Accepting)
    # On a machine that is busy nothing is missed.
    monkeypatch.setattr(callbacks, "LONGEST_SECONDS", 3600)
    yield
    assert CLERK not in [thread.name for thread in threading.enumerate()]


def recorded() -> AbstractContextManager[CallRecording]:
    return callbacks.recorded(cast("Any", Places()))


def tell(
    site: int, domain: int, number: int, parameters: ctypes.Structure | None = None, *, engine: ctypes.CDLL | None = None
) -> None:
    """Tell of a call as CUPTI does. `engine`: `library()`, to do so without the GIL."""
    data = CallbackData(site=site, function=b"cuSomething")
    if parameters is not None:
        data.parameters = ctypes.addressof(parameters)
    called = (engine or gil_library()).xe_callbacks_called
    called(None, domain, ctypes.c_uint32(number), ctypes.byref(data))


def seen(domain: int, number: int, parameters: ctypes.Structure | None = None) -> CudaCall:
    """Return what is made of a call, whether its thread holds the GIL or not."""
    with recorded() as recording:
        for engine in gil_library(), library():
            tell(ENTER, domain, number, parameters, engine=engine)
            tell(EXIT, domain, number, parameters, engine=engine)
        until = time.monotonic() + WATCHDOG
        # The clerk may come to some calls later.
        while len(recording.calls) < 2 and not recording.missed and recording.failure is None and time.monotonic() < until:
            time.sleep(0.001)
        if recording.failure is not None:
            raise recording.failure
        if recording.missed:
            # The clerk cannot look at a stream of the calling thread's own.
            assert recording.calls[0].stream == PER_THREAD
            return recording.calls[0]
        one, other = recording.calls
    assert (one.serial, other.serial) == (1, 2)
    assert replace(other, serial=1, site=one.site) == one
    return one


@pytest.mark.parametrize(
    ("domain", "number", "parameters", "stream"),
    [
        (DRIVER, 277, copy(DEVICE, PINNED, 9, ("hStream", U64), hStream=7), 7),
        (DRIVER, 421, copy(DEVICE, PINNED, 9, ("hStream", U64), hStream=0), 2),
        (DRIVER, 276, copy(DEVICE, PINNED, 9), LEGACY),
        (DRIVER, 397, copy(DEVICE, PINNED, 9), 2),
        (RUNTIME, 41, copy(DEVICE, PINNED, 9, ("kind", U32), ("stream", U64), kind=1, stream=7), 7),
        (RUNTIME, 31, copy(DEVICE, PINNED, 9, ("kind", U32), kind=1), LEGACY),
    ],
)
def test_copies_are_read_off_their_parameters(domain: int, number: int, parameters: ctypes.Structure, stream: int) -> None:
    call = seen(domain, number, parameters)
    assert (call.kind, call.direction, call.nbytes, call.address, call.pageable) == ("copy", "h2d", 9, DEVICE, False)
    assert call.stream == stream


def test_the_direction_and_the_host_memory_are_asked_of_the_driver() -> None:
    stream = ("hStream", U64)
    back = seen(DRIVER, 279, copy(PAGEABLE, DEVICE + 16, 9, stream, hStream=7))
    assert (back.direction, back.address, back.pageable) == ("d2h", DEVICE + 16, True)
    inside = seen(DRIVER, 306, copy(DEVICE, DEVICE, 9, stream, hStream=7))
    assert inside.direction is None


def test_rows_and_batches_are_added_up() -> None:
    names = ("dst", "dpitch", "src", "spitch", "width", "height", "kind", "stream")
    values = {"dst": DEVICE, "src": PINNED, "dpitch": 64, "spitch": 64, "width": 10, "height": 3, "kind": 1, "stream": 7}
    rows = struct(*((name, U32 if name == "kind" else U64) for name in names), **values)
    assert (seen(RUNTIME, 44, rows).nbytes, seen(RUNTIME, 44, rows).stream) == (30, 7)
    targets, sources, sizes = (U64 * 2)(DEVICE, DEVICE), (U64 * 2)(PINNED, PINNED), (U64 * 2)(4, 5)
    names = ("dsts", "srcs", "sizes", "count", "attrs", "indices", "attributes", "hStream")
    batch = struct(
        *((name, U64) for name in names),
        dsts=ctypes.addressof(targets),
        srcs=ctypes.addressof(sources),
        sizes=ctypes.addressof(sizes),
        count=2,
        hStream=7,
    )
    call = seen(DRIVER, 796, batch)
    assert (call.nbytes, call.direction, call.stream) == (9, "h2d", 7)


END_2D = ("kind", U32), ("host", U64), ("device", U64), ("array", U64), ("pitch", U64)


def ends(corner: tuple[str, ...], middle: tuple[tuple[str, Any], ...]) -> list[tuple[str, Any]]:
    """Return the fields of a structure of the driver: the source's, the target's, and the size."""
    one = [*((name, U64) for name in corner), *middle]
    return [(f"{end}_{name}", kind) for end in ("src", "dst") for name, kind in one]


def two_dimensions(**values: int) -> ctypes.Structure:
    return struct(*ends(("x", "y"), END_2D), ("width", U64), ("height", U64), **values)


def three_dimensions(**values: int) -> ctypes.Structure:
    middle = (*END_2D[:4], ("reserved", U64), ("pitch", U64), ("rows", U64))
    return struct(*ends(("x", "y", "z", "lod"), middle), ("width", U64), ("height", U64), ("depth", U64), **values)


def runtime_dimensions(**values: int) -> ctypes.Structure:
    fields = ("array", "x", "y", "z", "device", "pitch", "xsize", "rows")
    return struct(
        *((f"{end}_{name}", U64) for end in ("src", "dst") for name in fields),
        ("width", U64),
        ("height", U64),
        ("depth", U64),
        **values,
    )


def pointing(box: ctypes.Structure, stream: int = 7) -> ctypes.Structure:
    made = struct(("box", U64), ("stream", U64), box=ctypes.addressof(box), stream=stream)
    # An address keeps nothing alive.
    made.kept = box
    return made


@pytest.mark.parametrize(("number", "stream"), [(289, 7), (424, 7), (287, LEGACY), (288, LEGACY), (405, 2)])
def test_copies_of_rows_by_the_driver_are_read_off_their_structure(number: int, stream: int) -> None:
    place = {"dst_kind": 2, "dst_device": DEVICE, "dst_host": 1, "dst_pitch": 32, "dst_x": 4, "dst_y": 3}
    there = two_dimensions(src_kind=1, src_host=PINNED, src_pitch=64, src_device=1, width=10, height=5, **place)
    call = seen(DRIVER, number, pointing(there))
    assert (call.kind, call.direction, call.nbytes, call.pageable, call.stream) == ("copy", "h2d", 50, False, stream)
    assert call.address == DEVICE + 3 * 32 + 4
    # Memory of either kind, as the driver finds out.
    back = two_dimensions(src_kind=4, src_device=DEVICE, dst_kind=4, dst_device=PAGEABLE, width=10, height=5)
    call = seen(DRIVER, number, pointing(back))
    assert (call.direction, call.nbytes, call.pageable, call.address) == ("d2h", 50, True, DEVICE)


@pytest.mark.parametrize("number", [290, 291, 407, 425])
def test_copies_of_boxes_by_the_driver_are_read_off_their_structure(number: int) -> None:
    place = {"dst_kind": 2, "dst_device": DEVICE, "dst_x": 1, "dst_y": 2, "dst_z": 3, "dst_pitch": 16, "dst_rows": 4}
    there = three_dimensions(src_kind=1, src_host=PINNED, width=10, height=5, depth=2, **place)
    call = seen(DRIVER, number, pointing(there))
    assert (call.direction, call.nbytes, call.address) == ("h2d", 100, DEVICE + (3 * 4 + 2) * 16 + 1)
    assert call.stream == {290: LEGACY, 291: 7, 407: 2, 425: 7}[number]
    # An array has no address: it is a copy, and nobody knows which way.
    call = seen(
        DRIVER,
        number,
        pointing(three_dimensions(src_kind=1, src_host=PINNED, dst_kind=3, dst_array=9, width=10, height=5, depth=2)),
    )
    assert (call.kind, call.direction) == ("copy", None)


def test_copies_of_boxes_by_the_runtime_are_read_off_their_structure() -> None:
    back = runtime_dimensions(src_device=DEVICE, src_y=1, src_pitch=32, src_rows=4, dst_device=PINNED, width=10, height=5, depth=2)
    for number, stream in ((144, LEGACY), (145, 7), (246, 7)):
        call = seen(RUNTIME, number, pointing(back))
        assert (call.direction, call.nbytes, call.address, call.stream) == ("d2h", 100, DEVICE + 32, stream)
    names = ("dst", "dpitch", "src", "spitch", "width", "height")
    rows = struct(*((name, U64) for name in names), dst=DEVICE, src=PAGEABLE, width=10, height=3)
    call = seen(RUNTIME, 32, rows)
    assert (call.direction, call.nbytes, call.pageable, call.stream) == ("h2d", 30, True, LEGACY)


def test_memory_that_is_set_is_work_on_its_stream() -> None:
    flat = struct(("dst", U64), ("value", U32), ("count", U64), ("stream", U64), stream=7)
    rows = struct(("dst", U64), ("pitch", U64), ("value", U32), ("width", U64), ("height", U64), ("stream", U64), stream=7)
    box = struct(("dst", U64 * 4), ("value", U32), ("extent", U64 * 3), ("stream", U64), stream=7)
    for domain, number, parameters in (
        *((DRIVER, 216, flat), (DRIVER, 430, flat), (DRIVER, 222, rows), (DRIVER, 226, rows)),
        *((RUNTIME, 51, flat), (RUNTIME, 52, rows), (RUNTIME, 143, box)),
    ):
        call = seen(domain, number, parameters)
        assert (call.kind, call.stream) == ("set", 7), number
    for domain, number in ((DRIVER, 249), (DRIVER, 254), (RUNTIME, 49), (RUNTIME, 50), (RUNTIME, 142)):
        call = seen(domain, number, flat)
        assert (call.kind, call.stream) == ("set", LEGACY), number


def test_copies_inside_the_device_are_work_and_go_nowhere() -> None:
    call = seen(DRIVER, 281, copy(DEVICE, DEVICE, 9, ("hStream", U64), hStream=7))
    assert (call.kind, call.direction, call.nbytes, call.stream) == ("copy", None, 9, 7)


def test_launches_give_their_stream() -> None:
    config = struct(*SIX, ("shared", U32), ("hStream", U64), hStream=7)
    by_config = struct(("config", U64), config=ctypes.addressof(config))
    runtime = struct(("function", U64), *SIX, ("args", U64), ("shared", U64), ("stream", U64), stream=7)
    runtime_config = struct(*SIX, ("shared", U64), ("stream", U64), stream=7)
    driver = struct(("function", U64), *SIX, ("shared", U32), ("hStream", U64), hStream=7)
    graph = struct(("graph", U64), ("hStream", U64), hStream=7)
    in_runtime = struct(("config", U64), config=ctypes.addressof(runtime_config))
    for domain, number, parameters in (
        *((DRIVER, 307, driver), (DRIVER, 652, by_config), (DRIVER, 514, graph)),
        *((RUNTIME, 211, runtime), (RUNTIME, 430, in_runtime), (RUNTIME, 311, graph)),
    ):
        call = seen(domain, number, parameters)
        assert (call.kind, call.stream) == ("launch", 7)


def test_events_and_waits_give_event_and_stream() -> None:
    record = seen(DRIVER, 119, struct(("hEvent", U64), ("hStream", U64), hEvent=3, hStream=5))
    assert (record.kind, record.event, record.stream, record.blocking) == ("record", 3, 5, True)
    wait = seen(RUNTIME, 147, struct(("stream", U64), ("event", U64), ("flags", U32), stream=7, event=3))
    assert (wait.kind, wait.event, wait.stream, wait.blocking) == ("wait", 3, 7, False)
    assert seen(DRIVER, 121, struct(("hEvent", U64), hEvent=3)).event == 3
    assert seen(DRIVER, 126, struct(("hStream", U64), hStream=0)).stream == LEGACY
    assert seen(DRIVER, 17).kind == "sync device"
    assert seen(RUNTIME, 22).kind == "memory"


@pytest.mark.parametrize(
    ("number", "parameters"),
    [
        (514, struct(("graph", U64), ("hStream", U64), hStream=Places.captured)),
        (119, struct(("hEvent", U64), ("hStream", U64), hEvent=3, hStream=Places.captured)),
        (277, copy(DEVICE, PINNED, 9, ("hStream", U64), hStream=Places.captured)),
        (126, struct(("hStream", U64), hStream=Places.captured)),
    ],
    ids=["launch", "record", "copy", "sync"],
)
def test_what_is_captured_into_a_graph_is_no_work(number: int, parameters: ctypes.Structure) -> None:
    with recorded() as recording:
        for engine in gil_library(), library():
            tell(ENTER, DRIVER, number, parameters, engine=engine)
            tell(EXIT, DRIVER, number, parameters, engine=engine)
        assert (recording.calls, recording.failure, recording.missed) == ([], None, "")


@pytest.mark.parametrize("engine", [gil_library, library], ids=["with the GIL", "without"])
def test_calls_inside_a_call_count_as_that_call(engine: Callable[[], ctypes.CDLL]) -> None:
    runtime = copy(DEVICE, PINNED, 9, ("kind", U32), ("stream", U64), stream=7)
    driver = copy(DEVICE, PINNED, 9, ("hStream", U64), hStream=7)
    told: list[str] = []

    class Listener:
        def entered(self, call: CudaCall) -> None:
            told.append("entered")
            # What is called in here is nobody's.
            tell(ENTER, DRIVER, 17, engine=library())
            tell(EXIT, DRIVER, 17, engine=library())

        def left(self, call: CudaCall) -> None:
            self.entered(call)
            told[-1] = "left"

    with recorded() as recording:
        recording.listener = Listener()
        for _ in range(2):
            tell(ENTER, RUNTIME, 41, runtime, engine=engine())
            tell(ENTER, DRIVER, 277, driver, engine=engine())
            tell(EXIT, DRIVER, 277, driver, engine=engine())
            assert list(recording.open.values()) == recording.calls[-1:]
            tell(EXIT, RUNTIME, 41, runtime, engine=engine())
        with recording.ours():
            tell(ENTER, DRIVER, 17, engine=engine())
            tell(EXIT, DRIVER, 17, engine=engine())
        assert (recording.open, recording.failure, recording.missed) == ({}, None, "")
        assert told == ["entered", "left"] * 2
        assert [call.serial for call in recording.calls] == [1, 2]


def test_a_recording_that_ended_inside_a_call_leaves_the_next_nothing() -> None:
    with recorded():
        tell(ENTER, DRIVER, 17)
    with recorded() as recording:
        tell(ENTER, DRIVER, 17)
        assert len(recording.calls) == 1


def test_the_end_of_a_call_that_began_before_is_no_end_of_another() -> None:
    with recorded() as recording:
        tell(EXIT, RUNTIME, 165)
        tell(ENTER, DRIVER, 17)
        assert len(recording.calls) == len(recording.open) == 1


def test_the_line_is_that_of_the_users_code() -> None:
    call = seen(DRIVER, 17)
    assert call.site is not None
    assert (call.site.file, call.site.function) == (__file__, "tell")
    assert site_of(sys._getframe()) == (__file__, site_of(sys._getframe()).line, "test_the_line_is_that_of_the_users_code")  # type: ignore[union-attr]


@pytest.mark.parametrize("engine", [gil_library, library], ids=["with the GIL", "without"])
def test_the_line_is_that_of_the_thread_that_calls(engine: Callable[[], ctypes.CDLL]) -> None:
    def another() -> None:
        tell(ENTER, DRIVER, 17, engine=engine())

    with recorded() as recording:
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        (found,) = recording.calls
    assert found.site is not None
    assert (found.site.function, found.near, found.in_loop) == ("tell", None, False)


def test_a_thread_without_lines_of_the_user_says_where_the_loop_is() -> None:
    # The loop is in nobody's code but this test's; the thread runs code of installed packages alone.
    code = compile("call()", "/usr/lib/python3/dist-packages/framework.py", "exec")
    data = CallbackData(site=ENTER, function=b"cuSomething")

    def call() -> None:
        library().xe_callbacks_called(None, DRIVER, ctypes.c_uint32(17), ctypes.byref(data))

    call.__code__ = call.__code__.replace(co_filename="/usr/lib/python3/dist-packages/framework.py")
    with recorded() as recording:
        thread = threading.Thread(target=exec, args=(code, {"call": call}))
        thread.start()
        thread.join()
        (found,) = recording.calls
    assert found.site is None
    assert found.near is not None
    assert found.near.function == "test_a_thread_without_lines_of_the_user_says_where_the_loop_is"


def test_a_thread_may_keep_the_gil_until_another_has_come_out_of_its_call(
    built_cupti: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As XLA does: one thread calls with a lock of its own, another waits for that lock and does not give up the GIL."""
    cupti = ctypes.CDLL(str(built_cupti))
    monkeypatch.setattr(callbacks, "load", lambda: cupti)
    monkeypatch.setattr(callbacks, "LONGEST_SECONDS", 1)
    with recorded() as recording:
        caller = threading.Thread(target=cupti.standin_call_meanwhile, args=(DRIVER, 17))
        caller.start()
        assert ctypes.PyDLL(str(built_cupti)).standin_keep(20_000), "the call waited for the GIL"
        caller.join()
        assert "not seen in time" in recording.missed
        # Nobody waits in vain again. What holds the GIL is seen as before.
        tell(ENTER, DRIVER, 17, engine=library())
        tell(EXIT, DRIVER, 17, engine=library())
        assert recording.calls == []
        tell(ENTER, DRIVER, 17)
        tell(EXIT, DRIVER, 17, engine=library())
        assert len(recording.open) == 1
        recording.forgive()
        assert (recording.missed, recording.open) == ("", {})
        tell(ENTER, DRIVER, 17, engine=library())
        assert (len(recording.calls), recording.missed, recording.failure) == (2, "", None)


def test_an_event_is_recorded_while_another_thread_keeps_the_gil_and_takes_its_place_later(
    built_cupti: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its order matters, so its thread need not wait for as long as others do, and nothing is missed."""
    cupti = ctypes.CDLL(str(built_cupti))
    monkeypatch.setattr(callbacks, "load", lambda: cupti)
    taken = threading.Event()
    clerk = CallRecording.called

    def late(recording: CallRecording, call: Any) -> None:
        # Behind what the thread with the GIL does next.
        if call.thread != threading.get_ident():
            taken.wait()
        clerk(recording, call)

    monkeypatch.setattr(CallRecording, "called", late)
    with recorded() as recording:
        caller = threading.Thread(target=cupti.standin_call_meanwhile, args=(DRIVER, 119))
        caller.start()
        assert ctypes.PyDLL(str(built_cupti)).standin_keep(20_000), "the call waited for the GIL"
        tell(ENTER, DRIVER, 17)
        tell(EXIT, DRIVER, 17)
        taken.set()
        caller.join()
        until = time.monotonic() + 20
        while len(recording.calls) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        assert [(call.kind, call.serial) for call in recording.calls] == [("record", 1), ("sync device", 2)]
        assert (recording.calls[0].site, recording.open, recording.failure, recording.missed) == (None, {}, None, "")


def test_calls_that_nobody_took_are_given_up_with_their_recording(built_cupti: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cupti = ctypes.CDLL(str(built_cupti))
    busy, free = threading.Event(), threading.Event()

    def never(recording: CallRecording, call: Any) -> None:
        busy.set()
        free.wait()

    with monkeypatch.context() as patched:
        patched.setattr(callbacks, "load", lambda: cupti)
        patched.setattr(CallRecording, "called", never)
        patched.setattr(CallRecording, "join", lambda _: free.set())
        with recorded() as recording:
            for _ in range(3):
                # Each goes on, the first while the clerk has it.
                on_thread(lambda: cupti.standin_call(DRIVER, 119)).result(20)
            assert busy.is_set()
    recording.join()
    assert seen(DRIVER, 17).serial == 1


def test_a_call_goes_on_when_the_listener_has_been_told() -> None:
    went_on = {ENTER: threading.Event(), EXIT: threading.Event()}
    seen_on: list[bool] = []

    class Listener:
        def entered(self, call: CudaCall) -> None:
            seen_on.append(went_on[ENTER].wait(0.1))

        def left(self, call: CudaCall) -> None:
            seen_on.append(went_on[EXIT].wait(0.1))

    def calls() -> None:
        for site, done in went_on.items():
            tell(site, DRIVER, 17, engine=library())
            done.set()

    with recorded() as recording:
        recording.listener = Listener()
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
        assert recording.missed == ""
    assert seen_on == [False, False]


def test_calls_of_many_threads_are_all_recorded() -> None:
    together = threading.Barrier(6)

    def calls(engine: ctypes.CDLL) -> None:
        together.wait(WATCHDOG)
        for _ in range(50):
            tell(ENTER, DRIVER, 17, engine=engine)
            tell(EXIT, DRIVER, 17, engine=engine)

    with recorded() as recording:
        threads = [threading.Thread(target=calls, args=(engine,)) for engine in [library()] * 4 + [gil_library()] * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (recording.open, recording.failure, recording.missed) == ({}, None, "")
        assert [call.serial for call in recording.calls] == list(range(1, 301))


def test_on_behalf_of_another_thread_its_context_is_current() -> None:
    driver = Places()
    with callbacks.recorded(cast("Any", driver)) as recording:
        data = CallbackData(site=ENTER, context=0xC0, function=b"cuSomething")
        for engine in gil_library(), library():
            engine.xe_callbacks_called(None, DRIVER, ctypes.c_uint32(17), ctypes.byref(data))
            tell(EXIT, DRIVER, 17, engine=engine)
        assert len(recording.calls) == 2
    assert driver.contexts == [0xC0, None]


def test_a_default_stream_of_the_threads_own_is_missed_by_the_clerk() -> None:
    with recorded() as recording:
        parameters = struct(("hStream", U64), hStream=PER_THREAD)
        tell(ENTER, DRIVER, 126, parameters)
        tell(EXIT, DRIVER, 126, parameters)
        assert (len(recording.calls), recording.missed) == (1, "")
        tell(ENTER, DRIVER, 126, parameters, engine=library())
        tell(EXIT, DRIVER, 126, parameters, engine=library())
        assert len(recording.calls) == 1
        assert "own default stream" in recording.missed
        recording.forgive()
        assert recording.missed == ""


def test_what_a_callback_raises_is_kept_and_the_call_goes_on() -> None:
    class Listener:
        def entered(self, call: CudaCall) -> None:
            raise KeyError(call.kind)

        left = entered

    for engine in gil_library(), library():
        with recorded() as recording:
            recording.listener = Listener()
            tell(ENTER, DRIVER, 17, engine=engine)
            assert isinstance(recording.failure, KeyError)
            assert recording.missed == ""


def test_the_end_of_a_recording_lets_all_who_wait_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is with the clerk, who waits for both; the other is in the queue."""
    out = threading.Semaphore(0)
    entered = threading.Event()

    class Listener:
        def entered(self, call: CudaCall) -> None:
            entered.set()
            for _ in range(2):
                assert out.acquire(timeout=WATCHDOG)

        def left(self, call: CudaCall) -> None: ...

    def calls() -> None:
        tell(ENTER, DRIVER, 17, engine=library())
        out.release()

    def unsubscribe(*_: object) -> None:
        # CUPTI may wait for whoever is in a callback.
        for thread in threads:
            thread.join(WATCHDOG)
        unsubscribed.append(not any(thread.is_alive() for thread in threads))

    monkeypatch.setattr(Accepting, "cuptiUnsubscribe", unsubscribe)
    threads = [threading.Thread(target=calls) for _ in range(2)]
    unsubscribed: list[bool] = []

    def ended_by_an_error() -> None:
        with recorded() as recording:
            recording.listener = Listener()
            recordings.append(recording)
            for thread in threads:
                thread.start()
            assert entered.wait(WATCHDOG)
            raise KeyboardInterrupt

    recordings: list[CallRecording] = []
    with pytest.raises(KeyboardInterrupt):
        ended_by_an_error()
    assert unsubscribed == [True]
    assert recordings[0].failure is None


class Refusing:
    """Stands for CUPTI: what it does when it is asked for a subscription, and whether that was given back."""

    def __init__(self, status: int | KeyboardInterrupt) -> None:
        self.status = status
        self.subscribed = 0

    def cuptiSubscribe(self, subscriber: Any, *_: object) -> int:  # noqa: N802
        if not isinstance(self.status, int):
            self.subscribed += 1
            subscriber._obj.value = 7
            raise self.status
        return self.status

    def cuptiUnsubscribe(self, subscriber: ctypes.c_void_p) -> None:  # noqa: N802
        assert subscriber.value == 7
        self.subscribed -= 1

    def cuptiGetResultString(self, status: int, text: Any) -> None:  # noqa: N802
        text._obj.value = b"CUPTI_ERROR"


@pytest.mark.parametrize(("status", "advice"), [(39, "End it first"), (35, "ERR_NVGPUCTRPERM"), (999, "CUPTI_ERROR")])
def test_what_cupti_refuses_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch, status: int, advice: str) -> None:
    monkeypatch.setattr(callbacks, "load", lambda: Refusing(status))
    with pytest.raises(BackendUnavailableError, match=advice) as raised, callbacks.recorded(cast("Any", Places())):
        pass
    assert ("profiler" in str(raised.value)) is (status == 39)


def test_an_interrupt_on_the_way_in_leaves_cupti_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cupti = Refusing(KeyboardInterrupt())
    monkeypatch.setattr(callbacks, "load", lambda: cupti)
    with pytest.raises(KeyboardInterrupt), callbacks.recorded(cast("Any", Places())):
        pass
    assert cupti.subscribed == 0


def test_without_cupti_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str, *_: object) -> ctypes.CDLL:
        raise OSError(name)

    library()
    monkeypatch.setattr(callbacks, "load", load)
    monkeypatch.setattr(ctypes, "CDLL", none)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(BackendUnavailableError, match="pip install nvidia-cuda-cupti"), callbacks.recorded(cast("Any", Places())):
        pass
