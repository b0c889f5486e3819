"""The functions of CUDA's driver and runtime that a loop is judged by, and where each has its stream, its event and its copies.

All is read from the structure of parameters that CUPTI shows in a callback.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from xferlib.overlap.calls import LEGACY, CallKind
from xferlib.tracing.library import DRIVER, RUNTIME

__all__ = ["FUNCTIONS", "PER_THREAD", "Function"]

PER_THREAD = 2
"""The handle of the calling thread's default stream."""


class _CopyEnd(NamedTuple):
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

    source: _CopyEnd
    target: _CopyEnd
    size: tuple[int, ...]
    """Of its width in bytes, its height and its depth."""


# CUDA_MEMCPY2D and CUDA_MEMCPY3D of cuda.h, cudaMemcpy3DParms of driver_types.h.
_BOX_2D = _Box(_CopyEnd((0, 8), 48, None, 16, 24, 32), _CopyEnd((56, 64), 104, None, 72, 80, 88), (112, 120))
_BOX_3D = _Box(_CopyEnd((0, 8, 16), 72, 80, 32, 40, 48), _CopyEnd((88, 96, 104), 160, 168, 120, 128, 136), (176, 184, 192))
_BOX_3D_RUNTIME = _Box(_CopyEnd((8, 16, 24), 40, 56, device=32), _CopyEnd((72, 80, 88), 104, 120, device=96), (128, 136, 144))
HOST_MEMORY, ARRAY_MEMORY = 1, 3


class Function(NamedTuple):
    """Where a function's parameters lie, in bytes from the start of the structure that CUPTI shows. None: there is no such one.

    `at`: the address of that structure in a call.
    """

    kind: CallKind
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

    @property
    def nbytes_read(self) -> tuple[int, int]:
        """How many bytes are read of the parameters, and of what the first of them points to, if that is one structure."""
        places = [self.stream, self.event, self.target, self.source, self.nbytes, self.rows]
        places += [24] if self.batch else [0] if self.by_config or self.box else []
        pointed = 40 if self.by_config else 0 if self.box is None else max(self.box.size) + 8
        return max([place + 8 for place in places if place is not None], default=0), pointed

    def event_of(self, at: int) -> int | None:
        """Return the handle of the event that a call names."""
        return None if self.event is None else _word(at + self.event)

    def stream_of(self, at: int) -> int | None:
        """Return the handle of the stream that a call works on, its thread's default one included."""
        if self.by_config:
            stream = _word(_word(at) + 32)
        elif self.stream is not None:
            stream = _word(at + self.stream)
        elif self.kind in ("copy", "set"):
            stream = 0
        else:
            return None
        return stream or (PER_THREAD if self.per_thread else LEGACY)

    def copied(self, at: int) -> tuple[int, int, int] | None:
        """Return target, source and bytes of a call that copies; an address of 0: it is an array. None: it copies nothing."""
        if self.kind != "copy":
            return None
        if self.box is not None:
            box = _word(at)
            nbytes = math.prod([_word(box + place) for place in self.box.size])
            return _address_of(self.box.target, box), _address_of(self.box.source, box), nbytes
        assert self.target is not None
        assert self.source is not None
        assert self.nbytes is not None
        target, source, nbytes = _word(at + self.target), _word(at + self.source), _word(at + self.nbytes)
        if self.batch:
            sizes, count = nbytes, _word(at + 24)
            if count == 0:
                return None
            target, source = _word(target), _word(source)
            nbytes = sum(_word(sizes + 8 * index) for index in range(count))
        elif self.rows is not None:
            nbytes *= _word(at + self.rows)
        return target, source, nbytes


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _address_of(end: _CopyEnd, box: int) -> int:
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


def _both(number: int, threaded: int, function: Function) -> dict[int, Function]:
    """Return a function, and that which takes a stream of 0 for the thread's own, by number."""
    return {number: function, threaded: function._replace(per_thread=True)}


