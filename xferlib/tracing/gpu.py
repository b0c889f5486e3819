"""Recording what the GPUs of a process do, by CUPTI's activity records, and where the program asked for it, by its callbacks.

CUPTI serves one tool in a process. No Python code runs in its callbacks: see activity.h. Times are those of `perf_counter_ns`:
CUPTI is given that clock and converts what the devices say.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from types import CodeType
from typing import Any, Final, Literal, final

from xferlib.engine.native import MOST_FUNCTIONS, Call, Frame, Python, library
from xferlib.tracing.events import HOST, Event
from xferlib.tracing.library import DRIVER, RUNTIME, CuptiError, check, load
from xferlib.tracing.log import Log, shown
from xferlib.tracing.records import (
    CONCURRENT_KERNEL,
    MARKER,
    MEMCPY,
    MEMCPY2,
    MEMSET,
    STREAM,
    Activity,
    Records,
    check_size,
    cut,
    read,
)

__all__ = ["Gpus", "has_gpu"]

RECORDED: Final = (MEMCPY, MEMCPY2, MEMSET, CONCURRENT_KERNEL, MARKER)
"""Kinds of activity. Not the calls: of those that say something the callback tells, and a launch pays for no record of its call."""
BUFFER_NBYTES: Final = 1 << 20
"""Each thread that launches takes one of its own at first."""
MOST_BUFFERS: Final = 1024
"""A gigabyte: some five million kernels."""
MOST_CALLS: Final = 2_000_000
WANTED, COPIES = 1, 2
FORCED = 1
ZEROED_BUFFERS = 5
"""`CUPTI_ACTIVITY_ATTR_ZEROED_OUT_ACTIVITY_BUFFER`."""
OLDEST, NEWEST = 18, 139999
"""`CUPTI_API_VERSION` of CUDA 12.0, and the last that CUDA 13 can have. Of those between, sizes tell."""

_ISSUES = re.compile(r"(cu|cuda)Memcpy")
_WAITS = re.compile(r"(cu|cuda)\w*Synchronize")
_ALLOCATES = re.compile(
    r"cuMem(Alloc(?!Async|FromPool)|Free(?!Async)|Host(Alloc|Register|Unregister)|Create|Release)"
    r"|cuda(Malloc(?!Async|FromPool)|Free(?!Async)|Host(Alloc|Register|Unregister))"
)
_PLAIN_COPY = re.compile(r"(cuMemcpy(HtoD|DtoH)(Async)?_v2|cuMemcpy(Async)?|cudaMemcpy(Async)?_v\d+)(_pt[ds]s|_ptsz)?$")
"""Functions whose parameters begin with a destination, a source and a size."""
NVTX = "NVTX_INJECTION64_PATH"


def has_gpu() -> bool:
    """Tell whether the process has an NVIDIA GPU."""
    driver = _driver()
    count = ctypes.c_int()
    return driver is not None and driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


@final
class Gpus:
    """A recording of all GPUs, which begins here. Raises `CuptiError` where it cannot. `finish` or `abandon` must follow."""

    def __init__(self) -> None:
        self._cupti = load()
        self._subscriber = ctypes.c_void_p()
        self._enabled: list[int] = []
        self._names: Mapping[tuple[int, int], str] = {}
        self._environment = False
        self._clock = False
        self._zeroed = False
        self._began = False
        self._owns_frames = False
        self._check_version()
        engine = library()
        called, requested, completed = (_address(engine, name) for name in ("called", "requested", "completed"))
        # First: if another tool has CUPTI, nothing of it is touched.
        self._call("cuptiSubscribe", ctypes.byref(self._subscriber), called, None)
        try:
            flags, self._names = _wanted(self._cupti._handle)
            self._python = _python()
            if not engine.xe_activity_start(BUFFER_NBYTES, MOST_BUFFERS, MOST_CALLS, flags, ctypes.byref(self._python)):
                raise CuptiError("another trace runs in this process, or its buffers were not taken")
            self._began = self._owns_frames = True
            self._call("cuptiActivityRegisterTimestampCallback", _address(engine, "now"))
            self._clock = True
            self._say_zeroed(True)
            self._call("cuptiActivityRegisterCallbacks", requested, completed)
            # Streams that are there are told of, too. Without this the NULL stream looks like any other.
            with suppress(CuptiError):
                self._enable(STREAM, "cuptiActivityEnableAndDump")
            for kind in RECORDED:
                self._enable(kind, "cuptiActivityEnable")
            for domain, function in self._names:
                self._call("cuptiEnableCallback", ctypes.c_uint32(1), self._subscriber, domain, ctypes.c_uint32(function))
            if NVTX not in os.environ:
                # Before the program first names a range: then the library that it calls looks for a tool.
                os.environ[NVTX] = self._cupti._name
                self._environment = True
        except BaseException:
            self.abandon()
            raise

    def finish(self, log: Log) -> None:
        """End the recording and add it to the log of our transfers, without what the devices have not done yet."""
        engine = library()
        self._disable()
        self._cupti.cuptiActivityFlushAll(ctypes.c_uint32(FORCED))
        engine.xe_activity_stop()
        try:
            records = Records()
            try:
                for buffer in self._buffers():
                    read(buffer, _text, records)
            except CuptiError as error:
                records = Records()
                log.notes.append(f"nothing of the GPUs was read: {error}")
            _add(records, self._calls(log), log)
            dropped = ctypes.c_size_t()
            self._cupti.cuptiActivityGetNumDroppedRecords(None, ctypes.c_uint32(0), ctypes.byref(dropped))
            lost = engine.xe_activity_lost()
            if dropped.value or lost:
                log.notes.append(
                    f"not everything was recorded: {dropped.value} records and {lost} buffers or calls found no room. "
                    "Trace fewer steps"
                )
            if records.incomplete:
                log.notes.append(
                    f"{records.incomplete} copies and kernels were not done when the trace ended, and are not in it. Wait for the "
                    "device before the end of the block"
                )
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the recording and drop what was recorded."""
        self._disable()
        engine = library()
        if self._began:
            engine.xe_activity_stop()
            for _ in self._buffers():
                pass
            if self._owns_frames:
                # Nobody has read them; each holds its code.
                _places(_frames())
                self._owns_frames = False
            engine.xe_activity_drop()
            self._began = False
        if self._clock:
            # Whoever uses CUPTI next expects its own.
            self._cupti.cuptiActivityRegisterTimestampCallback(_address(engine, "usual"))
            self._clock = False
        if self._zeroed:
            self._say_zeroed(False)
        if self._subscriber.value is not None:
            self._cupti.cuptiUnsubscribe(self._subscriber)
            self._subscriber = ctypes.c_void_p()
        if self._environment and os.environ.get(NVTX) == self._cupti._name:
            del os.environ[NVTX]
            self._environment = False

    def _check_version(self) -> None:
        version = ctypes.c_uint32()
        self._call("cuptiGetVersion", ctypes.byref(version))
        if not OLDEST <= version.value <= NEWEST:
            raise CuptiError(
                f"this CUPTI is version {version.value}; known are {OLDEST} (CUDA 12.0) to {NEWEST} (CUDA 13). Install one"
            )

    def _enable(self, kind: int, function: str) -> None:
        nbytes = ctypes.c_size_t()
        size_of = getattr(self._cupti, "cuptiActivityGetStructSize", None)
        # Where it can be asked before anything is recorded.
        if size_of is not None and size_of(kind, ctypes.c_uint32(0), ctypes.byref(nbytes)) == 0:
            check_size(kind, nbytes.value)
        self._call(function, kind)
        self._enabled.append(kind)

    def _disable(self) -> None:
        while self._enabled:
            self._cupti.cuptiActivityDisable(self._enabled.pop())

    def _say_zeroed(self, zeroed: bool) -> None:
        """Tell CUPTI whether buffers are zeroed when they are given, so that it does not do so on the thread that launches."""
        nbytes, value = ctypes.c_size_t(1), ctypes.c_uint8(zeroed)
        # One that does not know of it zeroes them again.
        status = self._cupti.cuptiActivitySetAttribute(ZEROED_BUFFERS, ctypes.byref(nbytes), ctypes.byref(value))
        self._zeroed = zeroed and status == 0

    def _buffers(self) -> Iterator[Iterator[bytes]]:
        """Take all buffers; each is the bytes of its records."""
        engine = library()
        valid = ctypes.c_size_t()
        while (address := engine.xe_activity_take(ctypes.byref(valid))) is not None:
            try:
                yield cut(ctypes.string_at(address, valid.value), self._ends(address, valid.value))
            finally:
                engine.xe_activity_free(address)

    def _ends(self, address: int, nbytes: int) -> Iterator[int]:
        """Ask CUPTI where records begin, and so where those before them end."""
        record = ctypes.c_void_p()
        first = True
        while self._cupti.cuptiActivityGetNextRecord(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.byref(record)) == 0:
            if not first:
                yield (record.value or 0) - address
            first = False
        if not first:
            yield nbytes

    def _calls(self, log: Log) -> list[tuple[Event, int, int, int]]:
        """Return the calls as events, each with its correlation, destination and source."""
        engine = library()
        count = ctypes.c_size_t()
        start = engine.xe_activity_calls(ctypes.byref(count))
        calls: Any = (Call * count.value).from_address(start) if count.value else ()
        places = _places(_frames())
        found: list[tuple[Event, int, int, int]] = []
        self._owns_frames = False
        for call in calls:
            name = self._names.get((call.domain, call.function), "")
            kind = kind_of_call(name)
            if kind is None:
                continue
            site = shown(places[call.first : call.first + call.frames]) or log.served_at(call.thread)
            blocking = kind == "issue" and "Async" not in name
            event = Event(kind, name, call.start, call.end, HOST, call.thread, call.nbytes, "", site, call.start, blocking)
            found.append((event, call.correlation, call.destination, call.source))
        return found

    def _call(self, function: str, *arguments: Any) -> None:
        check(self._cupti, function, *arguments)


