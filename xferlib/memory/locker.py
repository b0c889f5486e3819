"""Page-locking that nobody waits for: a daemon thread locks what tables have mapped, one segment after another.

While the driver locks memory that is there, every launch of the process waits: some 30 to 60 ms for a GiB (seen on an H100 and an
H200, driver 580). Whoever calls it again at once gets its lock before anybody else, so there is a pause after each call.
The length of one call cannot be helped: if memory is locked in slices, the driver refuses any copy that spans two of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Final, NamedTuple, TypeAlias, final

from xferlib.daemon import Daemon, report
from xferlib.errors import said

__all__ = ["LOCKER", "Lock", "lock_later", "pause_after"]

PACE = 8 << 30
"""Bytes a second: a pause of 2 ms behind 16 MiB, whose lock takes 1."""
ERROR_SECONDS, MOST_ERROR_SECONDS = 0.01, 1.0
"""How long until a table that raised is tried again, at first and at most: twice as long each time that it raises again."""


Lock: TypeAlias = Callable[[], int]
"""Locks some memory of a table, and returns its bytes; 0: there is none that is to be locked. Called by one thread.

If it raises, the error is reported (once, if the same error comes again), and it is called again after others had their turn. So
memory that cannot be locked must no longer count as memory to be locked.
"""


def lock_later(lock: Lock) -> None:
    """Have everything locked that is to be. Waits for nothing; any thread, also in a finalizer."""
    LOCKER.inbox.put(lock)


def pause_after(nbytes: int) -> None:
    """Let others come to the driver, behind a call that has locked or unlocked so many bytes."""
    time.sleep(nbytes / PACE)


def _run() -> None:
    failed: dict[Lock, _Retry] = {}
    while not LOCKER.over:
        due = min([one.due for one in failed.values()], default=None)
        asked: Lock | None = None
        with suppress(Empty):
            asked = LOCKER.inbox.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        now = time.monotonic()
        # Also where others ask all the time.
        again = [lock for lock, one in failed.items() if one.due <= now and lock != asked]
        for lock in (asked, *again):
            if lock is not None:
                _lock_all(lock, failed)
        # Not kept while there is nothing to do.
        del asked, again, lock


@final
class _Retry(NamedTuple):
    """What a table has raised, and when it is tried again: so many seconds later."""

    said: str
    seconds: float
    due: float


def _lock_all(lock: Lock, failed: dict[Lock, _Retry]) -> None:
    try:
        _lock_each(lock, failed)
    except BaseException as error:
        # Nothing may end this thread: whoever waits until all is locked would wait for ever.
        before = failed.get(lock)
        seconds = ERROR_SECONDS if before is None else min(2 * before.seconds, MOST_ERROR_SECONDS)
        failed[lock] = _Retry(said(error), seconds, time.monotonic() + seconds)
        if before is None or before.said != said(error):
            report(error)


def _lock_each(lock: Lock, failed: dict[Lock, _Retry]) -> None:
    while not LOCKER.over:
        nbytes = lock()
        failed.pop(lock, None)
        if not nbytes:
            return
        pause_after(nbytes)


LOCKER: Final[Daemon[Lock]] = Daemon("xferlib-locker", _run)
