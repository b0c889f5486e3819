"""Recompute a sample of frames from the source and compare them, bit for bit, with what the file says."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

from xferlib.cli.demo import reference
from xferlib.cli.demo.source import FrameSource
from xferlib.workload import EdgeSpec

__all__ = ["compare", "sample"]

SPREAD = 8
BORDERS = 4
MOST_WORK = 4e9
"""Pixels times rounds: a minute or so of NumPy. Beyond it fewer frames are taken."""


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


def compare(source: FrameSource, result: Path, spec: EdgeSpec, *, rounds: int, pool: Executor) -> dict[str, Any]:
    """Return which frames were compared, and those that differ. The file is opened anew."""
    written = np.load(result, mmap_mode="r")
    numbers = sample(source.frames, spec.frames, work=spec.height * spec.width * (rounds + 4))

    def wrong_pixels(number: int) -> int:
        return int(np.count_nonzero(written[number] != reference.edges(source.original(number), rounds=rounds)))

    counts = zip(numbers, pool.map(wrong_pixels, numbers), strict=True)
    mismatches = [{"frame": number, "wrong_pixels": wrong} for number, wrong in counts if wrong]
    return {"verified": not mismatches, "verified_frames": numbers, "mismatches": mismatches}