@cache
def _wanted(handle: int) -> tuple[bytes, Mapping[tuple[int, int], str]]:
    """Return the flags of all functions, and the names of those that count. To ask for thousands of names takes milliseconds.

    `handle`: of CUPTI, which is the same however often it is loaded.
    """
    cupti = ctypes.CDLL("libcupti", handle=handle)
    flags = bytearray(2 * MOST_FUNCTIONS)
    names: dict[tuple[int, int], str] = {}
    text = ctypes.c_char_p()
    for domain in (DRIVER, RUNTIME):
        for function in range(1, MOST_FUNCTIONS):
            if cupti.cuptiGetCallbackName(domain, ctypes.c_uint32(function), ctypes.byref(text)) != 0 or not text.value:
                continue
            name = text.value.decode()
            if kind_of_call(name) is not None:
                names[domain, function] = name
                flags[(domain - 1) * MOST_FUNCTIONS + function] = WANTED | (COPIES if _PLAIN_COPY.match(name) else 0)
    return bytes(flags), names


def kind_of_call(name: str) -> Literal["issue", "wait", "allocation"] | None:
    """Say what a function of the driver or the runtime does; None: nothing that is recorded."""
    if _ISSUES.match(name):
        return "issue"
    if _WAITS.match(name):
        return "wait"
    return "allocation" if _ALLOCATES.match(name) else None


