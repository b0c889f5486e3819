"""What is page-locked under one limit, by whom, and the most of it so far; the refusals that say so.

The pool's lock is held around every change.
"""

from __future__ import annotations

from typing import final

from xferlib.errors import AllocationError
from xferlib.memory.blocks import Returned, Usage, Wanted, WhenFull, in_words

__all__ = ["Account", "asked_inside"]


@final
class Account:
    """Bytes: of the pool's segments, of what arrays and staging hold of them, and of what others have locked beside the pool."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.segments = 0
        """Of the pool, idle or not."""
        self.arrays = 0
        """What arrays hold, without staging."""
        self._used = self._asked = self._peak = self._asked_peak = 0
        self._reserved: dict[int, int] = {}
        """By address."""

    def excess(self, nbytes: int) -> int:
        """Return how many bytes too many it would be if so many more were locked."""
        return self.segments + self._beside() + nbytes - self.limit

    def reserve(self, address: int, nbytes: int) -> None:
        """Count memory beside the pool, until `unreserve`."""
        self._reserved[address] = nbytes

    def unreserve(self, address: int) -> None:
        """Count it no more. Twice is fine."""
        self._reserved.pop(address, None)

    def hand_out(self, wanted: Wanted) -> None:
        """Count a block of the pool as in use."""
        self._used += wanted.size
        self._asked += wanted.asked
        self.arrays += wanted.size * wanted.for_array
        self._asked_peak = max(self._asked_peak, self._asked + self._beside())

    def take_back(self, returned: Returned) -> None:
        """Count a block as idle."""
        _, nbytes, asked, for_array = returned
        self._used -= nbytes
        self._asked -= asked
        self.arrays -= nbytes * for_array

    def note_peaks(self) -> None:
        """Look at the figures of this moment. To be called when memory is there that was only counted before."""
        beside = self._beside()
        self._peak = max(self._peak, self.segments + beside)
        self._asked_peak = max(self._asked_peak, self._asked + beside)

    def usage(self) -> Usage:
        """Return the figures of this moment."""
        beside = self._beside()
        return Usage(self.segments + beside, self._peak, self._used, self._asked + beside, self._asked_peak)

    def full(self, nbytes: int, when_full: WhenFull) -> AllocationError:
        """Return the refusal of memory of the pool."""
        why = "nothing is in flight that could free more" if when_full == "wait" else f"when_full={when_full!r} waits for nothing"
        return AllocationError(
            f"pinned memory is full: {in_words(nbytes)} asked, {self}, and {why}. "
            "Raise pinned_limit, lower the depth, drop pinned arrays, or close pins and shared rings"
        )

    def too_large(self, nbytes: int) -> AllocationError:
        """Return the refusal of what the limit could never hold."""
        return AllocationError(
            f"{in_words(nbytes)} of pinned memory asked, more than pinned_limit={self.limit} ({in_words(self.limit)}). "
            "Raise pinned_limit, or use smaller arrays"
        )

    def no_room(self, nbytes: int) -> AllocationError:
        """Return the refusal of memory beside the pool."""
        return AllocationError(
            f"{in_words(nbytes)} to be page-locked, and pinned_limit={self.limit} has no room for them: {self}. "
            "Raise pinned_limit, close pins or shared rings, or drop pinned arrays"
        )

    def __str__(self) -> str:
        beside = self._beside()
        pins = f", {in_words(beside)} by pins and shared rings" if beside else ""
        return f"{in_words(self._used)} of {in_words(self.limit)} in use by arrays and staging{pins}"

    def _beside(self) -> int:
        return sum(self._reserved.copy().values())


def asked_inside(nbytes: int) -> AllocationError:
    """Return the refusal of who asks while the same thread is in the pool."""
    return AllocationError(
        f"{nbytes} bytes of pinned memory asked by a finalizer that ran inside another request. Ask from ordinary code"
    )
