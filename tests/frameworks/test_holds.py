"""What the laws lean on, on a real device: holds that hold, a watchdog that ends them, and a witness that counts memory calls."""

from __future__ import annotations

import numpy as np
import pytest

from tests.frameworks.kits.every import CUDA_KITS, given
from tests.frameworks.kits.kit import CudaKit
from xferlib.conformance import StagerConformance, cuda
from xferlib.conformance.values import assert_same, words
from xferlib.gates import gate_table
from xferlib.stager import Stager

PAGE = 4096

every_cuda_kit = given(*CUDA_KITS)


def test_held_compute_is_held_until_it_is_released(laws: StagerConformance, stager: Stager) -> None:
    array = laws.from_numpy(words(1))
    with laws.hold_compute(stager.backend) as hold:
        seen = laws.calls.start(laws.read_later(array, hold))
        laws.assert_stays(lambda: not seen.done(), hold)
        hold.release()
        assert_same(seen.result(laws.deadline_seconds), words(1))
        assert not hold.held


# JAX shows an array to nobody before its producer has ended.
@every_cuda_kit
def test_a_held_array_holds_other_values_until_it_is_released(laws: StagerConformance, stager: Stager) -> None:
    for dtype in (np.int32, np.float64, np.bool_):
        values = words(1).astype(dtype)
        with laws.held_array(stager.backend, values) as held:
            assert not (laws.to_numpy(held.array) == values).any()
            assert held.held
        assert_same(laws.to_numpy(held.array), values)


@every_cuda_kit
def test_the_watchdog_ends_a_call_that_waits_for_held_work(kit: CudaKit, stager: Stager) -> None:
    (stream, *_) = kit.bench.streams
    with pytest.raises(TimeoutError, match="the watchdog opened the gate"), cuda.hold_streams([kit.handle(stream)], seconds=0.2):
        stream.synchronize()


@every_cuda_kit
def test_a_failure_under_a_hold_says_if_the_watchdog_was_there_before(kit: CudaKit, stager: Stager) -> None:
    (stream, *_) = kit.bench.streams
    with pytest.raises(ValueError, match="of the test") as caught, cuda.hold_streams([kit.handle(stream)], seconds=0.2):
        stream.synchronize()
        raise ValueError("of the test")
    assert "the watchdog opened the gate" in caught.value.__notes__[0]


@every_cuda_kit
def test_gates_are_given_back(kit: CudaKit, stager: Stager) -> None:
    (stream, *_) = kit.bench.streams
    free = len(gate_table().free)
    for _ in range(2 * free):
        with cuda.hold_streams([kit.handle(stream)]) as hold:
            assert hold.held
    assert len(gate_table().free) == free


@every_cuda_kit
def test_the_driver_knows_page_locked_memory_from_pageable(kit: CudaKit, stager: Stager) -> None:
    raw = np.zeros(3 * PAGE, np.uint8)
    address = -(-raw.ctypes.data // PAGE) * PAGE
    assert not cuda.page_locked(address)
    kit.page_lock(address, PAGE)
    try:
        assert cuda.page_locked(address)
        assert cuda.page_locked(address + PAGE - 1)
        assert not cuda.page_locked(address + PAGE)
    finally:
        kit.page_unlock(address)
    assert not cuda.page_locked(address)


@every_cuda_kit
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this_thread", "another_thread"])
def test_each_memory_call_is_counted_once(kit: CudaKit, laws: StagerConformance, stager: Stager, elsewhere: bool) -> None:
    raw = np.zeros(3 * PAGE, np.uint8)
    page = -(-raw.ctypes.data // PAGE) * PAGE

    def six_calls() -> None:
        kit.allocate_and_free(1 << 20)
        kit.allocate_and_free_pinned(PAGE)
        kit.page_lock(page, PAGE)
        kit.page_unlock(page)

    before = laws.memory_calls(stager.backend)
    if elsewhere:
        laws.assert_returns(six_calls)
    else:
        six_calls()
    assert laws.memory_calls(stager.backend) - before == 6


@every_cuda_kit
def test_what_the_backend_allocates_is_counted(laws: StagerConformance, stager: Stager) -> None:
    before = laws.memory_calls(stager.backend)
    block = stager.backend.alloc_device(1 << 20)
    address = stager.backend.alloc_pinned(1 << 20)
    assert laws.memory_calls(stager.backend) - before == 2
    stager.backend.free_pinned(address)
    stager.backend.free_device(block)
    assert laws.memory_calls(stager.backend) - before == 4


@every_cuda_kit
def test_copies_and_events_are_no_memory_calls(kit: CudaKit, laws: StagerConformance, stager: Stager) -> None:
    values = words(1)
    laws.warm(stager, values)
    source, array = laws.pinned(stager, values), laws.from_numpy(values)
    before = laws.memory_calls(stager.backend)
    for _ in range(10):
        stager.put(source, into=array).synchronize()
        kit.record_and_wait(kit.bench.streams[0])
    assert laws.memory_calls(stager.backend) == before
