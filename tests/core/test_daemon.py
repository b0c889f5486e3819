"""The threads of the process that serve all stagers: whatever comes out of what they call, they go on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import WATCHDOG, on_thread, succeeds, tampered
from xferlib.memory.locker import LOCKER, lock_later


class Speechless(BaseException):
    """An error of somebody's that cannot be shown, and that keeps its traceback."""

    def __repr__(self) -> str:
        raise ValueError("no words")


class Clinging(Exception):
    """As above; one that frameworks raise."""

    def __repr__(self) -> str:
        raise ValueError("no words")

    def with_traceback(self, tb: object) -> Any:
        raise ValueError("it stays")


def test_an_error_of_a_daemon_s_own_is_reported_and_it_goes_on() -> None:
    said = succeeds("""
        import threading
        from xferlib.daemon import Daemon
        heard, reported = threading.Event(), []
        threading.excepthook = lambda args: reported.append((args.thread.name, str(args.exc_value)))

        def run() -> None:
            while not served.over:
                asked = served.inbox.get()
                if asked == "fail":
                    raise SystemExit("broken")
                if asked:
                    heard.set()

        served: Daemon[str] = Daemon("xferlib-broken", run)
        served.start()
        served.inbox.put("fail")
        served.inbox.put("go on")
        assert heard.wait(5)
        print(reported)
    """)
    assert said == "[('xferlib-broken', 'broken')]\n"


def test_a_daemon_that_fails_again_and_again_ends_with_the_interpreter() -> None:
    succeeds("""
        import threading
        from xferlib.daemon import Daemon
        often = threading.Semaphore(0)
        threading.excepthook = lambda args: often.release()

        def run() -> None:
            raise ValueError("always")

        Daemon("xferlib-broken", run).start()
        for _ in range(3):
            assert often.acquire(timeout=5)
    """)


def test_a_daemon_that_has_ended_is_not_started_again() -> None:
    succeeds("""
        from xferlib import daemon
        begun = []
        ended = daemon.Daemon("xferlib-late", lambda: None)
        ended.end()
        # Behind the last of Python's threads the system's call is refused.
        daemon.start_new_thread = lambda run, arguments: begun.append(run)
        ended.start()
        assert not begun
    """)


def test_of_two_starts_at_once_the_second_does_not_rely_on_the_first_which_is_refused() -> None:
    succeeds("""
        import threading
        from xferlib import daemon

        def run() -> None:
            while not served.over:
                if served.inbox.get():
                    heard.set()

        def refused(run, arguments):
            # Another stager is opened meanwhile.
            daemon.start_new_thread = begin
            served.start()
            raise RuntimeError("can't start new thread")

        heard = threading.Event()
        begin, daemon.start_new_thread = daemon.start_new_thread, refused
        served = daemon.Daemon("xferlib-second", run)
        try:
            served.start()
        except RuntimeError:
            served.inbox.put("go")
            assert heard.wait(5)
        else:
            raise AssertionError("the first start was not refused")
    """)


def test_of_two_threads_that_were_started_at_once_one_serves() -> None:
    said = succeeds("""
        import threading
        from xferlib import daemon

        def run() -> None:
            print("serving", flush=True)
            while not served.over:
                served.inbox.get()

        def begin(serve, arguments):
            if not nested:
                # Another stager is opened meanwhile.
                nested.append(None)
                served.start()
            begin_thread(lambda: (serve(*arguments), ended.release()), ())

        nested, ended = [], threading.Semaphore(0)
        begin_thread, daemon.start_new_thread = daemon.start_new_thread, begin
        served = daemon.Daemon("xferlib-once", run)
        served.start()
        assert ended.acquire(timeout=5)
    """)
    assert said == "serving\n"


def test_the_end_waits_for_all_daemons_together_and_tells_each_before() -> None:
    said = succeeds("""
        from xferlib import daemon

        class Held:
            \"\"\"The end of a thread that something holds.\"\"\"

            def wait(self, seconds):
                waited.append((seconds, [served.over for served in all_served]))
                daemon.time.now += seconds

        class Time:
            now = 0.0

            def monotonic(self):
                return self.now

        waited, daemon.time, daemon.start_new_thread = [], Time(), lambda run, arguments: None
        all_served = [daemon.Daemon(f"xferlib-{number}", lambda: None) for number in range(3)]
        for served in all_served:
            served._ended = Held()
            served.start()
        daemon.end_daemons()
        print(waited == [(seconds, [True] * 3) for seconds in (daemon.END_SECONDS, 0, 0)])
        # Twice is fine.
        daemon.end_daemons()
        print(len(waited))
    """)
    assert said.split() == ["True", "3"]


