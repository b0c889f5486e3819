"""Page-locking that nobody waits for: a daemon thread locks what tables have mapped, one piece of memory after another.

While the driver locks memory that is there, every launch of the process waits: some 30 to 60 ms for a GiB (seen on an H100 and an
H200, driver 580). Whoever calls it again at once takes its lock again before anybody else, so there is a pause behind each call.
How long one call takes cannot be helped: memory that is locked in slices is refused by the driver in any copy over two of them.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from _thread import start_new_thread
from queue import SimpleQueue
from typing import Protocol

__all__ = ["Lockable", "lock_later", "pause_after", "start_locker"]

PACE = 8 << 30
"""Bytes a second: a pause of 2 ms behind 16 MiB, whose lock takes 1."""


class Lockable(Protocol):
    """A table with memory that is to be locked."""

    def lock_next(self) -> int:
        """Lock some memory, and return its bytes; 0: there is none that is to be locked. Called by one thread."""


_wanted: SimpleQueue[Lockable | None] = SimpleQueue()
_started = _over = False


def start_locker() -> None:
    """Start the thread, if it does not run. Called when a stager is opened: a finalizer could not."""
    global _started
    if not _started and not _over:
        _started = True
        start_new_thread(_run, ())


def lock_later(table: Lockable) -> None:
    """Have everything locked that is to be. Waits for nothing; any thread, also in a finalizer."""
    _wanted.put(table)


def pause_after(nbytes: int) -> None:
    """Let others come to the driver, behind a call that has locked or unlocked so many bytes."""
    time.sleep(nbytes / PACE)


def is_over() -> bool:
    """Tell whether nothing is locked any more: the interpreter ends."""
    return _over


def _run() -> None:
    threading.current_thread().name = "xferlib-locker"
    while not _over:
        table = _wanted.get()
        if table is not None:
            _lock_all(table)
        # Not kept while there is nothing to do.
        del table


def _lock_all(table: Lockable) -> None:
    while not _over:
        try:
            nbytes = table.lock_next()
        except Exception as error:
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread())))
            return
        if not nbytes:
            return
        pause_after(nbytes)


def _end() -> None:
    """At interpreter exit: what is not locked yet stays as it is."""
    global _over
    _over = True
    _wanted.put(None)


def _forget() -> None:
    """In a forked child: the memory is the parent's, and there is no thread."""
    global _started, _wanted
    _started, _wanted = False, SimpleQueue()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
