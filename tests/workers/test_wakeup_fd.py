"""What wakes an iteration from another thread: a descriptor of any number, which is somebody else's once it is closed."""

from __future__ import annotations

import os
import select

import pytest

from tests.core.fakes import WATCHDOG, on_thread
from xferlib.pipeline.workers.pool import WakeupFd


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Have eventfd give descriptor 0, as in a program whose standard input is closed, and note what is done to any; nothing is."""
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "eventfd", lambda *_: 0)
    monkeypatch.setattr(os, "eventfd_write", lambda number, value: seen.append(("woken", number)))
    monkeypatch.setattr(os, "close", lambda number: seen.append(("closed", number)))
    return seen


def test_one_with_the_number_of_standard_input_wakes_and_is_closed(touched: list[tuple[str, int]]) -> None:
    wakeup = WakeupFd()
    wakeup.wake()
    assert touched == [("woken", 0)]
    wakeup.close()
    assert touched == [("woken", 0), ("closed", 0)]


def test_it_is_readable_from_when_it_is_woken_until_it_is_cleared() -> None:
    wakeup = WakeupFd()
    try:
        heard = select.poll()
        heard.register(wakeup.number, select.POLLIN)
        assert not heard.poll(0)
        wakeup.wake()
        wakeup.wake()
        assert heard.poll(0)
        wakeup.clear()
        assert not heard.poll(0)
        # Though nobody has woken it.
        assert not os.get_blocking(wakeup.number)
        wakeup.clear()
    finally:
        wakeup.close()


def test_no_program_that_is_started_inherits_it() -> None:
    wakeup = WakeupFd()
    try:
        assert not os.get_inheritable(wakeup.number)
    finally:
        wakeup.close()


def test_one_that_is_closed_touches_no_descriptor(touched: list[tuple[str, int]]) -> None:
    wakeup = WakeupFd()
    wakeup.close()
    touched.clear()
    wakeup.wake()
    wakeup.close()
    assert touched == []


def test_a_finalizer_in_the_middle_of_it_may_wake_and_close_it() -> None:
    wakeup = WakeupFd()

    def finalized() -> int:
        with wakeup._lock:
            wakeup.wake()
            wakeup.close()
            return wakeup.number

    assert on_thread(finalized).result(WATCHDOG) == -1
