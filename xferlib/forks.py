"""Objects that must forget their memory in a forked child, where device, page-locks and threads stayed with the parent, and what
whoever uses the parent's there is told.
"""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

from xferlib.errors import BackendUnavailableError
from xferlib.tickets import Alive

__all__ = ["IN_CHILD", "ForkSafe", "forget_in_child", "leak", "unavailable_in_child"]

IN_CHILD = "Open stagers in the child, and start processes with the spawn or forkserver method"


class ForkSafe(Protocol):
    """Something that owns memory of a device or a driver."""

    def forget(self) -> None:
        """Free nothing from here on, and wait for nothing. Called in the child, where no other thread runs."""


_owners: Alive[ForkSafe] = Alive()


def forget_in_child(owner: ForkSafe) -> None:
    """Call `owner.forget()` in every child that is forked while the owner lives."""
    _owners.add(owner)


def leak(*held: object) -> None:
    """Never free these objects nor what they hold, not even when the interpreter ends."""
    for thing in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def unavailable_in_child(what: str, since: str, advice: str = IN_CHILD) -> BackendUnavailableError:
    """Return the error for use of what is the parent's: "the stager cannot be used", "the stager was opened"."""
    return BackendUnavailableError(f"{what} here: this process was forked after {since}. {advice}")


def _forget_all() -> None:
    for owner in _owners:
        owner.forget()


os.register_at_fork(after_in_child=_forget_all)
