"""Threads that share out preparation and verification, and how large pieces memory is best copied in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self, TypeVar, final

import numpy as np
import numpy.typing as npt

__all__ = ["PIECE", "Team", "copy", "cores"]

T = TypeVar("T")

PIECE = 4 << 20
"""Bytes. Beyond some size memcpy writes past the cache; below it a pinned slot is still in cache when the copy engine reads it."""


def cores() -> int:
    """Return how many this process may use."""
    return len(os.sched_getaffinity(0))


def copy(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copy frames, converting the byte order where that differs. The first axis counts frames; `target` is C contiguous."""
    if source.flags.c_contiguous:
        target, source = target.reshape(-1), source.reshape(-1)
    step = max(1, PIECE * len(source) // source.nbytes)
    for start in range(0, len(source), step):
        np.copyto(target[start : start + step], source[start : start + step])


@final
class Team:
    """As many threads as cores. One caller at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(cores(), "xferlib-team")

    def each(self, work: Callable[[T], object], items: Iterable[T]) -> None:
        """Do the work for every item. Returns, or raises the first error, when nobody works any more."""
        futures = [self._pool.submit(work, item) for item in items]
        try:
            wait(futures)
        finally:
            for future in futures:
                future.cancel()
        for future in futures:
            future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
