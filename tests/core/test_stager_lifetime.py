"""Opening, figures, closing, forgetting to close, fork, and the end of the interpreter."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import WATCHDOG, Tampered, always_raises, held, on_thread, run_python, succeeds, tampered, until
from xferlib import uninterrupted
from xferlib.callers import COLLECTS_ANYWHERE, wait_for_callers
from xferlib.ledger import all_ledgers

MODULE = sys.modules["xferlib.stager"]
"""Not the function of that name."""


def test_figures_are_right(stager: xferlib.Stager) -> None:
    source = stager.empty_pinned(1000, np.uint8)
    device = stager.put({"pinned": source, "pageable": np.zeros(10)}).result()
    stager.get(device["pinned"], out=source).result()
    stats = stager.stats()
    assert (stats.h2d_nbytes, stats.d2h_nbytes, stats.synchronous) == (1080, 1000, 1)
    assert stats.pinned_limit_nbytes == 64 << 20
    assert stats.pinned_nbytes == 0
    # Nothing is page-locked here, and the limit holds all the same: the array, and slots that staged the other one.
    assert 1000 <= stats.pinned_used_nbytes <= 1 << 20
    assert stats.device_nbytes == stats.device_peak_nbytes == 1280
    assert stats.pool_misses == 1


def test_figures_of_a_backend_that_pins() -> None:
    with xferlib.stager(tampered(capabilities=xferlib.Capabilities(pinned=True, register=True))) as stager:
        array = stager.empty_pinned(3 << 20, np.uint8)
        mine = np.zeros(100, np.uint8)
        with stager.pin(mine):
            stats = stager.stats()
            assert stats.pinned_nbytes == (3 << 20) + 100
            assert stats.pinned_used_nbytes == array.nbytes
        assert stager.stats().pinned_peak_nbytes == (3 << 20) + 100


def test_trim_gives_everything_idle_back(stager: xferlib.Stager) -> None:
    device = stager.put(stager.empty_pinned(3 << 20, np.uint8)).result()
    del device
    stager.trim()
    calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # the host backend's
    assert calls.pinned_allocations == calls.pinned_frees
    assert calls.device_allocations == calls.device_frees
    assert stager.stats().device_nbytes == 0


def test_close_waits_for_what_is_in_flight() -> None:
    stager = xferlib.stager("host")
    memory = np.zeros(1000)
    with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.get(np.ones(1000), out=memory)
        closing = on_thread(stager.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        gate.set()
        closing.result(10)
    assert transfer.done()
    assert memory.all()


def test_close_twice_is_fine_and_waits_both_times() -> None:
    stager = xferlib.stager("host")
    with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.put(np.ones(1000))
        ended: list[bool] = []

        def close() -> None:
            stager.close()
            ended.append(gate.is_set())

        closing = [on_thread(close), on_thread(close)]
        with pytest.raises(TimeoutError):
            closing[0].result(0.1)
        gate.set()
        for future in closing:
            future.result(10)
    assert ended == [True, True]
    assert transfer.done()
    stager.close()


def test_arrays_outlive_their_stager() -> None:
    stager = xferlib.stager("host")
    memory = stager.backend.memory  # type: ignore[attr-defined]  # the host backend's
    pinned = stager.empty_pinned(10, np.int64)
    pinned[:] = 3
    device = stager.put(pinned).result()
    idle = stager.put(np.zeros(100_000)).result()
    del idle
    view = pinned[2:4]
    stager.close()
    assert (memory.calls().pinned_allocations - memory.calls().pinned_frees) == 1
    assert (memory.calls().device_allocations - memory.calls().device_frees) == 1
    del pinned
    assert view.tolist() == [3, 3]
    assert device.tolist() == [3] * 10
    del view, device
    assert until(lambda: memory.calls().pinned_allocations == memory.calls().pinned_frees, seconds=1.0)
    assert until(lambda: memory.calls().device_allocations == memory.calls().device_frees, seconds=1.0)


def test_a_stager_that_is_dropped_says_so_and_closes() -> None:
    stager = xferlib.stager("host")
    backend: Any = stager.backend
    out = np.zeros(100)
    stager.get(np.ones(100), out=out)
    with pytest.warns(ResourceWarning, match=r"<Stager 'host'.*> was never closed. Use it as a context manager"):
        del stager

    def closed() -> bool:
        try:
            backend.h2d.record()
        except xferlib.ClosedError:
            return True
        return False

    assert until(closed)
    assert out.all()


@contextmanager
def opened() -> Iterator[xferlib.Stager]:
    yield xferlib.stager("host")


def test_a_stager_that_is_never_closed_is_told_of_at_the_line_that_opened_it() -> None:
    line = opened.__wrapped__.__code__.co_firstlineno + 2  # type: ignore[attr-defined]  # Of the decorator.
    with pytest.warns(ResourceWarning, match="never closed") as told, opened():
        pass
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]
    # With it Python finds where it was made, if it keeps that.
    assert isinstance(told[0].source, xferlib.Stager)


def test_a_call_that_contextlib_makes_is_told_of_at_the_line_of_the_program() -> None:
    stack = ExitStack()
    stack.callback(xferlib.stager, "host")
    line = sys._getframe().f_lineno + 2
    with pytest.warns(ResourceWarning, match="never closed") as told:
        stack.close()
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]


def test_at_the_end_of_the_interpreter_a_stager_is_told_of_at_the_line_that_opened_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import contextlib\nimport xferlib\n\nstack = contextlib.ExitStack()\nkept = stack.enter_context(xferlib.stager('host'))\n"
    )
    ended = run_python(f"import runpy; kept = runpy.run_path({str(program)!r})", "-W", "always::ResourceWarning")
    assert ended.returncode == 0
    (said,) = [line for line in ended.stderr.splitlines() if "never closed" in line]
    assert said.startswith(f"{program}:5: ResourceWarning: <Stager 'host'")


def test_a_close_that_was_interrupted_may_be_finished() -> None:
    backend = tampered()
    interrupts = [KeyboardInterrupt()]

    class Interrupted:
        def __init__(self, event: Any) -> None:
            self.done = event.done
            self.stream_wait = event.stream_wait
            self._event = event

        def synchronize(self) -> None:
            if interrupts:
                raise interrupts.pop()
            self._event.synchronize()

    backend.record_h2d = lambda: Interrupted(backend.inner.record_h2d())
    stager = xferlib.stager(backend)
    with held(backend.inner.h2d) as gate:
        transfer = stager.put(np.ones(1000))
        with pytest.raises(KeyboardInterrupt):
            stager.close()
        with pytest.raises(xferlib.ClosedError):
            stager.put(np.ones(3))
        gate.set()
        stager.close()
    assert transfer.done()
    with pytest.raises(xferlib.ClosedError):
        backend.inner.h2d.record()


@pytest.mark.parametrize("step", ["close", "free_pinned"])
def test_a_close_that_failed_half_way_has_done_the_rest_and_is_not_done_again(step: str) -> None:
    backend = tampered()
    calls: list[str] = []

    def fails(*args: object) -> None:
        calls.append(step)
        getattr(backend.inner, step)(*args)
        raise KeyboardInterrupt

    setattr(backend, step, fails)
    stager = xferlib.stager(backend)
    stager.put(stager.empty_pinned(3 << 20, np.uint8)).synchronize()
    with pytest.raises(KeyboardInterrupt):
        stager.close()
    stager.close()
    assert calls == [step]
    figures = backend.inner.memory.calls()
    assert figures.device_allocations == figures.device_frees
    assert figures.pinned_allocations == figures.pinned_frees
    with pytest.raises(xferlib.ClosedError):
        backend.inner.h2d.record()


def test_a_backend_that_has_no_close_keeps_nothing_else_open() -> None:
    class NoClose(Tampered):
        def __getattribute__(self, name: str) -> Any:
            if name == "close":
                raise LookupError(name)
            return super().__getattribute__(name)

    backend: Any = NoClose({})
    stager = xferlib.stager(backend)
    array = stager.empty_pinned(1000, np.uint8)
    with pytest.raises(LookupError, match="close"):
        stager.close()
    assert stager._resources.ledger not in all_ledgers()
    del array
    calls = backend.inner.memory.calls
    assert until(lambda: calls().pinned_allocations == calls().pinned_frees)
    backend.inner.close()


def test_of_a_refused_constructor_nothing_keeps_the_backend() -> None:
    """Though no stager was opened before."""
    succeeds(
        """
        import gc, weakref, xferlib
        from tests.core.fakes import tampered, until
        backend = tampered()
        kept = weakref.ref(backend)
        try:
            xferlib.Stager(backend, pinned_limit=-1)
        except ValueError:
            pass
        backend.inner.close()
        del backend
        gc.collect()
        assert until(lambda: kept() is None, 2)
        """
    )


def test_a_refused_constructor_says_nothing_when_it_is_dropped(recwarn: pytest.WarningsRecorder) -> None:
    backend = tampered()
    with pytest.raises(ValueError, match="pinned_limit"):
        xferlib.Stager(backend, pinned_limit=0)
    gc.collect()
    backend.close()
    assert not recwarn.list


@pytest.mark.parametrize("engine", ["h2d", "d2h"])
def test_a_stager_that_dies_in_the_collector_of_its_own_engine_does_not_hang(engine: str) -> None:
    succeeds(
        f"""
        import gc, threading, warnings, numpy as np, xferlib
        warnings.simplefilter("ignore")
        gc.disable()
        s = xferlib.stager("host")
        backend, gate = s.backend, threading.Event()
        backend.{engine}.submit(gate.wait)
        backend.{engine}.submit(gc.collect)
        transfers = s.put(s.empty_pinned(10, "u1")), s.get(np.ones(3), out=np.zeros(3))
        cycle = [s]
        cycle.append(cycle)
        del cycle, s
        gate.set()
        for transfer in transfers:
            transfer.synchronize()
        """
    )


def test_a_stager_that_dies_in_the_collector_of_a_thread_that_makes_its_copies_does_not_hang() -> None:
    succeeds(
        """
        import gc, threading, warnings, numpy as np, xferlib
        from tests.core.fakes import tampered
        warnings.simplefilter("ignore")
        gc.disable()
        backend = tampered()
        class Collects:
            def __init__(self, event):
                self.event, self.done = event, event.done
            def synchronize(self):
                if threading.current_thread().name == "xferlib-dispatcher":
                    gc.collect()
                self.event.synchronize()
        backend.record_d2h = lambda: Collects(backend.inner.record_d2h())
        gate = threading.Event()
        backend.inner.d2h.submit(gate.wait)
        s = xferlib.stager(backend)
        out = np.zeros(3)
        transfer = s.get(np.ones(3), out=out)
        cycle = [s]
        cycle.append(cycle)
        del cycle, s
        transfer2 = None
        gate.set()
        transfer.synchronize()
        assert out.all()
        """
    )


def test_the_interpreter_ends_without_close() -> None:
    succeeds(
        """
        import numpy as np, xferlib
        s = xferlib.stager("host")
        keep = s.put(np.ones(1 << 20)), s.get(np.ones(1 << 20), out=np.zeros(1 << 20)), s.empty_pinned(5, "u1"), s.pin(np.zeros(3))
        """
    )


def test_the_interpreter_closes_all_stagers_where_warnings_are_errors() -> None:
    ended = run_python(
        """
        import atexit, xferlib
        from tests.core.fakes import tampered
        stagers = []
        for n in range(2):
            backend = tampered()
            backend.close = lambda n=n, close=backend.inner.close: (close(), print("closed", n))
            stagers.append(xferlib.stager(backend))
        """,
        "-W",
        "error::ResourceWarning",
    )
    assert ended.returncode == 0
    assert sorted(ended.stdout.split("\n")) == ["", "closed 0", "closed 1"]


@pytest.mark.parametrize(
    "body",
    [
        "del stager",
        "threading.Thread(target=stager.close, daemon=True).start()",
        """
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    stager.close()
except KeyboardInterrupt:
    pass
