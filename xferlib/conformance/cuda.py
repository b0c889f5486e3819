"""What the hooks of every CUDA backend share: streams stopped at a gate, and questions to the driver. Knows only CUDA.

Held work is work behind a wait for a word of host memory, which the test writes. Nothing here depends on timing. Nothing goes
through a backend's own calls, so a hold also holds a broken backend. The driver bindings are imported when first used.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, final

from xferlib.gates import GATE_SECONDS, Gate, gate_table
from xferlib.watchdog import OPEN, TABLE_NBYTES

__all__ = [
    "NO_DEVICE_MEMORY",
    "CudaError",
    "Mark",
    "StreamHold",
    "call",
    "context",
    "copies_go_nowhere",
    "count_calls",
    "device_free_nbytes",
    "hold_streams",
    "page_locked",
    "write_combined",
]

NO_DEVICE_MEMORY = 4096
"""An address that is nobody's: copies to and from it fail at once with "invalid argument", and later ones work."""

CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_NOT_READY = 600
CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
EVENT_DISABLE_TIMING = 2
HOST_REGISTER_PORTABLE_AND_MAPPED = 1 | 2
HOST_ALLOC_WRITE_COMBINED = 4
MEMORYTYPE_HOST = 1
WAIT_VALUE_GEQ = 0
_TO_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_TO_HOST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
_broken: list[object] = []


@final
class CudaError(RuntimeError):
    """Raised when a driver call fails; `status` is its CUresult."""

    def __init__(self, function: str, status: Any) -> None:
        super().__init__(f"{function} failed with {getattr(status, 'name', status)} ({int(status)})")
        self.status = int(status)


@final
class Mark:
    """A point in a stream, known only to the driver. `destroy` it when the streams are done with it."""

    def __init__(self, stream: int, *, device: int = 0) -> None:
        self._device = device
        with context(device):
            self._event = int(call("cuEventCreate", EVENT_DISABLE_TIMING))
            call("cuEventRecord", self._event, stream)

    def reached(self) -> bool:
        status = _driver().cuEventQuery(self._event)[0]
        if int(status) not in (0, CUDA_ERROR_NOT_READY):
            raise CudaError("cuEventQuery", status)
        return int(status) == 0

    def wait(self) -> None:
        """Block, without the GIL, until the point is reached."""
        call("cuEventSynchronize", self._event)

    def destroy(self) -> None:
        with context(self._device):
            call("cuEventDestroy", self._event)


@final
class StreamHold:
    """Streams stopped at one gate, and a mark behind what is held on each: a `HeldArray` of the suite. Made by `hold_streams`."""

    def __init__(self, gate: Gate, marks: list[Mark], stream: object | None, array: Any) -> None:
        self._gate = gate
        self._marks = marks
        self._finished = False
        self.stream = stream
        self.array = array
        self.opened_by: Literal["test", "watchdog"] | None = None

    @property
    def held(self) -> bool:
        return not self._finished and self._gate.shut and not any(mark.reached() for mark in self._marks)

    def release(self) -> None:
        if not self._finished:
            self._gate.open()

    def finish(self) -> None:
        """Release, wait for what was held, and give the gate back."""
        self.release()
        for mark in self._marks:
            mark.wait()
            mark.destroy()
        self.opened_by = self._gate.opened_by
        self._finished = True
        self._gate.give_back()


@contextmanager
def hold_streams(
    streams: Iterable[int],
    *,
    stream: object | None = None,
    enqueue: Callable[[], None] | None = None,
    array: Any = None,
    device: int = 0,
    seconds: float = GATE_SECONDS,
) -> Iterator[StreamHold]:
    """Stop these streams, by handle, at one gate; `enqueue` then adds the work that is to be held.

    `stream` is what the hold names as its own, and `array` what that work produces, if a hook asks for it. Whatever runs under the
    hold must have run before: first launches, compiles and frees wait for held work. If the watchdog had to open the gate, leaving
    the context raises, or adds a note to what is being raised.
    """
    handles = list(streams)
    # Before the gate is shut, because page-locking the table may take its time.
    _register_table(device)
    gate = Gate(seconds)
    hold = StreamHold(gate, [], stream, array)
    try:
        with context(device):
            for handle in handles:
                call("cuStreamWaitValue32", handle, _device_address(gate.address, device), OPEN, WAIT_VALUE_GEQ)
        if enqueue is not None:
            enqueue()
        hold._marks.extend(Mark(handle, device=device) for handle in handles)
        yield hold
    except BaseException as error:
        hold.finish()
        if hold.opened_by == "watchdog":
            error.add_note(_overdue(seconds))
        raise
    hold.finish()
    if hold.opened_by == "watchdog":
        raise TimeoutError(_overdue(seconds))


