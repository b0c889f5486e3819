"""Calls made in a device's context and without spoiling a capture, and where the thread is afterwards."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from tests.core.fakes import WATCHDOG, on_thread
from tests.cuda.driver import CONTEXT, ELSEWHERE, REFUSED, RELAXED, THREAD_LOCAL
from tests.interrupts.repeated import interrupted
from xferlib.cuda.context import Context
from xferlib.cuda.driver import primary_context


class Failed(Exception):
    """As a framework's error for a status."""


def failure(name: str, status: int) -> Exception:
    return Failed(name, status)


@pytest.fixture
def context(library: ctypes.CDLL) -> Context:
    return Context(CONTEXT, failure, Failed)


def place(library: ctypes.CDLL) -> tuple[int, int]:
    """Return in which context the thread is, and in which capture mode."""
    return library.driver_context(), library.driver_mode()


def test_a_call_here_is_in_the_context_and_relaxed(library: ctypes.CDLL, context: Context) -> None:
    assert context.here(lambda found: (place(library), found), 7) == ((CONTEXT, RELAXED), 7)
    assert place(library) == (ELSEWHERE, THREAD_LOCAL)


def test_a_call_inside_is_in_the_context_and_in_the_mode_of_the_thread(library: ctypes.CDLL, context: Context) -> None:
    assert context.inside(lambda found: (place(library), found))(7) == ((CONTEXT, THREAD_LOCAL), 7)


def test_a_relaxed_call_is_where_the_thread_is(library: ctypes.CDLL, context: Context) -> None:
    assert context.capture_mode.relaxed(place, library) == (ELSEWHERE, RELAXED)


def test_a_call_within_a_call_leaves_the_outer_one_where_it_is(library: ctypes.CDLL, context: Context) -> None:
    # What earlier calls have left is used again.
    context.here(place, library)

    def outer() -> list[tuple[int, int]]:
        return [place(library), context.here(place, library), place(library)]

    assert context.here(outer) == [(CONTEXT, RELAXED)] * 3


def fail() -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("way", ["here", "inside", "relaxed"])
def test_after_a_call_that_fails_the_thread_is_where_it_was(library: ctypes.CDLL, context: Context, way: str) -> None:
    with pytest.raises(ArithmeticError):
        {"here": context.here, "inside": lambda call: context.inside(call)(), "relaxed": context.capture_mode.relaxed}[way](fail)
    assert (library.driver_depth(), *place(library)) == (1, ELSEWHERE, THREAD_LOCAL)


@pytest.mark.parametrize("has_one", [True, False], ids=["thread_with_a_context", "thread_without_one"])
@pytest.mark.parametrize("way", ["here", "inside"])
def test_where_the_context_cannot_be_entered_nothing_is_called(
    library: ctypes.CDLL, context: Context, has_one: bool, way: str
) -> None:
    called: list[None] = []

    def enter() -> None:
        depth = library.driver_depth()
        assert depth == has_one
        with pytest.raises(Failed) as raised:
            context.here(called.append, None) if way == "here" else context.inside(called.append)(None)
        assert raised.value.args == ("cuCtxPushCurrent", REFUSED)
        assert library.driver_depth() == depth

    library.driver_refuse(CONTEXT)
    try:
        if has_one:
            enter()
        else:
            on_thread(enter).result(WATCHDOG)
    finally:
        library.driver_refuse(None)
    assert called == []


def test_no_interrupt_leaves_the_thread_elsewhere_or_relaxed(library: ctypes.CDLL, context: Context) -> None:
    inside = context.inside(library.driver_depth)

    def work() -> None:
        while True:
            context.here(library.driver_depth)
            inside()
            context.capture_mode.relaxed(library.driver_depth)

    interrupted(work, 400)
    assert (library.driver_depth(), *place(library)) == (1, ELSEWHERE, THREAD_LOCAL)


def test_giving_back_tells_nobody_of_a_failed_device_and_hides_nothing_else(library: ctypes.CDLL, context: Context) -> None:
    given: list[Any] = []

    def release(error: Exception) -> None:
        given.append(place(library))
        raise error

    context.give_back(release, Failed())
    with pytest.raises(ArithmeticError):
        context.give_back(release, ArithmeticError())
    assert given == [(CONTEXT, RELAXED)] * 2


# Python warns of forking a process with threads, and JAX, if another test has loaded it, of any fork.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_forked_child_gives_nothing_back(context: Context) -> None:
    given: list[None] = []
    child = os.fork()
    if child == 0:
        try:
            context.give_back(given.append, None)
        finally:
            os._exit(len(given))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    context.give_back(given.append, None)
    assert given == [None]


def test_the_primary_context_is_found_or_its_error_raised(library: ctypes.CDLL) -> None:
    assert primary_context(0, failure) == CONTEXT
    assert primary_context(3, failure) == CONTEXT + 3
    with pytest.raises(Failed) as raised:
        primary_context(-1, failure)
    assert raised.value.args == ("cuDeviceGet", 101)
