"""Tables own memory, structs and stagers: what dies gives back nothing by itself, and hangs nobody."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from xferlib_jax import conformance

from tests.interrupts.repeated import interrupted
from tests.jax.garbage import Cycle, eventually
from xferlib.conformance.values import assert_same, words
from xferlib.stager import Stager
from xferlib.tickets import Returns, _Ticket

NBYTES = 4096


# Device memory.


def test_a_block_is_freed_by_free_device_alone_and_once(laws: conformance.TestJax, stager: Stager) -> None:
    backend: Any = laws.open()
    before = laws.memory_calls(backend)
    block = backend.alloc_device(NBYTES)
    assert laws.memory_calls(backend) == before + 1
    assert (block.nbytes, block.address % 256) == (NBYTES, 0)
    assert not backend.lost(block)
    backend.close()
    gc.collect()
    assert laws.memory_calls(backend) == before + 1
    backend.free_device(block)
    assert laws.memory_calls(backend) == before + 2
    with pytest.raises(backend.failures, match=r"Free what alloc_device returned, once"):
        backend.free_device(block)
    assert laws.memory_calls(backend) == before + 2


def test_a_block_that_nobody_has_is_freed_by_nobody(laws: conformance.TestJax, stager: Stager) -> None:
    backend: Any = laws.open()
    before = laws.memory_calls(backend)
    Cycle(lambda: None, backend.alloc_device(NBYTES))
    gc.collect()
    assert laws.memory_calls(backend) == before + 1
    backend.close()


def test_an_array_does_not_keep_the_memory_of_its_block(stager: Stager) -> None:
    """So that a block that is freed too early is a wrong byte in a test, and no secret."""
    if stager.on_gpu:
        pytest.skip("JAX's own pool is the memory there")
    backend: Any = stager.backend
    block = backend.alloc_device(NBYTES)
    memory = weakref.ref(backend.memory._blocks[block.address])
    array = backend.as_array(block, 0, (NBYTES,), np.dtype(np.uint8), after=backend.record_h2d(), lease=block)
    assert memory() is not None
    backend.free_device(block)
    assert memory() is None
    del array


def test_opening_leaves_no_block_behind(laws: conformance.TestJax, stager: Stager) -> None:
    backend: Any = laws.open()
    assert (backend.blocks_made - backend.blocks_freed if stager.on_gpu else backend.memory.blocks) == 0
    backend.close()


def test_pinned_memory_is_counted_and_freed_once(stager: Stager) -> None:
    from xferlib_jax._memory import Memory, MemoryCallError

    memory = Memory()
    address = memory.alloc_pinned(NBYTES)
    own = np.zeros(NBYTES, np.uint8)
    memory.pin(own.ctypes.data, NBYTES)
    assert memory.calls == 2
    assert memory.is_pinned(address, NBYTES)
    assert not memory.is_pinned(address, NBYTES + 1)
    for start in (own.ctypes.data, own.ctypes.data + NBYTES - 1, address):
        with pytest.raises(MemoryCallError, match="pinned already"):
            memory.pin(start, 1)
    with pytest.raises(MemoryCallError, match="no memory was pinned"):
        memory.unpin(address)
    memory.unpin(own.ctypes.data)
    memory.free_pinned(address)
    assert memory.calls == 4
    assert not memory.is_pinned(address, 1)
    for again in (memory.unpin, memory.free_pinned):
        with pytest.raises(MemoryCallError, match="once"):
            again(address)


# Structs that JAX's arrays are imported from.


@pytest.mark.parametrize("by", ["the private import", "the public one"])
def test_no_interrupt_leaves_a_lease_or_the_sweep_behind(stager: Stager, by: str) -> None:
    backend: Any = stager.backend
    capsules, imports = backend._capsules, backend._imports
    private = imports._convert
    block, event, leases, numbers = backend.alloc_device(NBYTES), backend.record_h2d(), Returns(), itertools.count()
    event.synchronize()

    def work() -> None:
        while True:
            lease: Any = leases.ticket(next(numbers))
            array = backend.as_array(block, 0, (NBYTES,), np.dtype(np.uint8), after=event, lease=lease)
            del lease, array
            backend.sweep()

    lost_before = 512 * len(capsules._chunks) - len(capsules._free) - len(capsules._live)
    if by == "the public one":
        imports._convert = None
    try:
        interrupted(work, 400)
    finally:
        imports._convert = private
    assert not capsules._sweeping.locked()

    def all_ended() -> bool:
        gc.collect()
        backend.sweep()
        tickets: list[Any] = [ticket for ticket in gc.get_objects() if isinstance(ticket, _Ticket)]
        return not [ticket for ticket in tickets if getattr(ticket.__del__, "__func__", None) == leases.put]

    eventually(all_ended)
    assert not capsules._cut_off
    # A struct is lost with an import that JAX was asked for and did not make, and with nothing else.
    lost = 512 * len(capsules._chunks) - len(capsules._free) - len(capsules._live) - lost_before
    assert 0 <= lost <= 400
    backend.free_device(block)


def test_a_finalizer_that_sweeps_inside_of_a_sweep_waits_for_nothing(stager: Stager) -> None:
    backend: Any = stager.backend
    block, event = backend.alloc_device(NBYTES), backend.record_h2d()
    event.synchronize()
    swept: list[None] = []

    class Lease:
        def __del__(self) -> None:
            backend.sweep()
            swept.append(None)

    array = backend.as_array(block, 0, (NBYTES,), np.dtype(np.uint8), after=event, lease=Lease())
    del array

    def ended() -> bool:
        backend.sweep()
        return swept == [None]

    eventually(ended)
    assert not backend._capsules._sweeping.locked()


def test_sweeps_of_several_threads_end_each_lease_once(stager: Stager) -> None:
    backend: Any = stager.backend
    capsules = backend._capsules
    block, event, leases, numbers = backend.alloc_device(NBYTES), backend.record_h2d(), Returns(), itertools.count()
    event.synchronize()

    def work() -> None:
        for _ in range(500):
            lease: Any = leases.ticket(next(numbers))
            kept = backend.as_array(block, 0, (NBYTES,), np.dtype(np.uint8), after=event, lease=lease)
            del lease
            backend.sweep()
            del kept

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def all_ended() -> bool:
        backend.sweep()
        return len(leases.unsettled()) == 1500

    eventually(all_ended)
    starts = [slot.start for slot in capsules._free]
    assert len(set(starts)) == len(starts)
    assert not set(starts) & set(capsules._live)


def test_a_lease_ends_behind_a_get_of_its_array(stager: Stager) -> None:
    """JAX lets go of what an exported capsule held only when it is asked for something else."""
    backend: Any = stager.backend
    block, leases = backend.alloc_device(NBYTES), Returns()
    event = backend.record_h2d()
    event.synchronize()
    array = backend.as_array(block, 0, (NBYTES,), np.dtype(np.uint8), after=event, lease=leases.ticket(0))
    source = backend.as_source(array)
    del array
    backend.sweep()
    assert not leases
    del source

    def ended() -> bool:
        backend.sweep()
        return bool(leases)

    eventually(ended)


# Stagers that loops share.


def test_a_hold_that_is_dropped_in_a_cycle_closes_its_stager_on_a_thread_of_its_own(stager: Stager) -> None:
    from xferlib_jax import _stagers

    device = conformance.bench().device
    first, second = _stagers.hold([device], keep=False), _stagers.hold([device], keep=False)
    (opened,) = first.stagers.values()
    assert second.stagers[device] is opened
    states: list[bool] = []
    Cycle(lambda: states.append(opened._resources.closed), first)
    del first
    gc.collect()
    assert states == [False]
    assert_same(opened.get(opened.put(words(1)).value).result(), words(1))
    Cycle(lambda: states.append(opened._resources.closed), second)
    del second
    gc.collect()
    assert states == [False, False]
    eventually(lambda: opened._resources.closed)
    assert _stagers._SHARED._rows == {}
    assert _stagers._SHARED._watches == {}


def test_a_hold_that_is_released_is_let_go_of_once(stager: Stager) -> None:
    from xferlib_jax import _stagers

    device = conformance.bench().device
    first, second = _stagers.hold([device], keep=False), _stagers.hold([device], keep=False)
    (opened,) = first.stagers.values()
    first.release()
    first.release()
    assert not opened._resources.closed
    second.release()
    assert opened._resources.closed


# Compiled functions that take trees apart.


def test_a_finalizer_that_unpacks_inside_of_another_unpacking_hangs_nobody(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    from xferlib_jax import _unpack

    from xferlib.protocol import Place

    dtype = np.dtype(np.uint8)
    others = tuple(Place(256 * number, (4,), dtype) for number in range(20))
    made: list[Any] = []

    class Recipe(_unpack._Recipe):  # type: ignore[misc]  # Final, but for this.
        def __init__(self, places: Any) -> None:
            if places is not others:
                made.append(_unpack._look(others)[1])
            super().__init__(places)

    monkeypatch.setattr(_unpack, "_recipes", {})
    monkeypatch.setattr(_unpack, "_Recipe", Recipe)
    places = tuple(Place(256 * number, (8,), dtype) for number in range(20))
    _, recipe = _unpack._look(places)
    assert recipe is not None
    assert recipe.places is places
    assert made[0].places is others
    assert _unpack._look(places)[1] is recipe
