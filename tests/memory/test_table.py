"""How a table grows: what counts when, and what becomes of memory for which nobody waits any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.core.fakes import WATCHDOG, on_thread
from xferlib.errors import AllocationError
from xferlib.memory.table import AtWork, Growth, Table


class Counter(Table):
    """A table whose rows are numbers of bytes."""

    def __init__(self) -> None:
        super().__init__("played memory")
        self.rows: dict[int, Growth] = {}
        self.unwanted: list[int] = []

    @property
    def nbytes(self) -> int:
        return self._counted(self.rows)

    def ask(self, number: int, nbytes: int) -> object:
        """Count memory to come, and return what somebody holds who waits for it."""
        held = self._returns.ticket(number)
        self._step(self._growing.__setitem__, number, Growth(nbytes))
        return held

    def grow(self, number: int, driver: Callable[[], int]) -> None:
        with self._grows(number):
            self._step(self._enter, number, driver())

    def _enter(self, number: int, nbytes: int) -> None:
        if not self._grown(number):
            self.unwanted.append(number)
        self.rows[number] = Growth(nbytes)

    def _trim(self) -> None:
        self.rows.clear()

    def _mend(self) -> None:
        return

    def _take_back(self, number: int, fences: list[Any]) -> bool:
        return self.rows.pop(number, None) is not None


def test_memory_counts_once_from_when_it_is_asked_for_until_it_is_given_back() -> None:
    table = Counter()
    held = table.ask(1, 10)
    seen: list[int] = []

    def driver() -> int:
        seen.append(table.nbytes)
        return 10

    table.grow(1, driver)
    assert (seen, table.nbytes, table.unwanted) == ([10], 10, [])
    del held
    table._step(bool)
    assert table.nbytes == 0


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_the_driver_refuses_counts_no_more_and_whoever_waits_looks_again(error: type[BaseException]) -> None:
    table = Counter()
    held = table.ask(1, 10)
    changes = table._changes

    def refuse() -> int:
        raise error

    with pytest.raises(error):
        table.grow(1, refuse)
    assert table.nbytes == 0
    assert table._worth_another_look(changes)
    assert not table._worth_another_look(table._changes)
    assert not table._at_work
    assert held is not None


def test_the_driver_is_not_asked_for_memory_that_was_given_up_before() -> None:
    table = Counter()
    # As of a request that is interrupted.
    table.ask(1, 10)
    with pytest.raises(AllocationError, match="nobody waits"):
        table.grow(1, lambda: pytest.fail("it was asked"))
    assert table.nbytes == 0


def test_memory_that_is_given_up_while_the_driver_is_asked_is_entered_and_wanted_by_nobody() -> None:
    table = Counter()
    held = [table.ask(1, 10)]

    def driver() -> int:
        held.clear()
        table._step(bool)
        assert table.nbytes == 10
        return 10

    table.grow(1, driver)
    assert (table.nbytes, table.unwanted) == (10, [1])


def test_memory_that_is_given_up_just_when_its_growth_ends_is_given_up_once() -> None:
    """The end of a growth is no step: it may come between any two lines of one."""
    table = Counter()

    class Ending(Growth):  # type: ignore[misc]  # Final for all but this.
        @property
        def begun(self) -> bool:
            table._growing.pop(1)
            return False

        @begun.setter
        def begun(self, begun: bool) -> None:
            assert not begun

    held = table._returns.ticket(1)
    table._growing[1] = Ending(10)
    del held
    table._step(bool)
    assert table.nbytes == 0


def test_somebody_else_at_work_is_worth_another_look() -> None:
    table = Counter()
    held = table.ask(1, 10)
    looks: list[bool] = []

    def driver() -> int:
        looks.append(on_thread(lambda: table._worth_another_look(table._changes)).result(WATCHDOG))
        # Not to oneself: a finalizer inside the call would wait for ever.
        looks.append(table._worth_another_look(table._changes))
        return 10

    table.grow(1, driver)
    assert looks == [True, False]
    assert held is not None


def test_threads_are_at_work_until_they_have_left_as_often_as_they_came() -> None:
    at_work = AtWork()
    assert not at_work
    with at_work:
        with at_work:
            assert at_work
        assert at_work
        # For this thread nobody else will make room; for another this one may.
        assert not at_work.is_more_to_come()
        assert on_thread(at_work.is_more_to_come).result(WATCHDOG)
    assert not at_work
    assert not on_thread(at_work.is_more_to_come).result(WATCHDOG)


def test_what_is_asked_before_settling_is_refused_as_soon_as_another_step_is_begun() -> None:
    """Were it let in between the first two instructions of that step, everybody would be let in during the rest of it."""
    asked: list[str] = []

    class Asked(Counter):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_inside" and value and not asked:
                asked.append("")
                with pytest.raises(AllocationError, match="inside another request") as caught:
                    self._before_settling(bool)
                asked.append(str(caught.value))

    for begin in (Asked._step, Asked._before_settling):
        asked[:] = ["not yet"]
        table = Asked()
        asked.clear()
        seen: list[bool] = []
        begin(table, lambda: seen.append(table.reentered))  # noqa: B023  # Called at once.
        assert seen == [True]
        assert len(asked) == 2
