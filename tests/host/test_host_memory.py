"""The tables of memory: what counts as page-locked, what is counted, and what outlives the stager."""

from __future__ import annotations

import gc
import sys
import tracemalloc
import weakref
from types import FrameType
from typing import Any

import numpy as np
import pytest
from xferlib_host import open_stager
from xferlib_host._memory import Calls, Memory, MemoryCallError
from xferlib_host._stager import NumpyStager

from tests.host.work import SECONDS, Lease, address, within

MEBI = 1 << 20
COUNTED = {
    "alloc_pinned": "pinned_allocations",
    "free_pinned": "pinned_frees",
    "pin": "pins",
    "unpin": "unpins",
    "alloc_device": "device_allocations",
    "free_device": "device_frees",
}


def test_pinned_memory_is_known_at_both_ends_until_it_is_freed(stager: NumpyStager) -> None:
    start = stager.alloc_pinned(10_000)
    assert start % 4096 == 0
    assert stager.is_pinned(start, 10_000)
    assert stager.is_pinned(start + 9_999, 1)
    assert not stager.is_pinned(start, 10_001)
    assert not stager.is_pinned(start + 1, 10_000)
    assert not stager.is_pinned(start - 1, 2)
    stager.free_pinned(start)
    assert not stager.is_pinned(start, 1)
    with pytest.raises(MemoryCallError, match="Free what alloc_pinned returned, once"):
        stager.free_pinned(start)


def test_memory_is_pinned_in_place_once(stager: NumpyStager) -> None:
    array = np.zeros(1000, np.uint8)
    start = address(array)
    assert not stager.is_pinned(start, 1000)
    stager.pin(start, 1000)
    assert stager.is_pinned(start, 1000)
    assert stager.is_pinned(start + 500, 500)
    for offset, nbytes in ((0, 1000), (999, 5), (-5, 6), (-5, 2000), (10, 1)):
        with pytest.raises(MemoryCallError, match="Unpin it first"):
            stager.pin(start + offset, nbytes)
    stager.pin(start + 1000, 1)
    stager.unpin(start + 1000)
    stager.unpin(start)
    assert not stager.is_pinned(start, 1)
    with pytest.raises(MemoryCallError, match="once"):
        stager.unpin(start)
    stager.pin(start, 1000)
    stager.unpin(start)


def test_pinned_memory_may_not_be_pinned_again(stager: NumpyStager) -> None:
    start = stager.alloc_pinned(4096)
    with pytest.raises(MemoryCallError, match="is pinned already"):
        stager.pin(start + 100, 8)
    stager.free_pinned(start)


def test_every_call_is_counted_and_refused_ones_are_not(stager: NumpyStager) -> None:
    first, second = stager.alloc_pinned(1), stager.alloc_pinned(1)
    stager.free_pinned(first)
    stager.pin(10, 5)
    with pytest.raises(MemoryCallError):
        stager.pin(12, 1)
    blocks = [stager.alloc_device(100) for _ in range(3)]
    stager.free_device(blocks.pop())
    assert stager.memory.calls() == Calls(2, 1, 1, 0, 3, 1)
    for block in blocks:
        stager.free_device(block)
    stager.unpin(10)
    stager.free_pinned(second)
    assert stager.memory.calls() == Calls(2, 2, 1, 1, 3, 3)


def test_memory_that_the_system_does_not_have_is_one_of_the_failures(stager: NumpyStager) -> None:
    for allocate in (stager.alloc_pinned, stager.alloc_device):
        with pytest.raises(MemoryCallError, match="Ask for less") as caught:
            allocate(1 << 60)
        assert isinstance(caught.value, stager.failures)
    assert sum(stager.memory.calls()) == 0


def test_memory_outlives_close() -> None:
    stager = open_stager()
    pinned, block, pageable = stager.alloc_pinned(100), stager.alloc_device(100), np.zeros(100)
    stager.pin(address(pageable), 800)
    lease = Lease()
    gone = weakref.ref(lease)
    array = stager.as_array(block, 0, (25,), np.dtype("f4"), after=stager.record_h2d(), lease=lease)
    del lease
    stager.close()
    array[:] = 3
    assert array.sum() == 75
    stager.free_pinned(pinned)
    stager.unpin(address(pageable))
    assert gone() is not None
    assert stager.memory.calls().device_frees == 0
    del array
    assert gone() is None
    stager.free_device(block)
    assert stager.memory.calls() == Calls(1, 1, 1, 1, 1, 1)


