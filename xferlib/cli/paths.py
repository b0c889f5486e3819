"""Which way a framework's own copies go on this machine: whether they are staged, keep their caller, wait for compute before them.

All of that is read off a short `measure_overlap`; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from xferlib.overlap.overlap_report import HIDDEN, SHOWN, OverlapReport, OverlapRow

__all__ = ["CopyPath", "findings_of", "paths_of", "slow_of_ours"]

STAGED = 0.7
"""Of the rate of pinned memory: a copy that is slower does not come straight from or to its host memory."""
OURS = "xferlib"
DO_H2D = "What xferlib.prefetch brings, or stager.put from memory of empty_pinned, is none of that"
DO_D2H = "Start stager.get before the next launch, and read its result a step later"


@final
@dataclass(frozen=True, kw_only=True)
class CopyPath:
    """One of the framework's calls.

    Attributes:
        call: As people write it.
        direction: To the device or to the host.
        gbps: GB/s of the copy alone.
        pinned_gbps: Of pinned memory by xferlib, in the same direction.
        keeps_caller: Whether the call returned only when most of the copy was made.
        waits_for_compute: Whether the copy waited for compute that was enqueued before it; None: it cannot be told.
        why: What the backend knows of it.
    """

    call: str
    direction: Literal["h2d", "d2h"]
    gbps: float
    pinned_gbps: float
    keeps_caller: bool
    waits_for_compute: bool | None
    why: str

    @property
    def staged(self) -> bool:
        """Whether it is as slow as a copy that somebody stages."""
        return self.gbps < STAGED * self.pinned_gbps

    @property
    def words(self) -> str:
        """Say what it does."""
        does = [
            f"staged: {self.gbps:.1f} GB/s of {self.pinned_gbps:.1f}" if self.staged else f"{self.gbps:.1f} GB/s",
            "keeps its caller" if self.keeps_caller else "returns at once",
            {True: "waits for compute before it", False: "waits for no compute", None: "whether it waits cannot be told"}[
                self.waits_for_compute
            ],
        ]
        return f"{self.call}, {'H2D' if self.direction == 'h2d' else 'D2H'}: {', '.join(does)}"


def paths_of(report: OverlapReport) -> list[CopyPath]:
    """Return those of the framework's own calls."""
    rates = {row.direction: _gbps(report, row) for row in report.rows if row.call == OURS}
    found = []
    for row in report.rows:
        if row.call.startswith(OURS) or row.direction == "both":
            continue
        found.append(
            CopyPath(
                call=row.call,
                direction=row.direction,
                gbps=_gbps(report, row),
                pinned_gbps=rates[row.direction],
                keeps_caller=row.keeps_caller,
                waits_for_compute=_waits(row),
                why=row.why,
            )
        )
    return found


def findings_of(paths: Sequence[CopyPath], backend: str) -> list[str]:
    """Return a sentence for each direction in which some of the calls hold anything up, with what to do."""
    found = []
    for direction, way, do in (("h2d", "to the device", DO_H2D), ("d2h", "to the host", DO_D2H)):
        there = [path for path in paths if path.direction == direction]
        held = {
            "staged": [path.call for path in there if path.staged],
            "keeping their caller": [path.call for path in there if path.keeps_caller],
            "waiting for compute that was enqueued before": [path.call for path in there if path.waits_for_compute],
        }
        said = [f"{what}: {', '.join(calls)}" for what, calls in held.items() if calls]
        if said:
            found.append(
                f"copies {way} by calls of the framework's own are {'; '.join(said)}. {do}. Why: xferlib overlap {backend}"
            )
    return found


def slow_of_ours(report: OverlapReport) -> list[str]:
    """Return a sentence for each copy of xferlib's that does not run beside compute that is enqueued after it."""
    return [
        f"{row.words}. Look with nvidia-smi whether another program uses the device, and run xferlib overlap {report.backend} alone"
        for row in report.rows
        if row.call == OURS and row.verdict not in ("cannot tell", "a CPU cannot tell") and row.copy_first.median < HIDDEN
    ]


def _waits(row: OverlapRow) -> bool | None:
    if row.verdict == "cannot tell":
        return None
    share = row.compute_first.median
    return True if share <= SHOWN else False if share >= HIDDEN else None


def _gbps(report: OverlapReport, row: OverlapRow) -> float:
    return report.nbytes / row.copy_seconds.median / 1e9
