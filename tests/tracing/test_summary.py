"""Summaries of tables that were made by hand, against answers that were computed by hand."""

from __future__ import annotations

import pytest

from tests.tracing.tables import COMPUTE, MIB, NULL, call, copy, kernel, ms, recording
from xferlib.tracing.events import Recording
from xferlib.tracing.gaps import all_gaps
from xferlib.tracing.summary import Gaps, summarize


def causes(table: Recording) -> dict[tuple[str, str], float]:
    """Return milliseconds by cause and line."""
    (device,) = summarize(table).devices
    return {(gaps.cause, gaps.site): round(gaps.seconds * 1e3, 6) for gaps in device.gaps}


def finding(table: Recording) -> Gaps:
    (found,) = summarize(table).findings
    return found


def test_a_copy_under_compute_is_hidden_and_nothing_is_found() -> None:
    summary = summarize(recording(kernel(0, 10), copy(2, 6, nbytes=4 * MIB), kernel(10, 20)))
    (device,) = summary.devices
    assert (device.kernels, device.seconds, device.compute_seconds) == (2, 0.02, 0.02)
    assert (device.h2d.copies, device.h2d.nbytes, device.h2d.seconds) == (1, 4 * MIB, 0.004)
    assert (device.h2d.use, device.h2d.hidden) == (0.2, 1.0)
    assert device.h2d.gb_per_second == pytest.approx(4 * MIB / 4e6)
    assert device.gaps == ()
    assert summary.findings == ()
    assert "nothing to mend was found" in str(summary)


def test_the_share_under_kernels_counts_time_and_not_copies() -> None:
    # Two copies at once are under way for 0-6, of which 2-5 lie under kernels; the second kernel overlaps the first.
    table = recording(copy(0, 4), copy(1, 6, stream=3), kernel(2, 4), kernel(3, 5, stream=9))
    (device,) = summarize(table).devices
    assert device.h2d.seconds == 0.006
    assert device.h2d.hidden == 0.5
    assert device.compute_seconds == 0.003


def test_directions_and_devices_are_told_apart() -> None:
    table = recording(kernel(0, 4), copy(0, 2, kind="d2h"), kernel(0, 1, device=1), copy(0, 4, device=1))
    first, second = summarize(table).devices
    assert (first.d2h.copies, first.h2d.copies, second.h2d.copies) == (1, 0, 1)
    assert (first.d2h.hidden, second.h2d.hidden) == (1.0, 0.25)
    assert (first.name, second.name) == ("GPU 0", "device 1")


def test_pageable_copies_are_named_with_their_line() -> None:
    table = recording(kernel(0, 10), copy(10, 15, memory="pageable", site="train.py:7"), kernel(15, 25))
    found = finding(table)
    assert (found.cause, found.direction, found.site, found.seconds, found.share) == ("pageable", "h2d", "train.py:7", 0.005, 0.2)
    (pageable,) = summarize(table).pageable
    assert (pageable.site, pageable.copies, pageable.nbytes, pageable.seconds) == ("train.py:7", 1, MIB, 0.005)
    assert "copies to the device of pageable memory" in found.words
    assert "[issued at train.py:7]" in found.words


def test_pageable_copies_that_are_hidden_are_listed_and_are_no_finding() -> None:
    summary = summarize(recording(kernel(0, 10), copy(2, 4, memory="pageable"), copy(5, 6, memory="pageable"), kernel(10, 20)))
    assert [found.copies for found in summary.pageable] == [2]
    assert summary.findings == ()


def test_copies_on_the_stream_of_compute() -> None:
    assert finding(recording(kernel(0, 10), copy(10, 15, stream=COMPUTE), kernel(15, 25))).cause == "same stream"


def test_copies_on_the_null_stream() -> None:
    assert finding(recording(kernel(0, 10), copy(10, 15, stream=NULL), kernel(15, 25), null=True)).cause == "null stream"


def test_a_copy_that_was_issued_in_time_and_waited_for_compute() -> None:
    assert finding(recording(kernel(0, 10), copy(10, 15, issued=1), kernel(15, 25))).cause == "held back"


def test_a_copy_that_waited_for_other_copies_was_not_held_back() -> None:
    table = recording(kernel(0, 10), copy(1, 10, issued=1), copy(10, 15, issued=1), kernel(15, 115))
    assert causes(table) == {("late", "train.py:3"): 5.0}


def test_a_copy_that_waited_for_something_else_than_compute_most_of_the_time_was_not_held_back() -> None:
    assert causes(recording(kernel(0, 10), copy(20, 25, issued=6), kernel(25, 35)))["late", "train.py:3"] == 5.0
    assert causes(recording(kernel(0, 10), copy(12, 17, issued=6), kernel(17, 27)))["held back", "train.py:3"] == 5.0


def test_a_copy_that_was_issued_too_late() -> None:
    assert causes(recording(kernel(0, 10), copy(11, 15, issued=10.99), kernel(15, 25))) == {
        ("late", "train.py:3"): 4.0,
        ("host", ""): 1.0,
    }