@contextmanager
def copies_go_nowhere(calls: Any) -> Iterator[None]:
    """Give the copies that the engine makes by these calls, an `xferlib.engine.native.Calls`, a device address that is nobody's."""
    before = calls.copy_h2d, calls.copy_d2h
    to_device, to_host = _TO_DEVICE(before[0]), _TO_HOST(before[1])
    broken = (
        _TO_DEVICE(lambda dst, src, nbytes, stream: to_device(NO_DEVICE_MEMORY, src, nbytes, stream)),
        _TO_HOST(lambda dst, src, nbytes, stream: to_host(dst, NO_DEVICE_MEMORY, nbytes, stream)),
    )
    # Kept for good: a thread may still be in one of them when this has ended.
    _broken.append(broken)
    calls.copy_h2d, calls.copy_d2h = [ctypes.cast(function, ctypes.c_void_p).value for function in broken]
    try:
        yield
    finally:
        calls.copy_h2d, calls.copy_d2h = before


def count_calls(module: Any, names: Iterable[str]) -> Callable[[], Counter[str]]:
    """Wrap functions of a module, for good, and return what gives the calls so far by name. Sees calls through the module."""
    called: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(module, name)

        def call(*arguments: Any) -> Any:
            called.append(name)
            return function(*arguments)

        return call

    for name in names:
        setattr(module, name, counted(name))
    return lambda: Counter(list(called))


def page_locked(address: int) -> bool:
    """Ask the driver whether it knows the address as page-locked host memory, whoever locked it."""
    driver = _driver()
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    with context(0):
        status, kind = driver.cuPointerGetAttribute(attribute, address)
    if int(status) == CUDA_ERROR_INVALID_VALUE:
        return False
    if int(status) != 0:
        raise CudaError("cuPointerGetAttribute", status)
    return int(kind) == MEMORYTYPE_HOST


def write_combined(address: int) -> bool:
    """Ask the driver whether the address is in host memory that it allocated as write-combined."""
    with context(0):
        status, flags = _driver().cuMemHostGetFlags(address)
    if int(status) == CUDA_ERROR_INVALID_VALUE:
        # Memory that somebody else has mapped, and that the driver has only locked.
        return False
    if int(status) != 0:
        raise CudaError("cuMemHostGetFlags", status)
    return bool(int(flags) & HOST_ALLOC_WRITE_COMBINED)


def device_free_nbytes(device: int = 0) -> int:
    """Return the free bytes of the device, as the driver counts them."""
    with context(device):
        free, _ = call("cuMemGetInfo")
    return int(free)


@contextmanager
def context(device: int) -> Iterator[None]:
    """Make the device's primary context, which every framework shares, current, and leave the caller's context as found."""
    call("cuCtxPushCurrent", _primary_context(device))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def call(function: str, *arguments: object) -> Any:
    """Call the driver and return what it returns beside the status. Raises `CudaError`."""
    status, *results = getattr(_driver(), function)(*arguments)
    if int(status) != 0:
        raise CudaError(function, status)
    return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the laws of a CUDA backend are tested with the driver's Python bindings. Install them with: pip install cuda-bindings",
            name=error.name,
        ) from error
    bindings: ModuleType = driver
    return bindings


@functools.cache
def _primary_context(device: int) -> Any:
    call("cuInit", 0)
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))


@functools.cache
def _register_table(device: int) -> None:
    with context(device):
        try:
            call("cuMemHostRegister", gate_table().address, TABLE_NBYTES, HOST_REGISTER_PORTABLE_AND_MAPPED)
        except CudaError as error:
            # Portable: one registration serves every device.
            if error.status != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
                raise


def _device_address(address: int, device: int) -> int:
    with context(device):
        return int(call("cuMemHostGetDevicePointer", address, 0))


def _overdue(seconds: float) -> str:
    return (
        f"the watchdog opened the gate after {seconds:g} s. Something waited for the held work, or for what stands behind it; look "
        "for the last call made while it was held"
    )
