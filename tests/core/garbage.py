"""Garbage of others whose finalizers act, and a collector that runs at any allocation of a call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import final

import pytest

from tests.core.fakes import until
from xferlib.errors import XferError

__all__ = ["Garbage", "at_every_allocation", "collected_when_told"]

MOST = 150
"""Allocations, should a call always have more."""
MISSES = 8
"""Numbers in a row to which a call does not come."""


@pytest.fixture(autouse=True)
def collected_when_told() -> Iterator[None]:
    """Put the collector back as it was."""
    threshold = gc.get_threshold()
    gc.collect()
    yield
    gc.set_threshold(*threshold)
    gc.enable()


@final
class Garbage:
    """A reference cycle whose finalizer does something, and notes what came of it."""

    def __init__(self, act: Callable[[], object], outcomes: list[str]) -> None:
        self.me = self
        self.act = act
        self.outcomes = outcomes

    def __del__(self) -> None:
        self.outcomes.append("begun")
        try:
            self.act()
            self.outcomes.append("done")
        except XferError as error:
            self.outcomes.append(f"{type(error).__name__}: {error}")


def at_every_allocation(call: Callable[[], object], act: Callable[[], object]) -> list[str]:
    """Call again and again, with the collector run when one object is alive that was not before, two, ...; return what came of it.

    First "begun" for each finalizer, then "done" or the words in which it was refused.
    """
    met: list[str] = []
    misses = 0
    for allocation in range(1, MOST):
        outcomes: list[str] = []
        gc.disable()
        gc.collect()
        Garbage(act, outcomes)
        gc.set_threshold(gc.get_count()[0] + allocation, 1000, 1000)
        gc.enable()
        try:
            call()
        except XferError as error:
            # Of a call inside of which the finalizer had taken the room, or was in the way.
            met.append(f"call: {error}")
        gc.disable()
        # On another thread it may be at it still; that it comes to its end is what is asked here.
        assert until(lambda: len(outcomes) != 1)  # noqa: B023  # Called in this turn alone.
        met += outcomes
        # Of several threads one may have more under way than another time.
        misses = 0 if outcomes else misses + 1
        if misses == MISSES:
            break
    gc.collect()
    return met
