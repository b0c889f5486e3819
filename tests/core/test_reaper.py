"""What goes on when nobody calls: memory that comes back after close, stagers that nobody closed, calls that no interrupt cuts."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import WATCHDOG, on_thread, succeeds, tampered, until
from xferlib import reaper

SECOND = 1.0
"""Within this the memory of a closed stager is back: law 14."""


def held(backend: Any) -> tuple[int, int, int]:
    """Return what the host backend has given out and not got back."""
    calls = backend.memory.calls()
    return (
        calls.pinned_allocations - calls.pinned_frees,
        calls.pins - calls.unpins,
        calls.device_allocations - calls.device_frees,
    )


@pytest.mark.parametrize("what", ["device", "pinned", "result", "view"])
def test_the_memory_of_a_closed_stager_is_back_within_a_second_of_the_last_array(what: str) -> None:
    with xferlib.stager("host") as stager:
        backend = stager.backend
        array: Any = stager.empty_pinned(1000, np.uint8)
        if what == "device":
            array = stager.put(array).result()
        if what == "result":
            array = stager.get(stager.put(array).value).result()
        if what == "view":
            array = stager.mapped(array)
    del stager
    part = array[3:5]
    del array
    gc.collect()
    assert not until(lambda: held(backend) == (0, 0, 0), 0.5), "memory was given back that an array still reaches"
    del part
    assert until(lambda: held(backend) == (0, 0, 0), SECOND)


@pytest.mark.parametrize("finalizer", [False, True])
def test_a_stager_that_dies_in_a_cycle_with_its_arrays_gives_everything_back(finalizer: bool) -> None:
    class Node:
        array: Any

        def __init__(self) -> None:
            self.me = self

    class Looks(Node):
        def __del__(self) -> None:
            seen.append(int(self.array.sum()))

    seen: list[int] = []
    node: Any = Looks() if finalizer else Node()
    node.stager = xferlib.stager("host")
    backend = node.stager.backend
    node.pinned = node.stager.empty_pinned(1000, np.uint8)
    node.pinned[:] = 2
    node.transfer = node.stager.put(node.pinned)
    node.array = node.transfer.value
    node.pin = node.stager.pin(np.zeros(100))
    del node
    with pytest.warns(ResourceWarning, match="never closed"):
        gc.collect()
    assert until(lambda: held(backend) == (0, 0, 0))
    assert seen == ([2000] if finalizer else [])


def test_what_a_table_raises_is_said_and_the_others_are_settled() -> None:
    class Broken:
        def settle(self) -> bool:
            raise OSError("broken on purpose")

    class Fine:
        def settle(self) -> bool:
            settled.set()
            return False

    settled, said, before = threading.Event(), list[tuple[str, str]](), threading.excepthook
    threading.excepthook = lambda args: said.append((args.thread.name if args.thread else "", str(args.exc_value)))
    try:
        reaper.start_reaper()
        reaper.watch(Broken())
        reaper.watch(Fine())
        assert settled.wait(WATCHDOG)
        # By its name, which says whose thread that was.
        assert until(lambda: said == [("xferlib-reaper", "broken on purpose")])
    finally:
        threading.excepthook = before


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("told", [False, True])
def test_nothing_that_a_table_raises_ends_the_reaper(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, *, told: bool
) -> None:
    def raises() -> None:
        raise error

    def refuse(arguments: object) -> None:
        raise RuntimeError("no")

    closed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", (lambda arguments: None) if told else refuse)
    reaper.start_reaper()
    reaper.close_later(raises)
    reaper.close_later(closed.set)
    assert closed.wait(5)


def test_a_stager_that_a_finalizer_inside_its_own_call_closes_is_closed_when_the_call_has_ended() -> None:
    backend = tampered()
    done: list[object] = []

    def sweep() -> None:
        if not done:
            done.append(None)
            stager.close()
        backend.inner.sweep()

    stager = xferlib.stager(backend)
    backend.sweep = stager._blocks._sweep = sweep
    with suppress(xferlib.ClosedError):
        on_thread(lambda: stager.put(np.ones(3))).result(WATCHDOG)
    assert until(lambda: "closed" in repr(stager))
    stager.close()


def test_a_reaper_that_the_system_had_no_thread_for_is_started_with_the_next_stager() -> None:
    succeeds(
        """
        import warnings, xferlib
        from tests.core.fakes import until
        from xferlib import daemon, reaper
        warnings.simplefilter("ignore", ResourceWarning)
        start, refused = daemon.start_new_thread, []

        def refuse(call, arguments):
            if call == reaper.REAPER._serve and not refused:
                refused.append(call)
                raise RuntimeError("can't start new thread")
            return start(call, arguments)

        daemon.start_new_thread = refuse
        try:
            xferlib.stager("host")
        except RuntimeError:
            pass
        assert refused
        stager = xferlib.stager("host")
        backend = stager.backend
        del stager
        assert until(lambda: not backend.h2d._worker.open, 2)
        """
    )


def test_a_forked_child_settles_nothing_and_opens_stagers_of_its_own() -> None:
    succeeds("""
        import os, time, numpy as np, xferlib
        from tests.core.fakes import until
        from xferlib import reaper
        s = xferlib.stager("host")
        backend, array = s.backend, s.put(np.ones(1000)).result()
        s.close()
        assert reaper.closed_tables()
        child = os.fork()
        if child == 0:
            before = backend.memory.calls()
            assert not reaper.closed_tables()
            del array
            time.sleep(0.5)
            assert backend.memory.calls() == before
            with xferlib.stager("host") as own:
                kept = own.put(np.ones(1000)).result()
            del kept
            assert until(lambda: own.backend.memory.calls().device_frees == 1)
            assert backend.memory.calls() == before
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del array
        assert until(lambda: backend.memory.calls().device_frees == 1)
    """)


def test_the_interpreter_ends_while_arrays_of_closed_stagers_live() -> None:
    succeeds("""
        import numpy as np, xferlib
        with xferlib.stager("host") as s:
            kept = s.put(np.ones(1000)).result(), s.empty_pinned(10, np.uint8)
    """)


def test_the_interpreter_ends_when_the_reaper_has_ended_what_it_had_begun() -> None:
    # Otherwise it would be gone by then. `time.sleep` lets go of the interpreter, as calls of a framework do.
    done = succeeds("""
        import os, threading, time
        import xferlib.reaper
        begun = threading.Event()
        def close() -> None:
            begun.set()
            time.sleep(0.3)
            os.write(1, b"ended")
        xferlib.reaper.start_reaper()
        xferlib.reaper.close_later(close)
        begun.wait()
    """)
    assert done == "ended"


def test_the_interpreter_does_not_wait_for_ever_for_the_reaper() -> None:
    succeeds("""
        import threading
        import xferlib.reaper
        begun, never = threading.Event(), threading.Event()
        def close() -> None:
            begun.set()
            never.wait()
        xferlib.reaper.start_reaper()
        xferlib.reaper.close_later(close)
        begun.wait()
    """)
