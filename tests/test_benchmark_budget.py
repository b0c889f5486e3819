"""How the time of a benchmark's run is shared out, and where its records go."""

from __future__ import annotations

import inspect
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

import xferlib

# Last: what is installed comes before the clone.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import command, records
from benchmarks.bench import Bench, Case
from benchmarks.budget import Budget, OutOfTime, Teller
from benchmarks.cases import CASES
from benchmarks.devices import open_device
from benchmarks.harness import BRIEF, FULL, Absences
from benchmarks.records import Record
from benchmarks.ways import Corrupted

CLOCK = [0.0]


@pytest.fixture(autouse=True)
def clock() -> list[float]:
    CLOCK[:] = [100.0]
    return CLOCK


def now() -> float:
    return CLOCK[0]


def case(name: str, seconds: float) -> Case:
    return Case(name=name, summary="", run=lambda _: iter(()), seconds=seconds)


def test_cases_share_the_time_and_leave_what_they_do_not_need() -> None:
    one, two, three = case("one", 10), case("two", 20), case("three", 10)
    budget = Budget(80, [one, two, three], now)
    assert budget.begin(one) == 20
    CLOCK[0] += 5
    assert not budget.is_over(one, 3)
    # 75 s are left for two and three.
    assert budget.begin(two) == 50
    CLOCK[0] += 49
    assert not budget.is_over(two, 1)
    CLOCK[0] += 1
    assert budget.is_over(two, 2)
    assert budget.begin(three) == budget.left == 25
    CLOCK[0] += 1000
    assert budget.is_over(three, 0)
    assert budget.left == 0
    assert budget.ended == ["two after 2 rows", "three, of which nothing was measured"]


def test_what_is_left_at_the_end_goes_to_those_that_had_too_little_and_can_go_on() -> None:
    one, other = replace(case("one", 10), resumes=True), replace(case("other", 30), resumes=True)
    stiff, quick = case("stiff", 20), case("quick", 40)
    budget = Budget(100, [one, other, stiff, quick], now)
    for each, seconds in ((one, 10), (other, 30), (stiff, 20)):
        assert budget.begin(each) == seconds
        CLOCK[0] += seconds
        assert budget.is_over(each, 2)
    budget.begin(quick)
    assert not budget.is_over(quick, 1)
    again = budget.turn_again()
    assert budget.ended == ["stiff after 2 rows"]
    # 40 s are left for both.
    assert budget.begin(one) == 10
    assert again == [one, other]
    CLOCK[0] += 26
    assert budget.is_over(one, 3)
    assert budget.ended == ["stiff after 2 rows", "one after 5 rows"]
    budget.begin(other)
    # What cannot be begun again in the time that is left is not.
    assert budget.turn_again() == []
    assert Budget(None, [one], now).turn_again() == []


def test_without_a_limit_nothing_ends() -> None:
    one = case("one", 10)
    budget = Budget(None, [one], now)
    assert budget.begin(one) is None
    CLOCK[0] += 1e6
    assert not budget.is_over(one, 0)
    assert (budget.left, budget.ended) == (None, [])


def test_progress_says_how_much_time_is_left() -> None:
    one = case("one", 10)
    budget = Budget(150, [one], now)
    for terminal in (False, True):
        shown = io.StringIO()
        teller = Teller(budget, Console(file=shown, force_terminal=terminal, width=120))
        with teller.drawn():
            teller.begin(one, 3, 13, 61.0)
            CLOCK[0] += 5
            teller.say("one: 64 bytes")
        assert "one: 64 bytes" in shown.getvalue()
        assert "one: case 3 of 13, up to 1:01" in shown.getvalue()
        assert ("at most 2:30 left" if not terminal else "at most 2:20 left") in shown.getvalue()


def test_a_brief_effort_makes_a_part_and_never_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(
        open_stager=partial(xferlib.stager, "host"),
        device=open_device("host"),
        machine={},
        versions={},
        effort=FULL,
        quick=False,
        absences=Absences(),
        say=print,
    )
    assert bench.count(12, 500, 60) == 500
    brief = replace(bench, effort=BRIEF)
    assert (brief.count(12, 500, 60), brief.count(2, 5, 3), brief.count(2, 2, 3)) == (100, 3, 2)
    assert replace(brief, quick=True).count(12, 500, 60) == 12


def test_a_run_that_is_out_of_time_ends_with_its_row_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []
    whole = CASES["overhead"]

    def rows(bench: Bench) -> Iterator[Record]:
        try:
            for record in whole.run(bench):
                yield record
                CLOCK[0] += 1000
        finally:
            closed.append("overhead")

    monkeypatch.setattr(command, "Budget", partial(Budget, clock=now))
    monkeypatch.setattr(command, "SCRATCH", tmp_path)
    cases = [Case(name="overhead", summary="", run=rows), CASES["leaves"]]
    status = command.run(
        partial(xferlib.stager, "host"), open_device("host"), cases, quick=True, minutes=1, json_file=command.TO_SCRATCH
    )
    assert status == 0
    shown = capsys.readouterr()
    assert "the time ran out: overhead after 2 rows; leaves, of which nothing was measured" in " ".join(shown.out.split())
    assert closed == ["overhead"]
    (file,) = tmp_path.iterdir()
    assert f"written: {file}" in shown.err