""",
    ],
    ids=["dropped", "on_a_daemon_thread", "interrupted"],
)
def test_the_interpreter_waits_for_a_closing_that_is_under_way(body: str) -> None:
    """It would end in the middle of calls of the driver."""
    code = """
import signal, threading, time, warnings, xferlib
from tests.core.fakes import tampered
warnings.simplefilter("ignore", ResourceWarning)
begun = threading.Event()
def close():
    begun.set()
    time.sleep(0.5)
    backend.inner.close()
    print("closed")
backend = tampered(close=close)
stager = xferlib.stager(backend)
"""
    assert succeeds(f"{code}\n{body}\nassert begun.wait(5)") == "closed\n"


FORK = """
import os, sys, numpy as np, xferlib
from tests.core.fakes import tampered

def say(*words):
    if os.getpid() != parent:
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())

parent = os.getpid()
backend = tampered()
for name in ("free_pinned", "unpin", "close"):
    def call(*args, name=name, inner=getattr(backend.inner, name)):
        say("child calls", name)
        return inner(*args)
    setattr(backend, name, call)

class Block:
    def __init__(self, inner):
        self.inner, self.address, self.nbytes, self.ready = inner, inner.address, inner.nbytes, None
    def __del__(self):
        say("child frees a block")

backend.alloc_device = lambda nbytes: Block(backend.inner.alloc_device(nbytes))
"""


@pytest.mark.parametrize(
    "body",
    [
        "s.put(np.ones(3))",
        "s.get(np.ones(3))",
        "s.empty_pinned(3, 'u1')",
        "s.pin(np.ones(3))",
        "s.trim()",
    ],
)
def test_a_forked_child_is_refused(body: str) -> None:
    said = succeeds(
        f"""
        import os, sys, numpy as np, xferlib
        with xferlib.stager("host") as s:
            x = s.put(np.ones(3)).result()
            pid = os.fork()
            if not pid:
                try:
                    {body}
                except xferlib.BackendUnavailableError as error:
                    print(error)
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            s.put(np.ones(3)).synchronize()
        """
    )
    assert said == (
        "backend 'host' cannot run here: this process was forked after the stager was opened. "
        "Open stagers in the child, and start processes with the spawn or forkserver method\n"
    )


@pytest.mark.parametrize("closed", [False, True])
def test_a_forked_child_frees_nothing_of_its_parent_s(closed: bool) -> None:
    said = succeeds(
        FORK
        + f"""
