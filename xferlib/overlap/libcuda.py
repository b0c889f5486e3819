"""The few functions of CUDA's driver that `assert_overlaps` calls, through ctypes: no framework has to bring bindings for them.

All of them may be called inside a callback of CUPTI. None allocates, frees or waits, except where it says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from xferlib.errors import BackendUnavailableError
from xferlib.gates import gate_table
from xferlib.watchdog import OPEN, TABLE_NBYTES

__all__ = ["Driver", "DriverError", "NoGpuError"]

LIBRARY = "libcuda.so.1"
NOT_READY, ALREADY_REGISTERED = 600, 712
STUB_LIBRARY, NO_DEVICE = 34, 100
HOST_MEMORY, DEVICE_MEMORY = 1, 2
ATTRIBUTE_MEMORY_TYPE, ATTRIBUTE_IS_MANAGED = 2, 8
PORTABLE_AND_MAPPED = 1 | 2
DISABLE_TIMING, NON_BLOCKING, WAIT_GEQ, RELAXED = 2, 1, 0, 2
NO_GPU = (
    "whether the loop overlaps cannot be tested here: assert_overlaps holds work on an NVIDIA GPU, and {reason}. A CPU has nothing "
    "to prove: its cores make copies and compute alike"
)


class NoGpuError(BackendUnavailableError):
    """Raised where there is no NVIDIA GPU; not where there is one that does not work."""


class DriverError(RuntimeError):
    """Raised when a call of the driver fails."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function} failed with CUDA error {status}")
        self.status = status


@final
class Driver:
    """The driver on one device, by its number. Raises `NoGpuError` where there is none, `BackendUnavailableError` if CUDA fails.

    Frameworks share the primary context of a device, and so does this.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            self._library: Any = ctypes.CDLL(LIBRARY)
        except OSError:
            raise NoGpuError(NO_GPU.format(reason="there is no NVIDIA driver (libcuda.so.1)")) from None
        count = ctypes.c_int()
        status = self._library.cuInit(0) or self._library.cuDeviceGetCount(ctypes.byref(count))
        if status in (STUB_LIBRARY, NO_DEVICE) or (status == 0 and count.value == 0):
            raise NoGpuError(NO_GPU.format(reason="CUDA finds none"))
        if status != 0:
            # As with a driver that does not fit its module of the kernel, or in the child of a process that used CUDA.
            raise BackendUnavailableError(
                f"there is an NVIDIA driver, and it cannot begin: CUDA error {status}. See whether nvidia-smi works, and whether "
                "this process was forked by one that had used CUDA: spawn it instead"
            )
        if not 0 <= device < count.value:
            raise ValueError(f"device={device!r}: CUDA shows {count.value}, counted from 0")
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        with self.current():
            self._gates = self._device_address()

    @contextmanager
    def current(self, context: int | None = None) -> Iterator[None]:
        """Make a context the calling thread's inside; None: the device's."""
        self._call("cuCtxPushCurrent_v2", self._context if context is None else ctypes.c_void_p(context))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def synchronize(self) -> None:
        """Wait until the device has nothing to do. Raises `DriverError` if something on it has failed."""
        with self.current():
            self._call("cuCtxSynchronize")

    def relax(self) -> None:
        """Let the calling thread ask events whatever somebody captures into a graph meanwhile."""
        self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))

    def new_event(self) -> int:
        """Return the handle of an event in the current context."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), DISABLE_TIMING)
        assert event.value is not None
        return event.value

    def destroy(self, event: int) -> None:
        self._library.cuEventDestroy_v2(ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> bool:
        """Record the event on a stream; tell whether that worked."""
        return bool(self._library.cuEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream)) == 0)

    def reached(self, event: int) -> bool:
        """Tell whether an event that was recorded is reached. Raises `DriverError` for failures."""
        status = self._library.cuEventQuery(ctypes.c_void_p(event))
        if status not in (0, NOT_READY):
            raise DriverError("cuEventQuery", status)
        return bool(status == 0)

    def hold(self, stream: int, gate: int) -> bool:
        """Make what is enqueued on the stream from now on wait for a gate's word, by its address; tell whether that worked."""
        address = ctypes.c_uint64(self._gates + gate - gate_table().address)
        return bool(self._library.cuStreamWaitValue32_v2(ctypes.c_void_p(stream), address, ctypes.c_uint32(OPEN), WAIT_GEQ) == 0)

    def is_capturing(self, stream: int) -> bool:
        """Tell whether a stream is being captured into a graph, or cannot be asked because another is."""
        capturing = ctypes.c_int()
        status = self._library.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(capturing))
        return bool(status != 0 or capturing.value != 0)

    def is_blocking(self, stream: int) -> bool:
        """Tell whether a stream and the NULL stream wait for each other. Not of one that is being captured: it would be no more."""
        flags = ctypes.c_uint()
        status = self._library.cuStreamGetFlags(ctypes.c_void_p(stream), ctypes.byref(flags))
        return bool(status == 0 and not flags.value & NON_BLOCKING)

    def memory(self, address: int) -> str:
        """Return "device", "pinned" or "pageable" for an address, as the driver sees it, or "managed"."""
        kind, managed = ctypes.c_uint(), ctypes.c_uint()
        where = ctypes.c_uint64(address)
        if self._library.cuPointerGetAttribute(ctypes.byref(kind), ATTRIBUTE_MEMORY_TYPE, where) != 0:
            return "pageable"
        status = self._library.cuPointerGetAttribute(ctypes.byref(managed), ATTRIBUTE_IS_MANAGED, where)
        if status == 0 and managed.value:
            return "managed"
        return {HOST_MEMORY: "pinned", DEVICE_MEMORY: "device"}.get(kind.value, "managed")

    def _device_address(self) -> int:
        """Page-lock the table of gates once, and return its address on the device. Allocates."""
        table = ctypes.c_void_p(gate_table().address)
        status = self._library.cuMemHostRegister_v2(table, ctypes.c_size_t(TABLE_NBYTES), PORTABLE_AND_MAPPED)
        if status not in (0, ALREADY_REGISTERED):
            raise DriverError("cuMemHostRegister", status)
        address = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), table, 0)
        return address.value

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise DriverError(function, status)