def test_a_busy_link_is_said_and_is_no_finding() -> None:
    table = recording(*(copy(at, at + 10) for at in range(0, 100, 10)), *(kernel(at, at + 4) for at in range(0, 101, 10)))
    summary = summarize(table)
    assert summary.findings == ()
    assert causes(table) == {("link", "train.py:3"): 60.0}
    assert "the link is busy all the time" in str(summary)


def test_the_host_that_waited_before_it_went_on() -> None:
    table = recording(kernel(0, 10), call("wait", 1, 10.1), kernel(15, 25))
    assert causes(table) == {("wait", "train.py:9"): 5.0}
    # Whoever had waited before, or waits for what comes next, is not the cause.
    assert causes(recording(kernel(0, 10), call("wait", 1, 9), call("wait", 15.1, 20), kernel(15, 25))) == {("host", ""): 5.0}


@pytest.mark.parametrize(("start", "end"), [(11, 12), (1, 16)], ids=["begun in the gap", "of a thread that goes on waiting"])
def test_waits_that_nobody_went_on_behind(start: float, end: float) -> None:
    assert causes(recording(kernel(0, 10), call("wait", start, end), kernel(15, 25))) == {("host", ""): 5.0}


def test_a_blocking_copy_is_a_wait() -> None:
    table = recording(
        kernel(0, 10),
        call("issue", 2, 12.5, blocking=True, site="train.py:4"),
        copy(10, 12, kind="d2h", site="train.py:4", issued=9.99),
        kernel(15, 25),
    )
    assert causes(table) == {("late", "train.py:4"): 2.0, ("wait", "train.py:4"): 3.0}
    # A thread of a library's waits as it pleases.
    assert causes(recording(kernel(0, 10), call("wait", 1, 10.1, site=""), kernel(15, 25))) == {("host", ""): 5.0}


def test_allocations_and_staging_and_other_work_of_the_device() -> None:
    table = recording(
        kernel(0, 10),
        call("allocation", 10, 12, site="train.py:5"),
        call("put", 12, 15, memory="pageable", site="train.py:6"),
        copy(15, 16, kind="memset"),
        kernel(20, 30),
    )
    assert causes(table) == {
        ("allocation", "train.py:5"): 2.0,
        ("staging", "train.py:6"): 3.0,
        ("device", "train.py:3"): 1.0,
        ("host", ""): 4.0,
    }


def test_a_source_that_makes_a_batch_while_its_consumer_waits_is_the_cause_and_of_the_copy_of_that_batch_too() -> None:
    table = recording(
        kernel(0, 10),
        call("source", 2, 15, site="train.py:3"),
        copy(16, 18, issued=15.5),
        kernel(18, 20),
    )
    assert causes(table) == {("source", "train.py:3"): 7.0, ("host", ""): 1.0}
    (found,) = summarize(table).findings[:1]
    assert (found.cause, found.direction, found.count) == ("source", "", 2)
    assert found.words.startswith("a prefetch waited for its source")
    assert found.words.endswith("[prefetch at train.py:3]")


@pytest.mark.parametrize(
    ("source", "site", "later"),
    [
        # Given before compute had nothing left to do.
        ((2, 9.9), "train.py:3", {}),
        # Of another batch, which came when this copy was issued already.
        ((10, 15.6), "train.py:3", {("source", "train.py:3"): 5.6}),
        ((10, 15), "train.py:4", {("source", "train.py:4"): 5.0}),
        ((10, 15), "", {("source", ""): 5.0}),
    ],
)
def test_copies_that_waited_for_no_source_are_late(
    source: tuple[float, float], site: str, later: dict[tuple[str, str], float]
) -> None:
    own = site if site == "" else "train.py:3"
    table = recording(kernel(0, 10), call("source", *source, site=site), copy(16, 18, issued=15.5, site=own), kernel(18, 20))
    found = causes(table)
    assert found.pop(("late", own)) == 2.0
    found.pop(("host", ""))
    assert found == later


def test_a_copy_of_which_nobody_knows_when_it_was_issued_waited_for_a_source_too() -> None:
    table = recording(kernel(0, 10), call("source", 2, 15, site="train.py:3"), copy(15, 18, issued=0), kernel(18, 20))
    assert causes(table) == {("source", "train.py:3"): 8.0}


def test_a_copy_to_the_host_waits_for_no_source() -> None:
    table = recording(kernel(0, 10), call("source", 2, 15, site="train.py:3"), copy(16, 18, kind="d2h"), kernel(18, 20))
    assert causes(table) == {("source", "train.py:3"): 5.0, ("late", "train.py:3"): 2.0, ("host", ""): 1.0}


def test_what_a_source_does_itself_is_told_of_before_it() -> None:
    table = recording(
        kernel(0, 10),
        call("source", 10, 18, site="train.py:3"),
        call("allocation", 11, 13, site="train.py:5"),
        call("wait", 9, 10.1),
        kernel(20, 30),
    )
    assert causes(table) == {("allocation", "train.py:5"): 2.0, ("source", "train.py:3"): 6.0, ("wait", "train.py:9"): 2.0}