def test_a_block_is_freed_by_its_stager_alone_on_any_thread(stager: NumpyStager) -> None:
    block = stager.alloc_device(100)
    stager.alloc_device(100)
    gc.collect()
    assert stager.memory.calls().device_frees == 0
    within(SECONDS, lambda: stager.free_device(block))
    assert stager.memory.calls().device_frees == 1


def test_a_block_is_freed_once(stager: NumpyStager) -> None:
    block = stager.alloc_device(100)
    stager.free_device(block)
    with pytest.raises(MemoryCallError, match="Free what alloc_device returned, once") as caught:
        stager.free_device(block)
    assert isinstance(caught.value, stager.failures)
    # What lies at its address by now is another's.
    others = [stager.alloc_device(100) for _ in range(100)]
    with pytest.raises(MemoryCallError, match="once"):
        stager.free_device(block)
    assert stager.memory.calls() == Calls(0, 0, 0, 0, 1 + len(others), 1)


def test_an_array_keeps_no_block(stager: NumpyStager) -> None:
    tracemalloc.start()
    try:
        block = stager.alloc_device(MEBI)
        array = stager.as_array(block, 0, (MEBI,), np.dtype("u1"), after=stager.record_h2d(), lease=block)
        held = tracemalloc.get_traced_memory()[0]
        stager.free_device(block)
        assert held - tracemalloc.get_traced_memory()[0] >= MEBI
    finally:
        tracemalloc.stop()
    del array


def test_freed_memory_does_not_hold_its_values_any_more(stager: NumpyStager) -> None:
    block = stager.alloc_device(1024)
    array = stager.as_array(block, 0, (1024,), np.dtype("u1"), after=stager.record_h2d(), lease=None)
    array[:] = 1
    # The allocator may have the memory back, but must not give it away while this looks.
    (row,) = stager.memory._device.values()
    stager.free_device(block)
    assert row.memory.size >= 1024
    assert (array != 1).all()


@pytest.mark.parametrize(
    "call", ["alloc_pinned", "free_pinned", "pin", "unpin", "is_pinned", "alloc_device", "free_device", "calls"]
)
def test_a_finalizer_may_come_back_into_memory_at_any_line(stager: NumpyStager, call: str) -> None:
    memory, array = stager.memory, np.zeros(2000, np.uint8)
    pinned, block = memory.alloc_pinned(4096), memory.alloc_device(100)
    memory.pin(address(array), 1000)
    arguments: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(["alloc_pinned", "alloc_device"], (100,)),
        **{"free_pinned": (pinned,), "free_device": (block,), "unpin": (address(array),), "calls": ()},
        **dict.fromkeys(["pin", "is_pinned"], (address(array) + 1000, 500)),
    }
    came_back = []

    def come_back() -> None:
        """What a finalizer of the user's may do while its thread is in here."""
        memory.free_device(memory.alloc_device(8))
        memory.free_pinned(memory.alloc_pinned(8))
        memory.pin(1, 1)
        memory.unpin(1)
        came_back.append(memory.calls().device_frees)

    code = getattr(Memory, call).__code__

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is code:
            come_back()
            return trace
        return None

    def run() -> list[None]:
        sys.settrace(trace)
        try:
            getattr(memory, call)(*arguments[call])
        finally:
            sys.settrace(None)
        return [None]

    before = memory.calls()
    within(SECONDS, run)
    assert len(came_back) >= 2
    extra = Calls(*(len(came_back),) * 6)
    expected = [first + more + (kind == COUNTED.get(call)) for first, more, kind in zip(before, extra, Calls._fields, strict=True)]
    assert memory.calls() == Calls(*expected)


def test_nothing_is_ever_lost_and_a_sweep_finds_nothing(stager: NumpyStager) -> None:
    block = stager.alloc_device(1)
    stager.sweep()
    assert not stager.lost(block)
