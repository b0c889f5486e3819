"""The calling thread's state in the driver, its capture mode and its current context, by ctypes on the library that is loaded.

Not by the bindings: they give the interpreter up around every call, and a thread that shares it with others would stand in line for
it again, twice for each call that only needs a context. These touch nothing but the thread, 0.1 us each.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any, final

__all__ = ["CaptureMode", "Contexts"]

LIBRARY = "libcuda.so.1"
RELAXED = 2


@final
class CaptureMode:
    """Makes calls that CUDA holds to be unsafe while anybody captures a graph, without spoiling the capture.

    In global mode the capture may be another thread's, so there is no asking first: every event query would invalidate it.
    """

    __slots__ = ("_cells", "_exchange")

    def __init__(self) -> None:
        self._exchange = ctypes.PyDLL(LIBRARY).cuThreadExchangeStreamCaptureMode
        # It fails only where CUDA is unusable, and the call inside says that better.
        self._exchange.restype = None
        # The call swaps the cell with the thread's mode. A cell in use belongs to one call: a finalizer may run inside another's.
        self._cells: deque[Any] = deque()

    def relax(self) -> Any:
        """Let this thread make such calls; hand the result to `restore` on the same thread."""
        try:
            cell = self._cells.pop()
        except IndexError:
            cell = ctypes.byref(ctypes.c_int(RELAXED))
        self._exchange(cell)
        return cell

    def restore(self, cell: Any) -> None:
        """Give the thread back the mode that it had."""
        self._exchange(cell)
        self._cells.append(cell)


@final
class Contexts:
    """One context, pushed and popped."""

    __slots__ = ("_context", "_pop", "_popped", "_push")

    def __init__(self, context: int) -> None:
        library = ctypes.PyDLL(LIBRARY)
        self._context = ctypes.c_void_p(context)
        self._push, self._pop = library.cuCtxPushCurrent_v2, library.cuCtxPopCurrent_v2
        self._pop.restype = None
        # Written by every pop, read by none.
        self._popped = ctypes.byref(ctypes.c_void_p())

    def push(self) -> int:
        """Make the context the thread's current one, and return the driver's status; if that is 0, `pop` must follow."""
        status: int = self._push(self._context)
        return status

    def pop(self) -> None:
        """Give the thread back the context that it had, or none."""
        self._pop(self._popped)
