"""Interrupts at moments that are known, and by real signals at moments that are not.

Python raises an interrupt between two steps of the main thread. `at_line` raises one in front of a certain line of certain files:
the first, the second, and so on, until none is left, so that no place is missed. `by_signal` lets a timer of the system do it.
"""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt(Exception):
    """What a handler raises that is no Ctrl-C."""


def at_line(number: int, files: tuple[str, ...], call: Callable[[], object]) -> bool:
    """Call, and raise an interrupt in front of the line that is run as such-and-such a one; False: fewer were run."""
    passed = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal passed
        if not frame.f_code.co_filename.endswith(files):
            return None
        # Behind a block, its `with` is traced in front of the release, where Python raises nothing. Nor does it where a `try`
        # begins, which for Python 3.11 is no part of the `with` around it: then it comes a line later.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith("with "):
            passed += 1
            if passed >= number and line != "try:":
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


LOSES = {"gc_callback", "_remove"}
"""Functions that Python calls by itself, and whose errors it ignores."""


def by_signal(seconds: float, call: Callable[[], object]) -> None:
    """Call something that has no end, until a timer of the system interrupts it."""

    over = False

    def heard(number: int, frame: FrameType | None) -> None:
        # What is raised in a callback of the collector, or of a weak reference in Python's own sets, is lost, and warned of.
        if not over and (frame is None or frame.f_code.co_name not in LOSES):
            raise Interrupt

    before = signal.signal(signal.SIGALRM, heard)
    try:
        # The second one is for an interrupt that is raised inside a finalizer, where Python ignores it.
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
        call()
    except Interrupt:
        # One that came late would get out of here: nothing looks for signals between this and the line above.
        over = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
