"""Record the calls of CUDA that a process makes, as CUPTI reports them, with the line of Python that made each.

CUPTI calls back when a function of the driver or of the runtime is entered and left, on the thread that makes the call. The call of
the runtime and those that it makes in the driver count as one. A process can have only one subscriber.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, Protocol, final

from xferlib.errors import BackendUnavailableError
from xferlib.overlap.calls import LEGACY, Call, Direction, Kind, Site
from xferlib.overlap.driver import Driver
from xferlib.tracing.library import CALLBACK, DRIVER, ENTER, RUNTIME, CuptiError, check, load
from xferlib.tracing.log import is_program

__all__ = ["Listener", "Recording", "recorded", "site_of"]

PER_THREAD = 2
"""The handle of the calling thread's default stream."""


class _End(NamedTuple):
    """Where one end of a copy of rows lies, in the structure that describes it: places of words, in bytes."""

    corner: tuple[int, ...]
    """Of x in bytes, y and, in three dimensions, z."""
    pitch: int
    height: int | None
    """In rows; None: there are two dimensions."""
    kind: int | None = None
    """Of what memory it says it is: then the address is at `host` for host memory, else at `device`."""
    host: int = 0
    device: int = 0


class _Box(NamedTuple):
    """A structure that describes a copy of rows."""

    source: _End
    target: _End
    size: tuple[int, ...]
    """Of its width in bytes, its height and its depth."""


# CUDA_MEMCPY2D and CUDA_MEMCPY3D of cuda.h, cudaMemcpy3DParms of driver_types.h.
_BOX_2D = _Box(_End((0, 8), 48, None, 16, 24, 32), _End((56, 64), 104, None, 72, 80, 88), (112, 120))
_BOX_3D = _Box(_End((0, 8, 16), 72, 80, 32, 40, 48), _End((88, 96, 104), 160, 168, 120, 128, 136), (176, 184, 192))
_BOX_3D_RUNTIME = _Box(_End((8, 16, 24), 40, 56, device=32), _End((72, 80, 88), 104, 120, device=96), (128, 136, 144))
HOST_MEMORY, ARRAY_MEMORY = 1, 3


class _Fields(NamedTuple):
    """Where a function's parameters lie, in bytes from the start of the structure that CUPTI shows. None: there is no such one."""

    kind: Kind
    stream: int | None = None
    event: int | None = None
    target: int | None = None
    source: int | None = None
    nbytes: int | None = None
    rows: int | None = None
    by_config: bool = False
    """The stream lies at 32 in the structure to which the first parameter points."""
    batch: bool = False
    """Target, source and bytes are arrays, of the length at 24."""
    box: _Box | None = None
    """The first parameter points to a structure that describes the copy."""
    per_thread: bool = False


def _both(number: int, threaded: int | None, fields: _Fields) -> dict[int, _Fields]:
    both = {number: fields}
    if threaded is not None:
        both[threaded] = fields._replace(per_thread=True)
    return both


