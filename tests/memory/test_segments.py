"""Segments and what is handed out of them: whatever is done, what follows from them is what it would be if derived anew."""

from __future__ import annotations

import random
from typing import Any

import pytest

from xferlib.memory.blocks import PoolRequest
from xferlib.memory.ranges import Ranges
from xferlib.memory.segments import Segment, Segments

UNIT = 256
SEGMENT = 16 * UNIT


def wanted(size: int, *, for_array: bool = True) -> PoolRequest:
    return PoolRequest(size, size - 1, None, False, for_array)


def free(ranges: Ranges) -> tuple[Any, ...]:
    return dict(ranges._start_to_end), sorted(ranges._by_size), sorted(ranges.whole()), dict(ranges.segments)


def derived(segments: Segments) -> tuple[Any, ...]:
    kinds = (segments.large, segments.small, segments.write_combined, segments.pageable)
    sums = segments.used_nbytes, segments.asked_nbytes, segments.arrays_nbytes
    return (*map(free, kinds), *sums, segments._index)


def after_random_steps(chance: random.Random) -> Segments:
    segments = Segments()
    for number in range(60):
        what = chance.choice(["add", "take", "take", "take back", "lock", "evict", "free"])
        kinds = (segments.large, segments.small, segments.write_combined, segments.pageable)
        if what == "add":
            ranges = chance.choice(kinds)
            # Some side by side, whose free parts must not merge.
            segments.add(Segment(number, number * SEGMENT, SEGMENT, ranges, locked=ranges is not segments.pageable))
        elif what == "take":
            ranges, size = chance.choice(kinds), UNIT * chance.randint(1, 8)
            address = ranges.take(size)
            if address is not None:
                segments.hand_out(address, ranges, wanted(size, for_array=chance.random() < 0.5), number)
        elif what == "take back" and segments.rows:
            assert segments.take_back(chance.choice(list(segments.rows)))
        elif what == "lock":
            claimed = segments.claim()
            if claimed is not None:
                segments.note_locked(claimed)
                claimed.claimed = False
        elif what == "evict":
            segments.evict(chance.choice([None, SEGMENT]))
        elif what == "free":
            for segment in segments.freeable():
                segments.remove(segment)
    return segments


@pytest.mark.parametrize("seed", range(40))
def test_what_follows_from_segments_and_rows_is_the_same_when_it_is_derived_anew(seed: int) -> None:
    segments = after_random_steps(random.Random(seed))
    before = derived(segments)
    segments.derive()
    assert derived(segments) == before


def test_what_is_handed_out_is_inside_what_is_locked_and_comes_back_once() -> None:
    segments = Segments()
    segments.add(Segment(0, 0, SEGMENT, segments.large))
    address = segments.large.take(UNIT)
    assert address == 0
    row = segments.hand_out(address, segments.large, wanted(UNIT), 7)
    assert (row.address, row.size, segments.arrays_nbytes, segments.asked_nbytes) == (0, UNIT, UNIT, UNIT - 1)
    assert segments.contains(0, SEGMENT)
    assert not segments.contains(UNIT, SEGMENT)
    assert segments.take_back(7)
    assert not segments.take_back(7)
    assert segments.large.whole() == [(0, SEGMENT)]


def test_none_is_freed_where_all_that_are_idle_would_not_be_enough() -> None:
    segments = Segments()
    for number in range(3):
        segments.add(Segment(number, 2 * number * SEGMENT, SEGMENT, segments.large))
    address = segments.large.take(UNIT)
    assert address is not None
    segments.hand_out(address, segments.large, wanted(UNIT), 0)
    assert not segments.evict(3 * SEGMENT)
    assert segments.freeable() == []
    assert segments.evict(SEGMENT + 1)
    assert len(segments.freeable()) == 2
    # Until it is removed it counts: it is still locked.
    assert len(segments.by_number) == 3
    assert segments.around(address, UNIT) is not None


def test_memory_that_is_pageable_is_found_but_not_said_to_be_locked_until_it_is() -> None:
    segments = Segments()
    segments.add(Segment(0, 0, SEGMENT, segments.pageable, locked=False))
    address = segments.pageable.take(UNIT)
    assert address is not None
    segments.hand_out(address, segments.pageable, wanted(UNIT), 0)
    around = segments.around(address, UNIT)
    assert around is not None
    assert around.pending
    assert not segments.contains(address, UNIT)
    claimed = segments.claim()
    assert claimed is around
    # Nobody else locks it.
    assert segments.claim() is None
    segments.note_locked(claimed)
    assert segments.contains(address, UNIT)
    assert not claimed.pending
    assert segments.take_back(0)
    assert segments.large.whole() == [(0, SEGMENT)]
    assert segments.pageable.whole() == []
