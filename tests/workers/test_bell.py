"""What wakes an iteration from another thread: a descriptor of any number, which is somebody else's once it is closed."""

from __future__ import annotations

import os
import select

import pytest

from xferlib.pipeline.workers.crew import Bell


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Have bells get descriptor 0, as in a program whose standard input is closed, and note what is done to any; nothing is."""
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "eventfd", lambda *_: 0)
    monkeypatch.setattr(os, "eventfd_write", lambda number, value: seen.append(("rung", number)))
    monkeypatch.setattr(os, "close", lambda number: seen.append(("closed", number)))
    return seen


def test_a_bell_with_the_number_of_standard_input_rings_and_is_closed(touched: list[tuple[str, int]]) -> None:
    bell = Bell()
    bell.ring()
    assert touched == [("rung", 0)]
    bell.close()
    assert touched == [("rung", 0), ("closed", 0)]


def test_a_bell_is_silent_until_it_is_rung_and_again_when_it_is_hushed() -> None:
    bell = Bell()
    try:
        heard = select.poll()
        heard.register(bell.number, select.POLLIN)
        assert not heard.poll(0)
        bell.ring()
        bell.ring()
        assert heard.poll(0)
        bell.hush()
        assert not heard.poll(0)
        # Silent as it is.
        assert not os.get_blocking(bell.number)
        bell.hush()
    finally:
        bell.close()


def test_no_program_that_is_started_has_a_bell() -> None:
    bell = Bell()
    try:
        assert not os.get_inheritable(bell.number)
    finally:
        bell.close()


def test_a_closed_bell_touches_no_descriptor(touched: list[tuple[str, int]]) -> None:
    bell = Bell()
    bell.close()
    touched.clear()
    bell.ring()
    bell.close()
    assert touched == []
