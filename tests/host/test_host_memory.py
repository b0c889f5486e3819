"""The tables of memory: what counts as page-locked, what is counted, and what outlives the stager."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
from xferlib_host import open_stager
from xferlib_host._memory import Calls, MemoryCallError
from xferlib_host._stager import NumpyStager

from tests.host.work import Lease, address


def test_pinned_memory_is_known_at_both_ends_until_it_is_freed(stager: NumpyStager) -> None:
    start = stager.alloc_pinned(10_000)
    assert start % 4096 == 0
    assert stager.is_pinned(start, 10_000)
    assert stager.is_pinned(start + 9_999, 1)
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
    del blocks[0]
    assert stager.memory.calls() == Calls(2, 1, 1, 0, 3, 1)
    blocks.clear()
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
    del lease, block
    stager.close()
    array[:] = 3
    assert array.sum() == 75
    stager.free_pinned(pinned)
    stager.unpin(address(pageable))
    assert gone() is not None
    assert stager.memory.calls().device_frees == 0
    del array
    assert gone() is None
    assert stager.memory.calls() == Calls(1, 1, 1, 1, 1, 1)


def test_a_block_may_outlive_its_stager_and_be_freed_on_any_thread() -> None:
    stager = open_stager()
    blocks = [stager.alloc_device(100)]
    memory = stager.memory
    stager.close()
    del stager
    thread = threading.Thread(target=blocks.clear)
    thread.start()
    thread.join()
    assert memory.calls().device_frees == 1


def test_nothing_is_ever_lost_and_a_sweep_finds_nothing(stager: NumpyStager) -> None:
    block = stager.alloc_device(1)
    stager.sweep()
    assert not stager.lost(block)
