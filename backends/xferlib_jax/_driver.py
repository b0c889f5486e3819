"""The CUDA driver as the backend uses it, by ctypes on the library that JAX has loaded: one device, any thread.

ctypes is used and not a bindings package, so that JAX needs no further package. The calls that change the calling thread's state
(its context and capture mode) stand around nearly every other call. For each transfer's calls, one call of the engine's library
makes them together with the call itself (`ContextCalls`); around other calls Python makes them (`Context`).

Invariants: the caller's current context and capture mode are left as found; a status other than 0 is raised as `CudaError`.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import sleep
from typing import Any, TypeAlias, final

from xferlib.cuda.context import Context
from xferlib.cuda.driver import LIBRARY, ContextCalls, primary_context

__all__ = ["OUT_OF_MEMORY", "CudaError", "Driver", "wait_for_releases"]

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_READY = 600
MEMORY_TYPE, HOST = 2, 1
DISABLE_TIMING = 2
NON_BLOCKING = 1
PORTABLE, WRITE_COMBINED, READ_ONLY = 1, 4, 8
PCI_BUS_ID_NBYTES = 32
POLL_SECONDS = 0.0005

_I, _P, _N = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGetPCIBusId": (_P, _I, _I),
    "cuEventCreate": (_P, _I),
    "cuGetErrorName": (_I, _P),
    "cuLaunchHostFunc": (_P, _P, _P),
    "cuMemFreeHost": (_P,),
    "cuMemHostAlloc": (_P, _N, _I),
    "cuMemHostRegister_v2": (_P, _N, _I),
    "cuMemHostUnregister": (_P,),
    "cuStreamCreate": (_P, _I),
    "cuStreamDestroy_v2": (_P,),
}

Call: TypeAlias = Callable[..., int]


@final
class CudaError(RuntimeError):
    """Raised when a call of the driver fails; `status` is its CUresult."""

    def __init__(self, function: str, status: int, name: str) -> None:
        super().__init__(f"{function} failed: {name} ({status})")
        self.status = status

    @property
    def out_of_memory(self) -> bool:
        return self.status == OUT_OF_MEMORY


_releasing: deque[int] = deque()
"""The threads that free or unlock memory: one of them has the driver's lock, until the device has nothing to do."""


def wait_for_releases() -> None:
    """Block, without the GIL, while other threads release memory. For use before JAX calls that would wait for it with the GIL."""
    if _releasing:
        me = get_ident()
        while any(thread != me for thread in tuple(_releasing)):
            sleep(POLL_SECONDS)


