"""Where every thread is when a program, or what one holds, lasts too long. The timer is faulthandler's: it needs no interpreter.

So it also tells of a call that waits for held work and keeps the interpreter from everybody who could release it.
"""

from __future__ import annotations

import faulthandler
import os

from xferlib.gates import GATE_SECONDS

__all__ = ["HANG_SECONDS", "begin_hold", "begin_program", "end_hold", "end_program"]

HANG_SECONDS = float(os.environ.get("XFERLIB_RANDOM_PROGRAMS_HANG_SECONDS", "45"))
"""Of one program. Longer than any hold."""
TELLS = bool(os.environ.get("XFERLIB_RANDOM_PROGRAMS_WHERE"))
"""Whether to tell where everybody is, shortly before the watchdog opens a gate that nobody has opened. Only when asked to: the
interpreter may crash as it is looked at from outside."""

_programs: list[None] = []


def begin_program() -> None:
    """From now on a program that hangs ends the process. Whoever reads the log sees why."""
    _programs.append(None)
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)


def end_program() -> None:
    _programs.clear()
    faulthandler.cancel_dump_traceback_later()


def begin_hold() -> None:
    """Be ready to tell."""
    if _programs and TELLS:
        faulthandler.dump_traceback_later(GATE_SECONDS - 1)


def end_hold() -> None:
    if _programs and TELLS:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