def _add(records: Records, calls: list[tuple[Event, int, int, int]], log: Log) -> None:
    by_correlation = {correlation: (event, target, source) for event, correlation, target, source in calls if event.kind == "issue"}
    blocking: set[int] = set()
    lanes: dict[tuple[int, int], tuple[int, int]] = {}
    for activity in records.activities:
        lanes[activity.context, activity.stream] = activity.device, activity.stream
        event = Event(activity.kind, activity.name, activity.start, activity.end, activity.device, activity.stream)
        if activity.kind in ("h2d", "d2h", "copy"):
            event = _placed(event, activity, by_correlation.get(activity.correlation), log)
            if activity.memory == "pageable":
                blocking.add(activity.correlation)
        elif activity.nbytes:
            event = event._replace(nbytes=activity.nbytes)
        log.events.append(event)
    # The driver makes whoever copies from or to pageable memory wait, whatever the function is called.
    log.events.extend(event._replace(blocking=event.blocking or correlation in blocking) for event, correlation, _, _ in calls)
    log.events.extend(Event("range", name, start, end) for name, start, end in records.ranges)
    log.null_streams.update(lanes[stream] for stream in records.null_streams if stream in lanes)
    log.devices.update(_device_names({activity.device for activity in records.activities}))


def _placed(event: Event, activity: Activity, call: tuple[Event, int, int] | None, log: Log) -> Event:
    """Return a copy's event with what the call that started it knows."""
    event = event._replace(nbytes=activity.nbytes, memory=activity.memory)
    if call is None:
        return event
    issue, target, source = call
    event = event._replace(site=issue.site, issued=issue.start)
    return event._replace(site=log.asked_at(event, target if event.kind == "h2d" else source))


