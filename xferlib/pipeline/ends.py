"""Waiting for a transfer without keeping what it moves, and for whatever transfers keep.

Whoever only waits must not hold the device arrays: their memory could not be used again, although the consumer has dropped them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, final

from xferlib.protocol import Event
from xferlib.stager import open_stagers
from xferlib.transfer import Transfer

__all__ = ["End", "Ends", "Started", "end_of", "reap_all", "under_way"]


class End(Protocol):
    """A point that is reached when a transfer is done. Raises `TransferError` if that failed."""

    def done(self) -> bool: ...

    def synchronize(self) -> None: ...


class Started(End, Protocol):
    """What putting a batch returns: a `Transfer`, or several that look like one."""

    @property
    def value(self) -> Any: ...


def end_of(started: Started) -> End:
    """Return the end of a transfer, which holds no arrays; of anything else that looks like one, the thing itself."""
    if isinstance(started, Transfer):
        return started.end
    return started


@final
class Ends:
    """The end of several things at once, failed or not."""

    def __init__(self, ends: Sequence[End | Event]) -> None:
        self._left = list(ends)

    def done(self) -> bool:
        """See `End`."""
        while self._left:
            # Who holds the transfer is told of its failure.
            with suppress(Exception):
                if not self._left[-1].done():
                    return False
            self._left.pop()
        return True

    def synchronize(self) -> None:
        """See `End`."""
        for end in self._left.copy():
            with suppress(Exception):
                end.synchronize()


def under_way() -> Ends:
    """Return the end of everything that any stager has started so far, as far as it uses host memory of the caller's."""
    return Ends([event for stager in open_stagers() for event in stager._traffic.under_way()])


def reap_all() -> None:
    """Have every stager let go of what its copies are done with. Never blocks.

    For whoever waits for memory that any of them may have read: where copies are small, they seldom look by themselves.
    """
    for stager in open_stagers():
        stager._traffic.reap()
