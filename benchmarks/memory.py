"""Host bytes in bulk: random, inverted, compared; by several threads, for there is far more to verify than to time."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.ways import Bytes

__all__ = ["empty_pageable", "equal", "fill_random", "invert"]

PIECE = 4 << 20
THREADS = min(16, len(os.sched_getaffinity(0)))
_threads = ThreadPoolExecutor(THREADS, "benchmark-bytes")


def empty_pageable(nbytes: int) -> Bytes:
    """Return ordinary memory, untouched."""
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


def equal(left: Bytes, right: Bytes) -> bool:
    """Tell whether both hold the same bytes."""

    def same(start: int) -> bool:
        return np.array_equal(left[start : start + PIECE], right[start : start + PIECE])

    return left.shape == right.shape and _each(same, range(0, left.nbytes, PIECE))


def _each(work: Callable[[int], bool], starts: range) -> bool:
    if len(starts) < 2:
        return all(work(start) for start in starts)
    # A list: every piece is done, also after the first that differs.
    return all(list(_threads.map(work, starts)))
