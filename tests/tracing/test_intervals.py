"""Sets of times, against counting each moment."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from xferlib.tracing.intervals import common, inside, length, union, without

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
