"""Host bytes in bulk: random, inverted, compared; by several threads, since there is far more to verify than to time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.steps import Bytes

__all__ = ["copied", "copy_rates", "empty_pageable", "equal", "fill_random", "invert", "pieces"]

PIECE = 4 << 20
HOT_PIECE = 1 << 20
THREADS = min(16, len(os.sched_getaffinity(0)))
_threads = ThreadPoolExecutor(THREADS, "benchmark-bytes")


def empty_pageable(nbytes: int) -> Bytes:
    """Return pageable memory, untouched."""
    return np.empty(nbytes, np.uint8)


def fill_random(target: Bytes, seed: int) -> None:
    """Fill with bytes that depend on the seed alone."""
    pieces = range(0, target.nbytes, PIECE)

    def fill(start: int) -> bool:
        piece = target[start : start + PIECE]
        piece[...] = np.frombuffer(np.random.default_rng((seed, start)).bytes(piece.nbytes), np.uint8)
        return True

    _each(fill, pieces)


def invert(source: Bytes, out: Bytes) -> None:
    """Flip every bit of `source` into `out`."""

    def flip(start: int) -> bool:
        np.invert(source[start : start + PIECE], out=out[start : start + PIECE])
        return True

    _each(flip, range(0, out.nbytes, PIECE))


def pieces(array: Any, ends: tuple[int, ...]) -> list[Any]:
    """Return views of an array, of the host's or a device's, that end at these bytes."""
    return [array[start:end] for start, end in pairwise((0, *ends))]


def copied(source: Bytes) -> Bytes:
    """Return new pageable memory with the same bytes."""
    target = empty_pageable(source.nbytes)

    def copy(start: int) -> bool:
        np.copyto(target[start : start + PIECE], source[start : start + PIECE])
        return True

    _each(copy, range(0, source.nbytes, PIECE))
    return target


def equal(left: Bytes, right: Bytes) -> bool:
    """Tell whether both hold the same bytes."""

    def same(start: int) -> bool:
        return np.array_equal(left[start : start + PIECE], right[start : start + PIECE])

    return left.shape == right.shape and _each(same, range(0, left.nbytes, PIECE))


def copy_rates(source: Bytes, target: Bytes) -> dict[str, float]:
    """Return how many GB/s NumPy copies with 1, 2, 4 threads and so on, each byte counted once: this is what the memory allows.

    "to memory" writes all of the target; "to cache" writes one small piece per thread again and again, and reads all the source.
    """
    rates: dict[str, float] = {}
    threads = 1
    while threads <= THREADS:
        for name, hot in (("to memory", False), ("to cache", True)):
            rates[f"{name}, {threads} thread{'s' if threads > 1 else ''}"] = round(_copy_rate(source, target, threads, hot), 2)
        threads *= 2
    return rates


def _copy_rate(source: Bytes, target: Bytes, threads: int, hot: bool) -> float:
    span = target.nbytes // threads

    def copy(first: int) -> None:
        for start in range(first, first + span, HOT_PIECE):
            piece = source[start : min(start + HOT_PIECE, first + span)]
            into = first if hot else start
            np.copyto(target[into : into + piece.nbytes], piece)

    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        list(_threads.map(copy, range(0, threads * span, span)))
        best = min(best, time.perf_counter() - begin)
    return threads * span / best / 1e9


def _each(work: Callable[[int], bool], starts: range) -> bool:
    if len(starts) < 2:
        return all(work(start) for start in starts)
    # A list, so that every piece is done, even after the first that differs.
    return all(list(_threads.map(work, starts)))
