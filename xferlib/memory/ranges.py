"""Free ranges of addresses inside segments: best fit, split, merge. Pure bookkeeping; not thread-safe; owns no memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import itemgetter

__all__ = ["Ranges"]


class Ranges:
    """Addresses that are free to be handed out, each range inside one segment.

    A range that is given back merges with its free neighbours of the same segment, so when all parts of a segment have come back,
    it is one range again, which `whole()` finds. `segments` maps start to nbytes.
    """

    def __init__(self) -> None:
        self.segments: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._start_to_end: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self._whole: dict[int, int] = {}
        """Start and nbytes of segments no part of which is handed out. Kept, since a full pool asks for them at each request."""

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]  # There is nothing to keep.

    def add_segment(self, start: int, nbytes: int, used: Iterable[tuple[int, int]] = ()) -> None:
        """Add memory. `used`: parts of it that are handed out, (start, nbytes) of each, in order."""
        self.segments[start] = nbytes
        free = start
        for part, size in used:
            if part > free:
                self._insert(free, part)
            free = part + size
        if free < start + nbytes:
            self._insert(free, start + nbytes)

    def remove_segment(self, start: int) -> None:
        """Forget a segment that `whole()` named."""
        self._remove(start, start + self.segments.pop(start))

    def remove_used_segment(self, start: int) -> None:
        """Forget a segment of which parts may be handed out: these are not given back here any more."""
        end = start + self.segments.pop(start)
        for part in [part for part in self._start_to_end if start <= part < end]:
            self._remove(part, self._start_to_end[part])

    def take(self, nbytes: int) -> int | None:
        """Cut `nbytes` from the smallest range that has them; None if none has."""
        index = bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        size, start = self._by_size.pop(index)
        end = start + size
        del self._start_to_end[start]
        self._whole.pop(start, None)
        if size > nbytes:
            # What is left ends where the range did, and is no whole segment.
            insort(self._by_size, (size - nbytes, start + nbytes))
            self._start_to_end[start + nbytes] = end
            self._end_to_start[end] = start + nbytes
        else:
            del self._end_to_start[end]
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
        before = self._end_to_start.get(start)
        if before is not None and start not in self.segments:
            self._remove(before, start)
            start = before
        after = self._start_to_end.get(end)
        if after is not None and end not in self.segments:
            # The neighbour ends where the range now ends, and is no whole segment.
            del self._by_size[bisect_left(self._by_size, (after - end, end))]
            del self._start_to_end[end]
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
