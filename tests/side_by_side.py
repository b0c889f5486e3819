"""What many tests wait for, done several at a time: processes that are mostly asleep need not follow each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

__all__ = ["chosen", "side_by_side"]

K = TypeVar("K")
V = TypeVar("V")


def chosen(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """Return the parameters of a test of the file, in their order, as far as they are to be run."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if item.originalname == test]


@contextmanager
def side_by_side(work: Callable[[K], V], keys: Iterable[K]) -> Iterator[Callable[[K], V]]:
    """Do the work for each key, as many at a time as there are cores. Gives what waits for one, and returns or raises its outcome.

    What is not begun at the end is not done.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = {key: pool.submit(work, key) for key in dict.fromkeys(keys)}
        try:
            yield lambda key: outcomes[key].result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
