"""The slots of a ring: who has each, and how one comes back.

Invariant: a slot that a worker may write is reachable by no consumer and by no copy. A consumer's arrays, and whatever is in flight
from them, hold a lease; when the last of them goes, on any thread, the slot is free.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, final

import numpy as np

from xferlib.pipeline.shared.layout import Bytes, Layout, Parts

__all__ = ["Bell", "Slots"]

FREE, FILLING, LEASED = range(3)


@final
class Bell:
    """Wakes who waits for `number` to be readable. Any thread, finalizers too."""

    def __init__(self) -> None:
        self.number: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # By name in the instance: at interpreter exit modules lose theirs.
        self.ring: Final = partial(os.eventfd_write, self.number, 1)
        self._close = partial(os.close, self.number)

    def hush(self) -> None:
        """Be silent until rung again."""
        try:
            os.eventfd_read(self.number)
        except BlockingIOError:
            return

    def __del__(self) -> None:
        self._close()


@final
class Slots:
    """All slots of one ring. One thread at a time, but leases end on any."""

    def __init__(self, raw: Bytes, layout: Layout, count: int, bell: Bell) -> None:
        self._layout = layout
        self._bytes = [raw[start : start + layout.nbytes] for start in range(0, count * layout.nbytes, layout.nbytes)]
        self._states = [FREE] * count
        self._bell = bell

    def take(self) -> int | None:
        """Return a free slot to be filled; None if there is none."""
        for index, state in enumerate(self._states):
            if state == FREE:
                self._states[index] = FILLING
                return index
        return None

    def give_back(self, index: int) -> None:
        """Have a slot free again that was taken and not leased."""
        self._states[index] = FREE

    def keep_only(self, taken: Collection[int]) -> None:
        """Have every slot free again that was taken, except these."""
        for index, state in enumerate(self._states):
            if state == FILLING and index not in taken:
                self._states[index] = FREE

    def lease(self, index: int, parts: Parts | None) -> Any:
        """Return the tree of arrays in a filled slot. The slot is free when none of them, and no view of any, is left."""
        self._states[index] = LEASED
        try:
            lease = _Lease(self._bytes[index], partial(self._end, index))
        except BaseException:
            self._states[index] = FREE
            raise
        return (parts or self._layout.whole).views(np.asarray(lease))

    @property
    def all_held(self) -> bool:
        """Whether every slot is leased."""
        return all(state == LEASED for state in self._states)

    def _end(self, index: int) -> None:
        # A finalizer, on any thread: no lock, single steps.
        self._states[index] = FREE
        self._bell.ring()


@final
class _Lease:
    """The bytes of one slot, for arrays to be based on."""

    __slots__ = ("__array_interface__", "_end", "_raw")

    def __init__(self, raw: Bytes, end: Callable[[], None]) -> None:
        self._raw = raw
        self._end = end
        self.__array_interface__ = {"shape": raw.shape, "typestr": "|u1", "data": (raw.ctypes.data, False), "version": 3}

    def __del__(self) -> None:
        self._end()
