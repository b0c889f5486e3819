"""Objects that must forget their memory in a forked child: device, page-locks and threads stayed with the parent."""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

from xferlib.tickets import Alive

__all__ = ["Forgetful", "forget_in_child", "leave"]


class Forgetful(Protocol):
    """Something that owns memory of a device or a driver."""

    def forget(self) -> None:
        """Free nothing from here on, and wait for nothing. Called in the child, where no other thread runs."""


_owners: Alive[Forgetful] = Alive()


def forget_in_child(owner: Forgetful) -> None:
    """Call `owner.forget()` in every child that is forked while the owner lives."""
    _owners.add(owner)


def leave(*held: object) -> None:
    """Never free these objects nor what they hold, not even when the interpreter ends."""
    for thing in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _forget_all() -> None:
    for owner in _owners:
        owner.forget()


os.register_at_fork(after_in_child=_forget_all)
