"""The calling thread's state in the driver, its current context and its capture mode: changed around calls, and left as found.

By ctypes on the library that the process has loaded, and not by bindings: those give up the interpreter around every call, so a
thread that shares it with others would queue for it twice more for each call that only needs a context. The calls here touch only
the thread's state and take 0.1 us each.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, final

from xferlib.cuda.driver import LIBRARY, RELAXED, Failure

__all__ = ["CaptureMode", "Context"]

T = TypeVar("T")


@final
class CaptureMode:
    """Makes calls that CUDA considers unsafe while anybody captures a graph, without spoiling the capture.

    In global mode the capture may be another thread's, so it is not possible to ask first: every event query would invalidate it.
    """

    __slots__ = ("_cells", "_exchange")

    def __init__(self) -> None:
        # PyDLL keeps the GIL. A pair costs 0.2 us this way, 3 us by the driver's bindings.
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
class Context:
    """One context, made the calling thread's current one around calls. Any thread. Never closed: who uses it outlives stagers.

        try:
            context.push()
            ...
        finally:
            context.pop()

    Each is one call in C. Nothing in the `try` comes before the push, so when an interrupt comes the push has been made and will be
    undone.
    Not `cudaSetDevice`: from CUDA 12 on that creates a context on the device that is set, also when it is set back. That would take
    half a gigabyte of a GPU that nobody uses.
    """

    __slots__ = ("_errors", "_getpid", "_is_finalizing", "_pid", "capture_mode", "handle", "pop", "push")

    def __init__(self, handle: int, failure: Failure, errors: type[Exception]) -> None:
        """`failure` makes the error for a push that fails; `errors` is what a call that gives something back may raise."""
        library = ctypes.PyDLL(LIBRARY)
        library.cuCtxPushCurrent_v2.restype = _Pushed(failure).__getitem__
        library.cuCtxPopCurrent_v2.restype = None
        self.handle = handle
        self.push = partial(library.cuCtxPushCurrent_v2, ctypes.c_void_p(handle))
        # Every pop writes here what it popped; nobody reads it.
        self.pop = partial(library.cuCtxPopCurrent_v2, ctypes.byref(ctypes.c_void_p()))
        self.capture_mode = CaptureMode()
        self._errors = errors
        self._pid = os.getpid()
        # Kept in the instance: at interpreter exit modules lose their names.
        self._getpid = os.getpid
        self._is_finalizing = sys.is_finalizing

    def here(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return `call(*arguments)`, made in this context, without spoiling anybody's capture."""
        try:
            self.push()
            return self.capture_mode.relaxed(call, *arguments)
        finally:
            self.pop()

    def inside(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return the call, to be made in this context, in whatever capture mode the thread is."""
        push, pop = self.push, self.pop

        def inside(*arguments: Any) -> T:
            try:
                push()
                return call(*arguments)
            finally:
                pop()

        return inside

    def give_back(self, release: Callable[..., object], *arguments: Any) -> None:
        """Make a call here that gives something back. Nobody is told of a failure: a failed device says so in the next call.

        Does nothing in a forked child, where what there is is the parent's, and at interpreter exit, where the driver may be gone.
        """
        if self._getpid() != self._pid or self._is_finalizing():
            return
        with suppress(self._errors):
            self.here(release, *arguments)


class _Pushed(dict[int, None]):
    """Handles the status of a push, as a look-up, which runs no Python code for 0."""

    def __init__(self, failure: Failure) -> None:
        super().__init__({0: None})
        self._failure = failure

    def __missing__(self, status: int) -> None:
        # The pop is still to come: push what the thread has once more, so that the pop takes only that.
        library, current = ctypes.PyDLL(LIBRARY), ctypes.c_void_p()
        library.cuCtxGetCurrent(ctypes.byref(current))
        if current:
            library.cuCtxPushCurrent_v2(current)
        raise self._failure("cuCtxPushCurrent", status)
