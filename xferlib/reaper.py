"""What happens when nobody calls: the daemon thread that settles what closed stagers left, and calls that no interrupt cuts.

Arrays outlive their stager. When the last of them is gone, no call of the stager comes that would give their memory back, so a
thread of the process looks now and then, for as long as anything is left. It may wait in the driver, which no finalizer may.

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
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, TypeVarTuple

from xferlib.latch import Latch
from xferlib.tickets import ticket

__all__ = [
    "Remains",
    "close_later",
    "closed_when_dropped",
    "collects",
    "start_reaper",
    "start_thread",
    "uninterrupted",
    "watch",
]

SETTLE_EVERY_SECONDS = 0.2
"""How often the reaper looks while a closed stager's memory is still held."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Remains(Protocol):
    """A table of a closed stager that still has rows."""

    def settle(self) -> bool:
        """Give back what nobody holds any more; tell whether anything is left. Called by the reaper alone, and may wait."""


class Closable(Protocol):
    """A stager, or something else that nobody closed."""

    def close(self) -> None: ...


_remains: dict[int, Remains] = {}
_dropped: SimpleQueue[Closable | None] = SimpleQueue()
_to_start: SimpleQueue[tuple[threading.Thread, Callable[[RuntimeError], object]]] = SimpleQueue()
_starting = False
_reaper: dict[None, object] = {}
"""Has an entry if the reaper runs, or is being started."""
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


def start_reaper() -> None:
    """Start the thread, if it does not run. Called when a stager is opened: a finalizer could not."""
    mine = object()
    # In one step: two stagers that are opened at once would start two.
    if not _over and _reaper.setdefault(None, mine) is mine:
        try:
            start_new_thread(_run, ())
        except RuntimeError:
            # The system has no more threads now: the next stager asks again.
            _reaper.clear()
            raise


def start_thread(thread: threading.Thread, refused: Callable[[RuntimeError], object]) -> None:
    """Start a thread where no interrupt comes, without waiting for it: an interrupted `Thread.start` leaves a lock held.

    If there can be no more threads, `refused` is called with the error, on another thread.
    """
    global _starting
    if not _starting:
        # In this order: after an interrupt in between a second one is started, which does no harm. In the other order callers might
        # wait for a thread that was never started.
        start_new_thread(_start_others, ())
        _starting = True
    _to_start.put((thread, refused))


def watch(remains: Remains) -> None:
    """Settle the table from now on until nothing is left in it. It is kept alive meanwhile."""
    _remains[id(remains)] = remains
    _dropped.put(None)


def close_later(thing: Closable) -> None:
    """Close something that is being finalized. Called by its finalizer: puts it into a queue, and does nothing else."""
    _dropped.put(thing)


def closed_when_dropped(thing: Closable) -> object:
    """Return a ticket: when its last reference is gone, the reaper closes the thing. No reference may lead from that to the
    ticket."""
    return ticket(_dropped.put, thing)


def uninterrupted(call: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Call, and return what it returns, or raise what it raises. If the caller is interrupted, the call still goes on to its end.

    In a finalizer that the collector runs, the call is made at once, on this thread. Another thread could wait for a lock of
    whatever the main thread was doing when the collection began; and no interrupt gets out of a finalizer.
    """
    if _over or get_ident() != _main or collects():
        return call(*arguments)
    # Both threads let go of what the call holds before anyone is told.
    calls = [(call, arguments)]
    del call, arguments
    outcome: list[tuple[T | None, BaseException | None]] = []
    ended = Latch()

    def run() -> None:
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


def _run() -> None:
    threading.current_thread().name = "xferlib-reaper"
    while not _over:
        with suppress(Empty):
            dropped = _dropped.get(timeout=SETTLE_EVERY_SECONDS if _remains else None)
            if dropped is not None:
                _attempt(dropped.close)
            del dropped
        for key, remains in _remains.copy().items():
            if not _over and not _attempt(remains.settle):
                _remains.pop(key, None)
            del remains


def _start_others() -> None:
    threading.current_thread().name = "xferlib-starter"
    while True:
        thread, refused = _to_start.get()
        try:
            thread.start()
        except RuntimeError as error:
            refused(error)
        del thread, refused


def _attempt(call: Callable[[], Any]) -> Any:
    """Call. What it raises is reported as exceptions of threads are, and a failure counts as nothing left."""
    try:
        return call()
    except BaseException as error:
        # Nothing may end this thread: stagers that are dropped later would stay open.
        with suppress(BaseException):
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread())))
        return False


def _end() -> None:
    """At interpreter exit, before modules are taken apart: what is left goes with the process."""
    global _over
    _over = True
    _dropped.put(None)


def _forget() -> None:
    """In a forked child: what is left is the parent's, and there is no thread."""
    global _starting, _dropped, _to_start, _remains, _main
    _starting, _main = False, get_ident()
    _reaper.clear()
    _to_start = SimpleQueue()
    _dropped, _remains = SimpleQueue(), {}


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
