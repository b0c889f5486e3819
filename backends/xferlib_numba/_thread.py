"""The calling thread's state in the driver, its capture mode and its current context, by ctypes on the library that is loaded.

Not by the bindings: they give the interpreter up around every call, and a thread that shares it with others would stand in line for
it again, twice for each call that only needs a context. These touch nothing but the thread, 0.1 us each.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, final

__all__ = ["CaptureMode", "pushed"]

T = TypeVar("T")

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

    def relaxed(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return `call(*arguments)`, made in relaxed mode."""
        exchange, cells = self._exchange, self._cells
        try:
            cell = cells.pop()
        except IndexError:
            cell = ctypes.byref(ctypes.c_int(RELAXED))
        try:
            # The first call in here, so that it has been made when an interrupt comes, and is undone.
            exchange(cell)
            return call(*arguments)
        finally:
            exchange(cell)
            cells.append(cell)


def pushed(context: int, fail: Callable[[int], None]) -> AbstractContextManager[None]:
    """Return an object whose `with` makes a context the thread's current one, and then gives the thread back what it had, or none.

    `fail` raises the error for a status. Both ends are calls in C and no Python code, so that an interrupt finds both made, or
    neither: a generator, or a method, could be cut off between its push and the `with`.
    """
    library = ctypes.PyDLL(LIBRARY)
    push, pop = library.cuCtxPushCurrent_v2, library.cuCtxPopCurrent_v2
    push.restype, pop.restype = _Statuses(fail).__getitem__, None
    # `with` passes on what is being raised: three arguments more than the driver looks at.
    pop.argtypes = (ctypes.c_void_p, _Unused, _Unused, _Unused)  # type: ignore[assignment]  # it takes all that convert
    # What was popped is written by every pop, and read by none.
    enter, leave = partial(push, ctypes.c_void_p(context)), partial(pop, ctypes.byref(ctypes.c_void_p()))
    made: AbstractContextManager[None] = type("Pushed", (), {"__enter__": staticmethod(enter), "__exit__": staticmethod(leave)})()
    return made


class _Statuses(dict[int, None]):
    """What is made of a status, as a look-up, which runs no Python code for 0: nothing, or the error is raised."""

    def __init__(self, fail: Callable[[int], None]) -> None:
        super().__init__({0: None})
        self._fail = fail

    def __missing__(self, status: int) -> None:
        self._fail(status)


class _Unused:
    """The type of an argument that is passed for nothing, whatever it is: as a number, which is all that ctypes asks for."""

    from_param = staticmethod(callable)
