"""One GPU as the backend uses it: driver calls through Numba's own bindings, for any thread.

Not through Numba's wrapped calls: those log each one, and raise for "not ready". What changes nothing but the calling thread's
state goes past the bindings, too (`_thread`). Nothing here enters Numba's queues of deferred frees.

Invariant: the caller's current context and capture mode are left as found.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from xferlib_numba._module import Numba
from xferlib_numba._thread import CaptureMode, Contexts

__all__ = ["LEGACY", "PER_THREAD", "Call", "Device"]

Call = Callable[..., Any]
INVALID_CONTEXT = 201
LEGACY, PER_THREAD = 1, 2
"""Handles of the default streams: one for all threads of the device, and one that is another in each thread."""


@final
class Device:
    """The calls. Never closed: events, blocks and arrays outlive stagers.

    What runs on a stream needs no current context, since the stream says which one is meant; a default stream is the current
    context's. A thread that has none is given this device's for each call. Where there are several devices, another one's may be
    current, so every call is given this device's.
    """

    def __init__(self, numba: Numba, ordinal: int, *, count: int) -> None:
        self.numba = numba
        self.ordinal = ordinal
        self.several = count > 1
        self.error = numba.driver.CudaAPIError
        self._binding = binding = numba.driver.binding
        capture_mode = CaptureMode()
        self.relax, self.restore = capture_mode.relax, capture_mode.restore
        self._bare = _Bare()
        self._pid = os.getpid()
        # By name in the instance: at interpreter exit modules lose theirs.
        self._getpid = os.getpid
        self._is_finalizing = sys.is_finalizing

        # Never released: arrays outlive every stager.
        self._context = self.raw("cuDevicePrimaryCtxRetain")(self.raw("cuDeviceGet")(ordinal))
        self._contexts = Contexts(int(self._context))
        self.copy_h2d = self.call("cuMemcpyHtoDAsync")
        self.copy_d2h = self.call("cuMemcpyDtoHAsync")
        self.record = self.call("cuEventRecord")
        self.wait = self.call("cuStreamWaitEvent")
        self.is_capturing = self.call("cuStreamIsCapturing")
        self.event_status = binding.cuEventQuery
        self.synchronize = self.call("cuEventSynchronize")

        with self.current():
            # Numba's own object for the same context. It finds it current, and so leaves the thread's as found.
            self.numba_context = numba.cuda.gpus[ordinal].get_primary_context()
        self.words = f"{self.numba_context.device.name} (cuda:{ordinal})"

    @property
    def pci_bus_id(self) -> str:
        """Where the device is, as the kernel names it. A GPU has one function."""
        place = self.numba_context.device.get_device_identity()
        return f"{place['pci_domain_id']:04x}:{place['pci_bus_id']:02x}:{place['pci_device_id']:02x}.0"

    def raw(self, name: str) -> Call:
        """Return a driver call that raises Numba's `CudaAPIError` and returns what there is beside the status."""
        function = getattr(self._binding, name)

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if result[0]:
                raise self.failed(name, result[0])
            return result[-1]

        return call

    def call(self, name: str) -> Call:
        """Return such a call, made in the thread's own context if it has one and no other device may be meant, else in ours."""
        function, pushed, bare = getattr(self._binding, name), self._pushed(self.raw(name)), self._bare
        if self.several:
            return pushed

        def call(*arguments: Any) -> Any:
            if bare.found:
                return pushed(*arguments)
            result = function(*arguments)
            status = result[0]
            if not status:
                return result[-1]
            if status == INVALID_CONTEXT:
                bare.found = True
                return pushed(*arguments)
            raise self.failed(name, status)

        return call

    def failed(self, name: str, status: Any) -> Exception:
        """Return the error that Numba's wrapped call would raise."""
        error: Exception = self.error(status, f"Call to {name} results in {getattr(status, 'name', status)}")
        return error

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device's context the thread's current one, and let it make calls that would spoil a capture of somebody's."""
        self._enter()
        try:
            mode = self.relax()
            try:
                yield
            finally:
                self.restore(mode)
        finally:
            self._contexts.pop()

    def owns(self, stream: Any) -> bool:
        """Tell whether a stream, not one of the default streams, is of this device."""
        found = self.raw("cuStreamGetCtx")(stream)
        if int(found) == int(self._context):
            return True
        # A context beside the primary one may still be of this device.
        self.raw("cuCtxPushCurrent")(found)
        try:
            return int(self.raw("cuCtxGetDevice")()) == self.ordinal
        finally:
            self._contexts.pop()

    def give_back(self, name: str, handle: Any) -> None:
        """Make a call of a destructor, which has nobody to raise to: a device that has failed says so in the next call.

        Nothing is done in a forked child, where the memory is the parent's, and at interpreter exit, where the driver may be gone.
        """
        if self._getpid() != self._pid or self._is_finalizing():
            return
        if self._contexts.push():
            return
        mode = self.relax()
        getattr(self._binding, name)(handle)
        self.restore(mode)
        self._contexts.pop()

    def _enter(self) -> None:
        status = self._contexts.push()
        if status:
            raise self.failed("cuCtxPushCurrent", self._binding.CUresult(status))

    def _pushed(self, call: Call) -> Call:
        enter, pop = self._enter, self._contexts.pop

        def pushed(*arguments: Any) -> Any:
            enter()
            try:
                return call(*arguments)
            finally:
                pop()

        return pushed


@final
class _Bare(threading.local):
    """Of each thread, whether a call found it without a context: asking the driver before each would cost as much as the call."""

    found = False
