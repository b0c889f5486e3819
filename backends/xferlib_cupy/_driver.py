"""The driver calls that CuPy has no binding for, by ctypes on the library that CuPy's runtime has loaded.

They change the calling thread's state (current context, capture mode) and nothing else. Statuses other than 0 are raised as
CuPy's `CUDARuntimeError`, whose numbers are the driver's.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, final

from cupy.cuda import runtime

__all__ = ["CaptureMode", "Contexts"]

T = TypeVar("T")

LIBRARY = "libcuda.so.1"
RELAXED = 2


@final
class CaptureMode:
    """Makes calls that CUDA considers unsafe while anybody captures a graph, without spoiling the capture.

    In global mode the capture may be another thread's, so it is not possible to ask first: every event query would invalidate it.
    """

    __slots__ = ("_cells", "_exchange")

    def __init__(self) -> None:
        # PyDLL keeps the GIL, for calls that only touch the thread's state. A pair costs 0.2 us this way, 3 us by cuda-bindings.
        exchange = ctypes.PyDLL(LIBRARY).cuThreadExchangeStreamCaptureMode
        # It fails only where CUDA is unusable, and then the call inside says so better.
        exchange.restype = None
        self._exchange = exchange
        # The call swaps the cell with the thread's mode. A cell in use belongs to one call: a finalizer may run inside another's.
        self._cells: deque[Any] = deque()

    def relaxed(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return `call(*arguments)`, made in relaxed mode."""
        exchange, cells = self._exchange, self._cells
        try:
            cell = cells.pop()
        except IndexError:
            cell = ctypes.byref(ctypes.c_int(RELAXED))
        try:
            # The first call in the `try`: when an interrupt comes, it has been made and will be undone.
            exchange(cell)
            return call(*arguments)
        finally:
            exchange(cell)
            cells.append(cell)


@final
class Contexts:
    """The primary context of one device, which every library of the process shares, made the calling thread's current one.

        try:
            contexts.push()
            ...
        finally:
            contexts.pop()

    Each is one call in C. Nothing in the `try` comes before the push, so when an interrupt comes the push has been made and will be
    undone.
    Not `cudaSetDevice`: from CUDA 12 on that creates a context on the device that is set, also when it is set back. That would take
    half a gigabyte of a GPU that nobody uses.
    """

    __slots__ = ("_get_device", "_push_other", "_stream_context", "context", "ordinal", "pop", "push")

    def __init__(self, ordinal: int) -> None:
        library, own = ctypes.PyDLL(LIBRARY), ctypes.PyDLL(LIBRARY)
        self._get_device = _call(library.cuCtxGetDevice)
        self._stream_context = _call(library.cuStreamGetCtx, ctypes.c_void_p, ctypes.c_void_p)
        self._push_other = library.cuCtxPushCurrent_v2
        self.ordinal = ordinal
        self.context = _retain(ordinal)
        # On the path of small transfers where there are several devices.
        own.cuCtxPushCurrent_v2.restype, own.cuCtxPopCurrent_v2.restype = _Pushed({0: None}).__getitem__, None
        self.push = partial(own.cuCtxPushCurrent_v2, ctypes.c_void_p(self.context))
        # Every pop writes here what it popped; nobody reads it.
        self.pop = partial(own.cuCtxPopCurrent_v2, ctypes.byref(ctypes.c_void_p()))

    def owns(self, stream: int) -> bool:
        """Tell whether a stream is of this device. Its handle is not one of the default streams'."""
        found = ctypes.c_void_p()
        self._stream_context(stream, ctypes.addressof(found))
        if found.value == self.context:
            return True
        # A context beside the primary one may still be of this device.
        ordinal = ctypes.c_int(-1)
        try:
            # Cannot fail for a context that the driver has just named. In the `try`, so that it is undone if an interrupt comes
            # after it.
            self._push_other(found)
            self._get_device(ctypes.byref(ordinal))
        finally:
            self.pop()
        return ordinal.value == self.ordinal


class _Pushed(dict[int, None]):
    """Handles the status of a push, as a look-up, which runs no Python code for 0."""

    def __missing__(self, status: int) -> None:
        # The pop is still to come: push what the thread has once more, so that the pop takes only that.
        library, current = ctypes.PyDLL(LIBRARY), ctypes.c_void_p()
        library.cuCtxGetCurrent(ctypes.byref(current))
        if current:
            library.cuCtxPushCurrent_v2(current)
        _check(status)


def _retain(ordinal: int) -> int:
    # Gives up the GIL: the first call in a process takes a fifth of a second. Never released: arrays outlive every stager.
    library = ctypes.CDLL(LIBRARY)
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    _call(library.cuInit)(0)
    _call(library.cuDeviceGet)(ctypes.byref(device), ordinal)
    _call(library.cuDevicePrimaryCtxRetain)(ctypes.byref(context), device)
    assert context.value is not None
    return context.value


def _call(function: Any, *argtypes: Any) -> Callable[..., None]:
    if argtypes:
        function.argtypes = argtypes
    function.restype = _check
    return function  # type: ignore[no-any-return]  # ctypes describes what a library's attributes are by Any


def _check(status: int) -> None:
    if status != 0:
        raise runtime.CUDARuntimeError(status)
