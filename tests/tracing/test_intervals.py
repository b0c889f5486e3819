"""Sets of times, against counting each moment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferlib.tracing import intervals
from xferlib.tracing.intervals import Lengths, common, inside, length, union, without

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def moments(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(PAIRS, PAIRS)
def test_they_are_those_of_the_moments(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    left, right = union(one), union(other)
    assert moments(left) == moments(one)
    assert all(end < start for (_, end), (start, _) in pairwise(left))
    assert moments(common(left, right)) == moments(one) & moments(other)
    assert moments(without(left, right)) == moments(one) - moments(other)
    assert moments(inside(left, 5, 20)) == moments(one) & set(range(5, 20))
    assert length(common(left, right)) == len(moments(one) & moments(other))
    for start, end in map(sorted, other):
        assert Lengths(left).inside(start, end) == len(moments(one) & set(range(start, end)))


class Counted(list[tuple[int, int]]):
    """Counts how many of its items are looked at."""

    looked = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.looked += len(found) if isinstance(index, slice) else 1
        return found


def test_one_is_taken_from_many_without_a_look_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of copies in one gap are taken from it one after the other."""
    looked = []

    def noted(other: Sequence[tuple[int, int]], start: int, end: int) -> Sequence[tuple[int, int]]:
        looked.append((start, end))
        return overlapping(other, start, end)

    overlapping = intervals.overlapping
    monkeypatch.setattr(intervals, "overlapping", noted)
    many = [(at, at + 2) for at in range(0, 3000, 3)]
    assert without(many, [(1500, 1504)]) == [*many[:500], (1504, 1505), *many[502:]]
    assert looked == [(1500, 1502), (1503, 1505)]


def test_what_one_shares_with_many_is_found_without_a_look_at_all_of_them() -> None:
    """Each of many copies is looked up among all kernels: to begin at the first each time would take minutes."""
    many = Counted((at, at + 1) for at in range(0, 200_000, 2))
    one: Sequence[tuple[int, int]] = [(150_001, 150_006)]
    assert common(one, many) == [(150_002, 150_003), (150_004, 150_005)]
    assert many.looked < 100


def test_how_long_a_set_is_within_others_is_told_without_a_look_at_all_of_it() -> None:
    many = Counted((at, at + 2) for at in range(0, 200_000, 4))
    lengths = Lengths(many)
    many.looked = 0
    assert lengths.inside(1, 199_997) == 100_000 - 2
    assert many.looked < 100
