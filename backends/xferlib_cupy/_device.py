"""One GPU as the backend uses it: CuPy's runtime calls, bound once, for any thread.

Invariant: the caller's current device and capture mode are left as found, and no context appears on a device that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from cupy.cuda import runtime

from xferlib_cupy._driver import Owner, open_context

__all__ = ["Device"]


@final
class Device:
    """The calls, for streams of our own and for streams of the user's. Never closed: events, blocks and arrays outlive stagers.

    Calls for our own streams need no current device, since stream and event say which device is meant. But the runtime gives a
    thread that has no current device yet one: device 0. For device 0 that is right; for others the context is pushed around each
    call. A user's stream may be a default stream, which means the current device's. So where there are several devices, the context
    is pushed for those calls, too.
    """

    def __init__(self, ordinal: int, *, count: int) -> None:
        self.ordinal = ordinal
        self.several = count > 1
        context = open_context(ordinal)
        self.context = context.handle
        self.here, self.give_back, self.capture_mode = context.here, context.give_back, context.capture_mode
        self.owns = Owner(ordinal, context).owns

        own = context.inside if ordinal > 0 else _plain
        self.copy = own(runtime.memcpyAsync)
        self.record = own(runtime.eventRecord)
        self.wait = own(runtime.streamWaitEvent)
        self.query = own(runtime.eventQuery)
        self.synchronize = own(runtime.eventSynchronize)
        self.memory_type = own(getattr(runtime, "pointerGetMemoryType", _memory_type))

        users = context.inside if self.several else _plain
        self.record_users = users(runtime.eventRecord)
        self.wait_users = users(runtime.streamWaitEvent)
        self.is_capturing = users(runtime.streamIsCapturing)

        name = self.here(runtime.getDeviceProperties, ordinal)["name"].decode()
        self.words = f"{name} (cuda:{ordinal})"


def _plain(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


def _memory_type(address: int) -> int:
    return int(runtime.pointerGetAttributes(address).type)
