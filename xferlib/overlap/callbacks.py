"""Record the calls of CUDA that a process makes, as CUPTI reports them, with the line of Python that made each.

CUPTI calls back when a function of the driver or of the runtime is entered and left, on the thread that makes the call. A thread
that has the GIL comes here itself. For others, which must not wait for it, the recording's clerk does: see `engine/callbacks.h`,
where the call of the runtime and those that it makes in the driver become one. A process can have only one subscriber. What a call
was given is read by `parameters`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, final

from xferlib.callers import caller_of, frame_of
from xferlib.engine.native import LEFT, MOST_FUNCTIONS, Callback, Reads, gil_library, library
from xferlib.errors import BackendUnavailableError
from xferlib.overlap.calls import CallKind, CopyDirection, CudaCall, Site
from xferlib.overlap.libcuda import Driver
from xferlib.overlap.parameters import FUNCTIONS, PER_THREAD
from xferlib.tracing.library import CuptiError, check, load
from xferlib.tracing.log import is_program

__all__ = ["CallRecording", "Listener", "recorded", "site_of"]

LONGEST_SECONDS = 1.0
"""That a call waits for the clerk."""
LATE_KINDS: tuple[CallKind, ...] = ("record", "wait")
"""Calls of which only the order matters, and that keep nobody: a thread that makes one goes on if the clerk does not come soon. A
framework may make them under a lock of its own, which another thread may wait for with the GIL."""
LATE = (
    "calls of CUDA by threads that did not hold Python's GIL were not seen in time: another thread kept it for more than a second, "
    "perhaps while it waited for one of these calls. Run it again"
)
PER_THREAD_UNSEEN = (
    "a thread that did not hold Python's GIL worked on its own default stream, which no other thread can look at. Give it a stream"
)


class Listener(Protocol):
    """Is told of each call, while the thread that makes it waits. Any thread, with the context of the call current.

    What it calls of CUDA is not recorded.
    """

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
        self._engine = gil_library()
        self._serial = next(_serials)
        self._clerk = threading.Thread(target=self._serve, name="xferlib-overlap-calls", daemon=True)
        self._unseen = False
        self._blocking: dict[int, bool] = {}
        # Calls of several threads enter the list one after the other. Reentrant: a finalizer may call CUDA inside.
        self._numbering = threading.RLock()

    def start(self) -> None:
        """Take calls from now on. A process takes those of one recording. `stop` must follow."""
        longest, check = int(LONGEST_SECONDS * 1e6), ctypes.pythonapi.PyGILState_Check
        if not self._engine.xe_callbacks_start(self._serial, longest, check, _CALLED_BACK, _reads()):
            raise RuntimeError("more would be read of parameters than the engine has room for")
        self._clerk.start()

    def stop(self) -> None:
        """Take no more calls. No thread waits because of this recording any more."""
        self._engine.xe_callbacks_stop(self._serial)

    def join(self) -> None:
        """Wait until the clerk has ended, after `stop`."""
        if self._clerk.ident is not None:
            self._clerk.join()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Do not record what the calling thread calls inside."""
        self._engine.xe_callbacks_nest(1)
        try:
            yield
        finally:
            self._engine.xe_callbacks_nest(-1)

    @property
    def missed(self) -> str:
        """Which calls were missed, and why, in words; "": none. If some were, what is recorded is not all."""
        return LATE if self._engine.xe_callbacks_missed(self._serial) else PER_THREAD_UNSEEN if self._unseen else ""

    def forgive(self) -> None:
        """Forget what was missed. Calls that are under way end unseen."""
        # The ends of these calls may have been missed.
        self.open.clear()
        self._unseen = False
        self._engine.xe_callbacks_forgive(self._serial)

    def called(self, call: Callback) -> None:
        """Take a call that is entered or left, on the thread that makes it or on behalf of that."""
        try:
            if call.thread == threading.get_ident():
                self._called(call)
            else:
                with self._driver.current(call.context):
                    self._called(call)
        except BaseException as error:  # Nothing may be raised into C.
            self.failure = self.failure or error

    def _serve(self) -> None:
        """Take the calls of threads that do not hold the GIL, one after the other, until the recording ends."""
        with self.ours():
            self._serve_all()

    def _serve_all(self) -> None:
        while library().xe_callbacks_wait(self._serial):
            # With the GIL from here on, so what is taken is handled.
            taken = self._engine.xe_callbacks_take(self._serial)
            if taken:
                self.called(taken.contents)
                self._engine.xe_callbacks_handled(taken)

    def _called(self, told: Callback) -> None:
        thread = told.thread
        left = self.open.pop(thread, None)
        if not told.enters:
            if left is not None and self.listener is not None:
                self.listener.left(left)
            return
        call = self._decoded(told)
        if call is None:
            return
        if call.kind not in LATE_KINDS:
            self.open[thread] = call
        with self._numbering:
            # Before the call is in the list, so that whoever finds it there finds its stream held.
            if self.listener is not None:
                self.listener.entered(call)
            self.calls.insert(self._place_of(call), call)

    def _place_of(self, call: CudaCall) -> int:
        """Return where in the list a call belongs: mostly at its end."""
        place = len(self.calls)
        while place and self.calls[place - 1].serial > call.serial:
            place -= 1
        return place

    def _decoded(self, told: Callback) -> CudaCall | None:
        thread, function = told.thread, FUNCTIONS[told.domain][told.number]
        at = ctypes.addressof(told) + Callback.parameters.offset
        # The thread has gone on from where it made the call, if it was not kept.
        site = None if told.state == LEFT else site_of(frame_of(thread))
        near = None
        if site is None and thread != self.loop:
            near = site_of(frame_of(self.loop))
        call = CudaCall(
            serial=told.serial,
            step=self.step,
            in_loop=thread == self.loop,
            kind=function.kind,
            function=(told.function or b"?").decode(),
            site=site,
            near=near,
        )
        call.event = function.event_of(at)
        call.stream = function.stream_of(at)
        if call.stream == PER_THREAD and thread != threading.get_ident():
            # Here the handle means another stream.
            self._unseen = True
            return None
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
_serials = itertools.count(1)


