"""Pageable memory moved by the engine: what a get waits for, addresses that stand for arrays, and computations that fail."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from xferlib_jax import conformance

from tests.core.fakes import WATCHDOG, on_thread
from tests.jax.garbage import Cycle, eventually
from xferlib.conformance import StagerConformance
from xferlib.conformance.moves import prepare
from xferlib.conformance.values import assert_same, words
from xferlib.errors import TransferError, XferError
from xferlib.stager import Stager

LARGE = 9 << 20
"""Bytes that take several chunks."""
HUGE = 80 << 20
"""Bytes that take more than all the chunks there are."""


@pytest.fixture
def cpu(stager: Stager) -> Iterator[Stager]:
    """A stager on the CPU, also where JAX computes on a GPU by default."""
    from xferlib_jax._cpu import CpuStager

    with Stager(CpuStager(conformance.bench().jax.local_devices(backend="cpu")[0])) as opened:
        yield opened


@pytest.mark.parametrize("nbytes", [LARGE, HUGE])
def test_a_get_that_is_held_holds_up_no_put_and_no_other_stager(laws: StagerConformance, stager: Stager, nbytes: int) -> None:
    other = laws.new_stager()
    values, mine = words(1, nbytes), words(2, LARGE)
    out = np.zeros_like(values)
    moves = [prepare(laws, one, way, mine) for one, way in ((stager, "put_pageable"), (other, "put_pageable"))]
    moves.append(prepare(laws, other, "get_pageable_out", mine))
    with laws.held_array(stager.backend, values) as held:
        waiting = laws.assert_returns(lambda: stager.get(held.array, out=out))
        transfers = [laws.assert_returns(move.start) for move in moves]
        for transfer in transfers:
            laws.assert_completes(transfer)
        assert not waiting.done()
        assert held.held
    waiting.synchronize()
    assert_same(out, values)
    for move, transfer in zip(moves, transfers, strict=True):
        assert_same(move.read(transfer), move.values)
    laws.calls.join(laws.deadline_seconds)
    other.close()


def test_a_get_before_one_that_is_held_comes_to_its_end(laws: StagerConformance, stager: Stager) -> None:
    values = words(1, LARGE)
    array, first, second = laws.from_numpy(values), np.zeros_like(values), np.zeros_like(values)
    laws.warm(stager, values)
    with laws.held_array(stager.backend, values) as held:
        before = laws.assert_returns(lambda: stager.get(array, out=first))
        waiting = laws.assert_returns(lambda: stager.get(held.array, out=second))
        laws.assert_completes(before)
        assert not waiting.done()
        assert held.held
    assert_same(first, values)
    waiting.synchronize()
    assert_same(second, values)


def test_what_is_placed_tells_the_copies_of_others_nothing(laws: StagerConformance, stager: Stager) -> None:
    """Nor does fresh memory hold up what is placed later, though it waits for all compute."""
    backend: Any = stager.backend
    array, values = laws.from_numpy(words(2)), words(1)
    laws.warm(stager, values)
    out = laws.pinned(stager, np.zeros_like(values))
    with laws.held_array(stager.backend, values) as held:
        block = backend.alloc_device(3 << 20)
        ready = backend.place(array)
        mark = backend.mark()
        if mark is not None:
            eventually(mark.done)
        waiting = backend.place(held.array)
        late = backend.mark()
        # A copy that waits for nothing.
        laws.assert_completes(stager.get(array, out=out))
        assert late is None or not late.done()
        assert held.held
    if late is not None:
        late.synchronize()
    assert ready.nbytes == waiting.nbytes == values.nbytes
    assert_same(out, words(2))
    backend.free_device(block)


def test_an_array_that_does_not_lie_in_c_order_is_got_in_many_chunks(laws: StagerConformance, stager: Stager) -> None:
    values = words(1, LARGE).reshape(1024, -1)
    for _, array in laws.layouts(values):
        out = np.zeros_like(values)
        stager.get(array, out=out).synchronize()
        assert_same(out, values)


@pytest.mark.parametrize("nbytes", [4096, LARGE, HUGE])
@pytest.mark.parametrize("pinned", [False, True])
def test_an_array_that_could_not_be_computed_fails_its_own_get_alone(cpu: Stager, nbytes: int, *, pinned: bool) -> None:
    bench = conformance.bench()
    if bench.device.platform != "cpu":
        pytest.skip("the bench holds work of a GPU's here")
    values = words(1, nbytes)
    before, after = bench.array(values), bench.array(words(2, nbytes))
    bench.read(before, bench.token).block_until_ready()
    outs = [cpu.empty_pinned(values.shape, values.dtype) if pinned else np.zeros_like(values) for _ in range(4)]
    with bench.hold() as hold:
        bad, good = bench.read(before, hold.token), bench.read(after, hold.token)
        transfers = [on_thread(partial(cpu.get, bad, out=outs[0])).result(WATCHDOG)] if nbytes == HUGE else []
        if not transfers:
            # On one thread, and before anybody has heard of a failure.
            transfers = [cpu.get(array, out=out) for array, out in zip((bad, good, after), outs, strict=False)]
        bad.delete()
    with pytest.raises(TransferError, match="could not be computed"):
        transfers[0].synchronize()
    for transfer, out in zip(transfers[1:], outs[1:], strict=False):
        transfer.synchronize()
        assert_same(out, words(2, nbytes))
    with pytest.raises(TransferError, match="could not be computed"):
        transfers[0].done()
    cpu.get(after, out=outs[3]).synchronize()
    assert_same(outs[3], words(2, nbytes))


def test_an_array_that_could_not_be_computed_fails_a_get_into_memory_of_both_kinds(cpu: Stager) -> None:
    bench = conformance.bench()
    if bench.device.platform != "cpu":
        pytest.skip("the bench holds work of a GPU's here")
    values = words(1, LARGE)
    before = bench.array(values)
    bench.read(before, bench.token).block_until_ready()
    for bad_one in range(2):
        outs = [np.zeros_like(values), cpu.empty_pinned(values.shape, values.dtype)]
        with bench.hold() as hold:
            pair = [bench.read(before, hold.token) for _ in range(2)]
            transfer = cpu.get(pair, out=outs)
            pair[bad_one].delete()
        with pytest.raises(TransferError, match="could not be computed"):
            transfer.synchronize()
    cpu.get(before, out=outs[0]).synchronize()
    assert_same(outs[0], values)


def test_a_finalizer_between_a_copy_and_its_event_takes_no_failure_of_the_copy(stager: Stager) -> None:
    from xferlib_jax._engine import CopyError, Engine
    from xferlib_jax._promise import Promises
    from xferlib_jax._reading import Readings

    class Broken:
        def block_until_ready(self) -> None:
            raise ArithmeticError("on purpose")

    promises = Promises(Readings(lambda: None))
    promise = promises.make(Broken())
    engine = Engine("engine", promises)
    source, target = words(1), np.zeros_like(words(1))
    events: list[Any] = []

    def act() -> None:
        engine.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
        events.append(engine.record())

    try:
        engine.copy(target.ctypes.data, promise.start, 8)
        Cycle(act)
        gc.collect()
        mine = engine.record()
        events[0].synchronize()
        with pytest.raises(CopyError, match="could not be computed"):
            mine.synchronize()
    finally:
        engine.close()
    assert_same(target, source)


def test_addresses_of_promises_stay_below_what_the_engine_can_know(stager: Stager) -> None:
    from xferlib_jax._promise import MOST, STEP, Promises
    from xferlib_jax._reading import Readings

    promises = Promises(Readings(lambda: None))
    first = promises.make(None)
    promises._numbers = itertools.count(MOST - 1)
    last, next_one = promises.make(None), promises.make(None)
    assert last.start + STEP <= 1 << 63
    # The first one's lie between, and are in use.
    assert next_one.start == first.start + STEP
    for promise in (first, last, next_one):
        assert promises.find(promise.start + STEP - 1) == (promise, STEP - 1)


def test_a_finalizer_on_an_engines_thread_is_refused_to_wait_for_pageable_memory(cpu: Stager) -> None:
    backend: Any = cpu.backend
    values = words(1, LARGE)
    array, out = conformance.bench().jax.device_put(values, backend.jax_device), np.zeros_like(values)
    gate = threading.Event()
    said: list[str] = []
    transfers: list[Any] = []

    def act() -> None:
        try:
            transfers[0].synchronize()
        except XferError as error:
            said.append(str(error))

    def collect() -> None:
        gate.wait(WATCHDOG)
        Cycle(act)
        gc.collect()

    backend.d2h.submit(collect)
    transfers.append(cpu.get(array, out=out))
    gate.set()
    on_thread(transfers[0].synchronize).result(WATCHDOG)
    assert len(said) == 1
    assert "for itself" in said[0]
    assert_same(out, values)