def turns_of(rows: Callable[[Bench], Iterator[Record]], file: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a case, which has half a minute, and another one that leaves it the other half; return the exit status."""
    monkeypatch.setattr(command, "Budget", partial(Budget, clock=now))
    cases = [Case(name="overhead", summary="", run=rows, seconds=10, resumes=True), replace(CASES["leaves"], seconds=10)]
    return command.run(partial(xferlib.stager, "host"), open_device("host"), cases, quick=True, minutes=1, json_file=str(file))


def test_a_case_that_had_too_little_time_gets_what_others_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CASES["overhead"]

    def rows(bench: Bench) -> Iterator[Record]:
        for record in whole.run(bench):
            if records.key(record) not in bench.done:
                yield record
                CLOCK[0] += 16

    file = tmp_path / "records.json"
    assert turns_of(rows, file, monkeypatch) == 0
    wanted = [records.key(one) for one in islice(whole.run(_bench()), 6)]
    assert [records.key(one) for one in records.read(file) if one["case"] == "overhead"] == sorted(wanted)


def test_wrong_bytes_in_the_second_turn_of_a_case_take_its_rows_of_the_first_out_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(bench: Bench) -> Iterator[Record]:
        if bench.done:
            raise Corrupted("wrong")
        for record in CASES["overhead"].run(bench):
            yield record
            CLOCK[0] += 16

    file = tmp_path / "records.json"
    assert turns_of(rows, file, monkeypatch) == 1
    assert {one["case"] for one in records.read(file)} == {"leaves"}


@pytest.mark.parametrize("whole", [0, 2])
def test_a_row_that_goes_on_when_the_time_is_over_is_cut_between_two_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whole: int
) -> None:
    closed: list[str] = []

    def rows(bench: Bench) -> Iterator[Record]:
        def slow() -> None:
            bench.effort.between()
            CLOCK[0] += 7

        try:
            yield from islice(CASES["overhead"].run(bench), whole)
            yield from CASES["overhead"].run(replace(bench, effort=replace(bench.effort, between=slow)))
        finally:
            closed.append("slow")

    monkeypatch.setattr(command, "Budget", partial(Budget, clock=now))
    cases = [Case(name="slow", summary="", run=rows), CASES["leaves"]]
    file = tmp_path / "records.json"
    assert command.run(partial(xferlib.stager, "host"), open_device("host"), cases, quick=True, minutes=1, json_file=str(file)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert len(json.loads(file.read_text()) if file.exists() else []) == whole
    end = f"slow after {whole} rows (the next was cut)" if whole else "slow, of which nothing was measured (the first row was cut)"
    assert f"the time ran out: {end}; leaves, of which nothing was measured." in shown
    # That is the first round which begins behind the minute.
    assert CLOCK[0] == 100 + 9 * 7
    assert closed == ["slow"]


def test_where_there_is_no_limit_no_row_is_cut() -> None:
    one = case("one", 10)
    for seconds in (None, 10.0):
        budget = Budget(seconds, [one], now)
        budget.begin(one)
        budget.between_rounds()
        CLOCK[0] += 10.0
        if seconds is None:
            budget.between_rounds()
        else:
            with pytest.raises(OutOfTime):
                budget.between_rounds()


@pytest.mark.parametrize("name", CASES)
def test_who_leaves_out_what_is_done_goes_on_at_the_end(name: str) -> None:
    case = CASES[name]
    assert case.resumes == ("bench.done" in inspect.getsource(sys.modules[case.run.__module__]))


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_cut(name: str) -> None:
    """Before its first round, even."""

    def between() -> None:
        raise OutOfTime

    bench = _bench()
    with pytest.raises(OutOfTime):
        for _ in CASES[name].run(replace(bench, effort=replace(bench.effort, between=between))):
            pass


def _bench() -> Bench:
    """Return a quick one on the host."""
    return command._bench(
        partial(xferlib.stager, "host"),
        open_device("host"),
        Teller(Budget(None, []), Console(file=io.StringIO())),
        Budget(None, []),
        quick=True,
        full=False,
        sizes=[],
    )


def test_only_who_asks_for_it_writes_into_what_the_pages_are_made_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[object, object, object]] = []

    def run(*arguments: object, json_file: object, full: object, minutes: object, **rest: object) -> int:
        asked.append((json_file, full, minutes))
        return 0

    monkeypatch.setattr(command, "run", run)
    for words in (["--json"], ["--record"], ["--record", "--full"], ["--json", "x.json", "--minutes", "2"]):
        assert command.main(["--backend", "host", *words]) == 0
    assert asked == [
        (command.TO_SCRATCH, False, None),
        (command.TO_RESULTS, False, None),
        (command.TO_RESULTS, True, None),
        ("x.json", False, 2.0),
    ]
    assert command._file(command.TO_SCRATCH, "a-gpu") == command.ROOT / "build" / "benchmarks" / "a-gpu.json"
    assert command._file(command.TO_RESULTS, "a-gpu") == command.ROOT / "benchmarks" / "results" / "a-gpu.json"
    for wrong in (["--record", "--json"], ["--minutes", "0"]):
        with pytest.raises(SystemExit):
            command.main(wrong)
    assert "expected more than 0" in capsys.readouterr().err
