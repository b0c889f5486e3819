"""How long a run may take, and who gets how much of it: cases take turns, and what one does not need goes to those behind it.

What is left at the end goes to those that had too little.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from benchmarks.bench import Case

__all__ = ["Budget", "OutOfTime", "Teller"]

SHORTEST_SECONDS = 15.0
"""To open peers and pinned memory once more takes some seconds."""


class OutOfTime(BaseException):
    """The run has had its time, in the middle of a row. No `Exception`: such a one is a contender's, which is left out then."""


class Budget:
    """The seconds of a run over its cases, in their order. A case ends with the row that its time runs out in, and that row goes on
    for as long as the run may: then it is cut between two rounds, and is none.

    `seconds`: None: there is no limit.
    """

    def __init__(self, seconds: float | None, cases: Sequence[Case], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._seconds = seconds
        self._waiting = list(cases)
        self._end = self._begin
        self._late: dict[str, tuple[Case, str]] = {}
        self._rows: Counter[str] = Counter()

    @property
    def gone(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._begin

    @property
    def left(self) -> float | None:
        """Seconds that the run may still take; None: there is no limit."""
        return None if self._seconds is None else max(0.0, self._seconds - self.gone)

    @property
    def ended(self) -> list[str]:
        """Where the time ran out, in words."""
        return [words for _, words in self._late.values()]

    def turn_again(self) -> list[Case]:
        """Return the cases whose time ran out and that can go on with their other rows, where there is time for that. They wait
        again."""
        self._waiting = [case for case, _ in self._late.values() if case.resumes and (self.left or 0) >= SHORTEST_SECONDS]
        for case in self._waiting:
            del self._late[case.name]
        return self._waiting.copy()

    def begin(self, case: Case) -> float | None:
        """Begin a case, the next one, and return the seconds that it may take; None: there is no limit."""
        share = case.seconds / sum([one.seconds for one in self._waiting])
        self._waiting.remove(case)
        if self.left is None:
            return None
        allowed = self.left * share
        self._end = self._clock() + allowed
        return allowed

    def is_over(self, case: Case, rows: int) -> bool:
        """Tell whether the case that was begun has had its time, and note where it ended."""
        if self._seconds is None or self._clock() < self._end:
            return False
        self._note_end(case, rows)
        return True

    def between_rounds(self) -> None:
        """Raise `OutOfTime` where the run has had its time."""
        if self.left == 0:
            raise OutOfTime

    def note_cut(self, case: Case, rows: int) -> None:
        """Note that a row of the case was cut, behind so many whole ones."""
        self._note_end(case, rows, " (the next was cut)" if rows + self._rows[case.name] else " (the first row was cut)")

    def _note_end(self, case: Case, rows: int, how: str = "") -> None:
        self._rows[case.name] += rows
        count = self._rows[case.name]
        where = f" after {count} row{'s' if count > 1 else ''}" if count else ", of which nothing was measured"
        self._late[case.name] = case, f"{case.name}{where}{how}"


class Teller:
    """Says on stderr what is measured and how much time is left: one line that changes in a terminal, lines elsewhere.

    Nothing is drawn while anything is timed: a thread that draws would take the interpreter from what is measured.
    """

    def __init__(self, budget: Budget, console: Console) -> None:
        self._budget = budget
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"), console=console, auto_refresh=False
        )
        self._task = self._bar.add_task("", total=None, left="")

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw the line inside, where there is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with self._bar:
            yield

    def begin(self, case: Case, number: int, count: int, allowed: float | None) -> None:
        """Say that a case begins."""
        most = "" if allowed is None else f", up to {_clock(allowed)}"
        self.say(f"{case.name}: case {number} of {count}{most}{self._left()}")

    def say(self, line: str) -> None:
        """Say what is measured next."""
        if not self._console.is_terminal:
            self._console.print(f"{self._budget.gone:6.1f} s  {line}", highlight=False, markup=False, soft_wrap=True)
            return
        left = self._budget.left
        total = None if left is None else self._budget.gone + left
        self._bar.update(self._task, description=line, completed=self._budget.gone, total=total, left=self._left().lstrip(", "))
        self._bar.refresh()

    def _left(self) -> str:
        left = self._budget.left
        return "" if left is None else f", at most {_clock(left)} left"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
