"""What loops that go over their source once have in common: how they end, how long they are, and what a `for` iterates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from operator import call
from types import GeneratorType
from typing import Any, Self, TypeVar

from xferlib.callers import user_line

__all__ = ["OnePass", "capped_depth", "known_length", "steps", "warn_of_ended", "warning_if_empty"]

T = TypeVar("T")


class OnePass(ABC):
    """A loop that goes over its source once. A context manager, which closes the loop."""

    _length: int | None

    @abstractmethod
    def close(self) -> None:
        """End the loop. Twice is fine."""

    def __len__(self) -> int:
        """How many there are in all, taken or not. Raises `TypeError` where `len()` of the source did not say so."""
        if self._length is None:
            # Which `list` and progress bars take for no length.
            raise TypeError("this loop has no length, as len() of its source tells none. Count the batches while they come")
        return self._length

    def __bool__(self) -> bool:
        """Say yes, whatever the length, as other iterators do."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def known_length(source: Any) -> int | None:
    """Return how many batches a source has, where it says so."""
    try:
        # Some loaders raise here, such as those whose data has no length.
        return len(source)
    except Exception:
        return None


def capped_depth(depth: int, length: int | None) -> int:
    """Return the depth that a source of this length can fill: what lies ahead costs memory, on the device and in the bill."""
    return depth if length is None else min(depth, max(1, length))


def steps(loop: Iterator[T]) -> Iterator[T]:
    """Return an iterator over what a loop still has, for one `for`.

    It is not the loop itself: code that takes batches in groups asks its iterator for an iterator once more after the last one, and
    the loop would refuse.
    """
    return map(call, repeat(loop.__next__))


def warn_of_ended(source: object, name: str) -> None:
    """Issue a `RuntimeWarning`, at the caller's line, for a generator that has ended: the loop would be empty, and say nothing.

    `name`: the argument.
    """
    if not isinstance(source, GeneratorType) or source.gi_frame is not None:
        return
    advice = f", as in {source.__name__}()" if source.__name__.isidentifier() else ""
    user_line().warn(
        f"{name}: this generator has ended, and the loop gets nothing from it. Make a new one for each loop, and so for each "
        f"epoch{advice}"
    )


def warning_if_empty(source: object, name: str) -> Callable[[], None] | None:
    """Return what warns, at the caller's line, of an iterator that turns out to give nothing, as one does that an earlier loop has
    taken all from. None: a source that begins anew, or that says that it has none.

    `name`: the argument.
    """
    # Of a generator it was known beforehand, and a loop tells of its own source.
    if not isinstance(source, Iterator) or isinstance(source, GeneratorType | OnePass) or known_length(source) is not None:
        return None
    return partial(
        user_line().warn,
        f"{name}: this {type(source).__qualname__} gave nothing. If an earlier loop has taken all that it had, make a new one for "
        "each loop, and so for each epoch",
    )
