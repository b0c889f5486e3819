"""Interrupts by a real signal, at moments that nobody chose: as Ctrl-C, many times a second."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Interrupt", "interrupted"]

SECONDS = 300e-6
"""Between two. They come while the interrupted work begins again as well, but are not raised there."""


class Interrupt(Exception):
    """Raised on the main thread, wherever that is."""


def interrupted(work: Callable[[], Any], times: int) -> None:
    """Call what never returns again and again, until it was interrupted so often. On the main thread.

    What is raised inside of a finalizer or a callback ends that, and is told to nobody.
    """
    assert threading.current_thread() is threading.main_thread()
    armed = False

    def handle(signum: int, frame: FrameType | None) -> None:
        if armed:
            raise Interrupt

    before, hook = signal.signal(signal.SIGALRM, handle), sys.unraisablehook
    sys.unraisablehook = _ignore
    signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
    try:
        hits = 0
        while hits < times:
            try:
                armed = True
                work()
            except Interrupt:
                armed = False
                hits += 1
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def _ignore(unraisable: Any) -> None:
    """Say nothing."""
