"""What happens when nobody calls: a daemon thread settles what closed stagers left.

Arrays outlive their stager. When the last of them is gone, no call of the stager comes that would give their memory back, so a
thread of the process looks now and then, for as long as anything is left. It may wait in the driver, which no finalizer may.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Final, Protocol

from xferlib.daemon import Daemon
from xferlib.tickets import ticket

__all__ = ["REAPER", "ClosedTable", "close_later", "closed_tables", "closed_when_dropped", "start_reaper", "watch"]

SETTLE_EVERY_SECONDS = 0.2
"""How often the reaper looks while a closed stager's memory is still held."""


class ClosedTable(Protocol):
    """A table of a closed stager that still has rows."""

    def settle(self) -> bool:
        """Give back what nobody holds any more; tell whether anything is left. Called by the reaper alone, and may wait."""


_tables: dict[int, ClosedTable] = {}


def watch(table: ClosedTable) -> None:
    """Settle the table from now on until nothing is left in it. It is kept alive meanwhile."""
    _tables[id(table)] = table
    REAPER.inbox.put(None)


def closed_tables() -> list[ClosedTable]:
    """Return the tables that have something left. Any thread."""
    return list(_tables.values())


def close_later(close: Callable[[], object]) -> None:
    """Close something that is being finalized. Called by its finalizer: puts it into a queue, and does nothing else."""
    REAPER.inbox.put(close)


def closed_when_dropped(close: Callable[[], object]) -> object:
    """Return a ticket: when its last reference is gone, the reaper calls this. No reference may lead from that to the ticket."""
    return ticket(REAPER.inbox.put, close)


def _run() -> None:
    """Whatever a call raises is reported, and the thread comes back here: see `Daemon`."""
    while not REAPER.over:
        dropped = None
        with suppress(Empty):
            dropped = REAPER.inbox.get(timeout=SETTLE_EVERY_SECONDS if _tables else None)
        if dropped is not None:
            dropped()
        del dropped
        for key, table in _tables.copy().items():
            if REAPER.over:
                return
            is_left = False
            try:
                is_left = table.settle()
            finally:
                # A failure counts as nothing left.
                if not is_left:
                    _tables.pop(key, None)
            del table


REAPER: Final[Daemon[Callable[[], object]]] = Daemon("xferlib-reaper", _run, _tables.clear)
start_reaper = REAPER.start
