"""One GPU as the backend uses it: CuPy's runtime calls, bound once, for any thread.

Invariant: the caller's current device and capture mode are left as found, and no context appears on a device that nobody asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, final

from cupy.cuda import runtime

from xferlib_cupy._driver import CaptureMode, Contexts

__all__ = ["DEFAULT_STREAMS", "Device"]

T = TypeVar("T")

DEFAULT_STREAMS = 2
"""Handles up to this one are no addresses: 0 and 1 are the legacy default stream of the current device, 2 the thread's own."""


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
        self.contexts = Contexts(ordinal)
        self.capture_mode = CaptureMode()
        self._pid = os.getpid()
        # Kept in the instance: at interpreter exit modules lose their names.
        self._getpid = os.getpid
        self._is_finalizing = sys.is_finalizing

        own = self._pushed if ordinal > 0 else _plain
        self.copy = own(runtime.memcpyAsync)
        self.record = own(runtime.eventRecord)
        self.wait = own(runtime.streamWaitEvent)
        self.query = own(runtime.eventQuery)
        self.synchronize = own(runtime.eventSynchronize)
        self.memory_type = own(getattr(runtime, "pointerGetMemoryType", _memory_type))

        users = self._pushed if self.several else _plain
        self.record_users = users(runtime.eventRecord)
        self.wait_users = users(runtime.streamWaitEvent)
        self.is_capturing = users(runtime.streamIsCapturing)

        name = self.here(runtime.getDeviceProperties, ordinal)["name"].decode()
        self.words = f"{name} (cuda:{ordinal})"

    def here(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return `call(*arguments)`, made with this device current, without spoiling anybody's capture."""
        contexts = self.contexts
        try:
            contexts.push()
            return self.capture_mode.relaxed(call, *arguments)
        finally:
            contexts.pop()

    def give_back(self, release: Callable[..., object], *arguments: Any) -> None:
        """Make a call here that gives something back. Nobody is told of a failure: a failed device says so in the next call.

        Does nothing in a forked child, where the memory is the parent's, and at interpreter exit, where the driver may be gone.
        """
        if self._getpid() != self._pid or self._is_finalizing():
            return
        with suppress(runtime.CUDARuntimeError):
            self.here(release, *arguments)

    def _pushed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        push, pop = self.contexts.push, self.contexts.pop

        def pushed(*arguments: int) -> Any:
            try:
                push()
                return call(*arguments)
            finally:
                pop()

        return pushed


def _plain(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


def _memory_type(address: int) -> int:
    return int(runtime.pointerGetAttributes(address).type)
