"""Open gates that were left shut. A script that `gates` runs in a process of its own.

A thread of the tests' own process would not do: a call that blocks with the GIL held stops every Python thread, including the one
that should end the wait. Only the standard library is imported here, so that it starts in a few milliseconds anywhere.

The table is shared memory, one slot per gate: the word that the device reads, who opened it, and when it is overdue.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import time

__all__ = ["BY_TEST", "BY_WATCHDOG", "OPEN", "SHUT", "SLOT_NBYTES", "TABLE_NBYTES", "open_overdue"]

SHUT, OPEN = 0, 1
BY_TEST, BY_WATCHDOG = 1, 2
SLOT_NBYTES = 16
"""uint32 word, uint32 opener, float64 deadline on the monotonic clock, which all processes share."""
TABLE_NBYTES = 4096
PERIOD_SECONDS = 0.05


def open_overdue(words: memoryview, deadlines: memoryview[float], now: float) -> None:
    """Open every gate that is shut and past its deadline. The views are of one table, as uint32 and as float64."""
    for slot in range(TABLE_NBYTES // SLOT_NBYTES):
        word = slot * SLOT_NBYTES // 4
        if words[word] == SHUT and deadlines[slot * SLOT_NBYTES // 8 + 1] < now:
            words[word + 1] = BY_WATCHDOG
            words[word] = OPEN


def main() -> None:
    table = mmap.mmap(int(sys.argv[1]), TABLE_NBYTES)
    parent = int(sys.argv[2])
    words, deadlines = memoryview(table).cast("I"), memoryview(table).cast("d")
    os.write(sys.stdout.fileno(), b"+")
    # The pipe ends with the parent, unless a child that it forked holds the other end: then the number of our parent changes.
    while os.getppid() == parent and not select.select([sys.stdin], [], [], PERIOD_SECONDS)[0]:
        open_overdue(words, deadlines, time.monotonic())


if __name__ == "__main__":
    main()
