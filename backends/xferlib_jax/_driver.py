"""The CUDA driver as the backend uses it, by ctypes on the library that JAX has loaded: one device, any thread.

ctypes is used and not a bindings package, so that JAX needs no further package. The calls that change the calling thread's state
(its context and capture mode) stand around nearly every other call. For each transfer's calls, one call of the engine's library
makes them together with the call itself; around other calls they are made with the GIL kept, 0.1 us each.

Invariants: the caller's current context and capture mode are left as found; a status other than 0 is raised as `CudaError`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import get_ident
from time import sleep
from typing import Any, TypeAlias, final

from xferlib.engine.cuda import ContextCalls

__all__ = ["OUT_OF_MEMORY", "CudaError", "Driver", "wait_for_releases"]

LIBRARY = "libcuda.so.1"
SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_READY = 600
RELAXED = 2
MEMORY_TYPE, HOST = 2, 1
DISABLE_TIMING = 2
NON_BLOCKING = 1
PORTABLE, WRITE_COMBINED, READ_ONLY = 1, 4, 8
PCI_BUS_ID_NBYTES = 32
POLL_SECONDS = 0.0005

_I, _P, _N = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxPopCurrent_v2": (_P,),
    "cuCtxPushCurrent_v2": (_P,),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGetPCIBusId": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuEventCreate": (_P, _I),
    "cuGetErrorName": (_I, _P),
    "cuInit": (_I,),
    "cuLaunchHostFunc": (_P, _P, _P),
    "cuMemFreeHost": (_P,),
    "cuMemHostAlloc": (_P, _N, _I),
    "cuMemHostRegister_v2": (_P, _N, _I),
    "cuMemHostUnregister": (_P,),
    "cuStreamCreate": (_P, _I),
    "cuStreamDestroy_v2": (_P,),
    "cuThreadExchangeStreamCaptureMode": (_P,),
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
        self._own, self._shared = ctypes.PyDLL(LIBRARY), ctypes.CDLL(LIBRARY)
        self._push, self._pop = self._bound(self._own, "cuCtxPushCurrent_v2"), self._bound(self._own, "cuCtxPopCurrent_v2")
        self._exchange = self._bound(self._own, "cuThreadExchangeStreamCaptureMode")
        self.context = self._retain()
        # Every pop writes it; nobody reads it.
        self._popped = ctypes.byref(ctypes.c_void_p())
        # A cell is swapped with the thread's mode. A cell in use belongs to one call: the collector may run another call inside it.
        self._cells: deque[Any] = deque()
        self._pid = os.getpid()
        # Kept in the instance: at interpreter exit modules lose their names.
        self._getpid, self._is_finalizing = os.getpid, sys.is_finalizing

        calls = ContextCalls(self.context)
        self._copy_h2d, self._copy_d2h, self._record, self._wait = calls.copy_h2d, calls.copy_d2h, calls.record, calls.wait
        self._query_event, self._query_stream, self._synchronize = calls.query_event, calls.query_stream, calls.synchronize
        self._attribute = calls.pointer_attribute
        self._register = self._checked(self._shared, "cuMemHostRegister_v2")
        self._unregister = self._checked(self._shared, "cuMemHostUnregister")
        self._alloc_host = self._checked(self._shared, "cuMemHostAlloc")
        self._free_host = self._checked(self._shared, "cuMemFreeHost")
        self._launch_host = self._checked(self._shared, "cuLaunchHostFunc")
        self._create_stream = self._checked(self._shared, "cuStreamCreate")
        self._destroy_stream = self._checked(self._shared, "cuStreamDestroy_v2")
        self._create_event = self._checked(self._shared, "cuEventCreate")

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
        with self.current():
            self._create_event(ctypes.byref(handle), DISABLE_TIMING)
        assert handle.value is not None
        return handle.value

    def create_stream(self, handle: ctypes.c_void_p) -> None:
        """Create a stream that the legacy default stream does not stop, in `handle`: an interrupt would lose a return value."""
        with self.current():
            self._create_stream(ctypes.byref(handle), NON_BLOCKING)

    def pci_bus_id(self) -> str:
        """Return where the device is on the PCI bus."""
        device, text = ctypes.c_int(), ctypes.create_string_buffer(PCI_BUS_ID_NBYTES)
        self._plain("cuDeviceGet", ctypes.byref(device), self.ordinal)
        self._plain("cuDeviceGetPCIBusId", text, PCI_BUS_ID_NBYTES, device.value)
        return text.value.decode()

    def register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Page-lock memory, for every device."""
        with self.current():
            self._register(address, nbytes, PORTABLE | (READ_ONLY if read_only else 0))

    def unregister(self, address: int) -> None:
        """Unlock memory. Waits for whatever runs on the device, without the GIL."""
        self._release(self._unregister, address)

    def alloc_write_combined(self, nbytes: int) -> int:
        """Return page-locked memory, for every device, that the CPU writes past its caches."""
        address = ctypes.c_void_p()
        with self.current():
            self._alloc_host(ctypes.byref(address), nbytes, PORTABLE | WRITE_COMBINED)
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
        with self.current():
            self._launch_host(stream, function, argument)

    def failure(self, what: str, status: int) -> CudaError:
        """Return the error for a status other than 0 of a driver call."""
        text = ctypes.c_char_p()
        self._bound(self._shared, "cuGetErrorName")(status, ctypes.byref(text))
        return CudaError(what, status, (text.value or b"unknown error").decode())

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's primary context the thread's current one, and allow what CUDA considers unsafe during a capture.

        In global mode the capture may be another thread's, so it is not possible to ask first. Not for a hot path: it takes 2 us.
        """
        self._push(self.context)
        cell = self._relax()
        try:
            yield
        finally:
            self._restore(cell)
            self._pop(self._popped)

    def destroy_stream(self, handle: int) -> None:
        """Give a stream back once its work is done. A device that failed says so in the next call."""
        # In a forked child the handle is the parent's; at interpreter exit the driver may be gone.
        if self._getpid() != self._pid or self._is_finalizing():
            return
        with suppress(CudaError), self.current():
            self._destroy_stream(handle)

    def _release(self, release: Callable[[int], None], address: int) -> None:
        try:
            # The first call in the `try`: when an interrupt comes, it has been made and will be undone.
            _releasing.append(get_ident())
            with self.current():
                release(address)
        finally:
            _releasing.remove(get_ident())

    def _relax(self) -> Any:
        try:
            cell = self._cells.pop()
        except IndexError:
            cell = ctypes.byref(ctypes.c_int(RELAXED))
        self._exchange(cell)
        return cell

    def _restore(self, cell: Any) -> None:
        self._exchange(cell)
        self._cells.append(cell)

    def _retain(self) -> int:
        # Never released: arrays outlive every stager. It is the context that JAX has made already.
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._plain("cuInit", 0)
        self._plain("cuDeviceGet", ctypes.byref(device), self.ordinal)
        self._plain("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.value)
        assert context.value is not None
        return context.value

    def _plain(self, name: str, *arguments: Any) -> None:
        self._check(name, self._bound(self._shared, name)(*arguments))

    def _bound(self, library: ctypes.CDLL, name: str) -> Call:
        function = getattr(library, name)
        function.argtypes = SIGNATURES[name]
        function.restype = ctypes.c_int
        return function  # type: ignore[no-any-return]  # ctypes describes what a library's attributes are by Any

    def _checked(self, library: ctypes.CDLL, name: str) -> Callable[..., None]:
        """Return the call with the context current around it and its status raised. For what harms no capture, or in `current`."""
        function = self._bound(library, name)
        push, pop, context, popped, check = self._push, self._pop, self.context, ctypes.byref(ctypes.c_void_p()), self._check

        def call(*arguments: Any) -> None:
            push(context)
            status = function(*arguments)
            pop(popped)
            if status != SUCCESS:
                check(name, status)

        return call

    def _check(self, name: str, status: int) -> None:
        if status != SUCCESS:
            raise self.failure(name, status)