s = xferlib.stager(backend)
pinned, device = s.empty_pinned(3 << 20, "u1"), s.put(np.ones(3)).result()
idle = s.put(np.zeros(100_000)).result()
del idle
if {closed}:
    s.close()
pid = os.fork()
if not pid:
    del pinned, device
    s.close()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
s.close()
"""
    )
    assert said == ""


def test_a_forked_child_leaves_the_block_of_a_pin_without_touching_it() -> None:
    said = succeeds(
        FORK
        + """
pid = 0
with xferlib.stager(backend) as s, s.pin(np.ones(1000)) as x:
    s.put(x).synchronize()
    pid = os.fork()
    if not pid:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    )
    assert said == ""


def test_a_forked_child_keeps_memory_that_its_parent_has_locked() -> None:
    """Whatever gave it to the caller may ask a driver when it is to be freed."""
    said = succeeds(
        FORK
        + """
import gc, weakref
s = xferlib.stager(backend)
array = np.ones(1000)
pin, memory = s.pin(array), weakref.ref(array)
pid = os.fork()
if not pid:
    del array, pin
    s.close()
    del s
    gc.collect()
    os._exit(0 if memory() is not None else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
pin.close()
s.close()
"""
    )
    assert said == ""


def test_a_forked_child_that_ends_by_itself_says_nothing_of_its_parents_stagers() -> None:
    succeeds(
        """
        import os, sys, warnings, xferlib
        warnings.simplefilter("always", ResourceWarning)
        with xferlib.stager("host") as kept:
            pid = os.fork()
            if not pid:
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """
    )


