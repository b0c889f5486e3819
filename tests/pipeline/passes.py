"""Whole passes over each kind of pipeline, for tests that disturb them: each gives the right numbers, or raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

import xferlib

NUMBERS = range(6)
SHAPE = (64, 100)

Pass: TypeAlias = Callable[[], None]


def arrays() -> Iterator[np.ndarray]:
    return (np.full(SHAPE, number, np.int32) for number in NUMBERS)


def whole(taken: list[int]) -> None:
    assert taken == list(NUMBERS)


def number_in(array: Any) -> int:
    """Return the number that an array is full of."""
    least, most = int(array.min()), int(array.max())
    assert least == most
    return least


def ordinary(stager: xferlib.Stager) -> Pass:
    def run() -> None:
        with xferlib.prefetch(arrays(), stager) as loop:
            whole([number_in(batch) for batch in loop])

    return run


def lent(stager: xferlib.Stager) -> Pass:
    def run() -> None:
        with xferlib.prefetch(list(arrays()), stager, rewrites=False) as loop:
            whole([number_in(batch) for batch in loop])

    return run


def pinned(stager: xferlib.Stager) -> Pass:
    def source() -> Iterator[np.ndarray]:
        array = stager.empty_pinned(SHAPE, np.int32)
        for number in NUMBERS:
            array[:] = number
            yield array

    def run() -> None:
        with xferlib.prefetch(source(), stager) as loop:
            whole([number_in(batch) for batch in loop])

    return run


def slots(stager: xferlib.Stager) -> Pass:
    ring = xferlib.Ring(stager, (SHAPE, np.int32), 3)

    def source() -> Iterator[xferlib.Slot]:
        for number in NUMBERS:
            slot = ring.acquire()
            slot.tree[:] = number
            yield slot

    def run() -> None:
        with xferlib.prefetch(source(), stager) as loop:
            whole([number_in(batch) for batch in loop])

    return run


def drained(stager: xferlib.Stager) -> Pass:
    def run() -> None:
        with xferlib.drain(arrays(), stager) as loop:
            whole([number_in(result) for result in loop])

    return run


def drained_into_arrays(stager: xferlib.Stager) -> Pass:
    def run() -> None:
        out = np.empty((len(NUMBERS), *SHAPE), np.int32)
        with xferlib.drain(arrays(), stager, out=out) as loop:
            whole([number_in(result) for result in loop])
        whole([number_in(row) for row in out])

    return run


def mapped(stager: xferlib.Stager) -> Pass:
    def run() -> None:
        with xferlib.stream_map(lambda batch: batch + 1, arrays(), stager) as loop:
            whole([number_in(result) - 1 for result in loop])

    return run


PASSES = pytest.mark.parametrize("make", [ordinary, lent, pinned, slots, drained, drained_into_arrays, mapped])