_COPY = _Fields("copy", target=0, source=8, nbytes=16)
_ROWS = _Fields("copy", target=0, source=16, nbytes=32, rows=40)
_SET = _Fields("set")
# The numbers are from cupti_driver_cbid.h and cupti_runtime_cbid.h, where they are only ever added; the offsets from
# generated_cuda_meta.h and generated_cuda_runtime_api_meta.h. Checked with the headers of CUDA 13.0.
_DRIVER: dict[int, _Fields] = {
    **_both(276, 397, _COPY),  # cuMemcpyHtoD_v2
    **_both(278, 398, _COPY),  # cuMemcpyDtoH_v2
    **_both(305, 408, _COPY),  # cuMemcpy
    **_both(277, 421, _COPY._replace(stream=24)),  # cuMemcpyHtoDAsync_v2
    **_both(279, 422, _COPY._replace(stream=24)),  # cuMemcpyDtoHAsync_v2
    **_both(306, 418, _COPY._replace(stream=24)),  # cuMemcpyAsync
    **_both(280, 399, _COPY),  # cuMemcpyDtoD_v2
    **_both(281, 423, _COPY._replace(stream=24)),  # cuMemcpyDtoDAsync_v2
    **_both(287, 405, _Fields("copy", box=_BOX_2D)),  # cuMemcpy2D_v2
    **_both(288, 406, _Fields("copy", box=_BOX_2D)),  # cuMemcpy2DUnaligned_v2
    **_both(289, 424, _Fields("copy", box=_BOX_2D, stream=8)),  # cuMemcpy2DAsync_v2
    **_both(290, 407, _Fields("copy", box=_BOX_3D)),  # cuMemcpy3D_v2
    **_both(291, 425, _Fields("copy", box=_BOX_3D, stream=8)),  # cuMemcpy3DAsync_v2
    # cuMemsetD8_v2, D16, D32, D2D8, D2D16, D2D32.
    **{number: fields for first in range(6) for number, fields in _both(249 + first, 411 + first, _SET).items()},
    **_both(216, 428, _SET._replace(stream=24)),  # cuMemsetD8Async
    **_both(218, 429, _SET._replace(stream=24)),  # cuMemsetD16Async
    **_both(220, 430, _SET._replace(stream=24)),  # cuMemsetD32Async
    **_both(222, 431, _SET._replace(stream=40)),  # cuMemsetD2D8Async
    **_both(224, 432, _SET._replace(stream=40)),  # cuMemsetD2D16Async
    **_both(226, 433, _SET._replace(stream=40)),  # cuMemsetD2D32Async
    **_both(776, 777, _COPY._replace(stream=64, batch=True)),  # cuMemcpyBatchAsync
    **_both(796, 797, _COPY._replace(stream=56, batch=True)),  # cuMemcpyBatchAsync_v2
    **_both(307, 442, _Fields("launch", stream=40)),  # cuLaunchKernel
    **_both(477, 478, _Fields("launch", stream=40)),  # cuLaunchCooperativeKernel
    **_both(652, 653, _Fields("launch", by_config=True)),  # cuLaunchKernelEx
    **_both(514, 515, _Fields("launch", stream=8)),  # cuGraphLaunch
    **_both(119, 441, _Fields("record", event=0, stream=8)),  # cuEventRecord
    **_both(587, 588, _Fields("record", event=0, stream=8)),  # cuEventRecordWithFlags
    **_both(295, 436, _Fields("wait", stream=0, event=8)),  # cuStreamWaitEvent
    **_both(126, 440, _Fields("sync stream", stream=0)),  # cuStreamSynchronize
    121: _Fields("sync event", event=0),  # cuEventSynchronize
    17: _Fields("sync device"),  # cuCtxSynchronize
    800: _Fields("sync device"),  # cuCtxSynchronize_v2
    # cuMemAlloc, AllocPitch, Free, AllocHost, FreeHost, HostAlloc, and their second versions.
    **dict.fromkeys((29, 31, 33, 37, 38, 39, 243, 244, 245, 271, 294), _Fields("memory")),
    # cuMemHostRegister, HostUnregister, HostRegister_v2, AllocManaged, Create, Release, Map, Unmap.
    **dict.fromkeys((301, 302, 379, 371, 549, 550, 551, 552), _Fields("memory")),
}
_RUNTIME: dict[int, _Fields] = {
    **_both(31, 215, _COPY),  # cudaMemcpy
    **_both(41, 225, _COPY._replace(stream=32)),  # cudaMemcpyAsync
    **_both(32, 216, _ROWS),  # cudaMemcpy2D
    **_both(44, 228, _ROWS._replace(stream=56)),  # cudaMemcpy2DAsync
    **_both(144, 245, _Fields("copy", box=_BOX_3D_RUNTIME)),  # cudaMemcpy3D
    **_both(145, 246, _Fields("copy", box=_BOX_3D_RUNTIME, stream=8)),  # cudaMemcpy3DAsync
    **_both(49, 233, _SET),  # cudaMemset
    **_both(50, 234, _SET),  # cudaMemset2D
    **_both(142, 243, _SET),  # cudaMemset3D
    **_both(51, 235, _SET._replace(stream=24)),  # cudaMemsetAsync
    **_both(52, 236, _SET._replace(stream=40)),  # cudaMemset2DAsync
    **_both(143, 244, _SET._replace(stream=64)),  # cudaMemset3DAsync
    **_both(482, 483, _COPY._replace(stream=64, batch=True)),  # cudaMemcpyBatchAsync
    **_both(509, 510, _COPY._replace(stream=56, batch=True)),  # cudaMemcpyBatchAsync, from 13.0 on
    **_both(211, 214, _Fields("launch", stream=48)),  # cudaLaunchKernel
    **_both(269, 270, _Fields("launch", stream=48)),  # cudaLaunchCooperativeKernel
    **_both(505, 506, _Fields("launch", stream=48)),  # __cudaLaunchKernel
    **_both(430, 431, _Fields("launch", by_config=True)),  # cudaLaunchKernelExC
    **_both(311, 312, _Fields("launch", stream=8)),  # cudaGraphLaunch
    **_both(135, 242, _Fields("record", event=0, stream=8)),  # cudaEventRecord
    **_both(370, 371, _Fields("record", event=0, stream=8)),  # cudaEventRecordWithFlags
    **_both(147, 247, _Fields("wait", stream=0, event=8)),  # cudaStreamWaitEvent
    **_both(131, 239, _Fields("sync stream", stream=0)),  # cudaStreamSynchronize
    137: _Fields("sync event", event=0),  # cudaEventSynchronize
    165: _Fields("sync device"),  # cudaDeviceSynchronize
    # cudaMalloc, MallocPitch, Free, MallocHost, FreeHost, HostAlloc, Malloc3D, HostRegister, HostUnregister, MallocManaged.
    **dict.fromkeys((20, 21, 22, 25, 26, 27, 140, 152, 153, 206), _Fields("memory")),
}
_TABLES = {DRIVER: _DRIVER, RUNTIME: _RUNTIME}


