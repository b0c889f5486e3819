"""The driver calls that CuPy has no binding for, by ctypes on the library that CuPy's runtime has loaded.

Statuses other than 0 are raised as CuPy's `CUDARuntimeError`, whose numbers are the driver's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, final

from cupy.cuda import runtime

from xferlib.cuda.context import Context
from xferlib.cuda.driver import LIBRARY, primary_context

__all__ = ["Owner", "failure", "open_context"]


def open_context(ordinal: int) -> Context:
    """Return the primary context of a device."""
    return Context(primary_context(ordinal, failure), failure, runtime.CUDARuntimeError)


def failure(name: str, status: int) -> Exception:
    """Return what CuPy raises for a status: it does not name the call."""
    error: Exception = runtime.CUDARuntimeError(status)
    return error


@final
class Owner:
    """Tells which streams are of one device, by its context."""

    __slots__ = ("_context", "_get_device", "_ordinal", "_pop", "_push_other", "_stream_context")

    def __init__(self, ordinal: int, context: Context) -> None:
        library = ctypes.PyDLL(LIBRARY)
        self._get_device = _call(library.cuCtxGetDevice)
        self._stream_context = _call(library.cuStreamGetCtx, ctypes.c_void_p, ctypes.c_void_p)
        self._push_other = library.cuCtxPushCurrent_v2
        self._pop = context.pop
        self._ordinal = ordinal
        self._context = context.handle

    def owns(self, stream: int) -> bool:
        """Tell whether a stream is of this device. Its handle is not one of the default streams'."""
        found = ctypes.c_void_p()
        self._stream_context(stream, ctypes.addressof(found))
        if found.value == self._context:
            return True
        # A context beside the primary one may still be of this device.
        ordinal = ctypes.c_int(-1)
        try:
            # Cannot fail for a context that the driver has just named. In the `try`, so that it is undone if an interrupt comes
            # after it.
            self._push_other(found)
            self._get_device(ctypes.byref(ordinal))
        finally:
            self._pop()
        return ordinal.value == self._ordinal


def _call(function: Any, *argtypes: Any) -> Callable[..., None]:
    if argtypes:
        function.argtypes = argtypes
    function.restype = _check
    return function  # type: ignore[no-any-return]  # ctypes describes what a library's attributes are by Any


def _check(status: int) -> None:
    if status != 0:
        raise runtime.CUDARuntimeError(status)
