"""The slots of a ring: who has each, and how one comes back.

Invariant: a slot that a worker may write is reachable by no consumer and by no copy. A consumer's arrays, and whatever is in flight
from them, hold a lease; when the last of them is gone, on any thread, the slot is free.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, final

import numpy as np

from xferlib.memory.arrays import address_of
from xferlib.memory.blocks import HostBlock
from xferlib.pipeline.workers.layout import Bytes, SlotLayout, SlotTree
from xferlib.tickets import Returns

__all__ = ["Slots"]

FREE, FILLING = 0, -1


@final
class Slots:
    """All slots of one ring. One thread at a time, but leases end on any."""

    def __init__(self, raw: Bytes, layout: SlotLayout, count: int) -> None:
        self._layout = layout
        self._bytes = [raw[start : start + layout.nbytes] for start in range(0, count * layout.nbytes, layout.nbytes)]
        self._holders = [FREE] * count
        """`FREE`, `FILLING`, or the number of the lease. No two leases have the same, so a late one frees nobody else's slot."""
        self._numbers = itertools.count(1)
        self._returns = Returns()

    def take(self) -> int | None:
        """Return a free slot to be filled; None if there is none."""
        self._settle()
        if FREE not in self._holders:
            return None
        index = self._holders.index(FREE)
        self._holders[index] = FILLING
        return index

    def give_back(self, index: int) -> None:
        """Free a slot that was taken and not leased."""
        self._holders[index] = FREE

    def keep_only(self, taken: Collection[int]) -> None:
        """Free every slot that was taken and not leased, except these."""
        for index, holder in enumerate(self._holders):
            if holder == FILLING and index not in taken:
                self._holders[index] = FREE

    def lease(self, index: int, tree: SlotTree | None) -> Any:
        """Return the tree of arrays in a filled slot. The slot is free when none of them, and no view of any, is left."""
        number = next(self._numbers)
        raw = self._bytes[index]
        block = HostBlock(address_of(raw), raw.nbytes, (raw, self._returns.ticket(number)))
        self._holders[index] = number
        return (tree or self._layout.whole).views(np.asarray(block))

    @property
    def all_held(self) -> bool:
        """Whether every slot is leased."""
        self._settle()
        return all(holder > FREE for holder in self._holders)

    def wait(self, seconds: float) -> None:
        """Block until a lease ends, or so many seconds have passed."""
        self._returns.wait(seconds)

    def _settle(self) -> None:
        for number in self._returns.unsettled():
            if number in self._holders:
                self._holders[self._holders.index(number)] = FREE
            self._returns.settled(number)
