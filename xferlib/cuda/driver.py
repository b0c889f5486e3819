"""CUDA's driver functions as C calls them: addresses in the library that the process has loaded.

Streams, events, pinned memory and the copies of pinned memory stay with each framework: `EngineCalls` serve the engine's chunks
alone. `ContextCalls` are for backends that call the driver themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, final

from xferlib.engine.native import VERSION, Calls, EngineContext, library
from xferlib.protocol import Event

__all__ = ["LIBRARY", "RELAXED", "ContextCalls", "EngineCalls", "Failure", "cuda_calls", "primary_context"]

LIBRARY = "libcuda.so.1"
Failure: TypeAlias = Callable[[str, int], Exception]
"""Returns what the framework raises when a call of this name says this status."""

NOT_READY = 600
RELAXED = 2
_FUNCTIONS = {
    "enter": "cuCtxSetCurrent",
    "current": "cuCtxGetCurrent",
    # Without it, asking an event could spoil somebody's graph capture.
    "capture_mode": "cuThreadExchangeStreamCaptureMode",
    "copy_h2d": "cuMemcpyHtoDAsync_v2",
    "copy_d2h": "cuMemcpyDtoHAsync_v2",
    "record": "cuEventRecord",
    "query": "cuEventQuery",
    "wait": "cuStreamWaitEvent",
}
_IN_CONTEXT = {
    "push": "cuCtxPushCurrent_v2",
    "pop": "cuCtxPopCurrent_v2",
    "capture_mode": "cuThreadExchangeStreamCaptureMode",
    "copy_h2d": "cuMemcpyHtoDAsync_v2",
    "copy_d2h": "cuMemcpyDtoHAsync_v2",
    "record": "cuEventRecord",
    "wait": "cuStreamWaitEvent",
    "query_event": "cuEventQuery",
    "query_stream": "cuStreamQuery",
    "synchronize": "cuEventSynchronize",
    "pointer_attribute": "cuPointerGetAttribute",
}


def primary_context(ordinal: int, failure: Failure) -> int:
    """Return the handle of a device's primary context, which every library of the process shares.

    It is never released: arrays outlive every stager. Without the GIL: the first call in a process takes a fifth of a second.
    """
    driver, device, context = ctypes.CDLL(LIBRARY), ctypes.c_int(), ctypes.c_void_p()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), ordinal)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
    ):
        status = getattr(driver, name)(*arguments)
        if status:
            raise failure(name, status)
    assert context.value is not None
    return context.value


def cuda_calls(context: int) -> Calls:
    """Return the calls for one context, by its handle: streams and events given to the engine are of this one."""
    size = ctypes.sizeof(Calls)
    return Calls(version=VERSION, nbytes=size, context=context, not_ready=NOT_READY, relaxed=RELAXED, **_addresses(_FUNCTIONS))


@final
class EngineCalls:
    """The `DriverCalls` of one stager, with streams and events of its framework's. Each event has its `handle`."""

    def __init__(
        self,
        context: int,
        streams: tuple[int, int],
        *,
        new_event: Callable[[], tuple[Event, int]],
        failure: Callable[[int], Exception],
    ) -> None:
        self.calls = cuda_calls(context)
        self.streams = streams
        self.new_event = new_event
        self.handle: Callable[[Any], int] = attrgetter("handle")
        self.failure = failure


@final
class ContextCalls:
    """Calls of the driver in one context, by its handle, whatever context the thread is in. They spoil nobody's graph capture.

    Each is one call of C that returns the driver's status; see context.h. No interrupt comes between its parts. All of them release
    the GIL.
    """

    def __init__(self, context: int) -> None:
        found = library()
        self._context = EngineContext(context=context, relaxed=RELAXED, **_addresses(_IN_CONTEXT))
        here = ctypes.byref(self._context)
        self.copy_h2d: Callable[[int, int, int, int], int] = partial(found.xe_context_copy_h2d, here)
        self.copy_d2h: Callable[[int, int, int, int], int] = partial(found.xe_context_copy_d2h, here)
        self.record: Callable[[int, int], int] = partial(found.xe_context_record, here)
        self.wait: Callable[[int, int], int] = partial(found.xe_context_wait, here)
        self.query_event: Callable[[int], int] = partial(found.xe_context_query_event, here)
        self.query_stream: Callable[[int], int] = partial(found.xe_context_query_stream, here)
        self.synchronize: Callable[[int], int] = partial(found.xe_context_synchronize, here)
        self.pointer_attribute: Callable[[Any, int, int], int] = partial(found.xe_context_pointer_attribute, here)


def _addresses(functions: dict[str, str]) -> dict[str, ctypes.c_void_p]:
    driver = ctypes.CDLL(LIBRARY)
    return {name: ctypes.cast(getattr(driver, called), ctypes.c_void_p) for name, called in functions.items()}
