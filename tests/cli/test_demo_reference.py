"""The reference against a loop over pixels that follows the definition word by word."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from xferlib.cli.demo import reference

Frame = npt.NDArray[Any]


def by_hand(frame: Frame, rounds: int) -> list[list[int]]:
    height, width = frame.shape[:2]
    values = [[grey(frame[row, column]) for column in range(width)] for row in range(height)]
    image = stretch(values)
    for _ in range(rounds):
        image = [[(around(image, row, column, BINOMIAL) + 8) >> 4 for column in range(width)] for row in range(height)]
    return [
        [min(255, abs(around(image, row, column, ACROSS)) + abs(around(image, row, column, DOWN))) for column in range(width)]
        for row in range(height)
    ]


BINOMIAL = ((1, 2, 1), (2, 4, 2), (1, 2, 1))
ACROSS = ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1))
DOWN = ((-1, -2, -1), (0, 0, 0), (1, 2, 1))


def around(image: list[list[int]], row: int, column: int, weights: tuple[tuple[int, ...], ...]) -> int:
    total = 0
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            y, x = min(max(row + down, 0), len(image) - 1), min(max(column + right, 0), len(image[0]) - 1)
            total += weights[down + 1][right + 1] * image[y][x]
    return total


def grey(pixel: Any) -> float:
    channels = pixel.tolist() if pixel.ndim else [pixel.item()]
    if len(channels) < 3:
        first: float = channels[0]
        return first
    if isinstance(channels[0], float):
        mixed: float = (0.299 * channels[0] + 0.587 * channels[1]) + 0.114 * channels[2]
        return mixed
    whole: int = (77 * channels[0] + 150 * channels[1] + 29 * channels[2]) >> 8
    return whole


def stretch(values: list[list[float]]) -> list[list[int]]:
    finite = [value for row in values for value in row if abs(value) < float("inf")]
    if not finite or min(finite) == max(finite):
        return [[0 for _ in row] for row in values]
    low, high = min(finite), max(finite)
    if isinstance(low, int):
        return [[int((value - low) * 255 // (high - low)) for value in row] for row in values]
    return [
        [int((value / 2 - low / 2) / (high / 2 - low / 2) * 255) if abs(value) < float("inf") else 0 for value in row]
        for row in values
    ]


def frames(dtype: str) -> list[Frame]:
    random = np.random.default_rng(7)
    shapes = [(1, 1), (1, 6), (5, 1), (6, 7), (4, 5, 1), (4, 5, 2), (4, 5, 3), (4, 5, 4)]
    if np.dtype(dtype).kind == "f":
        return [random.normal(0, 1000, shape).astype(dtype) for shape in shapes]
    limits = np.iinfo(dtype)
    return [random.integers(limits.min, limits.max, shape, dtype, endpoint=True) for shape in shapes]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "float32", "float64"])
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_reference_follows_the_definition_pixel_by_pixel(dtype: str, rounds: int) -> None:
    for frame in frames(dtype):
        assert reference.edges(frame, rounds=rounds).tolist() == by_hand(frame, rounds)


def test_values_that_are_not_finite_have_no_part_in_the_range_and_become_zero() -> None:
    frame = np.array([[np.nan, 1.0, 2.0], [np.inf, 3.0, -np.inf]])
    assert reference.normalised(reference.grey(frame)).tolist() == [[0, 0, 127], [0, 255, 0]]
    assert reference.edges(frame, rounds=1).tolist() == by_hand(frame, 1)


def test_a_range_too_wide_for_a_double_is_normalised_all_the_same() -> None:
    frame = np.array([[-1.7e308, 0.0, 1.7e308]])
    assert reference.normalised(frame).tolist() == [[0, 127, 255]]


@pytest.mark.parametrize("value", [7, np.nan, np.inf])
def test_a_flat_frame_has_no_edges(value: float) -> None:
    assert not reference.edges(np.full((3, 4), value), rounds=2).any()
