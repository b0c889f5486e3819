"""Free ranges of addresses inside segments: best fit, split, merge. Pure bookkeeping; not thread-safe; owns no memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import itemgetter
from typing import TypeAlias

__all__ = ["Ranges", "Segment", "evict"]


class Ranges:
    """Addresses that are free to be handed out, each range inside one segment.

    A range that is given back merges with its free neighbours of the same segment, so a segment all of whose parts came back is
    one range again: `whole()` finds it. `segments` maps start to nbytes.
    """

    def __init__(self) -> None:
        self.segments: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._start_to_end: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self._whole: dict[int, int] = {}
        """Start and nbytes of segments no part of which is handed out. Kept, since a full pool asks for them at each request."""

    def add_segment(self, start: int, nbytes: int) -> None:
        """Add new memory, all of it free."""
        self.segments[start] = nbytes
        self._insert(start, start + nbytes)

    def remove_segment(self, start: int) -> None:
        """Forget a segment that `whole()` named."""
        self._remove(start, start + self.segments.pop(start))

    def take(self, nbytes: int) -> int | None:
        """Cut `nbytes` from the smallest range that has them; None if none has."""
        index = bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self._remove(start, start + size)
        if size > nbytes:
            self._insert(start + nbytes, start + size)
        return start

    def take_at(self, start: int, nbytes: int) -> None:
        """Cut `nbytes` from the beginning of the free range that begins here."""
        end = self._start_to_end[start]
        self._remove(start, end)
        if end - start > nbytes:
            self._insert(start + nbytes, end)

    def give_back(self, start: int, nbytes: int) -> None:
        """Free what `take` cut."""
        end = start + nbytes
        # Two segments may lie side by side in memory; a range across their border could never be unpinned.
        if start not in self.segments and start in self._end_to_start:
            before = self._end_to_start[start]
            self._remove(before, start)
            start = before
        if end not in self.segments and end in self._start_to_end:
            after = self._start_to_end[end]
            self._remove(end, after)
            end = after
        self._insert(start, end)

    def whole(self) -> list[tuple[int, int]]:
        """Return (start, nbytes) of every segment no part of which is handed out, largest first."""
        return sorted(self._whole.items(), key=itemgetter(1), reverse=True)

    def _insert(self, start: int, end: int) -> None:
        insort(self._by_size, (end - start, start))
        self._start_to_end[start] = end
        self._end_to_start[end] = start
        if self.segments.get(start) == end - start:
            self._whole[start] = end - start

    def _remove(self, start: int, end: int) -> None:
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        del self._start_to_end[start]
        del self._end_to_start[end]
        self._whole.pop(start, None)


Segment: TypeAlias = tuple[Ranges, int, int]
"""Where it belongs, its start and nbytes."""


def evict(parts: Sequence[Ranges], excess: int | None) -> list[Segment]:
    """Forget idle segments until so many bytes are gone (None: all of them), and return them. None go if all are too few."""
    idle = [(ranges, start, nbytes) for ranges in parts for start, nbytes in ranges.whole()]
    if excess is not None and excess > sum(nbytes for _, _, nbytes in idle):
        return []
    victims: list[Segment] = []
    for ranges, start, nbytes in idle:
        if excess is not None:
            if excess <= 0:
                break
            excess -= nbytes
        ranges.remove_segment(start)
        victims.append((ranges, start, nbytes))
    return victims