@contextmanager
def recorded(driver: Driver) -> Iterator[CallRecording]:
    """Record the calls of this process inside. Raises `BackendUnavailableError` where CUPTI is missing or taken."""
    global _recording
    recording = CallRecording(driver)
    subscriber = ctypes.c_void_p()
    try:
        try:
            cupti = load()
            check(cupti, "cuptiSubscribe", ctypes.byref(subscriber), library().xe_callbacks_called, None)
        except CuptiError as error:
            raise BackendUnavailableError(f"assert_overlaps sees the calls of a loop through CUPTI: {error}") from None
        _recording = recording
        recording.start()
        for domain, table in FUNCTIONS.items():
            for number in table:
                # A function that this version does not have is not called either.
                cupti.cuptiEnableCallback(ctypes.c_uint32(1), subscriber, domain, ctypes.c_uint32(number))
        yield recording
    finally:
        if _recording is recording:
            _recording = None
        # First: CUPTI may wait for threads that are in a callback.
        recording.stop()
        # Also where an interrupt came as soon as there was one.
        if subscriber.value is not None:
            cupti.cuptiUnsubscribe(subscriber)
        recording.join()


def site_of(frame: FrameType | None) -> Site | None:
    """Return the line of the innermost frame that is the program's; see `is_program`."""
    while frame is not None:
        code = frame.f_code
        if is_program(code.co_filename):
            return Site(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = caller_of(frame)
    return None


def _reads() -> ctypes.Array[Reads]:
    """Return what is read of the parameters of each function."""
    table = (Reads * (2 * MOST_FUNCTIONS))()
    for domain, functions in FUNCTIONS.items():
        for number, function in functions.items():
            table[(domain - 1) * MOST_FUNCTIONS + number] = Reads(
                1, *function.nbytes_read, function.kind in LATE_KINDS, function.batch
            )
    return table


def _called_back(call: ctypes._Pointer[Callback]) -> None:
    # Never freed: a thread may still be on its way here when the recording has ended.
    recording = _recording
    if recording is not None:
        recording.called(call.contents)


_CALLED_BACK = ctypes.CFUNCTYPE(None, ctypes.POINTER(Callback))(_called_back)
