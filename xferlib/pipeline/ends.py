"""Waiting for a transfer without keeping what it moves, and for whatever transfers keep.

Whoever only waits must not hold the device arrays: their memory could not be used again, although the consumer has dropped them.
"""

from __future__ import annotations

from typing import Protocol, final

from xferlib.ledger import all_ledgers, all_views
from xferlib.memory.mapped import Views
from xferlib.transfer import Transfer

__all__ = ["End", "Users", "end_of"]


class Pending(Protocol):
    """Something that is over at some time, and can be asked."""

    def done(self) -> bool: ...


class End(Pending, Protocol):
    """A point that is reached when a transfer is done. Raises `TransferError` if that failed."""

    def synchronize(self) -> None: ...

    def wait_staged(self) -> None:
        """Block until pageable sources are free. Says nothing of a failure."""


def end_of(transfer: End) -> End:
    """Return the end of a transfer, which holds no arrays; of anything else that looks like one, the thing itself."""
    return transfer.end if isinstance(transfer, Transfer) else transfer


@final
class Users:
    """What uses some host memory when this is made: copies of any stager, and device views of it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._left = _users_of(address, nbytes)

    def done(self) -> bool:
        """Tell whether none of them uses it any more, failed or not. Never blocks."""
        # A new list: a finalizer may ask, too, while this goes through the old one.
        self._left = [use for use in self._left if not _is_over(use)]
        return not self._left


@final
class _Use:
    """The use of memory by device views that live, and by the work on them."""

    def __init__(self, views: Views, address: int, nbytes: int) -> None:
        self._views = views
        self._address = address
        self._nbytes = nbytes

    def done(self) -> bool:
        """Tell whether the views are gone, and the work on them is done."""
        # In this order: the work on a view that goes meanwhile is in the second.
        if self._views.held(self._address, self._nbytes):
            return False
        return all(map(_is_over, self._views.readers(self._address, self._nbytes)))


def _users_of(address: int, nbytes: int) -> list[Pending]:
    """Return copies and views, each of which is done no sooner than its use is over.

    A view that lives is not done, and nobody can wait for it.
    """
    users: list[Pending] = []
    for ledger in all_ledgers():
        ledger.reap()
        users += [entry.event for entry in ledger.entries() if entry.uses_host(address, nbytes)]
        users += ledger.jobs.using([(address, nbytes)])
    for views in all_views():
        # In this order: a view that goes meanwhile is in the second.
        if views.held(address, nbytes):
            users.append(_Use(views, address, nbytes))
        users += views.readers(address, nbytes)
    return users


def _is_over(use: Pending) -> bool:
    try:
        return use.done()
    except Exception:
        # Whoever holds the transfer is told of its failure.
        return True
