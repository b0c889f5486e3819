"""When a save reads its next piece: no faster than it was asked to, and behind the program's own transfers."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import final

from xferlib.files.plan import MOST_ARRAYS, FilePiece
from xferlib.latch import Latch
from xferlib.ledger import puts_under_way

__all__ = ["READS_AHEAD", "Pace", "wait_to_read"]

READS_AHEAD = 3
"""Pieces whose copies are started, and not done. They keep a link busy, and a get of the program's waits behind no more of them."""
PUTS_SECONDS = 0.005
"""How long the copy of a piece waits for puts. They come first; and where there is always one, a save still comes to its end."""
LEAST_WEIGHT = 0.5
"""Of a piece as large as they come: so much waits for puts. One of a file that goes past the cache, or the last one, is smaller."""
LOOK_SECONDS = 0.0005
"""How often it is looked whether puts are under way."""


@final
class Pace:
    """The pace of one save. One thread at a time, but any may use `reads`."""

    def __init__(self, rate_limit: float | None) -> None:
        """`rate_limit`: bytes per second; None: as fast as it goes."""
        self.reads: SimpleQueue[None] = SimpleQueue()
        """One for each read that may be started: taken and put back in calls of C, which wake one thread each."""
        for _ in range(READS_AHEAD):
            self.reads.put(None)
        self._rate_limit = rate_limit
        self._due = 0.0
        """When the next piece may be read, by the rate."""
        self._weight = 0.0
        """What was read since puts were waited for, in pieces as large as they come."""

    def seconds_until(self, nbytes: int) -> float:
        """Return how long the next piece, of so many bytes, has to wait until it may be read. It counts as read from then on."""
        if self._rate_limit is None:
            return 0.0
        now = time.monotonic()
        # Time in which nothing could be read is not made up for.
        due = max(now, self._due)
        self._due = due + nbytes / self._rate_limit
        return due - now

    def is_behind_puts(self, piece: FilePiece, most: int) -> bool:
        """Tell whether a piece is to wait for puts. `most`: the bytes of one as large as they come.

        A member of an archive is a piece, however small: of those, many wait together.
        """
        self._weight += max(piece.nbytes / most, len(piece.arrays) / MOST_ARRAYS)
        if self._weight < LEAST_WEIGHT:
            return False
        self._weight = 0.0
        return True


def wait_to_read(seconds: float, behind_puts: bool, stop: Latch) -> bool:
    """Block for so many seconds, then until no puts are under way, or have been waited for long. False: `stop` is open."""
    if seconds > 0 and stop.wait(seconds):
        return False
    deadline = time.monotonic() + PUTS_SECONDS
    while behind_puts and puts_under_way() and time.monotonic() < deadline:
        if stop.wait(LOOK_SECONDS):
            return False
    return True
