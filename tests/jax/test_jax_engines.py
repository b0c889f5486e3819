"""Copy engines of the CPU: finalizers that run on their threads or die with them, interrupts, closing."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from xferlib_jax import conformance

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
    from xferlib_jax import _engine
    from xferlib_jax._promise import Promises
    from xferlib_jax._reading import Readings

    source, target = words(1), np.zeros_like(words(1))
    left: list[Any] = []

    def make_garbage() -> None:
        def act() -> None:
            engine.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
            left.append((engine, engine.record()))

        # One before it and one after: whichever way they are finalized, one comes behind the engine.
        Cycle(act)
        engine = _engine.Engine("engine", Promises(Readings(lambda: None)))
        # What nobody has closed is there until it is; taken out of the table, it is garbage like any other.
        assert _engine._engines.pop(id(engine)) is engine
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


def test_a_closed_engine_refuses_and_leaves_no_thread(cpu: Any) -> None:
    from xferlib_jax import _engine

    thread = cpu.h2d._thread
    assert thread.ident in _engine._threads
    cpu.h2d.close()
    cpu.h2d.close()
    assert not thread.is_alive()
    assert thread.ident not in _engine._threads
    assert id(cpu.h2d) not in _engine._engines
    for call in (cpu.record_h2d, lambda: cpu.copy_h2d(0, 0, 1)):
        with pytest.raises(ClosedError):
            call()


def test_a_job_that_is_put_while_the_engine_is_closed_is_refused(cpu: Any) -> None:
    """As by a finalizer that closes it in between: behind the mark that ends the thread nobody would be answered."""
    queue = cpu.h2d._queue

    class ClosingQueue:
        def put(self, job: Any) -> None:
            cpu.h2d._queue = queue
            cpu.h2d.close()
            queue.put(job)

    cpu.h2d._queue = ClosingQueue()
    with pytest.raises(ClosedError):
        cpu.record_h2d()


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