_COPY = Function("copy", target=0, source=8, nbytes=16)
_ROWS = Function("copy", target=0, source=16, nbytes=32, rows=40)
_SET = Function("set")
# The numbers are from cupti_driver_cbid.h and cupti_runtime_cbid.h, where they are only ever added; the offsets from
# generated_cuda_meta.h and generated_cuda_runtime_api_meta.h. Checked with the headers of CUDA 13.0.
_DRIVER: dict[int, Function] = {
    **_both(276, 397, _COPY),  # cuMemcpyHtoD_v2
    **_both(278, 398, _COPY),  # cuMemcpyDtoH_v2
    **_both(305, 408, _COPY),  # cuMemcpy
    **_both(277, 421, _COPY._replace(stream=24)),  # cuMemcpyHtoDAsync_v2
    **_both(279, 422, _COPY._replace(stream=24)),  # cuMemcpyDtoHAsync_v2
    **_both(306, 418, _COPY._replace(stream=24)),  # cuMemcpyAsync
    **_both(280, 399, _COPY),  # cuMemcpyDtoD_v2
    **_both(281, 423, _COPY._replace(stream=24)),  # cuMemcpyDtoDAsync_v2
    **_both(287, 405, Function("copy", box=_BOX_2D)),  # cuMemcpy2D_v2
    **_both(288, 406, Function("copy", box=_BOX_2D)),  # cuMemcpy2DUnaligned_v2
    **_both(289, 424, Function("copy", box=_BOX_2D, stream=8)),  # cuMemcpy2DAsync_v2
    **_both(290, 407, Function("copy", box=_BOX_3D)),  # cuMemcpy3D_v2
    **_both(291, 425, Function("copy", box=_BOX_3D, stream=8)),  # cuMemcpy3DAsync_v2
    # cuMemsetD8_v2, D16, D32, D2D8, D2D16, D2D32.
    **{number: function for first in range(6) for number, function in _both(249 + first, 411 + first, _SET).items()},
    **_both(216, 428, _SET._replace(stream=24)),  # cuMemsetD8Async
    **_both(218, 429, _SET._replace(stream=24)),  # cuMemsetD16Async
    **_both(220, 430, _SET._replace(stream=24)),  # cuMemsetD32Async
    **_both(222, 431, _SET._replace(stream=40)),  # cuMemsetD2D8Async
    **_both(224, 432, _SET._replace(stream=40)),  # cuMemsetD2D16Async
    **_both(226, 433, _SET._replace(stream=40)),  # cuMemsetD2D32Async
    **_both(776, 777, _COPY._replace(stream=64, batch=True)),  # cuMemcpyBatchAsync
    **_both(796, 797, _COPY._replace(stream=56, batch=True)),  # cuMemcpyBatchAsync_v2
    **_both(307, 442, Function("launch", stream=40)),  # cuLaunchKernel
    **_both(477, 478, Function("launch", stream=40)),  # cuLaunchCooperativeKernel
    **_both(652, 653, Function("launch", by_config=True)),  # cuLaunchKernelEx
    **_both(514, 515, Function("launch", stream=8)),  # cuGraphLaunch
    **_both(119, 441, Function("record", event=0, stream=8)),  # cuEventRecord
    **_both(587, 588, Function("record", event=0, stream=8)),  # cuEventRecordWithFlags
    **_both(295, 436, Function("wait", stream=0, event=8)),  # cuStreamWaitEvent
    **_both(126, 440, Function("sync stream", stream=0)),  # cuStreamSynchronize
    121: Function("sync event", event=0),  # cuEventSynchronize
    17: Function("sync device"),  # cuCtxSynchronize
    800: Function("sync device"),  # cuCtxSynchronize_v2
    # cuMemAlloc, AllocPitch, Free, AllocHost, FreeHost, HostAlloc, and their second versions.
    **dict.fromkeys((29, 31, 33, 37, 38, 39, 243, 244, 245, 271, 294), Function("memory")),
    # cuMemHostRegister, HostUnregister, HostRegister_v2, AllocManaged, Create, Release, Map, Unmap.
    **dict.fromkeys((301, 302, 379, 371, 549, 550, 551, 552), Function("memory")),
}
_RUNTIME: dict[int, Function] = {
    **_both(31, 215, _COPY),  # cudaMemcpy
    **_both(41, 225, _COPY._replace(stream=32)),  # cudaMemcpyAsync
    **_both(32, 216, _ROWS),  # cudaMemcpy2D
    **_both(44, 228, _ROWS._replace(stream=56)),  # cudaMemcpy2DAsync
    **_both(144, 245, Function("copy", box=_BOX_3D_RUNTIME)),  # cudaMemcpy3D
    **_both(145, 246, Function("copy", box=_BOX_3D_RUNTIME, stream=8)),  # cudaMemcpy3DAsync
    **_both(49, 233, _SET),  # cudaMemset
    **_both(50, 234, _SET),  # cudaMemset2D
    **_both(142, 243, _SET),  # cudaMemset3D
    **_both(51, 235, _SET._replace(stream=24)),  # cudaMemsetAsync
    **_both(52, 236, _SET._replace(stream=40)),  # cudaMemset2DAsync
    **_both(143, 244, _SET._replace(stream=64)),  # cudaMemset3DAsync
    **_both(482, 483, _COPY._replace(stream=64, batch=True)),  # cudaMemcpyBatchAsync
    **_both(509, 510, _COPY._replace(stream=56, batch=True)),  # cudaMemcpyBatchAsync, from 13.0 on
    **_both(211, 214, Function("launch", stream=48)),  # cudaLaunchKernel
    **_both(269, 270, Function("launch", stream=48)),  # cudaLaunchCooperativeKernel
    **_both(505, 506, Function("launch", stream=48)),  # __cudaLaunchKernel
    **_both(430, 431, Function("launch", by_config=True)),  # cudaLaunchKernelExC
    **_both(311, 312, Function("launch", stream=8)),  # cudaGraphLaunch
    **_both(135, 242, Function("record", event=0, stream=8)),  # cudaEventRecord
    **_both(370, 371, Function("record", event=0, stream=8)),  # cudaEventRecordWithFlags
    **_both(147, 247, Function("wait", stream=0, event=8)),  # cudaStreamWaitEvent
    **_both(131, 239, Function("sync stream", stream=0)),  # cudaStreamSynchronize
    137: Function("sync event", event=0),  # cudaEventSynchronize
    165: Function("sync device"),  # cudaDeviceSynchronize
    # cudaMalloc, MallocPitch, Free, MallocHost, FreeHost, HostAlloc, Malloc3D, HostRegister, HostUnregister, MallocManaged.
    **dict.fromkeys((20, 21, 22, 25, 26, 27, 140, 152, 153, 206), Function("memory")),
}
FUNCTIONS: Final[Mapping[int, Mapping[int, Function]]] = {DRIVER: _DRIVER, RUNTIME: _RUNTIME}
"""By domain and number."""
