"""Recompute a sample of frames from the source and compare them, bit for bit, with what the file says."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from xferlib.cli.demo import reference
from xferlib.cli.demo.source import Source
from xferlib.cli.demo.team import Team

__all__ = ["Mismatch", "compare", "sample"]

SPREAD = 8
BORDERS = 4
MOST_WORK = 4e9
"""Pixels times rounds. Beyond it fewer frames are taken: a minute or so of NumPy."""


class Mismatch(NamedTuple):
    """A frame that is not what it must be."""

    frame: int
    wrong_pixels: int


def sample(frames: int, batch: int, *, work: float) -> list[int]:
    """Choose frames: the first, the last, evenly spread ones, and both sides of some borders between batches.

    `work` is what one frame costs, in pixels times rounds.
    """
    last = frames - 1
    ends = {0, last}
    spread = {round(last * part / (SPREAD - 1)) for part in range(SPREAD)}
    inner = range(batch, frames, batch)
    borders = {inner[round((len(inner) - 1) * part / (BORDERS - 1))] for part in range(BORDERS)} if inner else set()
    chosen = sorted(ends | spread | borders | {border - 1 for border in borders})
    most = max(2, int(MOST_WORK // work))
    return chosen if len(chosen) <= most else sorted(ends | set(chosen[1 : most - 1]))


def compare(source: Source, result: Path, numbers: list[int], *, rounds: int, team: Team) -> list[Mismatch]:
    """Return the frames of the sample that differ. The file is opened anew."""
    written = np.load(result, mmap_mode="r")
    found: list[Mismatch] = []

    def check(number: int) -> None:
        wrong = int(np.count_nonzero(written[number] != reference.edges(source.original(number), rounds=rounds)))
        if wrong:
            found.append(Mismatch(number, wrong))

    team.each(check, numbers)
    return sorted(found)