@final
class Driver:
    """The calls for one device, by its number in CUDA. Never closed: events, blocks and arrays outlive stagers.

    `context` is the handle of the device's primary context, which JAX uses, too.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        # All calls give up the GIL but those that touch only the thread's state. The driver has a lock. A thread that frees or
        # unlocks memory keeps it until the device has nothing to do, and a thread that waited for it with the GIL would stop every
        # thread.
        self._library = ctypes.CDLL(LIBRARY)
        # It is the context that JAX has made already.
        self.context = primary_context(ordinal, self.failure)
        context = Context(self.context, self.failure, CudaError)
        self._here, self._give_back = context.here, context.give_back

        calls = ContextCalls(self.context)
        self._copy_h2d, self._copy_d2h, self._record, self._wait = calls.copy_h2d, calls.copy_d2h, calls.record, calls.wait
        self._query_event, self._query_stream, self._synchronize = calls.query_event, calls.query_stream, calls.synchronize
        self._attribute = calls.pointer_attribute
        self._register = self._checked("cuMemHostRegister_v2")
        self._unregister = self._checked("cuMemHostUnregister")
        self._alloc_host = self._checked("cuMemHostAlloc")
        self._free_host = self._checked("cuMemFreeHost")
        self._launch_host = self._checked("cuLaunchHostFunc")
        self._create_stream = self._checked("cuStreamCreate")
        self._destroy_stream = self._checked("cuStreamDestroy_v2")
        self._create_event = self._checked("cuEventCreate")

    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from page-locked memory to the device."""
        status = self._copy_h2d(dst, src, nbytes, stream)
        if status != SUCCESS:
            self._check("cuMemcpyHtoDAsync_v2", status)

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from the device to page-locked memory."""
        status = self._copy_d2h(dst, src, nbytes, stream)
        if status != SUCCESS:
            self._check("cuMemcpyDtoHAsync_v2", status)

    def record(self, event: int, stream: int) -> None:
        """Enqueue the point at which an event is reached."""
        status = self._record(event, stream)
        if status != SUCCESS:
            self._check("cuEventRecord", status)

    def wait(self, stream: int, event: int) -> None:
        """Make later work on a stream wait for an event."""
        status = self._wait(stream, event)
        if status != SUCCESS:
            self._check("cuStreamWaitEvent", status)

    def query(self, event: int) -> bool:
        """Tell whether an event is reached, without spoiling a capture of anybody's."""
        status = self._query_event(event)
        if status != SUCCESS and status != NOT_READY:
            self._check("cuEventQuery", status)
        return status == SUCCESS

    def is_idle(self, stream: int) -> bool:
        """Tell whether a stream has nothing to do, likewise."""
        status = self._query_stream(stream)
        if status != SUCCESS and status != NOT_READY:
            self._check("cuStreamQuery", status)
        return status == SUCCESS

    def synchronize(self, event: int) -> None:
        """Block, without the GIL, until an event is reached."""
        status = self._synchronize(event)
        if status != SUCCESS:
            self._check("cuEventSynchronize", status)

    def create_event(self) -> int:
        """Create an event and return its handle."""
        handle = ctypes.c_void_p()
        self._here(self._create_event, ctypes.byref(handle), DISABLE_TIMING)
        assert handle.value is not None
        return handle.value

    def create_stream(self, handle: ctypes.c_void_p) -> None:
        """Create a stream that the legacy default stream does not stop, in `handle`: an interrupt would lose a return value."""
        self._here(self._create_stream, ctypes.byref(handle), NON_BLOCKING)

    def pci_bus_id(self) -> str:
        """Return where the device is on the PCI bus."""
        device, text = ctypes.c_int(), ctypes.create_string_buffer(PCI_BUS_ID_NBYTES)
        self._checked("cuDeviceGet")(ctypes.byref(device), self.ordinal)
        self._checked("cuDeviceGetPCIBusId")(text, PCI_BUS_ID_NBYTES, device.value)
        return text.value.decode()

    def register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Page-lock memory, for every device."""
        self._here(self._register, address, nbytes, PORTABLE | (READ_ONLY if read_only else 0))

    def unregister(self, address: int) -> None:
        """Unlock memory. Waits for whatever runs on the device, without the GIL."""
        self._release(self._unregister, address)

    def alloc_write_combined(self, nbytes: int) -> int:
        """Return page-locked memory, for every device, that the CPU writes past its caches."""
        address = ctypes.c_void_p()
        self._here(self._alloc_host, ctypes.byref(address), nbytes, PORTABLE | WRITE_COMBINED)
        assert address.value is not None
        return address.value

    def free_host(self, address: int) -> None:
        """Free what `alloc_write_combined` returned. Waits likewise."""
        self._release(self._free_host, address)

    def is_page_locked(self, address: int) -> bool:
        """Tell whether the driver knows this byte as page-locked host memory, whoever locked it."""
        kind = ctypes.c_int(0)
        status = self._attribute(ctypes.byref(kind), MEMORY_TYPE, address)
        if status == INVALID_VALUE:
            return False
        self._check("cuPointerGetAttribute", status)
        return kind.value == HOST

    def call_on(self, stream: int, function: int, argument: int) -> None:
        """Enqueue a call of a C function, by its address, that takes one integer or pointer."""
        self._here(self._launch_host, stream, function, argument)

    def failure(self, what: str, status: int) -> CudaError:
        """Return the error for a status other than 0 of a driver call."""
        text = ctypes.c_char_p()
        self._bound("cuGetErrorName")(status, ctypes.byref(text))
        return CudaError(what, status, (text.value or b"unknown error").decode())

    def destroy_stream(self, handle: int) -> None:
        """Give a stream back once its work is done. A device that failed says so in the next call."""
        self._give_back(self._destroy_stream, handle)

    def _release(self, release: Callable[[int], None], address: int) -> None:
        me = get_ident()
        try:
            # The first call in the `try`: when an interrupt comes, it has been made and will be undone.
            _releasing.append(me)
            self._here(release, address)
        finally:
            _releasing.remove(me)

    def _bound(self, name: str) -> Call:
        function = getattr(self._library, name)
        function.argtypes = SIGNATURES[name]
        function.restype = ctypes.c_int
        return function  # type: ignore[no-any-return]  # ctypes describes what a library's attributes are by Any

    def _checked(self, name: str) -> Callable[..., None]:
        """Return the call with its status raised."""
        function, check = self._bound(name), self._check

        def call(*arguments: Any) -> None:
            status = function(*arguments)
            if status != SUCCESS:
                check(name, status)

        return call

    def _check(self, name: str, status: int) -> None:
        if status != SUCCESS:
            raise self.failure(name, status)