def test_a_forked_child_asks_nothing_for_a_stream_known_by_its_handle() -> None:
    said = succeeds(
        FORK
        + """
from xferlib.protocol import Stream
backend.retire = lambda streams: say("child retires")
with xferlib.stager(backend) as s:
    transfer = s.put(np.ones(3))
    transfer._note_stream(7, Stream(7, None))
    x = transfer.result()
    del transfer
    pid = os.fork()
    if not pid:
        del x
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    )
    assert said == ""


def test_a_child_forked_while_copies_are_in_flight_ends() -> None:
    succeeds(
        FORK
        + """
import threading
gate = threading.Event()
backend.inner.h2d.submit(gate.wait)
with xferlib.stager(backend) as s, s.pin(np.ones(1000)) as x:
    transfer = s.put(x)
    pid = os.fork()
    if not pid:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.set()
"""
    )


@pytest.mark.parametrize("kind", ["put", "tree", "get", "empty_pinned"])
def test_close_waits_for_calls_that_are_inside(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As finalizers make them, on whatever thread the collector runs."""
    monkeypatch.setattr(MODULE, "LEAVE_SECONDS", WATCHDOG)
    gate, entered = threading.Event(), threading.Event()

    def stopped(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if armed:
                entered.set()
                gate.wait(WATCHDOG)
            return getattr(backend.inner, name)(*arguments)

        return call

    armed: list[None] = []
    names = {"put": "alloc_device", "tree": "copy_h2d", "get": "copy_d2h", "empty_pinned": "alloc_pinned"}
    backend = tampered(**{names[kind]: stopped(names[kind])})
    stager = xferlib.Stager(backend)
    values = np.arange(3000, dtype=np.int32)
    device, out, source = stager.put(values).result(), stager.empty_pinned(3000, np.int32), stager.empty_pinned(3000, np.int32)
    source[:] = values
    armed.append(None)
    calls: dict[str, Any] = {
        "put": lambda: stager.put(np.arange(100_000, dtype=np.int32)).result()[:3000],
        "tree": partial(lambda source: stager.put([source]).result()[0], source),
        "get": partial(lambda device, out: stager.get(device, out=out).result(), device, out),
        "empty_pinned": lambda: (stager.empty_pinned(8 << 20, np.uint8), values)[1],
    }
    calling = on_thread(calls[kind])
    assert entered.wait(WATCHDOG)
    closing = on_thread(stager.close)
    # Refused from here on.
    assert until(lambda: stager._refusal is not None)
    with pytest.raises(TimeoutError):
        closing.result(0.1)
    assert not stager._resources.closed
    gate.set()
    # On a thread with nothing above it, so that nobody but this test has the result.
    assert (calling.result(WATCHDOG) == values).all()
    closing.result(WATCHDOG)
    assert stager._resources.closed
    calls.clear()
    del device, out, source, calling
    gc.collect()
    assert until(lambda: stager.stats().device_nbytes == stager.stats().pinned_nbytes == 0)


def test_who_may_wait_no_time_for_callers_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        def call(self) -> None:
            entered.set()
            gate.wait(WATCHDOG)

    gate, entered, thing = threading.Event(), threading.Event(), Thing()
    slept: list[float] = []
    # A clock that has not moved on since it was asked first.
    clock = SimpleNamespace(monotonic=lambda: float(len(slept)), sleep=slept.append)
    monkeypatch.setattr("xferlib.callers.time", clock)
    calling = on_thread(thing.call)
    assert entered.wait(WATCHDOG)
    wait_for_callers(thing, {Thing.call.__code__}, 0.0)
    gate.set()
    calling.result(WATCHDOG)
    assert slept == []


def test_close_waits_no_longer_than_it_may_for_a_call_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "LEAVE_SECONDS", 0.05)
    closed, entered = threading.Event(), threading.Event()

    def copy(*arguments: int) -> None:
        entered.set()
        assert closed.wait(WATCHDOG)
        backend.inner.copy_h2d(*arguments)

    backend = tampered(copy_h2d=copy)
    stager = xferlib.Stager(backend)
    source = stager.empty_pinned(100, np.uint8)

    def put() -> str:
        with pytest.raises(xferlib.XferError) as caught:
            stager.put(source).result()
        return str(caught.value)

    putting = on_thread(put)
    assert entered.wait(WATCHDOG)
    on_thread(stager.close).result(WATCHDOG)
    closed.set()
    assert "closed" in putting.result(WATCHDOG)


def test_a_close_that_is_interrupted_goes_on_to_its_end() -> None:
    """On a thread that no interrupt comes to: else what comes behind would be left undone, and nobody would do it again."""
    told, closed = threading.Event(), threading.Event()

    def close() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]  # It has begun.
        assert told.wait(WATCHDOG)
        backend.inner.close()
        closed.set()

    backend = tampered(close=close)
    stager = xferlib.stager(backend)
    with pytest.raises(KeyboardInterrupt):
        stager.close()
    told.set()
    assert closed.wait(WATCHDOG)
    stager.close()


