"""Find out which threads are inside a call of an object. Their frames tell, so no call has to note anything that could be lost."""

from __future__ import annotations

import gc
import sys
import time
from _thread import get_ident
from collections.abc import Callable, Collection
from operator import call
from types import CodeType, FrameType
from typing import Any

__all__ = ["is_called", "wait_for_callers"]

LOOK_SECONDS = 1e-3


def wait_for_callers(of: object, methods: Collection[CodeType], seconds: float) -> None:
    """Wait until no other thread is inside one of the methods of an object, but no longer than `seconds`.

    The wait is bounded, because the other thread may be waiting for the caller.
    """
    deadline = time.monotonic() + seconds
    while is_called(of, methods) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def is_called(of: object, methods: Collection[CodeType]) -> bool:
    """Tell whether another thread is inside one of the methods of an object."""
    me = get_ident()
    return any(_is_inside(frame, of, methods) for thread, frame in _frames().items() if thread != me)


def _frames() -> dict[int, FrameType]:
    """Return each thread's frame, without a garbage collection meanwhile.

    Before Python 3.12 the interpreter holds its lock on the list of threads while it makes the frames, and a collection may begin
    there. If a finalizer gives up the GIL then, and another thread starts a thread or asks for frames, both wait for ever.
    """
    if not gc.isenabled():
        return sys._current_frames()
    steps: tuple[Callable[[], Any], ...] = gc.disable, sys._current_frames, gc.enable
    frames: dict[int, FrameType]
    try:
        # One after the other, without an interrupt or another thread between them.
        _, frames, _ = map(call, steps)
    except MemoryError:
        gc.enable()
        raise
    return frames


def _is_inside(frame: FrameType | None, of: object, methods: Collection[CodeType]) -> bool:
    while frame is not None:
        if frame.f_code in methods and frame.f_locals.get("self") is of:
            return True
        frame = frame.f_back
    return False
