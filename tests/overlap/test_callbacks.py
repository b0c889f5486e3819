"""What is made of CUPTI's callbacks: structures as CUDA's headers declare them, calls inside calls, and the line of the caller."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, cast

import pytest

from xferlib.errors import BackendUnavailableError
from xferlib.overlap import callbacks
from xferlib.overlap.callbacks import CallRecording, site_of
from xferlib.overlap.calls import LEGACY, CudaCall
from xferlib.tracing.library import CallbackData

DRIVER, RUNTIME = 1, 2
ENTER, EXIT = 0, 1
DEVICE, PINNED, PAGEABLE = 0x7000, 0x8000, 0x9000
U32, U64 = ctypes.c_uint32, ctypes.c_uint64
SIX = [("g", U32 * 3), ("b", U32 * 3)]


class Places:
    """Stands for the driver: says which memory an address is in, and which streams are blocking or captured."""

    captured = 99

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


def tell(recording: CallRecording, site: int, domain: int, number: int, parameters: ctypes.Structure | None = None) -> None:
    data = CallbackData(site=site, function=b"cuSomething")
    if parameters is not None:
        data.parameters = ctypes.addressof(parameters)
    recording.called(domain, number, ctypes.pointer(data))
    if recording.failure is not None:
        raise recording.failure


def seen(domain: int, number: int, parameters: ctypes.Structure | None = None) -> CudaCall:
    recording = CallRecording(cast("Any", Places()))
    tell(recording, ENTER, domain, number, parameters)
    (call,) = recording.calls
    return call


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
    return struct(("box", U64), ("stream", U64), box=ctypes.addressof(box), stream=stream)


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
    recording = CallRecording(cast("Any", Places()))
    tell(recording, ENTER, DRIVER, number, parameters)
    assert recording.calls == []


def test_calls_inside_a_call_count_as_that_call() -> None:
    recording = CallRecording(cast("Any", Places()))
    runtime = copy(DEVICE, PINNED, 9, ("kind", U32), ("stream", U64), stream=7)
    driver = copy(DEVICE, PINNED, 9, ("hStream", U64), hStream=7)
    told: list[str] = []

    class Listener:
        def entered(self, call: CudaCall) -> None:
            told.append("entered")
            # What is called in here is nobody's.
            tell(recording, ENTER, DRIVER, 17)
            tell(recording, EXIT, DRIVER, 17)

        def left(self, call: CudaCall) -> None:
            told.append("left")

    recording.listener = Listener()
    for _ in range(2):
        tell(recording, ENTER, RUNTIME, 41, runtime)
        tell(recording, ENTER, DRIVER, 277, driver)
        tell(recording, EXIT, DRIVER, 277, driver)
        assert list(recording.open.values()) == recording.calls[-1:]
        tell(recording, EXIT, RUNTIME, 41, runtime)
    assert recording.open == {}
    assert told == ["entered", "left"] * 2
    assert [call.serial for call in recording.calls] == [1, 2]


def test_the_line_is_that_of_the_users_code() -> None:
    call = seen(DRIVER, 17)
    assert call.site is not None
    assert (call.site.file, call.site.function) == (__file__, "tell")
    assert site_of(sys._getframe()) == (__file__, site_of(sys._getframe()).line, "test_the_line_is_that_of_the_users_code")  # type: ignore[union-attr]


def test_a_thread_without_lines_of_the_user_says_where_the_loop_is() -> None:
    recording = CallRecording(cast("Any", Places()))
    # The loop is in nobody's code but this test's; the thread runs code of installed packages alone.
    code = compile("call()", "/usr/lib/python3/dist-packages/framework.py", "exec")
    data = CallbackData(site=ENTER, function=b"cuSomething")

    def call() -> None:
        recording.called(DRIVER, 17, ctypes.pointer(data))

    call.__code__ = call.__code__.replace(co_filename="/usr/lib/python3/dist-packages/framework.py")
    thread = threading.Thread(target=exec, args=(code, {"call": call}))
    thread.start()
    thread.join()
    (found,) = recording.calls
    assert found.site is None
    assert found.near is not None
    assert found.near.function == "test_a_thread_without_lines_of_the_user_says_where_the_loop_is"


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

    monkeypatch.setattr(ctypes, "CDLL", none)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(BackendUnavailableError, match="pip install nvidia-cuda-cupti"), callbacks.recorded(cast("Any", Places())):
        pass