def test_a_daemon_that_has_nothing_to_do_is_woken_for_its_end() -> None:
    succeeds("""
        import threading
        from queue import SimpleQueue
        from xferlib import daemon

        class Inbox(SimpleQueue):
            def get(self):
                asleep.set()
                return super().get()

        def run() -> None:
            while not served.over:
                served.inbox.get()

        asleep = threading.Event()
        daemon.END_SECONDS = 60
        served = daemon.Daemon("xferlib-idle", run)
        served.inbox = Inbox()
        served.start()
        assert asleep.wait(5)
    """)


def test_a_stager_that_is_opened_behind_the_end_of_the_daemons_transfers_as_ever_or_is_refused_in_words() -> None:
    said = succeeds("""
        import atexit, _thread, numpy as np

        def starts_threads():
            try:
                _thread.start_new_thread(bool, ())
            except RuntimeError:
                return False
            return True

        def late() -> None:
            if not starts_threads():
                try:
                    xferlib.stager("host")
                except xferlib.BackendUnavailableError as error:
                    print("Open it" in str(error))
                return
            with xferlib.stager("host") as stager:
                for nbytes in (10, 8 << 20):
                    there = stager.put(np.ones(nbytes, np.uint8)).result()
                    print(int(stager.get(there).result().sum()))

        # Those of the library, which are registered later, come first.
        atexit.register(late)
        import xferlib
    """)
    # Python 3.12 starts none by then.
    assert said.split() in (["10", str(8 << 20)], ["True"])


def test_a_child_does_nothing_of_what_its_parent_s_daemon_was_to_do() -> None:
    said = succeeds("""
        import os, threading
        from xferlib.daemon import Daemon

        def run() -> None:
            while not served.over:
                work = served.inbox.get()
                if work is not None:
                    work()

        def stay() -> None:
            begun.set()
            gate.wait(5)

        begun, gate, done = threading.Event(), threading.Event(), threading.Event()
        served = Daemon("xferlib-parent", run)
        served.start()
        served.inbox.put(stay)
        served.inbox.put(lambda: print("the parent's", os.getpid() == parent, flush=True))
        parent = os.getpid()
        assert begun.wait(5)
        child = os.fork()
        if child == 0:
            served.start()
            served.inbox.put(done.set)
            assert done.wait(5)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.set()
        served.inbox.put(done.set)
        assert done.wait(5)
    """)
    assert said == "the parent's True\n"


@pytest.mark.parametrize("error", [Speechless, Clinging])
def test_an_error_that_cannot_be_shown_ends_no_dispatcher(error: type[BaseException]) -> None:
    def copy(*arguments: int) -> None:
        if errors and threading.current_thread().name == "xferlib-dispatcher":
            raise errors.pop()
        backend.inner.copy_h2d(*arguments)

    errors: list[BaseException] = [error()]
    backend = tampered(copy_h2d=copy)
    large = np.arange(8 << 20, dtype=np.uint8)
    with xferlib.stager(backend) as stager:
        failed = on_thread(lambda: stager.put(large).result()).exception(WATCHDOG)
        assert isinstance(failed, Clinging if error is Clinging else xferlib.XferError)
        assert np.array_equal(np.asarray(on_thread(lambda: stager.put(large).result()).result(WATCHDOG)), large)


@pytest.mark.parametrize("error", [Speechless, Clinging])
def test_an_error_that_cannot_be_shown_ends_no_locker(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def lock() -> int:
        if errors:
            raise errors.pop()
        again.set()
        return 0

    errors: list[BaseException] = [error(), error()]
    again, reported = threading.Event(), list[type[BaseException]]()
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    LOCKER.start()
    lock_later(lock)
    assert again.wait(WATCHDOG)
    # Once: the second one says the same.
    assert reported == [error]
