"""Who watches over a program, and over what it holds: to which end, and that nothing is left of it when the program has ended."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from tests.children import run
from tests.random_programs import hangs
from tests.random_programs.hangs import HANG_SECONDS, begin_hold, begin_program, end_hold, end_program
from xferlib.gates import GATE_SECONDS

ENDS, TELLS = (HANG_SECONDS, True), (GATE_SECONDS - 1, False)
"""When, and whether the process ends then."""


class Timer:
    """The part of faulthandler that is used: one timer, which each call sets anew."""

    def __init__(self) -> None:
        self.set_to: tuple[float, bool] | None = None

    def dump_traceback_later(self, seconds: float, exit: bool = False) -> None:
        self.set_to = (seconds, exit)

    def cancel_dump_traceback_later(self) -> None:
        self.set_to = None


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    timer = Timer()
    monkeypatch.setattr(hangs, "faulthandler", timer)
    monkeypatch.setattr(hangs, "_programs", [])
    return timer


def test_a_program_ends_its_process_only_until_it_ends(timer: Timer) -> None:
    for _ in range(2):
        begin_program()
        assert timer.set_to == ENDS
        end_program()
        assert timer.set_to is None


@pytest.mark.parametrize(("tells", "meanwhile"), [(True, TELLS), (False, ENDS)])
def test_what_is_held_is_told_of_before_its_gate_opens_where_that_is_asked_for(
    timer: Timer, monkeypatch: pytest.MonkeyPatch, tells: bool, meanwhile: tuple[float, bool]
) -> None:
    monkeypatch.setattr(hangs, "TELLS", tells)
    begin_program()
    begin_hold()
    assert timer.set_to == meanwhile
    end_hold()
    assert timer.set_to == ENDS
    end_program()
    assert timer.set_to is None


def test_nothing_is_timed_that_is_held_by_no_program(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "TELLS", True)
    begin_hold()
    assert timer.set_to is None
    end_hold()
    assert timer.set_to is None
    begin_program()
    begin_hold()
    # As of one that fails while it holds something.
    end_program()
    end_hold()
    assert timer.set_to is None


def test_a_process_whose_program_hangs_ends_and_says_where() -> None:
    program = """
        import threading
        from tests.random_programs.hangs import begin_program, end_program
        def stuck():
            threading.Event().wait()
        begin_program()
        end_program()
        begin_program()
        stuck()
        """
    environment = {**os.environ, "XFERLIB_RANDOM_PROGRAMS_HANG_SECONDS": "1"}
    ended = run([sys.executable, "-c", textwrap.dedent(program)], seconds=20, env=environment)
    assert ended.returncode == 1
    assert "in stuck" in ended.stderr
