"""Where parts of arrays lie in the whole, in bytes: which bytes of a part a run of bytes of the whole has, and how they go there.

A part is a box of the array: some of its rows, of these some columns. Its own bytes lie in C order. So bytes that follow each other
in the whole do so in each part, too, with those of other parts between them in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, final

import numpy as np

from xferlib.latch import Turn
from xferlib.memory.arrays import Array

__all__ = ["Region", "region"]

REMEMBERED = 4096
"""Layers are alike, and so are their parts."""


class _Axis(NamedTuple):
    """One axis, or several that are one since what the part has of them lies side by side. `start` and `extent` count indices."""

    start: int
    extent: int
    step: int
    """Bytes of the whole from one index to the next."""
    own_step: int
    """Bytes of the part."""


@final
class Region:
    """The place of a part in its array. The items of the last of its axes are bytes, which lie side by side in the whole."""

    def __init__(self, axes: Sequence[_Axis]) -> None:
        self._axes = axes
        self._extents = [axis.extent for axis in axes]

    @property
    def offset(self) -> int | None:
        """Where the part begins in the whole, if it lies side by side there; else None."""
        return self._axes[0].start if len(self._axes) == 1 else None

    def before(self, offset: int) -> int:
        """Return how many bytes of the part stand before an offset in the whole."""
        found = 0
        for start, extent, step, own_step in self._axes:
            index, offset = divmod(offset, step)
            if index < start:
                return found
            if index >= start + extent:
                return found + extent * own_step
            found += (index - start) * own_step
        return found

    def lay(self, source: Array, first: int, target: Array, where: int, turn: Turn) -> None:
        """Copy bytes of the part, from number `first` on, into a piece of the whole.

        `where`: where the whole begins in the piece, or would: it may be less than 0.
        """
        taken = 0
        for index, (*counts, length) in _sections(self._extents, first, first + source.nbytes):
            offset = where + sum([(axis.start + number) * axis.step for axis, number in zip(self._axes, index, strict=True)])
            # What lies side by side is one item: single bytes are copied at a tenth of the speed.
            item = np.dtype((np.void, length))
            strides = [axis.step for axis in self._axes[:-1]]
            np.copyto(np.ndarray(counts, item, target, offset, strides), np.ndarray(counts, item, source, taken))
            taken += math.prod(counts) * length
            turn.end_if_long()


@lru_cache(REMEMBERED)
def region(shape: tuple[int, ...], itemsize: int, start: tuple[int, ...], extents: tuple[int, ...]) -> Region:
    """Return the place of a part in an array of this shape, which is not empty: so many items along each axis, from an index on."""
    axes = [_Axis(0, itemsize, 1, 1)]
    # Of the axis that was found last, in the whole.
    length = itemsize
    for whole, first, extent in zip(reversed(shape), reversed(start), reversed(extents), strict=True):
        inner = axes[-1]
        if inner.extent == length or extent == 1:
            # What the part has of both lies side by side: they are one.
            axes[-1] = inner._replace(start=first * length + inner.start, extent=extent * inner.extent)
            length *= whole
        else:
            axes.append(_Axis(first, extent, inner.step * length, inner.own_step * inner.extent))
            length = whole
    return Region(axes[::-1])


def _sections(extents: Sequence[int], first: int, last: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield boxes of an array that have, one behind the other, its items from one number to another: the index and extents of each.

    At most two for each axis: what is left of a row at the front and at the end, and what is between them.
    """
    own = math.prod(extents[1:])
    head, tail = -(-first // own), last // own
    if head > tail:
        yield from _of_row(extents, tail, first - tail * own, last - tail * own)
        return
    if first < head * own:
        yield from _of_row(extents, head - 1, first - (head - 1) * own, own)
    if head < tail:
        yield [head, *[0] * (len(extents) - 1)], [tail - head, *extents[1:]]
    if tail * own < last:
        yield from _of_row(extents, tail, 0, last - tail * own)


def _of_row(extents: Sequence[int], row: int, first: int, last: int) -> Iterator[tuple[list[int], list[int]]]:
    for index, counts in _sections(extents[1:], first, last):
        yield [row, *index], [1, *counts]
