"""Steps that no interrupt cuts: calls, and the start of threads."""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import pytest

from tests.core.fakes import WATCHDOG, on_thread, succeeds, until
from xferlib.uninterrupted import start_thread, uninterrupted


def test_a_starter_of_threads_that_was_interrupted_is_started_again() -> None:
    succeeds(
        """
        from xferlib import uninterrupted as steps
        start, cut = steps.start_new_thread, []

        def interrupted(call, arguments):
            if not cut:
                cut.append(call)
                raise KeyboardInterrupt
            return start(call, arguments)

        steps.start_new_thread = interrupted
        try:
            steps.uninterrupted(int)
        except KeyboardInterrupt:
            pass
        assert steps.uninterrupted(int) == 0
        """
    )


def test_a_finalizer_on_the_thread_that_starts_others_may_wait_for_a_new_one() -> None:
    inside, started = threading.Event(), threading.Event()

    class Finalizes(threading.Thread):
        """Is started as if the collector ran meanwhile."""

        def start(self) -> None:
            start_thread(threading.Thread(target=inside.set), lambda error: None)
            assert inside.wait(WATCHDOG)
            super().start()

    def starters() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "xferlib-starter"]

    assert uninterrupted(int) == 0
    before = starters()
    start_thread(Finalizes(target=started.set), lambda error: None)
    assert started.wait(WATCHDOG)
    assert starters() == before


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
