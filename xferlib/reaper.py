"""What happens when nobody calls: a daemon thread settles what closed stagers left.

Arrays outlive their stager. When the last of them is gone, no call of the stager comes that would give their memory back, so a
thread of the process looks now and then, for as long as anything is left. It may wait in the driver, which no finalizer may.
"""

from __future__ import annotations

import atexit
import os
import threading
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from xferlib.tickets import ticket

__all__ = ["Remains", "close_later", "closed_when_dropped", "start_reaper", "watch"]

SETTLE_EVERY_SECONDS = 0.2
"""How often the reaper looks while a closed stager's memory is still held."""


class Remains(Protocol):
    """A table of a closed stager that still has rows."""

    def settle(self) -> bool:
        """Give back what nobody holds any more; tell whether anything is left. Called by the reaper alone, and may wait."""


_remains: dict[int, Remains] = {}
_dropped: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
_reaper: dict[None, object] = {}
"""Has an entry if the reaper runs, or is being started."""
_over = False


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


def watch(remains: Remains) -> None:
    """Settle the table from now on until nothing is left in it. It is kept alive meanwhile."""
    _remains[id(remains)] = remains
    _dropped.put(None)


def close_later(close: Callable[[], object]) -> None:
    """Close something that is being finalized. Called by its finalizer: puts it into a queue, and does nothing else."""
    _dropped.put(close)


def closed_when_dropped(close: Callable[[], object]) -> object:
    """Return a ticket: when its last reference is gone, the reaper calls this. No reference may lead from that to the ticket."""
    return ticket(_dropped.put, close)


def _run() -> None:
    threading.current_thread().name = "xferlib-reaper"
    while not _over:
        with suppress(Empty):
            dropped = _dropped.get(timeout=SETTLE_EVERY_SECONDS if _remains else None)
            if dropped is not None:
                _attempt(dropped)
            del dropped
        for key, remains in _remains.copy().items():
            if not _over and not _attempt(remains.settle):
                _remains.pop(key, None)
            del remains


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
    global _dropped, _remains
    _reaper.clear()
    _dropped, _remains = SimpleQueue(), {}


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
