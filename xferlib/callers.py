"""Find out which threads are inside a call of an object, and which line of a program called ours.

Frames tell, so no call has to note anything that could be lost.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from _thread import get_ident
from collections.abc import Callable, Collection
from functools import lru_cache, partial
from operator import attrgetter, call
from types import CodeType, FrameType
from typing import Any, NamedTuple, final

__all__ = ["UserLine", "caller_of", "frame_of", "is_called", "user_frame", "user_line", "wait_for_callers", "warn_at"]

CALL_LOOK_SECONDS = 1e-3
COLLECTS_ANYWHERE = sys.version_info < (3, 12)


@final
class UserLine(NamedTuple):
    """A line of a program. What stands there may be warned of later, on whatever thread."""

    file: str
    line: int
    module: str
    shown: dict[Any, Any]
    """What was shown of its module: Python's own note."""

    def warn(self, words: str, category: type[Warning] = RuntimeWarning, source: object = None) -> None:
        """Issue a warning, as `warnings.warn` would at this line."""
        warnings.warn_explicit(words, category, self.file, self.line, self.module, self.shown, source=source)


def user_line() -> UserLine:
    """Return the line of `user_frame`."""
    frame = user_frame()
    shown = frame.f_globals.setdefault("__warningregistry__", {})
    return UserLine(frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__")), shown)


def user_frame() -> FrameType:
    """Return the innermost frame of this thread that is neither ours nor of `contextlib`, which calls ours for the program.

    Its outermost, if all are: that of a thread that we started.
    """
    frame = sys._getframe(1)
    # Asked for each frame of ours at each large pageable put, but there are only some names.
    while _is_between(frame.f_globals.get("__name__")) and (caller := frame.f_back) is not None:
        frame = caller
    return frame


def warn_at(frame: FrameType, words: str, category: type[Warning]) -> None:
    """Issue a warning, as `warnings.warn` would at the line that a frame of this thread is at."""
    names = frame.f_globals
    shown = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(words, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), shown)


def wait_for_callers(of: object, methods: Collection[CodeType], seconds: float) -> None:
    """Wait until no other thread is inside one of the methods of an object, but no longer than `seconds`.

    The wait is bounded, because the other thread may be waiting for the caller.
    """
    deadline = time.monotonic() + seconds
    while is_called(of, methods) and time.monotonic() < deadline:
        time.sleep(CALL_LOOK_SECONDS)


def is_called(of: object, methods: Collection[CodeType]) -> bool:
    """Tell whether another thread is inside one of the methods of an object."""
    me = get_ident()
    return any(_is_inside(frame, of, methods) for thread, frame in _uncollected(sys._current_frames).items() if thread != me)


def frame_of(thread: int) -> FrameType | None:
    """Return what a thread, by its `ident`, is at; None: it runs no Python. Ask for more by `caller_of`."""
    frames: dict[int, FrameType] = _uncollected(sys._current_frames)
    return frames.get(thread)


def caller_of(frame: FrameType) -> FrameType | None:
    """Return the frame that has called this one, which may be another thread's."""
    caller: FrameType | None = _uncollected(partial(_back_of, frame))
    return caller


def _is_inside(frame: FrameType | None, of: object, methods: Collection[CodeType]) -> bool:
    while frame is not None:
        if frame.f_code in methods and _uncollected(partial(_locals_of, frame)).get("self") is of:
            return True
        frame = caller_of(frame)
    return False


@lru_cache(maxsize=256)
def _is_between(module: object) -> bool:
    package = str(module).partition(".")[0]
    return package in ("xferlib", "contextlib") or package.startswith("xferlib_")


def _uncollected(ask: Callable[[], Any]) -> Any:
    """Return what a function in C returns, without a garbage collection meanwhile.

    Before Python 3.12 one may begin wherever the interpreter makes an object, and a finalizer may give up the GIL. If it is asked
    for a frame of another thread just then, that thread goes on, and what is read of its frame is gone. If it lists the frames of
    all threads, its list of threads is locked: whoever starts a thread waits for that with the GIL, for ever.
    """
    if not COLLECTS_ANYWHERE or not gc.isenabled():
        return ask()
    try:
        # One after the other, without an interrupt or another thread between them. No name for what comes: this frame may be in it,
        # and would keep itself alive, and those below it.
        return list(map(call, (gc.disable, ask, gc.enable)))[1]
    except BaseException:
        gc.enable()
        raise


_back_of, _locals_of = attrgetter("f_back"), attrgetter("f_locals")
