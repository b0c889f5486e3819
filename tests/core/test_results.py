"""Results of gets that the pool has to grow by: there at once, pageable at first, locked behind everybody's back, and once."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
import pytest
from xferlib_host import open_stager

import xferlib
from tests import children
from tests.core.fakes import WATCHDOG, on_thread
from tests.mutants.locking import LockingBackend
from xferlib.memory.pinned_pool import UNLOCKED_FROM
from xferlib.memory.proc_maps import mappings

MIB = 1 << 20
LEAF = 3 * MIB
COUNT = 4
ALONE = UNLOCKED_FROM + 4096
ROOM = 256 * MIB
Tree = list[Any]


class Gated(LockingBackend):
    """Locks no result before the gate is open: chunks have other sizes."""

    def __init__(self) -> None:
        super().__init__(open_stager(), {})
        self.failures = (*self.inner.failures, ArithmeticError)
        self.gate = threading.Event()
        self.began = threading.Event()
        self.pins: list[int] = []
        self.refuses = False

    def pin(self, address: int, nbytes: int) -> None:
        if nbytes in (LEAF, ALONE):
            self.began.set()
            assert self.gate.wait(WATCHDOG)
            if self.refuses:
                raise ArithmeticError("no more")
            self.pins.append(nbytes)
        super().pin(address, nbytes)

    def knows_all(self, arrays: Tree) -> bool:
        return all(self.is_pinned(array.ctypes.data, array.nbytes) for array in arrays)

    def knows_some(self, arrays: Tree) -> bool:
        return any(self.knows(array.ctypes.data) for array in arrays)


@pytest.fixture
def backend() -> Iterator[Gated]:
    backend = Gated()
    yield backend
    backend.gate.set()


@pytest.fixture
def stager(backend: Gated) -> Iterator[xferlib.Stager]:
    with xferlib.stager(backend, pinned_limit=ROOM) as stager:
        yield stager
        backend.gate.set()


def values(seed: int) -> Tree:
    return [np.random.default_rng((seed, index)).integers(0, 255, LEAF, np.uint8) for index in range(COUNT)]


def assert_same(found: Tree, expected: Tree) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def device_tree(stager: xferlib.Stager, tree: Tree) -> Tree:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xferlib.SynchronousTransferWarning)
        found: Tree = stager.put(tree).result()
        return found


def until(reached: Callable[[], object]) -> None:
    end = time.monotonic() + WATCHDOG
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_first_get_waits_for_no_page_lock_and_the_second_finds_pinned_memory(backend: Gated, stager: xferlib.Stager) -> None:
    tree = values(1)
    device = device_tree(stager, tree)
    transfer = stager.get(device)
    assert backend.began.wait(WATCHDOG)
    # The page-lock is held, and all the bytes are there.
    found = transfer.result()
    assert_same(found, tree)
    assert not backend.knows_some(found)
    assert stager.stats().pinned_nbytes >= COUNT * LEAF
    assert stager.stats().synchronous == COUNT
    backend.gate.set()
    stager.idle()
    assert backend.knows_all(found)
    assert_same(found, tree)
    assert backend.pins == [LEAF] * COUNT
    places = sorted(array.ctypes.data for array in found)
    del found, transfer
    again = stager.get(device).result()
    assert_same(again, tree)
    assert sorted(array.ctypes.data for array in again) == places
    assert backend.pins == [LEAF] * COUNT


def test_one_array_likewise(backend: Gated, stager: xferlib.Stager) -> None:
    (array,) = [np.arange(ALONE, dtype=np.uint8)]
    device = device_tree(stager, [array])[0]
    found = stager.get(device).result()
    np.testing.assert_array_equal(found, array)
    assert not backend.knows(found.ctypes.data)
    backend.gate.set()
    stager.idle()
    assert backend.knows_all([found])


def test_a_little_is_locked_at_once(backend: Gated, stager: xferlib.Stager) -> None:
    backend.gate.set()
    device = device_tree(stager, [np.ones(UNLOCKED_FROM // 4, np.uint8)] * 2)
    found = stager.get(device).result()
    assert backend.knows_all(found)


def test_memory_asked_for_by_name_is_pinned_when_it_is_returned(backend: Gated, stager: xferlib.Stager) -> None:
    device = device_tree(stager, values(1))
    found = stager.get(device).result()
    del found
    gc.collect()
    # Idle, and pageable: not for who asks for pinned memory.
    asked = on_thread(lambda: stager.empty_pinned(LEAF, np.uint8))
    until(lambda: backend.began.is_set())
    assert not asked.done()
    backend.gate.set()
    assert backend.knows_all([asked.result(WATCHDOG)])


def test_gets_that_follow_find_what_is_not_locked_yet(backend: Gated, stager: xferlib.Stager) -> None:
    tree = values(1)
    device = device_tree(stager, tree)
    nbytes = [0, 0]
    for turn in range(2):
        found = stager.get(device).result()
        assert_same(found, tree)
        nbytes[turn] = stager.stats().pinned_nbytes
        del found
    assert nbytes[0] == nbytes[1]
    backend.gate.set()


def test_a_result_may_be_put_at_once_and_nobody_is_warned(backend: Gated, stager: xferlib.Stager) -> None:
    tree = values(1)
    found = stager.get(device_tree(stager, tree)).result()
    # Warnings are errors here.
    assert_same(stager.put(found).result(), tree)
    backend.gate.set()
    stager.idle()
    before = stager.stats().synchronous
    assert_same(stager.put(found).result(), tree)
    assert stager.stats().synchronous == before


def test_a_strict_stager_never_meets_memory_of_its_own_that_is_pageable(backend: Gated) -> None:
    backend.gate.set()
    with xferlib.stager(backend, pinned_limit=ROOM, strict=True) as stager:
        source = stager.empty_pinned((COUNT, LEAF), np.uint8)
        source[:] = 7
        found = stager.get(stager.put(list(source)).result()).result()
        assert backend.knows_all(found)
        stager.put(found).synchronize()


def test_what_can_be_asked_of_a_get_can_be_asked_of_the_first(backend: Gated, stager: xferlib.Stager) -> None:
    tree = values(1)
    transfer = stager.get(device_tree(stager, tree))
    transfer.stream_wait()
    assert transfer.done()
    assert_same(transfer.value, tree)
    backend.gate.set()


def test_a_view_of_a_result_is_had_when_it_is_locked(backend: Gated, stager: xferlib.Stager) -> None:
    found = stager.get(device_tree(stager, values(1))).result()
    viewed = on_thread(lambda: stager.mapped(found[1]))
    assert backend.began.wait(WATCHDOG)
    assert not viewed.done()
    backend.gate.set()
    np.testing.assert_array_equal(viewed.result(WATCHDOG), found[1])


def test_a_result_that_is_to_be_locked_is_not_pinned_beside(backend: Gated, stager: xferlib.Stager) -> None:
    found = stager.get(device_tree(stager, values(1))).result()
    assert backend.began.wait(WATCHDOG)
    pinned = on_thread(lambda: stager.pin(found[-1]))
    with pytest.raises(FutureTimeout):
        pinned.result(0.05)
    backend.gate.set()
    with pytest.raises(ValueError, match="pinned already"):
        pinned.result(WATCHDOG)
    assert backend.knows_all(found)


def test_what_the_driver_refuses_stays_pageable_and_is_given_back(backend: Gated, stager: xferlib.Stager) -> None:
    tree = values(1)
    backend.refuses = True
    found = stager.get(device_tree(stager, tree)).result()
    backend.gate.set()
    stager.idle()
    assert_same(found, tree)
    assert not backend.knows_some(found)
    places = [array.ctypes.data for array in found]
    del found
    stager.trim()
    assert not any(mappings(place, LEAF) for place in places)
    backend.refuses = False
    asked = stager.empty_pinned(LEAF, np.uint8)
    assert backend.knows_all([asked])


def test_where_the_limit_has_no_room_for_staging_beside_them_results_are_locked_at_once(backend: Gated) -> None:
    backend.gate.set()
    tree = values(1)
    with xferlib.stager(backend, pinned_limit=COUNT * LEAF + 8 * MIB) as stager:
        device = device_tree(stager, tree)
        found = stager.get(device).result()
        assert backend.knows_all(found)
        assert_same(found, tree)


def test_trim_gives_back_what_nobody_has_locked_yet(backend: Gated, stager: xferlib.Stager) -> None:
    found = stager.get(device_tree(stager, values(1))).result()
    assert backend.began.wait(WATCHDOG)
    places = [array.ctypes.data for array in found]
    del found
    gc.collect()
    stager.trim()
    # One of them is being locked.
    assert sum(bool(mappings(place, LEAF)) for place in places) == 1
    backend.gate.set()
    stager.idle()
    stager.trim()
    assert not any(mappings(place, LEAF) for place in places)
    assert len(backend.pins) == 1
    assert not any(end - start >= LEAF for start, end in backend.locked.items())


@pytest.mark.parametrize("kept", [False, True])
def test_close_leaves_nothing_to_be_locked(backend: Gated, *, kept: bool) -> None:
    tree = values(1)
    with xferlib.stager(backend, pinned_limit=ROOM) as stager:
        found = stager.get(device_tree(stager, tree)).result()
        assert backend.began.wait(WATCHDOG)
        places = [array.ctypes.data for array in found]
        if not kept:
            del found
            gc.collect()
    backend.gate.set()
    if kept:
        assert_same(found, tree)
        del found
    # Now by the reaper.
    until(lambda: not any(mappings(place, LEAF) for place in places))
    assert len(backend.pins) == 1
    assert backend.locked == {}


def test_a_child_has_what_its_parent_got_and_locks_nothing(backend: Gated, stager: xferlib.Stager) -> None:
    tree = values(1)
    found = stager.get(device_tree(stager, tree)).result()
    assert backend.began.wait(WATCHDOG)
    child = children.fork()
    if not child:
        same = all(bool((one == other).all()) for one, other in zip(found, tree, strict=True))
        os._exit(0 if same and threading.active_count() == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    backend.gate.set()
    stager.idle()
    assert backend.knows_all(found)


def test_threads_that_get_while_memory_is_locked_find_their_own(backend: Gated, stager: xferlib.Stager) -> None:
    trees = [values(seed) for seed in range(3)]
    devices = [device_tree(stager, tree) for tree in trees]
    backend.gate.set()

    def get(index: int) -> None:
        for _ in range(6):
            found = stager.get(devices[index]).result()
            assert_same(found, trees[index])
            assert_same(stager.put(found).result(), trees[index])
            if index == 0:
                del found
                stager.trim()

    for future in [on_thread(lambda index=index: get(index)) for index in range(3)]:  # type: ignore[misc]
        future.result(2 * WATCHDOG)
    stager.idle()
    stager.trim()
    assert not any(end - start >= LEAF for start, end in backend.locked.items())
