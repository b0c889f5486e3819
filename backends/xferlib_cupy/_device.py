"""One GPU as the backend uses it: CuPy's runtime calls, bound once, for any thread.

Invariant: the caller's current device and capture mode are left as found, and no context appears on a device that nobody asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

from cupy.cuda import runtime

from xferlib_cupy._driver import CaptureMode, Contexts

__all__ = ["DEFAULT_STREAMS", "Device"]

DEFAULT_STREAMS = 2
"""Handles up to this one are no addresses: 0 and 1 are the legacy default stream of the current device, 2 the thread's own."""


@final
class Device:
    """The calls, for streams of our own and for streams of the user's. Never closed: events, blocks and arrays outlive stagers.

    What runs on our own streams needs no current device, since stream and event say which one is meant. A thread that has none
    yet gets one from the runtime, though: device 0. On device 0 that is right; for others the context is pushed around each call.
    A user's stream may be a default stream, which means the current device's: where there are several, the context is pushed.
    """

    def __init__(self, ordinal: int, *, count: int) -> None:
        self.ordinal = ordinal
        self.several = count > 1
        self.contexts = Contexts(ordinal)
        self.capture_mode = CaptureMode()
        self._pid = os.getpid()
        # By name in the instance: at interpreter exit modules lose theirs.
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

        with self.current():
            name = runtime.getDeviceProperties(ordinal)["name"].decode()
        self.words = f"{name} (cuda:{ordinal})"

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device the thread's current one, and let it make calls that would spoil a capture of somebody's."""
        self.contexts.push()
        try:
            cell = self.capture_mode.relax()
            try:
                yield
            finally:
                self.capture_mode.restore(cell)
        finally:
            self.contexts.pop()

    def give_back(self, release: Callable[[int], None], handle: int) -> None:
        """Make a call of a destructor, which has nobody to raise to: a device that has failed says so in the next call.

        Nothing is done in a forked child, where the memory is the parent's, and at interpreter exit, where the driver may be gone.
        """
        if self._getpid() != self._pid or self._is_finalizing():
            return
        with suppress(runtime.CUDARuntimeError), self.current():
            release(handle)

    def _pushed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        push, pop = self.contexts.push, self.contexts.pop

        def pushed(*arguments: int) -> Any:
            push()
            try:
                return call(*arguments)
            finally:
                pop()

        return pushed


def _plain(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


def _memory_type(address: int) -> int:
    return int(runtime.pointerGetAttributes(address).type)
