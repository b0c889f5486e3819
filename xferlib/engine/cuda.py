"""CUDA's driver functions as the engine calls them: addresses in the library that the process has loaded. For backends.

Streams, events, pinned memory and the copies of pinned memory stay each framework's own; these serve the chunks alone.
"""

from __future__ import annotations

import ctypes

from xferlib.engine.native import VERSION, Calls

__all__ = ["cuda_calls"]

LIBRARY = "libcuda.so.1"
NOT_READY = 600
RELAXED = 2
_FUNCTIONS = {
    "enter": "cuCtxSetCurrent",
    "current": "cuCtxGetCurrent",
    # What is asked of an event would spoil a capture of somebody's otherwise.
    "capture_mode": "cuThreadExchangeStreamCaptureMode",
    "copy_h2d": "cuMemcpyHtoDAsync_v2",
    "copy_d2h": "cuMemcpyDtoHAsync_v2",
    "record": "cuEventRecord",
    "query": "cuEventQuery",
    "wait": "cuStreamWaitEvent",
}


def cuda_calls(context: int) -> Calls:
    """Return the calls for one context, by its handle: streams and events given to the engine are of this one."""
    library = ctypes.CDLL(LIBRARY)
    addresses = {name: ctypes.cast(getattr(library, called), ctypes.c_void_p) for name, called in _FUNCTIONS.items()}
    size = ctypes.sizeof(Calls)
    return Calls(version=VERSION, nbytes=size, context=context, not_ready=NOT_READY, relaxed=RELAXED, **addresses)
