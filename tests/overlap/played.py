"""A device of threads for loops that `assert_overlaps` runs: its streams are the host backend's, its calls report themselves."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast, final

from xferlib_host import Stream
from xferlib_host._stream import Event

from xferlib.overlap.callbacks import CallRecording
from xferlib.overlap.calls import CallKind, CopyDirection, CudaCall, Site

MIB = 1 << 20
COMPUTE, COPIES = 1001, 1002


@final
class Played:
    """Stands for the driver, and for what a framework offers: `launch`, `copy` and the rest, on streams by their handles."""

    def __init__(self) -> None:
        self.recording = CallRecording(cast("Any", self))
        self.streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._numbers = itertools.count(1)
        self._numbering = threading.RLock()
        self._serials = itertools.count(1)

    @contextmanager
    def recorded(self, driver: object) -> Iterator[CallRecording]:
        yield self.recording

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()

    # What `loops` calls of the driver.

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def relax(self) -> None: ...

    def destroy(self, event: int) -> None: ...

    def synchronize(self) -> None:
        for stream in list(self.streams.values()):
            stream.synchronize()

    def new_event(self) -> int:
        return next(self._numbers)

    def record(self, event: int, stream: int) -> bool:
        self._events[event] = self._stream(stream).record()
        return True

    def reached(self, event: int) -> bool:
        return self._events[event].done()

    def hold(self, stream: int, gate: int) -> bool:
        word = ctypes.c_uint32.from_address(gate)
        self._stream(stream).submit(_wait_until, lambda: word.value != 0)
        return True

    # What a loop calls.

    def launch(self, stream: int = COMPUTE, *, work: Callable[[], object] = lambda: None) -> None:
        self._call("launch", lambda: self._stream(stream).submit(work), stream=stream)

    def copy(
        self, direction: CopyDirection, stream: int = COPIES, *, address: int = 0, nbytes: int = MIB, wait: bool = False
    ) -> None:
        def start() -> None:
            self._stream(stream).submit(lambda: None)
            if wait:
                self._stream(stream).synchronize()

        self._call("copy", start, stream=stream, direction=direction, nbytes=nbytes, address=address, pageable=wait)

    def record_event(self, event: int, stream: int) -> None:
        def record() -> None:
            self._events[-event] = self._stream(stream).record()

        self._call("record", record, stream=stream, event=event)

    def wait_event(self, event: int, stream: int) -> None:
        def wait() -> None:
            if -event in self._events:
                self._stream(stream).wait(self._events[-event])

        self._call("wait", wait, stream=stream, event=event)

    def sync_stream(self, stream: int) -> None:
        self._call("sync stream", lambda: self._stream(stream).synchronize(), stream=stream)

    def _stream(self, handle: int) -> Stream:
        if handle not in self.streams:
            self.streams[handle] = Stream()
        return self.streams[handle]

    def _call(self, kind: CallKind, work: Callable[[], object], **fields: Any) -> None:
        frame = sys._getframe(2)
        site = Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        recording, thread = self.recording, threading.get_ident()
        in_loop = thread == recording.loop
        call = CudaCall(serial=0, step=recording.step, in_loop=in_loop, kind=kind, function=f"cu {kind}", site=site, **fields)
        with self._numbering:
            call.serial = next(self._serials)
            recording.open[thread] = call
            if recording.listener is not None:
                recording.listener.entered(call)
            recording.calls.append(call)
        work()
        del recording.open[thread]
        if recording.listener is not None:
            recording.listener.left(call)


def _wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(1e-3)
