"""Which way copies go, read off reports that were made by hand."""

from __future__ import annotations

from typing import Literal

import pytest

from xferlib.cli.paths import findings_of, paths_of, slow_of_ours
from xferlib.overlap.overlap_report import OverlapReport, OverlapRow, Spread

NBYTES = 50_000_000


def row(
    call: str,
    milliseconds: float,
    *,
    direction: Literal["h2d", "d2h"] = "h2d",
    first: float = 0.97,
    behind: float = 0.97,
    kept: float = 0.0,
    why: str = "",
) -> OverlapRow:
    seconds = milliseconds / 1e3
    return OverlapRow(
        call=call,
        direction=direction,
        copy_seconds=Spread.of([seconds]),
        compute_seconds=Spread.of([1.3 * seconds]),
        call_seconds=Spread.of([kept * seconds]),
        copy_first=Spread.of([first]),
        compute_first=Spread.of([behind]),
        on_gpu=True,
        why=why,
    )


def report(*rows: OverlapRow) -> OverlapReport:
    ours = (row("xferlib", 1.0), row("xferlib", 2.0, direction="d2h"))
    return OverlapReport(backend="any", device="a GPU", on_gpu=True, nbytes=NBYTES, rows=(*ours, *rows))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (row("a", 5.0, behind=0.0, kept=0.9), "staged: 10.0 GB/s of 50.0, keeps its caller, waits for compute before it"),
        (row("b", 1.0, behind=0.02), "50.0 GB/s, returns at once, waits for compute before it"),
        (row("c", 1.1), "45.5 GB/s, returns at once, waits for no compute"),
        (row("d", 1.0, behind=0.5), "50.0 GB/s, returns at once, whether it waits cannot be told"),
        (row("e", 2.0, direction="d2h", kept=0.9, behind=0.9), "25.0 GB/s, keeps its caller, waits for no compute"),
    ],
)
def test_what_a_copy_does_is_said(found: OverlapRow, words: str) -> None:
    (path,) = paths_of(report(found))
    assert path.words == f"{found.call}, {found.direction.upper()}: {words}"


def test_ours_with_a_stream_that_is_named_is_none_of_the_framework_s() -> None:
    assert paths_of(report(row("xferlib, get(stream=idle)", 9.0, direction="d2h", kept=0.9))) == []


def test_what_holds_something_up_is_a_finding_for_each_direction_with_what_to_do() -> None:
    paths = paths_of(report(row("set(pageable)", 5.0, behind=0.0, kept=0.9), row("put(pinned)", 1.0, behind=0.0), row("own", 1.0)))
    (line,) = findings_of(paths, "any")
    assert "copies to the device by calls of the framework's own are staged: set(pageable); keeping their caller: set(pag" in line
    assert "waiting for compute that was enqueued before: set(pageable), put(pinned). What xferlib.prefetch brings" in line
    assert line.endswith("Why: xferlib overlap any")
    (line,) = findings_of(paths_of(report(row("get()", 9.0, direction="d2h"))), "any")
    assert "to the host" in line
    assert "staged: get(). Start stager.get before the next launch" in line
    assert findings_of(paths_of(report(row("own", 1.0))), "any") == []


def test_a_copy_of_ours_that_is_not_hidden_is_a_finding() -> None:
    assert slow_of_ours(report()) == []
    (line,) = slow_of_ours(report(row("xferlib", 1.0, first=0.1)))
    assert "xferlib, host to device: overlaps only if it is enqueued after the compute" in line
    assert "xferlib overlap any" in line
