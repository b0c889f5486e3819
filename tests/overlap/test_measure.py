"""`measure_overlap` and its report: what is measured, what is said of it, and what a CPU cannot say."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xferlib
from xferlib.overlap.measure import MOST_LAUNCHED, _Bench
from xferlib.overlap.overlap_report import OverlapReport, OverlapRow, Spread

NBYTES = 1 << 20


def row(
    first: tuple[float, ...],
    behind: tuple[float, ...],
    *,
    call_seconds: float = 0.0,
    compute_seconds: float = 1.3,
    on_gpu: bool = True,
) -> OverlapRow:
    return OverlapRow(
        call="xferlib",
        direction="h2d",
        copy_seconds=Spread.of([1.0]),
        compute_seconds=Spread.of([compute_seconds]),
        call_seconds=Spread.of([call_seconds]),
        copy_first=Spread.of(first),
        compute_first=Spread.of(behind),
        on_gpu=on_gpu,
        why="Because.",
    )


@pytest.mark.parametrize(
    ("first", "behind", "verdict"),
    [
        ((0.97, 0.95, 0.99), (0.96, 0.93, 0.98), "overlaps"),
        ((0.02, -0.1, 0.05), (0.0, 0.01, -0.02), "does not overlap"),
        ((0.97, 0.95, 0.99), (0.02, 0.01, 0.03), "one order only"),
        ((0.5, 0.45, 0.55), (0.5, 0.45, 0.55), "in part"),
        ((0.97, 0.2, 0.99), (0.96, 0.93, 0.98), "cannot tell"),
        # Once of seven times something came between.
        ((0.97, 0.95, 0.99, -3.0, 0.96, 0.98, 0.97), (0.96, 0.93, 0.98, 0.95, 0.94, 0.97, 4.0), "overlaps"),
        ((0.02, -0.1, 0.05, 0.9, 0.01, 0.0, 0.03), (0.0, 0.01, -0.02, 0.02, 0.0, 0.01, -5.0), "does not overlap"),
        # Twice is no accident, and nobody can tell what the next time gives.
        ((0.97, 0.95, 0.99, 0.1, 0.1, 0.98, 0.97), (0.96,) * 7, "cannot tell"),
        ((0.96,) * 7, (0.05, 0.9, 0.1, 0.95, 0.02, 0.97, 0.93), "cannot tell"),
    ],
)
def test_the_verdict_is_of_the_medians_where_the_rounds_agree(first: Any, behind: Any, verdict: str) -> None:
    found = row(first, behind)
    assert found.verdict == verdict
    assert ("Because." in found.words) is (verdict != "overlaps")


class_of = {"overlaps": (0.8, 1.0), "does not overlap": (-0.05, 0.25)}
anything = st.floats(-50, 50)


@given(data=st.data(), verdict=st.sampled_from(sorted(class_of)), at=st.integers(0, 6), outlier=anything)
def test_one_of_seven_rounds_changes_no_verdict(data: st.DataObject, verdict: str, at: int, outlier: float) -> None:
    six = data.draw(st.lists(st.floats(*class_of[verdict]), min_size=6, max_size=6))
    seven = [*six[:at], outlier, *six[at:]]
    assert row(tuple(seven), tuple(six)).verdict == verdict
    assert row(tuple(six), tuple(seven)).verdict == verdict


@given(order=st.permutations(range(7)), many=st.integers(2, 5), low=st.floats(-0.5, 0.2), high=st.floats(0.85, 1.0))
def test_rounds_of_two_kinds_are_no_verdict(order: list[int], many: int, low: float, high: float) -> None:
    """Two or more of seven are hidden, and two or more are not: a spread, and no outlier."""
    rounds = tuple(low if number < many else high for number in order)
    assert row(rounds, (0.97,) * 7).verdict == "cannot tell"
    assert row((0.0,) * 7, rounds).verdict == "cannot tell"


@given(samples=st.lists(anything, min_size=1, max_size=12))
def test_a_spread_is_in_order_and_knows_no_order_of_its_samples(samples: list[float]) -> None:
    found = Spread.of(samples)
    assert min(samples) == found.least <= found.lower <= found.median <= found.upper <= found.greatest == max(samples)
    assert found == Spread.of(sorted(samples, reverse=True))
    # A quarter of the samples, rounded down, is on either side.
    quarter = (len(samples) - 1) // 4
    assert sum(sample <= found.lower for sample in samples) > quarter
    assert sum(sample >= found.upper for sample in samples) > quarter


def test_outliers_are_shown() -> None:
    found = Spread.of([0.97, 0.95, 0.99, -3.0, 0.96, 0.98, 0.97])
    assert found.percent() == "97 % (96 to 98; -300 to 99)"
    assert "97 % (96 to 98; -300 to 99)" in row((0.97, 0.95, 0.99, -3.0, 0.96, 0.98, 0.97), (0.9,)).words


def test_beside_compute_that_is_too_short_to_hide_the_copy_there_is_no_verdict() -> None:
    assert row((0.2,), (0.2,), compute_seconds=0.2).verdict == "cannot tell"


def test_one_order_only_says_which() -> None:
    assert "only if it is enqueued before the compute" in row((0.97,), (0.02,)).words
    assert "only if it is enqueued after the compute" in row((0.02,), (0.97,)).words


def test_a_call_that_keeps_its_caller_is_said_to() -> None:
    assert "the call keeps its caller 900.0 ms of 1000.0" in row((0.97,), (0.97,), call_seconds=0.9).words
    assert "keeps its caller" not in row((0.97,), (0.97,), call_seconds=0.1).words


def test_on_a_cpu_there_is_no_verdict() -> None:
    assert row((0.97,), (0.97,), on_gpu=False).verdict == "a CPU cannot tell"


@pytest.fixture(scope="module", params=[name for name in xferlib.backends() if name in ("host", "jax")])
def report(request: pytest.FixtureRequest) -> Iterator[OverlapReport]:
    try:
        stager = xferlib.stager(request.param)
    except xferlib.BackendUnavailableError as error:
        pytest.skip(str(error))
    with stager:
        before = stager.stats().pinned_nbytes
        yield xferlib.measure_overlap(stager, nbytes=NBYTES, rounds=1)
        stager.trim()
        assert stager.stats().pinned_nbytes == before


def test_each_way_is_measured_in_both_orders(report: OverlapReport) -> None:
    assert [(found.call, found.direction) for found in report.rows[:3]] == [
        ("xferlib", "h2d"),
        ("xferlib", "d2h"),
        ("xferlib", "both"),
    ]
    ours, theirs = ([row for row in report.rows[3:] if row.call.startswith("xferlib") is mine] for mine in (True, False))
    # Where a get waits for a stream: beside it, one that names a stream without work.
    named = [("xferlib, get(stream=idle)", way) for way in ("d2h", "both")] if report.backend == "host" else []
    assert [(found.call, found.direction) for found in ours] == named
    # What the framework itself offers, in either direction.
    assert {found.direction for found in theirs} == {"h2d", "d2h"}
    for found in report.rows:
        assert found.copy_seconds.least > 0
        assert found.compute_seconds.least > 0
        assert found.call_seconds.median <= found.copy_seconds.median
    assert report.nbytes == NBYTES


def test_the_report_is_a_table_and_json(report: OverlapReport) -> None:
    lines = str(report).splitlines()
    assert all(any(line.startswith(found.call) for line in lines) for found in report.rows)
    told = json.loads(report.to_json())
    assert told["backend"] == report.backend
    assert [entry["verdict"] for entry in told["rows"]] == [found.verdict for found in report.rows]
    assert told["rows"][0]["copy_seconds"] == dataclasses.asdict(report.rows[0].copy_seconds)
    assert ("verdict" in str(report)) is report.on_gpu


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_cpu_shows_no_shares_and_says_why_before_its_times(on_gpu: bool) -> None:
    found = row((0.97,), (0.97,), on_gpu=on_gpu)
    shown = str(OverlapReport(backend="host", device="the CPU", on_gpu=on_gpu, nbytes=NBYTES, rows=(found,)))
    assert ("%" in shown) is on_gpu
    assert ("overlap needs a GPU" in shown) is not on_gpu
    if not on_gpu:
        assert shown.index("overlap needs a GPU") < shown.index("copied by")


def test_the_stream_that_has_no_work_is_named_to_gets_of_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from xferlib_host import Stream

    named: list[Any] = []
    get = xferlib.Stager.get

    def noted(stager: Any, tree: Any, **options: Any) -> Any:
        named.append(options.get("stream"))
        return get(stager, tree, **options)

    monkeypatch.setattr(xferlib.Stager, "get", noted)
    with xferlib.stager("host") as stager:
        xferlib.measure_overlap(stager, nbytes=NBYTES, rounds=1)
    (idle,) = set(named) - {None}
    assert isinstance(idle, Stream)
    # Of the four rows that get, two are alike.
    flags = [stream is idle for stream in named]
    assert flags == sorted(flags)
    assert 0.4 < sum(flags) / len(flags) < 0.6


def test_a_backend_without_device_work_is_refused() -> None:
    with xferlib.stager("host") as stager, pytest.MonkeyPatch.context() as patched:
        patched.setattr("xferlib.registry.backend_module", lambda name, part: None)
        with pytest.raises(xferlib.CapabilityError, match="ships no device work"):
            xferlib.measure_overlap(stager)


def test_bad_arguments_are_refused() -> None:
    with xferlib.stager("host") as stager:
        with pytest.raises(ValueError, match="rounds=0"):
            xferlib.measure_overlap(stager, rounds=0)
        with pytest.raises(xferlib.AllocationError, match=r"copies of 1.0 PiB need .* Use a smaller nbytes"):
            xferlib.measure_overlap(stager, nbytes=1 << 50)
        with pytest.raises(ValueError, match="nbytes is a number of bytes greater than 0"):
            xferlib.measure_overlap(stager, nbytes=0)
        with pytest.raises(TypeError, match="nbytes is a whole number of bytes, got True"):
            xferlib.measure_overlap(stager, nbytes=True)
    with pytest.raises(TypeError, match="expected a stager"):
        xferlib.measure_overlap("host")  # type: ignore[arg-type]  # Refused.


def test_the_command_prints_json() -> None:
    command = [sys.executable, "-m", "xferlib", "overlap", "host", "--mib", "1", "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout)["rows"][0]["call"] == "xferlib"


@pytest.mark.parametrize(
    ("seconds", "at_most"),
    [
        # Each takes less than the one before, so the first guess, from one and nine, falls short.
        (lambda rounds: rounds**0.8, 1.1),
        # Eight of them are compiled as one.
        (lambda rounds: 1.0 + rounds // 8 * 2.0 + rounds % 8, 1.7),
        (lambda rounds: 0.1 * rounds, 1.1),
        # One takes longer already.
        (lambda rounds: 100.0 * rounds, 10.0),
    ],
)
def test_compute_takes_at_least_as_long_as_it_is_meant_to(seconds: Any, at_most: float) -> None:
    class Bench:
        """Its launches take what the test says."""

        def launched(self, rounds: int, copy: object) -> float:
            return float(seconds(rounds))

    for goal in (10.0, 13.0, 50.0):
        took = seconds(_Bench.rounds_for(cast("_Bench", Bench()), cast("Any", None), goal))
        assert goal <= took <= max(at_most * goal, seconds(1))


def test_compute_that_is_never_long_enough_has_an_end() -> None:
    class Bench:
        """Its launches take no time."""

        def launched(self, rounds: int, copy: object) -> float:
            return 1e-9

    assert _Bench.rounds_for(cast("_Bench", Bench()), cast("Any", None), 10.0) == MOST_LAUNCHED