def test_memory_of_a_closed_stager_comes_back_though_an_idle_one_has_copied_it() -> None:
    """Nobody calls that one any more, which would let go of what its copies held."""
    owner = xferlib.stager("host")
    with xferlib.stager("host") as other:
        memory = owner.put(np.zeros(1000)).result()
        with held(other.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
            transfer = other.get(memory)
            owner.close()
            gate.set()
        transfer.synchronize()
        del memory, transfer
        gc.collect()
        assert until(lambda: owner.stats().device_nbytes == 0)


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_threads_are_asked_where_they_are(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that gave up the GIL there would leave the interpreter's list of threads locked, before Python 3.12."""
    noted, really = [], sys._current_frames

    def frames() -> Any:
        noted.append(gc.isenabled())
        return really()

    def no_memory() -> Any:
        raise MemoryError

    monkeypatch.setattr(sys, "_current_frames", frames)
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        wait_for_callers(object(), set(), 0.0)
        assert noted == [enabled and not COLLECTS_ANYWHERE]
        assert gc.isenabled() == enabled
        monkeypatch.setattr(sys, "_current_frames", no_memory)
        with pytest.raises(MemoryError):
            wait_for_callers(object(), set(), 0.0)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_who_asks_where_threads_are_keeps_no_frame() -> None:
    class Local: ...

    def ask() -> weakref.ref[Local]:
        local = Local()
        wait_for_callers(local, {ask.__code__}, 0.0)
        return weakref.ref(local)

    # Now, so that the collector does not come before the end.
    gc.collect()
    assert ask()() is None


def test_a_closed_stager_is_entered_by_nobody() -> None:
    stager = xferlib.stager("host")
    with stager:
        pass
    with pytest.raises(xferlib.ClosedError), stager:
        pytest.fail("entered")


def test_where_python_starts_no_threads_since_the_program_ends_no_stager_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    # As Python from 3.12 on refuses them in handlers of atexit.
    refuse = always_raises(RuntimeError, "can't create new thread at interpreter shutdown")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(uninterrupted, "start_new_thread", refuse)
    with pytest.raises(xferlib.BackendUnavailableError, match=r"the program ends, .*Open it, .*before the end") as caught:
        xferlib.stager("host")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_where_python_starts_no_threads_since_the_program_ends_a_stager_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stager = xferlib.stager("host")
    memory = stager.backend.memory  # type: ignore[attr-defined]  # The host backend's.
    kept = stager.put(np.ones(10)).result()
    refuse = always_raises(RuntimeError, "can't create new thread at interpreter shutdown")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(uninterrupted, "start_new_thread", refuse)
    del kept
    stager.close()
    assert memory.calls().device_allocations == memory.calls().device_frees == 1


def test_threads_that_the_system_has_no_room_for_are_no_end_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", always_raises(RuntimeError, "can't start new thread"))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        xferlib.stager("host")


def test_a_stager_that_another_thread_has_opened_is_usable_and_closed_as_the_interpreter_ends() -> None:
    said = succeeds("""
        import atexit, threading, numpy as np, xferlib

        def open_here() -> None:
            global stager
            stager = xferlib.stager("host")

        thread = threading.Thread(target=open_here)
        thread.start()
        thread.join()

        @atexit.register
        def late() -> None:
            try:
                print([int(batch[0]) for batch in xferlib.prefetch([np.ones(3)], stager)])
            except xferlib.XferError as error:
                # Python 3.12.
                assert "with stager.put" in str(error)
                print([int(stager.put(np.ones(3)).result()[0])])
            stager.close()
    """)
    assert said == "[1]\n"


def test_a_stager_that_is_wanted_as_the_interpreter_ends_is_opened_or_refused_in_words() -> None:
    said = succeeds("""
        import atexit, xferlib

        @atexit.register
        def late() -> None:
            try:
                xferlib.stager("host").close()
            except xferlib.BackendUnavailableError as error:
                # Python 3.12.
                assert "before the end" in str(error)
            print("over")
    """)
    assert said == "over\n"
