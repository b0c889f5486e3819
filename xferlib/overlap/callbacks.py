"""Record the calls of CUDA that a process makes, as CUPTI reports them, with the line of Python that made each.

CUPTI calls back when a function of the driver or of the runtime is entered and left, on the thread that makes the call. The call of
the runtime and those that it makes in the driver count as one. A process can have only one subscriber. What a call was given is
read by `parameters`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, final

from xferlib.callers import caller_of, frame_of
from xferlib.errors import BackendUnavailableError
from xferlib.overlap.calls import CopyDirection, CudaCall, Site
from xferlib.overlap.libcuda import Driver
from xferlib.overlap.parameters import FUNCTIONS, Function
from xferlib.tracing.library import CALLBACK, ENTER, CuptiError, check, load
from xferlib.tracing.log import is_program

__all__ = ["CallRecording", "Listener", "recorded", "site_of"]


class Listener(Protocol):
    """Is told of each call, on the thread that makes it. What it calls of CUDA is not recorded."""

    def entered(self, call: CudaCall) -> None: ...

    def left(self, call: CudaCall) -> None: ...


@final
class CallRecording:
    """The calls of a process since this was made, in the order in which they were entered. Made by `recorded`.

    Attributes:
        calls: All of them. Other threads append to it.
        step: The step of the loop that is under way. Set by whoever runs it.
        loop: The thread that runs the loop.
        listener: Told of each call; None: nobody is.
        failure: What a callback raised, if one did: then what is recorded is not to be trusted.
        open: By thread, the call that the thread is in.
    """

    def __init__(self, driver: Driver) -> None:
        self.calls: list[CudaCall] = []
        self.step = 0
        self.loop = threading.get_ident()
        self.listener: Listener | None = None
        self.failure: BaseException | None = None
        self.open: dict[int, CudaCall] = {}
        self._driver = driver
        self._ours: set[int] = set()
        self._outer: dict[int, tuple[int, int]] = {}
        self._blocking: dict[int, bool] = {}
        self._number = 0
        # Calls of several threads are numbered one after the other. Reentrant: a finalizer may call CUDA inside.
        self._numbering = threading.RLock()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Do not record what the calling thread calls inside."""
        thread = threading.get_ident()
        if thread in self._ours:
            yield
            return
        self._ours.add(thread)
        try:
            yield
        finally:
            self._ours.discard(thread)

    def called(self, domain: int, number: int, data: Any) -> None:
        """Take a callback of CUPTI."""
        thread = threading.get_ident()
        if thread in self._ours:
            return
        try:
            with self.ours():
                self._called(thread, domain, number, data)
        except BaseException as error:  # Nothing may be raised into C.
            self.failure = self.failure or error

    def _called(self, thread: int, domain: int, number: int, data: Any) -> None:
        if data.contents.site == ENTER:
            if thread in self._outer:
                # Made inside another call, which stands for both.
                return
            self._outer[thread] = (domain, number)
            call = self._decoded(thread, FUNCTIONS[domain][number], data.contents)
            if call is None:
                return
            self.open[thread] = call
            with self._numbering:
                self._number += 1
                call.serial = self._number
                # Before the call is in the list, so that whoever finds it there finds its stream held.
                if self.listener is not None:
                    self.listener.entered(call)
                self.calls.append(call)
        elif self._outer.get(thread) == (domain, number):
            del self._outer[thread]
            left = self.open.pop(thread, None)
            if left is not None and self.listener is not None:
                self.listener.left(left)

    def _decoded(self, thread: int, function: Function, data: Any) -> CudaCall | None:
        at = data.parameters
        site = site_of(sys._getframe(2))
        near = None
        if site is None and thread != self.loop:
            near = site_of(frame_of(self.loop))
        call = CudaCall(
            serial=0,
            step=self.step,
            in_loop=thread == self.loop,
            kind=function.kind,
            function=(data.function or b"?").decode(),
            site=site,
            near=near,
        )
        call.event = function.event_of(at)
        call.stream = function.stream_of(at)
        if call.stream is not None:
            # First: to ask anything else of a stream that is being captured ends the capture by an error.
            if self._driver.is_capturing(call.stream):
                return None
            if call.stream not in self._blocking:
                self._blocking[call.stream] = self._driver.is_blocking(call.stream)
            call.blocking = self._blocking[call.stream]
        copied = function.copied(at)
        if copied is not None:
            self._ends(call, *copied)
        return call

    def _ends(self, call: CudaCall, target: int, source: int, nbytes: int) -> None:
        call.nbytes = nbytes
        if 0 in (target, source):
            # An array, which is not looked at.
            return
        to, of = self._driver.memory(target), self._driver.memory(source)
        direction: CopyDirection
        if to == "device" and of in ("pinned", "pageable"):
            direction, call.address, call.pageable = "h2d", target, of == "pageable"
        elif of == "device" and to in ("pinned", "pageable"):
            direction, call.address, call.pageable = "d2h", source, to == "pageable"
        else:
            return
        call.direction = direction


_recording: CallRecording | None = None


@contextmanager
def recorded(driver: Driver) -> Iterator[CallRecording]:
    """Record the calls of this process inside. Raises `BackendUnavailableError` where CUPTI is missing or taken."""
    global _recording
    recording = CallRecording(driver)
    subscriber = ctypes.c_void_p()
    try:
        try:
            cupti = load()
            check(cupti, "cuptiSubscribe", ctypes.byref(subscriber), _CALLED_BACK, None)
        except CuptiError as error:
            raise BackendUnavailableError(f"assert_overlaps sees the calls of a loop through CUPTI: {error}") from None
        _recording = recording
        for domain, table in FUNCTIONS.items():
            for number in table:
                # A function that this version does not have is not called either.
                cupti.cuptiEnableCallback(ctypes.c_uint32(1), subscriber, domain, ctypes.c_uint32(number))
        yield recording
    finally:
        if _recording is recording:
            _recording = None
        # Also where an interrupt came as soon as there was one.
        if subscriber.value is not None:
            cupti.cuptiUnsubscribe(subscriber)


def site_of(frame: FrameType | None) -> Site | None:
    """Return the line of the innermost frame that is the program's; see `is_program`."""
    while frame is not None:
        code = frame.f_code
        if is_program(code.co_filename):
            return Site(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = caller_of(frame)
    return None


def _called_back(_: int | None, domain: int, number: int, data: Any) -> None:
    # Never freed: a thread may still be on its way here when the recording has ended.
    recording = _recording
    if recording is not None:
        recording.called(domain, number, data)


_CALLED_BACK = CALLBACK(_called_back)
