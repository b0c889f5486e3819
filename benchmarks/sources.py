"""Host batches for a loop, and peers' feeds in the form from which a loop takes its device batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

from benchmarks import memory
from benchmarks.steps import Bytes, Feed

__all__ = ["AHEAD", "ahead", "anew", "in_line", "kept"]

AHEAD = 2
"""Batches that a thread is ahead of the loop, as `xferlib.prefetch` is by default. Feeds allow no more than that."""


def kept(batches: Sequence[Bytes]) -> Callable[[int], Iterator[Bytes]]:
    """Return a function that gives so many of the batches in turn: the same arrays again, to which the source keeps references."""
    return lambda steps: islice(cycle(batches), steps)


def anew(batches: Sequence[Bytes]) -> Callable[[int], Iterator[Bytes]]:
    """Return a function that copies so many of the batches in turn, all at once, and then gives the copies away one by one.

    Nothing else refers to what it gives, and giving takes no time, since making batches is not measured.
    """

    def give(steps: int) -> Iterator[Bytes]:
        made = deque(memory.copied(batch) for batch in islice(cycle(batches), steps))
        return (made.popleft() for _ in range(steps))

    return give


@contextmanager
def in_line(feed: Feed, batches: Iterable[Bytes]) -> Iterator[Iterator[Any]]:
    """Bring each batch when the loop asks for it, on the loop's own thread."""
    yield (feed.use(feed.start(batch)) for batch in batches)


@contextmanager
def ahead(feed: Feed, batches: Iterable[Bytes]) -> Iterator[Iterator[Any]]:
    """Start each batch on a thread, ahead of the loop."""
    with ThreadPoolExecutor(1, "benchmark-feed") as thread:
        yield map(feed.use, _ended(thread.submit(feed.start, batch) for batch in batches))


def _ended(coming: Iterator[Future[Any]]) -> Iterator[Any]:
    """Return what was started, in order, with so many more under way."""
    started = deque(islice(coming, AHEAD))
    while started:
        oldest = started.popleft()
        started.extend(islice(coming, 1))
        yield oldest.result()
