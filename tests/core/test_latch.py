"""Latches and changes: who waits passes when they come, and no sooner than his time is over where they do not."""

from __future__ import annotations

import time

import pytest

from tests.core.fakes import WATCHDOG, on_thread, until
from xferlib import latch as latches
from xferlib.latch import TURN_SECONDS, WAIT_SECONDS, Latch, Turn, is_copy_thread, is_over, note_copy_thread


@pytest.fixture
def is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits does not look by himself, which would hide that nobody wakes him."""
    monkeypatch.setattr(latches, "WAIT_SECONDS", 10 * WATCHDOG)


@pytest.mark.usefixtures("is_told")
def test_all_who_wait_pass_when_it_opens() -> None:
    latch = Latch()
    waiting = [on_thread(latch.wait) for _ in range(3)] + [on_thread(lambda: latch.wait(9 * WATCHDOG)) for _ in range(3)]
    assert until(lambda: len(latch._sleepers) == 6)
    assert not latch.is_open()
    latch.open()
    assert latch.is_open()
    assert all(each.result(WATCHDOG) for each in waiting)


def test_who_comes_when_it_is_open_passes_however_little_time_he_has() -> None:
    latch = Latch()
    latch.open()
    # Twice is fine.
    latch.open()
    assert [latch.wait(0), latch.wait(-1), latch.wait(), latch.wait(0)] == [True] * 4


def test_a_shut_one_is_waited_for_as_long_as_was_said() -> None:
    """Longer than one slice of it, and shorter."""
    latch = Latch()
    for seconds in (2.5 * WAIT_SECONDS, WAIT_SECONDS / 2):
        began = time.monotonic()
        assert not latch.wait(seconds)
        assert time.monotonic() - began >= seconds
    assert not latch.wait(0)


@pytest.mark.usefixtures("is_told")
def test_who_is_woken_by_another_change_is_woken_again_by_his() -> None:
    changed = Latch()
    looks: list[bool] = []
    came: list[bool] = []
    waiting = on_thread(lambda: changed.wait_for(lambda: looks.append(True) or came))  # type: ignore[func-returns-value]
    for wakes in range(3):
        # One before it can be woken, one since, and one for each wake.
        assert until(lambda: len(looks) == 2 + wakes and bool(changed._sleepers))  # noqa: B023  # Called in this turn alone.
        changed.wake()
    came.append(True)
    changed.wake()
    assert waiting.result(WATCHDOG)


@pytest.mark.usefixtures("is_told")
def test_a_change_between_the_look_and_the_sleep_is_not_missed() -> None:
    changed = Latch()
    looked: list[bool] = []

    def reached() -> bool:
        looked.append(True)
        if len(looked) == 1:
            # Another thread is faster.
            changed.wake()
            return False
        return True

    on_thread(lambda: changed.wait_for(reached)).result(WATCHDOG)


@pytest.mark.usefixtures("is_told")
def test_whoever_waits_for_so_long_is_told_whether_it_came() -> None:
    changed = Latch()
    assert not changed.wait_for(lambda: False, 0.001)
    assert changed.wait_for(lambda: True, 0.001)
    came: list[bool] = []
    waiters = [on_thread(lambda: changed.wait_for(lambda: came, 9 * WATCHDOG)) for _ in range(3)]
    assert until(lambda: len(changed._sleepers) >= 3)
    came.append(True)
    changed.wake()
    assert all(waiter.result(WATCHDOG) for waiter in waiters)


def test_a_change_that_nobody_tells_of_is_seen_all_the_same() -> None:
    """As an interrupt between the two leaves it; and a signal that comes a moment before the sleep does not end that."""
    changed = Latch()
    came: list[bool] = []
    waiting = on_thread(lambda: changed.wait_for(lambda: came))
    assert until(lambda: bool(changed._sleepers))
    came.append(True)
    assert waiting.result(WATCHDOG)


def test_whoever_has_waited_long_enough_leaves_nothing_behind() -> None:
    changed = Latch()
    assert not changed.wait_for(lambda: False, 1.5 * WAIT_SECONDS)
    assert not changed._sleepers


def test_whoever_is_interrupted_as_it_waits_leaves_nothing_behind() -> None:
    """Nobody may ever wake who waits there, and a program may be interrupted as often as it likes."""
    changed = Latch()
    looked: list[bool] = []

    def interrupted() -> bool:
        looked.append(True)
        if len(looked) == 3:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        changed.wait_for(interrupted)
    assert not changed._sleepers


def test_whoever_finds_the_change_before_it_sleeps_leaves_nothing_behind() -> None:
    changed = Latch()
    looks = iter([False, True])
    assert changed.wait_for(lambda: next(looks))
    assert not changed._sleepers


def test_what_one_thread_notes_of_itself_is_said_of_no_other() -> None:
    def noted() -> bool:
        note_copy_thread()
        return is_copy_thread()

    assert on_thread(noted).result(WATCHDOG)
    assert not is_copy_thread()
    assert not on_thread(is_copy_thread).result(WATCHDOG)


def test_what_has_failed_is_over_and_other_errors_are_raised() -> None:
    def fails() -> bool:
        raise OSError("the device is gone")

    assert [is_over(lambda: True), is_over(lambda: False), is_over(fails), is_over(fails, OSError)] == [True, False, True, True]
    with pytest.raises(OSError, match="gone"):
        is_over(fails, (KeyError, ValueError))


def test_a_thread_gives_way_once_for_each_turn_that_was_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], list[float]()

    def give_way() -> None:
        given.append(now[0])
        # Others have had it for long.
        now[0] += 100 * TURN_SECONDS

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(latches, "give_way", give_way)
    turn = Turn()
    for _ in range(5):
        now[0] += 0.4 * TURN_SECONDS
        turn.end_if_long()
    assert given == [pytest.approx(1.2 * TURN_SECONDS)]
