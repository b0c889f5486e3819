"""Frames repeated to a size, each copy shifted by its number, in memory: a source as fast as memory, with no two frames alike."""

from __future__ import annotations

import math
from itertools import count
from typing import Any, final

import numpy as np
import numpy.typing as npt
import psutil

from xferlib.cli.demo.source import Source
from xferlib.cli.demo.team import PIECE, Team, copy
from xferlib.cli.errors import CommandError
from xferlib.memory.limits import memory_limit

__all__ = ["TiledSource", "check_memory"]


@final
class TiledSource:
    """`frames` frames; the ones after those of `base` are copies, rolled round by a step that only repeats after every pixel."""

    def __init__(self, base: Source, frames: int, team: Team) -> None:
        self._base = base
        self._period = min(base.frames, frames)
        self.label = base.label if frames <= base.frames else f"{base.label}, repeated and shifted"
        self.frames = frames
        self.frame_shape = base.frame_shape
        self.dtype = base.dtype
        self._memory = np.empty((frames, *base.frame_shape), base.dtype)
        stretch = max(1, PIECE // self._memory[0].nbytes)
        team.each(
            lambda start: base.read(start, self._memory[start : min(start + stretch, self._period)]),
            range(0, self._period, stretch),
        )
        team.each(
            lambda start: self._make(range(start, min(start + stretch, frames))),
            range(self._period, frames, stretch),
        )

    def read(self, start: int, out: npt.NDArray[Any]) -> None:
        copy(out, self._memory[start : start + len(out)])

    def original(self, number: int) -> npt.NDArray[Any]:
        """Make the frame again from its origin: what is in memory has no part in it."""
        copy, index = divmod(number, self._period)
        return np.roll(self._base.original(index), self._shift(copy), axis=(0, 1))

    def _shift(self, copy: int) -> tuple[int, int]:
        height, width = self.frame_shape[:2]
        step = next(step for step in count(max(1, width // 14)) if math.gcd(step, width) == 1)
        return copy // width % height, copy * step % width

    def _make(self, numbers: range) -> None:
        height, width = self.frame_shape[:2]
        for number in numbers:
            copy, index = divmod(number, self._period)
            down, right = self._shift(copy)
            source, target = self._memory[index], self._memory[number]
            for to_row, from_row in ((slice(down, None), slice(height - down)), (slice(down), slice(height - down, None))):
                target[to_row, right:] = source[from_row, : width - right]
                target[to_row, :right] = source[from_row, width - right :]


def check_memory(nbytes: int) -> None:
    """Raise `CommandError` if this machine, or the share of it that is ours, has not that much memory left."""
    available = min(psutil.virtual_memory().available, memory_limit())
    if nbytes > 0.9 * available:
        raise CommandError(
            f"{nbytes / 2**30:.1f} GiB of memory needed, {available / 2**30:.1f} GiB available. Lower --gib, or give a .npy file "
            "without --gib: it is read as it is needed"
        )
