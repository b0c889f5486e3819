"""Steps that no interrupt cuts: calls, and the start of threads."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
import weakref
from typing import Any, NoReturn

import pytest

from tests.core.fakes import WATCHDOG, Timeout, always_raises, on_thread, succeeds, until
from xferlib import uninterrupted as steps
from xferlib.uninterrupted import start_thread, uninterrupted


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Timeout("too late")], ids=repr)
@pytest.mark.parametrize("starts", [True, False], ids=["behind the start", "in its place"])
def test_an_interrupt_at_the_start_of_a_thread_is_told_and_takes_nothing_from_the_next(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, starts: bool
) -> None:
    start = _thread.start_new_thread

    def interrupted(*call: Any) -> NoReturn:
        if starts:
            start(*call)
        raise error

    called: list[int] = []
    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(steps, "start_new_thread", interrupted)
        uninterrupted(called.append, 1)
    uninterrupted(called.append, 2)
    assert until(lambda: sorted(called) == ([1, 2] if starts else [2]))


def test_a_finalizer_in_the_middle_of_the_start_of_a_thread_may_wait_for_a_new_one() -> None:
    inside, started = threading.Event(), threading.Event()

    class Finalizes(threading.Thread):
        """Is started as if the collector ran meanwhile."""

        def start(self) -> None:
            start_thread(threading.Thread(target=inside.set), lambda error: None)
            assert inside.wait(WATCHDOG)
            super().start()

    start_thread(Finalizes(target=started.set), lambda error: None)
    assert started.wait(WATCHDOG)


def test_a_start_does_not_wait_for_another_that_never_ends() -> None:
    begun, gate = threading.Event(), threading.Event()

    class Stuck(threading.Thread):
        def start(self) -> None:
            begun.set()
            assert gate.wait(WATCHDOG)
            super().start()

    ended = threading.Event()
    start_thread(Stuck(target=ended.set), lambda error: None)
    assert begun.wait(WATCHDOG)
    assert uninterrupted(int) == 0
    gate.set()
    assert ended.wait(WATCHDOG)


@pytest.mark.parametrize("refusal", [(RuntimeError, "can't start new thread"), (MemoryError,)], ids=str)
def test_where_there_can_be_no_more_threads_the_call_is_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch, refusal: tuple[Any, ...]
) -> None:
    """It may give back what the next thread needs."""
    monkeypatch.setattr(steps, "start_new_thread", always_raises(*refusal))
    called: list[int] = []
    uninterrupted(called.append, 1)
    assert called == [1]


@pytest.mark.parametrize("refusal", [(RuntimeError, "can't start new thread"), (MemoryError,), (SystemExit,)], ids=str)
def test_whatever_keeps_the_thread_from_its_start_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, refusal: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(threading.Thread, "start", always_raises(*refusal))
    called: list[int] = []
    uninterrupted(called.append, 1)
    assert called == [1]


def test_a_thread_that_runs_although_it_was_refused_does_nothing_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes memory behind the start, too."""
    start, ended = threading.Thread.start, threading.Event()

    def started_and_refused(thread: threading.Thread) -> NoReturn:
        start(thread)
        ended.set()
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "start", started_and_refused)
    called: list[int] = []

    def call(number: int) -> int:
        called.append(number)
        return number

    for number in range(20):
        assert uninterrupted(call, number) == number
        assert ended.wait(WATCHDOG)
        ended.clear()
    assert called == [*range(20)]


def test_an_interrupt_ends_the_waiting_and_not_the_call() -> None:
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        assert gate.wait(WATCHDOG)
        ended.set()

    def interrupt() -> None:
        assert begun.wait(WATCHDOG)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting = on_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(call)
    interrupting.result(WATCHDOG)
    assert not ended.is_set()
    gate.set()
    assert ended.wait(WATCHDOG)


def test_in_a_forked_child_the_thread_that_forked_is_the_one_that_interrupts_come_to() -> None:
    succeeds("""
        import os, threading
        from xferlib.uninterrupted import uninterrupted

        def fork() -> None:
            child = os.fork()
            if child == 0:
                os._exit(uninterrupted(threading.get_ident) == threading.get_ident())
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        codes: list[int] = []
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert codes == [0]
    """)


def test_a_finalizer_that_the_collector_runs_needs_no_other_thread() -> None:
    """The main thread may have a lock, of a framework's or its own, that another would wait for."""
    lock = threading.RLock()
    called: list[int] = []

    class Asks:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            uninterrupted(ask)

    def ask() -> None:
        if lock.acquire(timeout=WATCHDOG):
            called.append(threading.get_ident())
            lock.release()

    Asks()
    with lock:
        gc.collect()
    assert called == [threading.get_ident()]
    assert uninterrupted(threading.get_ident) != threading.get_ident()


def test_what_an_uninterrupted_call_returns_or_raises_comes_back() -> None:
    def fail() -> None:
        raise LookupError("no")

    assert uninterrupted(lambda: 3) == 3
    with pytest.raises(LookupError, match="no"):
        uninterrupted(fail)
    # Interrupts come to the main thread alone.
    assert on_thread(lambda: uninterrupted(threading.get_ident) == threading.get_ident()).result(WATCHDOG)


def test_an_error_of_a_call_comes_back_and_is_gone_when_it_is_dropped() -> None:
    class OwnError(Exception):
        pass

    def fail() -> None:
        raise OwnError

    gc.disable()
    try:
        with pytest.raises(OwnError) as caught:
            uninterrupted(fail)
        left = weakref.ref(caught.value)
        del caught
        # The thread lets go of it behind its answer. The collector never comes: it could come to nobody's help.
        assert until(lambda: left() is None)
    finally:
        gc.enable()
