"""The calling thread's state in the driver, its capture mode and its current context, by ctypes on the library that is loaded.

Not by the bindings: they give up the interpreter around every call, so a thread that shares it with others would queue for it twice
more for each call that only needs a context. The calls here touch only the thread's state and take 0.1 us each.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar, final

__all__ = ["LIBRARY", "CaptureMode", "Context"]

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
        self._exchange = ctypes.PyDLL(LIBRARY).cuThreadExchangeStreamCaptureMode
        # It fails only where CUDA is unusable, and then the call inside says so better.
        self._exchange.restype = None
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
    """One context, made the calling thread's current one. Calls stand between push and pop:

        try:
            context.push()
            ...
        finally:
            context.pop()

    Each is one call in C. Nothing in the `try` comes before the push, so when an interrupt comes the push has been made and will be
    undone.
    """

    __slots__ = ("pop", "push")

    def __init__(self, context: int, fail: Callable[[int], NoReturn]) -> None:
        """`fail` raises the error for a status of a push."""
        library = ctypes.PyDLL(LIBRARY)
        library.cuCtxPushCurrent_v2.restype = _Pushed(fail).__getitem__
        library.cuCtxPopCurrent_v2.restype = None
        self.push = partial(library.cuCtxPushCurrent_v2, ctypes.c_void_p(context))
        # Every pop writes here what it popped; nobody reads it.
        self.pop = partial(library.cuCtxPopCurrent_v2, ctypes.byref(ctypes.c_void_p()))


class _Pushed(dict[int, None]):
    """Handles the status of a push, as a look-up, which runs no Python code for 0."""

    def __init__(self, fail: Callable[[int], NoReturn]) -> None:
        super().__init__({0: None})
        self._fail = fail

    def __missing__(self, status: int) -> None:
        # The pop is still to come: push what the thread has once more, so that the pop takes only that.
        library, current = ctypes.PyDLL(LIBRARY), ctypes.c_void_p()
        library.cuCtxGetCurrent(ctypes.byref(current))
        if current:
            library.cuCtxPushCurrent_v2(current)
        self._fail(status)
