"""Where parts of arrays lie in the whole: compared with an array that has the number of each of its bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from xferlib.files.regions import region
from xferlib.latch import Turn

RANDOM = np.random.default_rng(23)
CASES = [
    # Shape, itemsize, start and extents.
    ((), 4, (), ()),
    ((), 1, (), ()),
    ((7,), 2, (2,), (3,)),
    ((7,), 1, (0,), (7,)),
    ((4, 6), 4, (1, 0), (2, 6)),
    ((4, 6), 4, (0, 2), (4, 3)),
    ((4, 6), 2, (1, 4), (2, 1)),
    ((1, 8), 4, (0, 2), (1, 2)),
    ((8, 1), 4, (2, 0), (3, 1)),
    ((3, 4, 5), 2, (0, 1, 0), (3, 2, 5)),
    ((3, 4, 5), 2, (1, 0, 3), (2, 4, 2)),
    ((3, 4, 5), 1, (1, 1, 1), (2, 2, 2)),
    ((2, 3, 2, 4), 8, (0, 1, 1, 0), (2, 2, 1, 4)),
    ((2, 3, 2, 4), 16, (1, 0, 0, 1), (1, 3, 2, 2)),
    ((3, 4, 5), 2, (1, 1, 0), (1, 2, 5)),
    ((3, 4, 5), 2, (2, 1, 2), (1, 1, 2)),
    ((1, 2, 1, 6), 2, (0, 1, 0, 2), (1, 1, 1, 3)),
    ((5, 4), 4, (1, 2), (2, 0)),
]


def bytes_of(shape: tuple[int, ...], itemsize: int, start: tuple[int, ...], extents: tuple[int, ...]) -> Any:
    """Return the numbers of a part's bytes in the whole, in the order of the part."""
    whole = np.arange(math.prod(shape) * itemsize).reshape(*shape, itemsize)
    return whole[tuple(slice(first, first + count) for first, count in zip(start, extents, strict=True))].ravel()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_a_part_stand_where_they_stand_in_the_whole(case: Any) -> None:
    numbers, place = bytes_of(*case), region(*case)
    total = math.prod(case[0]) * case[1]
    for offset in range(total + 1):
        assert place.before(offset) == int((numbers < offset).sum()), offset
    if place.offset is not None:
        assert numbers.tolist() == list(range(place.offset, place.offset + len(numbers)))
    elif len(numbers):
        assert numbers[-1] - numbers[0] + 1 > len(numbers)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_of_them_are_laid_where_they_belong_and_nothing_else_is_written(case: Any) -> None:
    numbers, place = bytes_of(*case), region(*case)
    total = math.prod(case[0]) * case[1]
    for _ in range(60):
        front, end = sorted(RANDOM.integers(0, total + 1, 2).tolist())
        first, last = place.before(front), place.before(end)
        if first == last:
            continue
        source = RANDOM.integers(1, 256, last - first, np.uint8)
        piece = np.zeros(end - front, np.uint8)
        place.lay(source, first, piece, -front, Turn())
        want = np.zeros(end - front, np.uint8)
        want[numbers[first:last] - front] = source
        assert piece.tobytes() == want.tobytes(), (front, end)


def test_no_part_is_laid_in_more_steps_than_its_axes_have_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    monkeypatch.setattr("xferlib.files.regions.np.copyto", lambda target, source: copies.append((target.shape, target.dtype)))
    place = region((1000, 8, 1000), 4, (0, 2, 250), (1000, 4, 250))
    source = np.zeros(1000 * 4 * 250 * 4 - 12, np.uint8)
    place.lay(source, 5, np.zeros(1000 * 8 * 1000 * 4, np.uint8), 0, Turn())
    assert len(copies) == 5
    # What lies side by side is copied as one item.
    assert ((998, 4), np.dtype("V1000")) in copies