def test_every_moment_of_a_gap_has_one_cause() -> None:
    table = recording(
        kernel(0, 10),
        copy(9, 13, stream=COMPUTE),
        copy(12, 14, kind="d2h", memory="pageable", site="train.py:8"),
        call("allocation", 11, 17),
        call("wait", 3, 18),
        kernel(20, 30),
    )
    gaps = all_gaps(table)[0]
    assert [(gap.cause, gap.start, gap.end) for gap in gaps] == [
        ("same stream", ms(10), ms(13)),
        ("pageable", ms(13), ms(14)),
        ("allocation", ms(14), ms(17)),
        ("wait", ms(17), ms(20)),
    ]


def test_an_event_that_began_long_before_a_gap_counts_there_and_not_beyond_its_end() -> None:
    """Among many that are shorter: who looks only at those that began shortly before does not see it."""
    kernels = [kernel(at, at + 0.5) for at in range(200)]
    long = copy(0.75, 150, stream=3, site="train.py:1")
    short = [copy(at + 0.625, at + 0.75, site="train.py:2") for at in range(199)]
    gaps = [gap for gap in all_gaps(recording(*kernels, long, *short))[0] if gap.cause == "late"]
    assert {gap.site for gap in gaps if gap.start < ms(0.75)} == {"train.py:2"}
    assert {gap.site for gap in gaps if ms(0.75) <= gap.start < ms(150)} == {"train.py:1"}
    assert {gap.site for gap in gaps if gap.start >= ms(150)} == {"train.py:2"}


def test_short_gaps_are_no_finding() -> None:
    table = recording(*(kernel(at / 50, at / 50 + 0.005) for at in range(100)))
    assert summarize(table).findings == ()
    assert list(causes(table)) == [("short", "")]


def test_without_kernels_it_says_so() -> None:
    summary = summarize(recording(copy(0, 4)))
    assert summary.devices[0].h2d.hidden == 0.0
    assert "no kernel was recorded" in str(summary)
    # Nor of a share that would look like a fault.
    assert "under kernels" not in str(summary)
    assert "0% of that under kernels" in str(summarize(recording(copy(0, 4), kernel(4, 5))))


def test_of_nothing_it_says_so() -> None:
    assert str(summarize(Recording(events=(), start=0, end=ms(1500), notes=("a note",)))).splitlines() == [
        "traced 1.500 s: no copy and no kernel was recorded",
        "a note",
    ]


def test_findings_come_longest_first_and_the_verdict_is_the_first() -> None:
    table = recording(
        kernel(0, 10), copy(10, 12, memory="pageable", site="train.py:1"), kernel(12, 20), call("wait", 15, 20.1), kernel(25, 30)
    )
    summary = summarize(table)
    assert [found.cause for found in summary.findings] == ["wait", "pageable"]
    assert summary.verdict.startswith("compute stood still for 17% of the time: the host had waited")


IN_SO_SHORT_A_TIME = "in so short a time another run may say otherwise: take more steps"


@pytest.mark.parametrize(
    ("end", "copies", "doubts"),
    [
        (199, 0, [IN_SO_SHORT_A_TIME]),
        (199, 20, [IN_SO_SHORT_A_TIME]),
        (200, 20, []),
        (200, 5, []),
        (200, 4, ["of 4 copies little can be told: take more steps"]),
        (200, 1, ["of 1 copy little can be told: take more steps"]),
        # Without any there is nothing that copies could have been in the way of.
        (200, 0, []),
    ],
)
def test_what_is_too_short_to_tell_is_said_to_be(end: float, copies: int, doubts: list[str]) -> None:
    for last in (0, 20):
        # With findings, and without.
        table = recording(kernel(0, end - last - 1), *(copy(at, at + 1) for at in range(copies)), kernel(end - 1, end))
        summary = summarize(table)
        assert list(summary.doubts) == doubts
        assert bool(summary.findings) == bool(last)
        assert summary.lines()[len(summary.lines()) - len(doubts) :] == doubts


def test_of_a_trace_without_kernels_there_is_nothing_to_doubt() -> None:
    assert summarize(recording(copy(0, 1))).doubts == ()
    # Another device that only copies does not make the time longer.
    assert summarize(recording(kernel(0, 1), copy(0, 500, device=1))).doubts == (IN_SO_SHORT_A_TIME,)


def test_copies_of_both_directions_and_devices_that_compute_tell_together() -> None:
    ends = kernel(0, 10), kernel(20, 300)
    both = *(copy(at, at + 1) for at in range(3)), copy(4, 5, kind="d2h"), copy(6, 7, kind="d2h")
    assert summarize(recording(*ends, *both)).doubts == ()
    # One device that ran for long enough will do, and what only copies adds nothing to the others.
    assert summarize(recording(*ends, *(copy(at, at + 1) for at in range(5)), kernel(0, 5, device=1))).doubts == ()
    idle = [copy(at, at + 1, device=1) for at in range(9)]
    assert summarize(recording(*ends, copy(1, 2), *idle)).doubts == ("of 1 copy little can be told: take more steps",)
