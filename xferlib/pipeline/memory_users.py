"""Who still uses some host memory: copies of any stager, and device views of it. A slot is handed out again when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from xferlib.latch import is_over
from xferlib.ledger import all_ledgers, all_views
from xferlib.memory.mapped import Views

__all__ = ["MemoryUsers"]


@final
class MemoryUsers:
    """What uses some host memory when this is made: copies of any stager, and device views of it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._left = _users_of(address, nbytes)

    def done(self) -> bool:
        """Tell whether none of them uses it any more, failed or not. Never blocks."""
        # A new list: a finalizer may ask, too, while this goes through the old one.
        self._left = [use for use in self._left if not is_over(use)]
        return not self._left


def _is_unseen(views: Views, address: int, nbytes: int) -> bool:
    """Tell whether the device views of some memory are gone, and the work on them is done."""
    # In this order: the work on a view that goes meanwhile is in the second.
    return not views.held(address, nbytes) and all(is_over(event.done) for event in views.readers(address, nbytes))


def _users_of(address: int, nbytes: int) -> list[Callable[[], bool]]:
    """Return what tells of each copy and each view whether it is done: no sooner than its use is over.

    A view that lives is not done, and nobody can wait for it.
    """
    users: list[Callable[[], bool]] = []
    for ledger in all_ledgers():
        ledger.reap()
        users += [entry.event.done for entry in ledger.entries() if entry.uses_host(address, nbytes)]
        users += [job.done for job in ledger.jobs.using([(address, nbytes)])]
    for views in all_views():
        # In this order: a view that goes meanwhile is in the second.
        if views.held(address, nbytes):
            users.append(partial(_is_unseen, views, address, nbytes))
        users += [event.done for event in views.readers(address, nbytes)]
    return users
