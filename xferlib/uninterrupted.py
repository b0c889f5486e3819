"""Steps that no interrupt cuts: calls, and the start of threads. What a finalizer may do of such: `collects`, `finalizer_timeout`.

Python raises an interrupt (Ctrl-C, a signal's handler) on the main thread alone, and the result of the call that has just ended is
lost. So calls that take memory or give it back run on another thread, and the main thread waits for them: an interrupt ends only
the waiting.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
from _thread import get_ident, start_new_thread
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

from xferlib.errors import BackendUnavailableError
from xferlib.latch import Latch

__all__ = ["collects", "ends_program", "finalizer_timeout", "is_refusal", "opening", "start_thread", "uninterrupted"]

FINALIZER_SECONDS = 2.0
"""How long a finalizer that the collector runs waits for a thread of ours: that may wait for what was stopped in the middle by it,
or may be the one that was."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_over = False
_main = threading.main_thread().ident
"""The thread that interrupts come to. In a forked child this is the thread that forked."""

_told: dict[str, object] = {}
"""What the collector says of a collection before it begins ("start") and behind its end ("stop")."""
_told_here = threading.local()
"""The same of the calling thread's own collections, as attributes."""
_order = OrderedDict.fromkeys(("start", "stop"))
"""The last of the two stands last."""
_BEGUN = OrderedDict.fromkeys(("stop", "start"))
# Each is called with "start" or "stop" and what is said. None is Python code: an interrupt that comes at the entry of such a call
# is reported and forgotten, and a program that was told to end goes on.
gc.callbacks += [_told.__setitem__, _told_here.__setattr__]
gc.callbacks.append(_order.move_to_end)  # type: ignore[arg-type]  # What is said counts as true: to the end that is last.


def collects() -> bool:
    """Tell whether the collector runs on the calling thread now, and so whether this is a finalizer."""
    # Equal means in the same order, too.
    return _order == _BEGUN and getattr(_told_here, "start", None) is _told["start"]


def finalizer_timeout() -> float | None:
    """Return how long the caller may wait for a thread of ours: in a finalizer that the collector runs, not for ever (None)."""
    return FINALIZER_SECONDS if collects() else None


def start_thread(thread: threading.Thread, refused: Callable[[BaseException], object]) -> None:
    """Start a thread where no interrupt comes, without waiting for it: an interrupted `Thread.start` leaves a lock held.

    If there can be no more threads, `refused` is called with the error, perhaps on this thread. Where memory is short the thread
    may run all the same: what both do is to be done by the first.
    """
    # By another thread for each, none that is kept: a finalizer may stop it in the middle of the start, and wait for the next.
    try:
        start_new_thread(_start, (thread, refused))
    except (RuntimeError, MemoryError) as error:
        if not is_refusal(error):
            raise
        refused(error)


def is_refusal(error: BaseException) -> bool:
    """Tell whether Python has raised this where it starts no thread. A signal's handler may raise errors of the same types."""
    return type(error) is MemoryError or "new thread" in str(error)


def ends_program(error: BaseException) -> bool:
    """Tell whether a thread was refused since the program ends. Python 3.12 starts none in handlers of `atexit`, 3.13 does."""
    return "interpreter shutdown" in str(error)


@contextmanager
def opening() -> Iterator[None]:
    """Open in here what needs threads. Raises `BackendUnavailableError` where the program ends, so that none can be started."""
    try:
        yield
    except RuntimeError as error:
        if not ends_program(error):
            raise
        raise BackendUnavailableError(
            "the program ends, and Python starts no threads any more, without which no stager can be opened. Open it, or begin the "
            "first loop or save, before the end. If it is for a handler of atexit, register the handler behind that"
        ) from error


def uninterrupted(call: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Call, and return what it returns, or raise what it raises. If the caller is interrupted, the call still goes on to its end.

    In a finalizer that the collector runs, the call is made at once, on this thread. Another thread could wait for a lock of
    whatever the main thread was doing when the collection began; and no interrupt gets out of a finalizer. Where there can be no
    more threads it is made on this one, too, and an interrupt may cut it: memory that is given back makes room for threads.
    """
    if _over or get_ident() != _main or collects():
        return call(*arguments)
    # Both threads let go of what the call holds before anyone is told.
    calls = [(call, arguments)]
    del call, arguments
    outcome: list[tuple[T | None, BaseException | None]] = []
    ended = Latch()

    def run() -> None:
        if not calls:
            # The thread runs, although it was refused.
            return
        try:
            outcome.append((_called(*calls.pop()), None))
        except BaseException as error:
            outcome.append((None, error))
        finally:
            ended.open()

    start_thread(threading.Thread(target=run, name="xferlib-memory", daemon=True), lambda error: run())
    ended.wait()
    value, error = outcome.pop()
    try:
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # Where there is no error it is the call's.
    finally:
        # Its traceback leads to this frame, and back.
        del error


def _called(call: Callable[[*Arguments], T], arguments: tuple[*Arguments]) -> T:
    return call(*arguments)


def _start(thread: threading.Thread, refused: Callable[[BaseException], object]) -> None:
    try:
        thread.start()
    except BaseException as error:  # Whatever it is, nobody must wait for ever.
        refused(error)


def _note_exit() -> None:
    """At interpreter exit: from here on every call is made on the thread that asks for it."""
    global _over
    _over = True


def _forget() -> None:
    """In a forked child its only thread is the one that interrupts come to."""
    global _main
    _main = get_ident()


atexit.register(_note_exit)
os.register_at_fork(after_in_child=_forget)
