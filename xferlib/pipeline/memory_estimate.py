"""What a loop costs in memory, said before it is spent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

from xferlib.errors import AllocationError
from xferlib.tree import PLAIN, ShapeDtype, Trees
from xferlib.words import in_words

__all__ = ["Charge", "MemoryEstimate", "at_a_time", "check_room", "described", "tree_nbytes"]

BESIDE_DEPTH = 2
"""How many there are at a time besides those that are ahead: one with the consumer, and one that the consumer is just taking, or
whose readers on the device are not done yet."""


@final
@dataclass(frozen=True)
class Charge:
    """One line of an estimate: so many batches, or other things, of so many bytes each.

    Attributes:
        memory: Where they lie.
        count: How many there are.
        nbytes: Of one of them.
        what: What they are for, in words.
    """

    memory: Literal["pinned", "device"]
    count: int
    nbytes: int
    what: str

    def __str__(self) -> str:
        total = f"{in_words(self.count * self.nbytes)} {self.memory}"
        return f"{total}: {self.what}" if self.count == 1 else f"{total}: {self.count} x {in_words(self.nbytes)} {self.what}"


@final
@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a loop needs while it runs, above what its consumer keeps. `str()` of it has a line for each charge.

    Attributes:
        charges: What is needed, line by line.
    """

    charges: tuple[Charge, ...] = ()

    @property
    def pinned_nbytes(self) -> int:
        """In pinned memory."""
        return self._sum("pinned")

    @property
    def device_nbytes(self) -> int:
        """On the device."""
        return self._sum("device")

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        return MemoryEstimate(self.charges + other.charges)

    def __str__(self) -> str:
        return "\n".join(map(str, self.charges)) or "nothing"

    def _sum(self, memory: str) -> int:
        return sum(charge.count * charge.nbytes for charge in self.charges if charge.memory == memory)


def at_a_time(depth: int, length: int | None) -> int:
    """Return how many batches or results of a loop there are at a time. `length`: how many in all, where that is known."""
    count = depth + BESIDE_DEPTH
    return count if length is None else min(count, max(1, length))


def check_room(
    memory: Literal["pinned", "device"], depth: int, count: int, nbytes: int, limit: int, what: str, advice: str = ""
) -> None:
    """Raise `AllocationError` where a loop of this depth needs more than its stager's limit: `count` of `what`, `nbytes` each."""
    if count * nbytes <= limit:
        return
    fit = limit // nbytes - BESIDE_DEPTH
    raise AllocationError(
        f"depth={depth} needs {in_words(count * nbytes)} of {memory} memory, {count} x {in_words(nbytes)} {what}, more than "
        f"{memory}_limit={limit} ({in_words(limit)}). {f'Use depth={fit}, raise' if fit > 0 else 'Raise'} {memory}_limit, "
        f"{advice}or make smaller {what}"
    )


def tree_nbytes(tree: Any, trees: Trees = PLAIN) -> int:
    """Return the bytes of all arrays, host or device, of a tree. What is no array counts for nothing."""
    return sum(math.prod(map(int, shape)) * dtype.itemsize for shape, dtype in described(tree, trees))


def described(tree: Any, trees: Trees = PLAIN) -> list[ShapeDtype]:
    """Return shapes and dtypes of all arrays, host or device, of a tree."""
    leaves, _ = trees.flatten(tree)
    return list(filter(None, map(trees.describe, leaves)))
