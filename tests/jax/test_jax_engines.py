"""Copy engines of the CPU: finalizers that run on their threads or die with them, interrupts, closing."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from xferlib_jax import conformance

from tests.core.points import interrupted_at
from tests.interrupts.repeated import interrupted
from tests.jax.garbage import Cycle, eventually
from xferlib.conformance.values import assert_same, words
from xferlib.errors import CapabilityError, ClosedError
from xferlib.stager import Stager


@pytest.fixture
def cpu(stager: Stager) -> Any:
    """A backend on the CPU, also where JAX computes on a GPU by default."""
    from xferlib_jax._cpu import CpuStager

    backend = CpuStager(conformance.bench().jax.local_devices(backend="cpu")[0])
    yield backend
    backend.close()


class Closing:
    """A queue. Its engine is closed before a job comes in, as by another thread."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._queue = engine, engine._queue

    def put(self, job: Any) -> None:
        self._engine._queue = self._queue
        self._engine.close()
        self._queue.put(job)


def _engine_named(name: str) -> Any:
    from xferlib_jax._engine import Engine
    from xferlib_jax._promise import Promises
    from xferlib_jax._reading import Readings

    return Engine(name, Promises(Readings(lambda: None)))


def test_a_finalizer_on_an_engines_thread_may_start_copies_and_is_refused_to_wait_for_them(cpu: Any) -> None:
    source, target = words(1), np.zeros_like(words(1))
    said: list[str] = []
    events: list[Any] = []

    def act() -> None:
        cpu.copy_h2d(target.ctypes.data, source.ctypes.data, source.nbytes)
        events.append(cpu.record_h2d())
        try:
            events[0].synchronize()
        except CapabilityError as error:
            said.append(str(error))

    def collect() -> None:
        Cycle(act)
        gc.collect()

    cpu.h2d.submit(collect)
    cpu.record_h2d().synchronize()
    assert len(said) == 1
    assert "cannot wait for copies there" in said[0]
    events[0].synchronize()
    assert events[0].done()
    assert_same(target, source)


def test_an_engine_may_wait_for_an_event_of_another(cpu: Any) -> None:
    gate = threading.Event()
    cpu.d2h.submit(gate.wait)
    cpu.order_h2d(cpu.record_d2h())
    event = cpu.record_h2d()
    assert not event.done()
    gate.set()
    event.synchronize()
    assert event.done()


def test_what_waits_for_copies_that_failed_is_not_copied(cpu: Any) -> None:
    from xferlib_jax._engine import CopyError

    def fail() -> None:
        raise OSError("a cable was pulled")

    source, target = words(1), np.zeros_like(words(1))
    cpu.d2h.submit(fail)
    cpu.order_h2d(cpu.record_d2h())
    cpu.copy_h2d(target.ctypes.data, source.ctypes.data, source.nbytes)
    with pytest.raises(CopyError, match="a cable was pulled"):
        cpu.record_h2d().synchronize()
    assert not target.any()


def test_an_event_may_be_waited_for_by_many_and_interrupted(cpu: Any) -> None:
    gate = threading.Event()
    cpu.h2d.submit(gate.wait)
    event = cpu.record_h2d()
    seen: list[bool] = []

    def wait() -> None:
        event.synchronize()
        seen.append(event.done())

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    interrupted(event.synchronize, 100)
    assert not event.done()
    gate.set()
    event.synchronize()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4


def test_an_engine_in_a_cycle_still_copies_for_the_finalizers_that_die_with_it(stager: Stager) -> None:
    source, target = words(1), np.zeros_like(words(1))
    left: list[Any] = []

    def make_garbage() -> None:
        def act() -> None:
            engine.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
            left.append((engine, engine.record()))

        # One before it and one after: whichever way they are finalized, one comes behind the engine.
        Cycle(act)
        engine = _engine_named("engine")
        Cycle(act)

    # The collector would find the first of them before there is an engine to copy with.
    gc.disable()
    try:
        make_garbage()
    finally:
        gc.enable()
    gc.collect()
    assert len(left) == 2
    for _, event in left:
        eventually(event.done)
    assert_same(target, source)
    left[0][0].close()


def test_a_dropped_engine_ends_its_thread_behind_the_copies_that_it_had_started(stager: Stager) -> None:
    gate = threading.Event()
    source, target = words(1), np.zeros_like(words(1))
    engine = _engine_named("dropped")
    thread = engine._thread
    engine.submit(gate.wait)
    engine.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
    event = engine.record()
    del engine
    gate.set()
    event.synchronize()
    assert_same(target, source)
    eventually(lambda: not thread.is_alive())


def test_an_engine_whose_start_is_interrupted_at_any_point_leaves_no_error_and_no_thread_behind(stager: Stager) -> None:
    """`Thread.start` waits with locks held, which an interrupt loses."""
    for point in itertools.count(1):
        kept: list[Any] = []
        struck = interrupted_at(point, ("/threading.py", "_engine.py"), lambda: kept.append(_engine_named("cut")))  # noqa: B023  # Called in this turn alone.
        kept.clear()
        eventually(lambda: "cut" not in [thread.name for thread in threading.enumerate()])
        if not struck:
            break
    assert point >= 3


def test_a_closed_engine_refuses_and_leaves_no_thread(cpu: Any) -> None:
    from xferlib_jax import _engine

    thread = cpu.h2d._thread
    assert thread.ident in _engine._threads
    cpu.h2d.close()
    cpu.h2d.close()
    assert not thread.is_alive()
    assert thread.ident not in _engine._threads
    for call in (cpu.record_h2d, lambda: cpu.copy_h2d(0, 0, 1)):
        with pytest.raises(ClosedError):
            call()


def test_a_job_that_is_put_while_the_engine_is_closed_is_refused(cpu: Any) -> None:
    """As by a finalizer that closes it in between: behind the mark that ends the thread nobody would be answered."""
    cpu.h2d._queue = Closing(cpu.h2d)
    with pytest.raises(ClosedError):
        cpu.record_h2d()


def test_an_event_that_came_too_late_for_its_engine_keeps_neither(stager: Stager) -> None:
    engine = _engine_named("late")
    engine._queue = Closing(engine)
    with pytest.raises(ClosedError):
        engine.record()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_a_source_that_nobody_holds_is_no_address(cpu: Any) -> None:
    bench = conformance.bench()
    jax = bench.jax
    array = jax.device_put(words(1).reshape(-1, 4), jax.local_devices(backend="cpu")[0])
    promise = cpu._promises.make(array)
    start = promise.start
    found, offset = cpu._promises.find(start + 5)
    assert (found, offset) == (promise, 5)
    del promise, found
    with pytest.raises(LookupError, match="nobody holds the source"):
        cpu.copy_d2h(0, start, 4)
    assert cpu._promises.make(array).start > start
    assert len(cpu._promises._live) == 1