class Listener(Protocol):
    """Is told of each call, on the thread that makes it. What it calls of CUDA is not recorded."""

    def entered(self, call: Call) -> None: ...

    def left(self, call: Call) -> None: ...


@final
class Recording:
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
        self.calls: list[Call] = []
        self.step = 0
        self.loop = threading.get_ident()
        self.listener: Listener | None = None
        self.failure: BaseException | None = None
        self.open: dict[int, Call] = {}
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
            call = self._decoded(thread, _TABLES[domain][number], data.contents)
            if call is None:
                return
            self.open[thread] = call
            with self._numbering:
                self._number += 1
                call.serial = self._number
                # Before the call is seen, so that who sees it finds its stream held.
                if self.listener is not None:
                    self.listener.entered(call)
                self.calls.append(call)
        elif self._outer.get(thread) == (domain, number):
            del self._outer[thread]
            left = self.open.pop(thread, None)
            if left is not None and self.listener is not None:
                self.listener.left(left)

    def _decoded(self, thread: int, fields: _Fields, data: Any) -> Call | None:
        at = data.parameters
        site = site_of(sys._getframe(2))
        near = None
        if site is None and thread != self.loop:
            near = site_of(sys._current_frames().get(self.loop))
        call = Call(
            serial=0,
            step=self.step,
            in_loop=thread == self.loop,
            kind=fields.kind,
            function=(data.function or b"?").decode(),
            site=site,
            near=near,
        )
        if fields.event is not None:
            call.event = _word(at + fields.event)
        if fields.by_config:
            call.stream = _handle(_word(_word(at) + 32), fields.per_thread)
        elif fields.stream is not None:
            call.stream = _handle(_word(at + fields.stream), fields.per_thread)
        elif fields.kind in ("copy", "set"):
            call.stream = _handle(0, fields.per_thread)
        if call.stream is not None:
            if call.stream not in self._blocking:
                self._blocking[call.stream] = self._driver.is_blocking(call.stream)
            call.blocking = self._blocking[call.stream]
            if fields.kind in ("launch", "copy", "set", "record", "wait") and self._driver.is_capturing(call.stream):
                return None
        if fields.kind == "copy":
            self._sizes(call, fields, at)
        return call

    def _sizes(self, call: Call, fields: _Fields, at: int) -> None:
        if fields.box is not None:
            box = _word(at)
            nbytes = math.prod([_word(box + place) for place in fields.box.size])
            self._ends(call, _address_of(fields.box.target, box), _address_of(fields.box.source, box), nbytes)
            return
        assert fields.target is not None
        assert fields.source is not None
        assert fields.nbytes is not None
        target, source, nbytes = _word(at + fields.target), _word(at + fields.source), _word(at + fields.nbytes)
        if fields.batch:
            sizes, count = nbytes, _word(at + 24)
            if count == 0:
                return
            target, source = _word(target), _word(source)
            nbytes = sum(_word(sizes + 8 * index) for index in range(count))
        elif fields.rows is not None:
            nbytes *= _word(at + fields.rows)
        self._ends(call, target, source, nbytes)

    def _ends(self, call: Call, target: int, source: int, nbytes: int) -> None:
        call.nbytes = nbytes
        if 0 in (target, source):
            # An array, which is not looked at.
            return
        to, of = self._driver.memory(target), self._driver.memory(source)
        direction: Direction
        if to == "device" and of in ("pinned", "pageable"):
            direction, call.address, call.pageable = "h2d", target, of == "pageable"
        elif of == "device" and to in ("pinned", "pageable"):
            direction, call.address, call.pageable = "d2h", source, to == "pageable"
        else:
            return
        call.direction = direction


