"""One GPU as the backend uses it: driver calls through Numba's own bindings, for any thread.

Numba's wrapped calls are not used: they log each call, and raise for "not ready". Calls that change only the calling thread's state
go past the bindings, too (`_thread`). Nothing here enters Numba's queues of deferred frees.

Invariant: the caller's current context and capture mode are left as found.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar, final

from xferlib_numba._module import Numba
from xferlib_numba._thread import LIBRARY, CaptureMode, Context

__all__ = ["LEGACY", "PER_THREAD", "Call", "Device"]

T = TypeVar("T")

Call = Callable[..., Any]
INVALID_CONTEXT = 201
LEGACY, PER_THREAD = 1, 2
"""Handles of the default streams: one for all threads of the device, and one that is another in each thread."""


@final
class Device:
    """The calls. Never closed: events, blocks and arrays outlive stagers.

    Work on a stream needs no current context, since the stream says which one is meant; a default stream is the current context's.
    A thread without a current context is given this device's for each call. Where there are several devices, another one's context
    may be current, so every call is given this device's, even questions about events.
    """

    def __init__(self, numba: Numba, ordinal: int, *, count: int) -> None:
        self.numba = numba
        self.ordinal = ordinal
        self.several = count > 1
        self.error = numba.driver.CudaAPIError
        self._binding = binding = numba.driver.binding
        self.relaxed = CaptureMode().relaxed
        self._pointer_attribute = ctypes.CDLL(LIBRARY).cuPointerGetAttribute
        self._bare = _Bare()
        self._pid = os.getpid()
        # Kept in the instance: at interpreter exit modules lose their names.
        self._getpid = os.getpid
        self._is_finalizing = sys.is_finalizing

        # Never released: arrays outlive every stager.
        self._context = self.raw("cuDevicePrimaryCtxRetain")(self.raw("cuDeviceGet")(ordinal))
        self.context = int(self._context)
        thread = Context(self.context, self._fail_to_push)
        self._push, self._pop = thread.push, thread.pop
        self.copy_h2d = self.call("cuMemcpyHtoDAsync")
        self.copy_d2h = self.call("cuMemcpyDtoHAsync")
        self.record = self.call("cuEventRecord")
        self.wait = self.call("cuStreamWaitEvent")
        self.is_capturing = self.call("cuStreamIsCapturing")
        self.event_status = self._inside(binding.cuEventQuery) if self.several else binding.cuEventQuery
        self.synchronize = self.call("cuEventSynchronize")

        # Numba's own object for the same context. Numba finds the context current, and so leaves the thread's as it was.
        self.numba_context = self.here(numba.cuda.gpus[ordinal].get_primary_context)
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
        """Return such a call. It is made in the thread's own context if it has one and there is no other device, else in ours."""
        function, inside, bare = getattr(self._binding, name), self._inside(self.raw(name)), self._bare
        if self.several:
            return inside

        def call(*arguments: Any) -> Any:
            if bare.found:
                return inside(*arguments)
            result = function(*arguments)
            status = result[0]
            if not status:
                return result[-1]
            if status == INVALID_CONTEXT:
                bare.found = True
                return inside(*arguments)
            raise self.failed(name, status)

        return call

    def failed(self, name: str, status: Any) -> Exception:
        """Return the error that Numba's wrapped call would raise."""
        error: Exception = self.error(status, f"Call to {name} results in {getattr(status, 'name', status)}")
        return error

    def here(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return `call(*arguments)`, made with this device current, without spoiling anybody's capture."""
        try:
            self._push()
            return self.relaxed(call, *arguments)
        finally:
            self._pop()

    def asked(self, attribute: int, address: int) -> int | None:
        """Return an attribute of memory, one that is an int in C; None if the driver does not know the memory.

        Asks the driver itself: some bindings read the ordinal of the device from another field than it was written to, and say 0
        for every device (NVIDIA/cuda-python, issue 2928; 13.3.1 has it).
        """
        found = ctypes.c_int()
        status = self.here(self._pointer_attribute, ctypes.byref(found), attribute, ctypes.c_uint64(address))
        return None if status else found.value

    def owns(self, stream: Any) -> bool:
        """Tell whether a stream, not one of the default streams, is of this device."""
        found = self.raw("cuStreamGetCtx")(stream)
        if int(found) == self.context:
            return True
        # A context beside the primary one may still be of this device.
        push, pop = self._binding.cuCtxPushCurrent, self._binding.cuCtxPopCurrent
        try:
            # Cannot fail for a context that the driver has just named. In the `try`, so that it is undone if an interrupt comes
            # after it.
            push(found)
            return int(self.raw("cuCtxGetDevice")()) == self.ordinal
        finally:
            pop()

    def give_back(self, release: Callable[..., object], *arguments: Any) -> None:
        """Make a call here that gives something back. Nobody is told of a failure: a failed device says so in the next call.

        Does nothing in a forked child, where the memory is the parent's, and at interpreter exit, where the driver may be gone.
        """
        if self._getpid() != self._pid or self._is_finalizing():
            return
        with suppress(self.error):
            self.here(release, *arguments)

    def _fail_to_push(self, status: int) -> NoReturn:
        raise self.failed("cuCtxPushCurrent", self._binding.CUresult(status))

    def _inside(self, call: Call) -> Call:
        push, pop = self._push, self._pop

        def inside(*arguments: Any) -> Any:
            try:
                push()
                return call(*arguments)
            finally:
                pop()

        return inside


@final
class _Bare(threading.local):
    """Whether a call has found this thread without a context: to ask the driver before each call would cost as much as the call."""

    found = False
