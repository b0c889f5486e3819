"""What loops that go over their source once have in common: how long they are, and what a `for` iterates."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import call
from typing import Any, TypeVar

__all__ = ["capped_depth", "known_length", "steps", "told_length"]

T = TypeVar("T")


def known_length(source: Any) -> int | None:
    """Return how many batches a source has, where it says so."""
    try:
        # Some loaders raise here, such as those whose data has no length.
        return len(source)
    except Exception:
        return None


def told_length(length: int | None) -> int:
    """Return a known length, for `len()` of a loop. Else raises `TypeError`, which `list` and progress bars take for no length."""
    if length is None:
        raise TypeError("this loop has no length, as len() of its source tells none. Count the batches while they come")
    return length


def capped_depth(depth: int, length: int | None) -> int:
    """Return the depth that a source of this length can fill: what lies ahead costs memory, on the device and in the bill."""
    return depth if length is None else min(depth, max(1, length))


def steps(loop: Iterator[T]) -> Iterator[T]:
    """Return an iterator over what a loop still has, for one `for`.

    It is not the loop itself: code that takes batches in groups asks its iterator for an iterator once more after the last one, and
    the loop would refuse.
    """
    return map(call, repeat(loop.__next__))
