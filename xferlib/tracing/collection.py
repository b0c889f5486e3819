"""Python's garbage collector, which looks at all objects again and again while hundreds of thousands are made: here it waits."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from operator import call
from typing import TypeVar, TypeVarTuple

__all__ = ["uncollected"]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_waits: dict[object, None] = {}
"""The calls under way that have turned it off."""


def uncollected(work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Call without the collector, on all threads, and return what that returns; what is no longer referred to goes all the same.

    Where it is off already, it stays off. If two threads are inside, it may run again when the first leaves.
    """
    if not gc.isenabled():
        return work(*arguments)
    me = object()
    # One call of C at the end: no interrupt comes in between. No context manager: one that comes at the entry of its `__exit__`
    # would leave the collector off.
    steps: tuple[Callable[[], object], ...] = (gc.enable, partial(_waits.pop, me, None))
    leave = map(call, steps)
    try:
        _waits[me] = None
        gc.disable()
        return work(*arguments)
    finally:
        list(leave)


def _renew() -> None:
    """In a forked child: the threads that would turn it on again are not there."""
    if _waits:
        _waits.clear()
        gc.enable()


os.register_at_fork(after_in_child=_renew)