def _frames() -> Any:
    """Return the frames of all calls, where they lie."""
    count = ctypes.c_size_t()
    start = library().xe_activity_frames(ctypes.byref(count))
    return (Frame * count.value).from_address(start) if count.value else ()


def _places(frames: Iterable[Any]) -> list[tuple[CodeType, int]]:
    """Return code and line of frames, which no longer have to be given back."""
    kept: dict[int, CodeType] = {}
    lines: dict[tuple[int, int], int] = {}
    places = []
    line_of = ctypes.pythonapi.PyCode_Addr2Line
    decref = ctypes.pythonapi.Py_DecRef
    for frame in frames:
        key = address, _ = frame.code, frame.at
        code = kept.get(address)
        if code is None:
            code = kept[address] = ctypes.cast(ctypes.c_void_p(address), ctypes.py_object).value
        if key not in lines:
            lines[key] = line_of(ctypes.py_object(code), ctypes.c_int(frame.at))
        places.append((code, lines[key]))
        decref(ctypes.c_void_p(address))
    return places


def _address(engine: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    return ctypes.cast(getattr(engine, f"xe_activity_{name}"), ctypes.c_void_p)


def _python() -> Python:
    api = ctypes.pythonapi
    functions: Mapping[str, str] = {
        "this_thread": "PyGILState_GetThisThreadState",
        "ensure": "PyGILState_Ensure",
        "release": "PyGILState_Release",
        "frame": "PyEval_GetFrame",
        "code": "PyFrame_GetCode",
        "at": "PyFrame_GetLasti",
        "back": "PyFrame_GetBack",
        "decref": "Py_DecRef",
        "gc_disable": "PyGC_Disable",
        "gc_enable": "PyGC_Enable",
    }
    return Python(**{name: ctypes.cast(getattr(api, called), ctypes.c_void_p) for name, called in functions.items()})


def _text(address: int) -> str:
    return ctypes.string_at(address).decode(errors="replace")


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _device_names(numbers: Iterable[int]) -> dict[int, str]:
    driver = _driver()
    names = {}
    for number in numbers:
        text = ctypes.create_string_buffer(256)
        device = ctypes.c_int()
        known = (
            driver is not None
            and driver.cuDeviceGet(ctypes.byref(device), number) == 0
            and driver.cuDeviceGetName(text, 256, device) == 0
        )
        names[number] = f"GPU {number}" + (f" ({text.value.decode()})" if known else "")
    return names
