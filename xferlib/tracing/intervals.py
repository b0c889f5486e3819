"""Sets of times, as sorted lists of pairs that neither overlap nor touch: (start, end) with start < end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias, final

__all__ = ["Interval", "Lengths", "common", "inside", "length", "overlapping", "union", "without"]

Interval: TypeAlias = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times that lie in any of them."""
    some = sorted([(start, end) for start, end in intervals if end > start])
    if not some:
        return []
    merged: list[Interval] = []
    first, last = some[0]
    for start, end in some:
        if start > last:
            merged.append((first, last))
            first, last = start, end
        elif end > last:
            last = end
    merged.append((first, last))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Return how long they are together."""
    return sum([end - start for start, end in intervals])


def overlapping(intervals: Sequence[Interval], start: int, end: int) -> Sequence[Interval]:
    """Return those of a set that share any time with (start, end), whole."""
    first, last = _span(intervals, start, end)
    return intervals[first:last]


def _span(intervals: Sequence[Interval], start: int, end: int) -> tuple[int, int]:
    first = bisect_right(intervals, start, key=lambda interval: interval[1])
    return first, bisect_left(intervals, end, lo=first, key=lambda interval: interval[0])


def inside(intervals: Sequence[Interval], start: int, end: int) -> list[Interval]:
    """Return what of a set lies in (start, end)."""
    return [(max(start, first), min(end, last)) for first, last in overlapping(intervals, start, end)]


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times that lie in both sets."""
    return [(max(start, first), min(end, last)) for start, end in one for first, last in overlapping(other, start, end)]


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times of one set that do not lie in the other."""
    if not other:
        return list(one)
    # One after the other is taken from a gap that thousands of copies lie in: what none of it touches is not looked at.
    before, behind = _span(one, other[0][0], other[-1][1])
    found = list(one[:before])
    for start, end in one[before:behind]:
        for first, last in overlapping(other, start, end):
            if first > start:
                found.append((start, first))
            start = max(start, last)
        if start < end:
            found.append((start, end))
    found += one[behind:]
    return found


@final
class Lengths:
    """How long a set is within any times, without a look at each of its intervals."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._intervals = intervals
        self._before = [*accumulate([end - start for start, end in intervals], initial=0)]
        """Of each interval, how long those before it are together."""

    def inside(self, start: int, end: int) -> int:
        """Return how long what lies in (start, end) is."""
        first, last = _span(self._intervals, start, end)
        if first == last:
            return 0
        cut = max(0, start - self._intervals[first][0]) + max(0, self._intervals[last - 1][1] - end)
        return self._before[last] - self._before[first] - cut