_recording: Recording | None = None


@contextmanager
def recorded(driver: Driver) -> Iterator[Recording]:
    """Record the calls of this process inside. Raises `BackendUnavailableError` where CUPTI is missing or taken."""
    global _recording
    recording = Recording(driver)
    subscriber = ctypes.c_void_p()
    try:
        try:
            cupti = load()
            check(cupti, "cuptiSubscribe", ctypes.byref(subscriber), _CALLED_BACK, None)
        except CuptiError as error:
            raise BackendUnavailableError(f"assert_overlaps sees the calls of a loop through CUPTI: {error}") from error
        _recording = recording
        for domain, table in _TABLES.items():
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
        frame = frame.f_back
    return None


def _called_back(_: int | None, domain: int, number: int, data: Any) -> None:
    # Never freed: a thread may still be on its way here when the recording has ended.
    recording = _recording
    if recording is not None:
        recording.called(domain, number, data)


_CALLED_BACK = CALLBACK(_called_back)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _address_of(end: _End, box: int) -> int:
    """Return where one end of a copy of rows begins; 0: in an array, which has no address."""
    if end.kind is not None:
        # Half of the word says nothing.
        kind = _word(box + end.kind) & 0xFFFFFFFF
        base = 0 if kind == ARRAY_MEMORY else _word(box + (end.host if kind == HOST_MEMORY else end.device))
    else:
        base = _word(box + end.device)
    if base == 0:
        return 0
    x, y, *z = [_word(box + place) for place in end.corner]
    rows = y + (z[0] * _word(box + end.height) if z and end.height is not None else 0)
    return base + rows * _word(box + end.pitch) + x


def _handle(stream: int, per_thread: bool) -> int:
    return stream or (PER_THREAD if per_thread else LEGACY)
