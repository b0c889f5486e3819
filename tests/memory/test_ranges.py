"""Free ranges: best fit, merging, and the borders of segments."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from xferlib.memory.ranges import Ranges


def test_the_smallest_range_that_fits_is_cut() -> None:
    ranges = Ranges()
    ranges.add_segment(0, 100)
    ranges.add_segment(1000, 50)
    assert ranges.take(40) == 1000
    assert ranges.take(60) == 0
    assert ranges.take(41) is None
    assert ranges.take(40) == 60


def test_parts_given_back_in_any_order_make_a_whole_segment_again() -> None:
    ranges = Ranges()
    ranges.add_segment(0, 30)
    parts = [ranges.take(10) for _ in range(3)]
    for start in (parts[0], parts[2], parts[1]):
        assert start is not None
        assert ranges.whole() == []
        ranges.give_back(start, 10)
    assert ranges.whole() == [(0, 30)]
    ranges.remove_segment(0)
    assert ranges.take(1) is None


def test_neighbouring_segments_never_merge() -> None:
    ranges = Ranges()
    ranges.add_segment(100, 100)
    ranges.add_segment(0, 100)
    ranges.add_segment(200, 50)
    taken = [ranges.take(n) for n in (50, 100, 100)]
    assert None not in taken
    for start, nbytes in zip(taken, (50, 100, 100), strict=True):
        assert start is not None
        ranges.give_back(start, nbytes)
    assert sorted(ranges.whole()) == [(0, 100), (100, 100), (200, 50)]
    assert ranges.take(101) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 9)), max_size=40))
def test_what_is_handed_out_is_disjoint_and_comes_back(steps: list[tuple[int, bool, int]]) -> None:
    ranges = Ranges()
    for start in (0, 64, 200):
        ranges.add_segment(start, 64)
    live: list[tuple[int, int]] = []
    for nbytes, drop, which in steps:
        if drop and live:
            ranges.give_back(*live.pop(which % len(live)))
            continue
        found = ranges.take(nbytes)
        if found is not None:
            assert any(base <= found and found + nbytes <= base + 64 for base in (0, 64, 200))
            assert all(found + nbytes <= other or other + size <= found for other, size in live)
            live.append((found, nbytes))
    for part in live:
        ranges.give_back(*part)
    assert sorted(ranges.whole()) == [(0, 64), (64, 64), (200, 64)]
