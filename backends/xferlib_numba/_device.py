"""One GPU as the backend uses it: driver calls through Numba's own bindings, for any thread.

Numba's wrapped calls are not used: they log each call, and raise for "not ready". Calls that change only the calling thread's state
go past the bindings, too (`Context`). Nothing here enters Numba's queues of deferred frees.

Invariant: the caller's current context and capture mode are left as found.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

from xferlib.cuda.context import Context
from xferlib.cuda.driver import LIBRARY
from xferlib_numba._module import Numba

__all__ = ["Call", "Device"]

Call = Callable[..., Any]
INVALID_CONTEXT = 201


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
        self._pointer_attribute = ctypes.CDLL(LIBRARY).cuPointerGetAttribute
        self._bare = _Bare()

        # Never released: arrays outlive every stager.
        self.context = int(self.raw("cuDevicePrimaryCtxRetain")(self.raw("cuDeviceGet")(ordinal)))
        context = Context(self.context, self.failure, self.error)
        self.here, self.give_back, self.relaxed = context.here, context.give_back, context.capture_mode.relaxed
        self._inside = context.inside
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

    def failure(self, name: str, status: int) -> Exception:
        """Return that error for a status that did not come from the bindings."""
        named: Any = status
        # A newer driver's status may have no name in them.
        with suppress(ValueError):
            named = self._binding.CUresult(status)
        return self.failed(name, named)

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


@final
class _Bare(threading.local):
    """Whether a call has found this thread without a context: to ask the driver before each call would cost as much as the call."""

    found = False
