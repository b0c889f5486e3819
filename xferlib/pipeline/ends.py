"""Waiting for a transfer without keeping what it moves, and for whatever transfers keep.

Whoever only waits must not hold the device arrays: their memory could not be used again, although the consumer has dropped them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, final

import numpy as np

from xferlib.memory.arrays import extent
from xferlib.protocol import Event
from xferlib.stager import open_stagers
from xferlib.transfer import Transfer
from xferlib.views import ViewLease

__all__ = ["End", "Ends", "Started", "end_of", "reap_all", "users_of"]


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


@final
class _Use:
    """The use of memory by a device view that lives."""

    def __init__(self, lease: weakref.ref[ViewLease]) -> None:
        self._lease = lease

    def done(self) -> bool:
        """Tell whether the view is gone. Work on it may be under way then."""
        return self._lease() is None

    def synchronize(self) -> None:
        """Return at once: whoever has the view can let go of it, and nobody else."""


def users_of(address: int, nbytes: int) -> list[End | Event]:
    """Return what may still use this host memory: copies of any stager, and device views of it.

    Each is done no sooner than its use is over. A view that lives is not done, and nobody can wait for it.
    """
    users: list[End | Event] = []
    for stager in open_stagers():
        traffic = stager._traffic
        # Views that are gone become events.
        traffic.reap()
        for direction in (traffic.h2d, traffic.d2h):
            for entries in (direction._entries, direction._unordered):
                users += [
                    event for event, kept, _ in entries.copy() if _overlaps(kept, address, nbytes) and not Ends([event]).done()
                ]
        users += [landing for landing in traffic.landings.unreached() if _meets(landing.memory, address, nbytes)]
        views = traffic.views
        users += [event for memory, event in views._fenced.copy() if _overlaps(memory, address, nbytes)]
        with views._adding:
            live = [lease for lease in views._live if _overlaps(lease.memory, address, nbytes)]
        users += [_Use(weakref.ref(lease)) for lease in live]
    return users


def _overlaps(kept: object, address: int, nbytes: int) -> bool:
    """Tell whether an array among these has bytes of the memory."""
    if isinstance(kept, np.ndarray):
        return _meets([extent(kept)], address, nbytes)
    return isinstance(kept, (tuple, list)) and any(_overlaps(each, address, nbytes) for each in kept)


def _meets(memory: Iterable[tuple[int, int]], address: int, nbytes: int) -> bool:
    return any(start < address + nbytes and address < start + size for start, size in memory)


def reap_all() -> None:
    """Have every stager let go of what its copies are done with. Never blocks.

    For whoever waits for memory that any of them may have read: where copies are small, they seldom look by themselves.
    """
    for stager in open_stagers():
        stager._traffic.reap()
