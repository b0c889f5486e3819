"""Results of gets that the pool has to grow by: there at once, pageable at first, locked behind everybody's back, and once."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from xferlib_host import open_stager

import xferlib
from tests import children
from tests.core.fakes import WATCHDOG, on_thread, succeeds
from tests.core.points import interrupted_at
from tests.memory.test_pinned_pool import Driver
from tests.mutants.laws.broken import BrokenBackend
from tests.mutants.laws.locking import LockingBackend, LockingHost
from xferlib import callers, daemon
from xferlib.errors import AllocationError
from xferlib.latch import note_copy_thread
from xferlib.memory import locker, pages, pinned_pool
from xferlib.memory.locker import lock_later
from xferlib.memory.pages import HostPages
from xferlib.memory.pinned_pool import LARGE_FROM_NBYTES, UNLOCKED_FROM_NBYTES, PinnedPool
from xferlib.memory.proc_maps import mappings
from xferlib.memory.segments import Segment, Segments
from xferlib.memory.table import AtWork

MIB = 1 << 20
LEAF = 3 * MIB
COUNT = 4
ALONE = UNLOCKED_FROM_NBYTES + 4096
ROOM = 256 * MIB
TABLES = ("memory/pinned_pool.py", "memory/segments.py", "memory/table.py", "memory/ranges.py", "memory/blocks.py", "tickets.py")
Tree = list[Any]


class Gated(LockingBackend):
    """Locks no result before the gate is open: chunks have other sizes."""

    def __init__(self) -> None:
        super().__init__(open_stager(), {})
        self.failures = (*self.inner.failures, ArithmeticError)
        self.gate = threading.Event()
        self.began = threading.Event()
        self.pins: list[int] = []
        self.refuses = self.locks_by_name = self.closed_for_all = False

    def pin(self, address: int, nbytes: int) -> None:
        by_name = self.locks_by_name and threading.current_thread().name != "xferlib-locker"
        if (nbytes in (LEAF, ALONE) and not by_name) or (self.closed_for_all and nbytes == LARGE_FROM_NBYTES):
            self.began.set()
            assert self.gate.wait(WATCHDOG)
            if self.refuses:
                raise ArithmeticError("no more")
        super().pin(address, nbytes)
        if nbytes in (LEAF, ALONE):
            self.pins.append(nbytes)

    def knows_all(self, arrays: Tree) -> bool:
        return all(self.is_pinned(array.ctypes.data, array.nbytes) for array in arrays)

    def knows_some(self, arrays: Tree) -> bool:
        return any(self.knows(array.ctypes.data) for array in arrays)


class Shared(BrokenBackend):
    """The same for another stager, which does not close it."""

    def close(self) -> None:
        pass


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
    device = device_tree(stager, [np.ones(UNLOCKED_FROM_NBYTES // 4, np.uint8)] * 2)
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
    backend.locks_by_name = True
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


@pytest.mark.parametrize("for_good", [False, True])
def test_what_the_driver_refuses_is_tried_once_more_when_it_is_handed_out_again(
    backend: Gated, stager: xferlib.Stager, *, for_good: bool
) -> None:
    tree = values(1)
    device = device_tree(stager, tree)
    backend.refuses = True
    backend.gate.set()
    found = stager.get(device).result()
    stager.idle()
    assert not backend.knows_some(found)
    places = {array.ctypes.data for array in found}
    asked: list[int] = []
    pin = backend.pin

    def noted(address: int, nbytes: int) -> None:
        asked.extend([nbytes] * (address in places))
        pin(address, nbytes)

    backend.pin = noted  # type: ignore[method-assign]  # On this one alone.
    assert stager.stats().pinned_nbytes == stager._pool.nbytes - COUNT * LEAF
    backend.refuses = for_good
    for _ in range(3):
        found.clear()
        found = stager.get(device).result()
        stager.idle()
        assert_same(found, tree)
        assert {array.ctypes.data for array in found} == places
        assert backend.knows_all(found) is not for_good
    assert asked == [LEAF] * COUNT
    assert stager.stats().pinned_nbytes == stager._pool.nbytes - for_good * COUNT * LEAF


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


class Cycle:
    """Garbage whose finalizer does something, and says what came of it."""

    def __init__(self, act: Callable[[], object], outcomes: list[str]) -> None:
        self.me, self.act, self.outcomes = self, act, outcomes

    def __del__(self) -> None:
        try:
            self.act()
            self.outcomes.append("done")
        except Exception as error:
            self.outcomes.append(str(error))


ASKING: dict[str, Callable[[xferlib.Stager, Tree], object]] = {
    "idle": lambda stager, found: stager.idle(),
    "pin": lambda stager, found: stager.pin(found[-1]),
    "mapped": lambda stager, found: stager.mapped(found[-1]),
}


@pytest.mark.parametrize("how", ["by the locking thread", "by name"])
@pytest.mark.parametrize("ask", ASKING)
def test_a_finalizer_that_would_wait_for_the_lock_that_it_runs_inside_of_is_refused(
    backend: Gated, stager: xferlib.Stager, ask: str, how: str
) -> None:
    outcomes: list[str] = []
    found: Tree = []
    pin = backend.pin

    def collected(address: int, nbytes: int) -> None:
        if nbytes == LEAF and not outcomes:
            until(lambda: found)
            Cycle(lambda: ASKING[ask](stager, found), outcomes)
            gc.collect()
        pin(address, nbytes)

    backend.pin = collected  # type: ignore[method-assign]  # On this one alone.
    device = device_tree(stager, values(1))
    found += stager.get(device).result()
    if how == "by name":
        # The one that is being locked waits at the gate, and this is another thread.
        outcomes.append("not yet")
        assert backend.began.wait(WATCHDOG)
        outcomes.clear()
        asked = on_thread(lambda: stager.empty_pinned(LEAF, np.uint8))
        until(lambda: outcomes)
        backend.gate.set()
        asked.result(WATCHDOG)
    until(lambda: outcomes)
    assert "Ask from ordinary code" in outcomes[0]
    backend.gate.set()
    stager.idle()
    assert backend.knows_all(found)


def test_a_finalizer_inside_the_pool_waits_for_no_lock(backend: Gated, stager: xferlib.Stager) -> None:
    found = stager.get(device_tree(stager, values(1))).result()
    assert backend.began.wait(WATCHDOG)
    outcomes: list[str] = []

    def step() -> None:
        Cycle(stager._pool.idle, outcomes)
        gc.collect()

    on_thread(lambda: stager._pool._step(step)).result(WATCHDOG)
    assert "Ask from ordinary code" in outcomes[0]
    backend.gate.set()
    stager.idle()
    assert backend.knows_all(found)


def test_a_finalizer_inside_the_pool_waits_for_no_transfer_of_others(backend: Gated, stager: xferlib.Stager) -> None:
    device = device_tree(stager, values(1))
    backend.gate.set()
    outcomes: list[str] = []
    others: list[Any] = []

    def step() -> None:
        # It wants chunks, and so the pool.
        others.append(on_thread(lambda: stager.get(device, out=values(2)).result()))
        until(lambda: stager._ledger.jobs.d2h)
        Cycle(stager.idle, outcomes)
        gc.collect()

    stepped = on_thread(lambda: stager._pool._step(step))
    until(lambda: outcomes)
    assert "Ask from ordinary code" in outcomes[0]
    stepped.result(WATCHDOG)
    assert_same(others[0].result(WATCHDOG), values(1))


def test_a_pin_that_is_closed_inside_the_pool_waits_for_no_transfer_of_others_and_is_unlocked_soon(
    backend: Gated, stager: xferlib.Stager
) -> None:
    device, source = device_tree(stager, values(1)), values(2)
    backend.gate.set()
    pin = stager.pin(np.zeros(LEAF // 2, np.uint8))
    outcomes: list[str] = []
    others: list[Any] = []

    def step() -> None:
        # It wants chunks, and so the pool.
        others.append(on_thread(lambda: stager.get(device, out=source).result()))
        until(lambda: stager._ledger.jobs.d2h)
        Cycle(pin.close, outcomes)
        gc.collect()

    stepped = on_thread(lambda: stager._pool._step(step))
    stepped.result(WATCHDOG)
    assert outcomes == ["done"]
    others[0].result(WATCHDOG)
    until(lambda: not stager._pins._rows)
    assert not backend.knows(pin.array.ctypes.data)
    # Twice is fine.
    pin.close()


def test_a_pin_that_is_closed_by_the_locking_thread_waits_for_no_pin_that_waits_for_it(
    backend: Gated, stager: xferlib.Stager
) -> None:
    mine, outcomes, found, asked = stager.pin(np.zeros(LEAF // 2, np.uint8)), [], [], []  # type: ignore[var-annotated]  # As above.
    pin = backend.pin

    def collected(address: int, nbytes: int) -> None:
        if nbytes == LEAF and not outcomes:
            until(lambda: found)
            asked.append(on_thread(lambda: stager.pin(found[-1])))
            # It holds what pins wait for, and waits for this thread.
            until(lambda: len(stager._pins._rows) == 2 and not lock_is_free(stager._pins._changing))
            Cycle(mine.close, outcomes)
            gc.collect()
        pin(address, nbytes)

    backend.pin = collected  # type: ignore[method-assign]  # On this one alone.
    found += stager.get(device_tree(stager, values(1))).result()
    backend.gate.set()
    until(lambda: outcomes == ["done"])
    with pytest.raises(ValueError, match="pinned already"):
        asked[0].result(WATCHDOG)
    until(lambda: not stager._pins._rows)


def lock_is_free(lock: Any) -> bool:
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


@pytest.mark.parametrize("error", [TypeError, SystemExit])
def test_an_error_that_is_no_refusal_is_told_and_keeps_nobody_waiting(
    backend: Gated, stager: xferlib.Stager, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: told.append(arguments.exc_type))
    pin, numbers = backend.pin, itertools.count()

    def broken(address: int, nbytes: int) -> None:
        if nbytes == LEAF and next(numbers) == 1:
            raise error
        pin(address, nbytes)

    backend.pin = broken  # type: ignore[method-assign]  # On this one alone.
    tree = values(1)
    found = stager.get(device_tree(stager, tree)).result()
    backend.gate.set()
    # Also where nobody waits for it.
    until(lambda: sum(backend.knows_all([array]) for array in found) == COUNT - 1)
    on_thread(stager.idle).result(WATCHDOG)
    assert sorted(backend.knows_all([array]) for array in found) == [False, True, True, True]
    assert told == [error]
    assert_same(found, tree)


class Failing:
    """A table that is locked only when it is told."""

    def __init__(self) -> None:
        self.calls = 0
        self.mended = self.locked = False

    def lock_next(self) -> int:
        self.calls += 1
        if not self.mended:
            raise TypeError("settling fails")
        self.locked = True
        return 0


def test_a_table_that_raises_each_time_is_told_of_once_and_keeps_no_other_waiting(
    backend: Gated, stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: told.append(str(arguments.exc_value)))
    failing = Failing()
    lock_later(failing.lock_next)
    until(lambda: failing.calls > 3)
    backend.gate.set()
    found = stager.get(device_tree(stager, values(1))).result()
    on_thread(stager.idle).result(WATCHDOG)
    assert backend.knows_all(found)
    assert told == ["settling fails"]
    failing.mended = True
    until(lambda: failing.locked)


def test_a_table_that_raises_is_tried_again_though_others_ask_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    locker.LOCKER.start()
    failing, other = Failing(), Failing()
    other.mended = True
    lock_later(failing.lock_next)

    def again() -> bool:
        lock_later(other.lock_next)
        return failing.calls > 3

    until(again)
    failing.mended = True
    until(lambda: failing.locked)


def test_whoever_waits_for_the_lock_hears_of_tables_that_cannot_be_settled(
    backend: Gated, stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    found = stager.get(device_tree(stager, values(1))).result()
    assert backend.began.wait(WATCHDOG)

    def fail(*arguments: object) -> None:
        raise TypeError("settling fails")

    with monkeypatch.context() as patched:
        patched.setattr(stager._pool, "_mend", fail)
        stager._pool._torn = True
        with pytest.raises(TypeError, match="settling fails"):
            on_thread(stager._pool.idle).result(WATCHDOG)
    backend.gate.set()
    stager.idle()
    assert backend.knows_all(found)


def test_a_thread_that_did_not_start_is_started_by_the_next_stager(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    def refuse(*call: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(locker.LOCKER, "_started", False)
    monkeypatch.setattr(daemon, "start_new_thread", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        locker.LOCKER.start()
    monkeypatch.setattr(daemon, "start_new_thread", lambda *call: started.append(call))
    locker.LOCKER.start()
    locker.LOCKER.start()
    assert len(started) == 1


def test_a_segment_that_is_freed_meanwhile_does_not_disturb_whoever_looks_for_one_to_lock(
    backend: Gated, stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = stager._pool._segments.by_number
    stager.empty_pinned(LARGE_FROM_NBYTES, np.uint8)
    number = next(iter(segments))
    lost: list[Segment] = []
    pending: Any = Segment.pending

    def look(self: Segment) -> bool:
        if threading.current_thread().name == "xferlib-locker":
            # As who frees one does, without the lock.
            lost.extend(segments.pop(number) for _ in range(1 - len(lost)))
        return bool(pending.fget(self))

    monkeypatch.setattr(Segment, "pending", property(look))
    found = stager.get(device_tree(stager, values(1))).result()
    backend.gate.set()
    on_thread(stager.idle).result(WATCHDOG)
    assert backend.knows_all(found)
    segments[number] = lost[0]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python starts no threads any more then, and so there is no such stager")
def test_a_stager_that_is_opened_as_the_interpreter_ends_has_nothing_locked_behind_its_back() -> None:
    succeeds(
        """
        import atexit

        def get():
            backend = Gated()
            backend.gate.set()
            with xferlib.stager(backend, pinned_limit=ROOM) as stager:
                # Trees are taken apart no more.
                assert stager.get(np.full(ALONE, 7, np.uint8)).result().sum() == 7 * ALONE
                stager.idle()
                assert not backend.pins, backend.pins

        # Before the core is there, and so behind whatever it does at the end.
        atexit.register(get)
        import numpy as np
        from tests.memory.test_pinned_pool_results import ALONE, ROOM, Gated
        import xferlib
        """
    )


def test_who_finds_no_room_but_what_is_claimed_sees_that_somebody_is_at_it(
    backend: Gated, stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Segments.claim
    looks: list[bool] = []

    def look(self: Segments) -> Any:
        looks.append(bool(stager._pool._at_work))
        return claim(self)

    monkeypatch.setattr(Segments, "claim", look)
    backend.gate.set()
    found = stager.get(device_tree(stager, values(1))).result()
    stager.idle()
    assert backend.knows_all(found)
    assert looks
    assert all(looks)


def test_a_result_that_is_locked_while_it_is_put_is_warned_of_by_nobody(
    backend: Gated, stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = values(1)
    found = stager.get(device_tree(stager, tree)).result()
    frame = callers.user_frame

    def locked() -> FrameType:
        backend.gate.set()
        stager.idle()
        return frame()

    monkeypatch.setattr("xferlib.pageable_warning.user_frame", locked)
    # Warnings are errors here.
    assert_same(stager.put(found).result(), tree)
    assert backend.knows_all(found)


@pytest.mark.parametrize("strict", [False, True])
def test_another_stager_takes_a_result_as_its_own(backend: Gated, stager: xferlib.Stager, *, strict: bool) -> None:
    tree = values(1)
    found = stager.get(device_tree(stager, tree)).result()
    assert backend.began.wait(WATCHDOG)
    other = xferlib.stager(Shared(backend), pinned_limit=ROOM, strict=strict)
    with other:
        # Warnings are errors here.
        assert_same(other.put(found).result(), tree)
        pinned = on_thread(lambda: other.pin(found[-1]))
        with pytest.raises(FutureTimeout):
            pinned.result(0.05)
        backend.gate.set()
        with pytest.raises(ValueError, match="pinned already"):
            pinned.result(WATCHDOG)
    assert backend.knows_all(found)
    assert backend.pins == [LEAF] * COUNT


def test_what_a_closed_stager_left_is_pageable_memory_like_any(backend: Gated) -> None:
    with xferlib.stager(Shared(backend), pinned_limit=ROOM) as stager:
        found = stager.get(device_tree(stager, values(1))).result()
        assert backend.began.wait(WATCHDOG)
    backend.gate.set()
    with xferlib.stager(backend, pinned_limit=ROOM) as other:
        with pytest.warns(xferlib.SynchronousTransferWarning):
            other.put(found).synchronize()
        # The last one was being locked.
        with other.pin(found[0]):
            assert backend.knows_all(found[:1])


def test_where_staging_has_no_room_beside_it_idle_memory_that_is_not_locked_is_left_alone(backend: Gated) -> None:
    tree = values(1)
    with xferlib.stager(backend, pinned_limit=128 * MIB) as stager:
        pool, device = stager._pool, device_tree(stager, tree)
        stager.get(device).result()
        assert backend.began.wait(WATCHDOG)
        # Chunks, which others take the room of.
        stager._staging.release()
        until(lambda: stager.stats().pinned_used_nbytes == 0)
        backend.locks_by_name = True
        kept = [stager.empty_pinned(nbytes, np.uint8) for _, nbytes in pool._segments.large.whole()]
        while pool.nbytes < pool.limit:
            kept.append(stager.empty_pinned(min(2 * MIB, pool.limit - pool.nbytes), np.uint8))
        got = on_thread(lambda: stager.get(device).result())
        until(lambda: got.done() or pool._at_work.is_more_to_come())
        backend.gate.set()
        assert_same(got.result(WATCHDOG), tree)
        assert pool.nbytes <= pool.limit
        kept.clear()


def room_taken(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> Tree:
    """Have others take all room before a get that has its results takes its first chunk; `then` is called behind that."""
    staging, pool = stager._staging, stager._pool
    taken: Tree = []
    copy_out = staging.copy_out

    def late(*arguments: Any, **options: Any) -> Any:
        staging.release()
        taken.extend(
            stager.empty_pinned(nbytes, np.uint8)
            for ranges in (pool._segments.large, pool._segments.small)
            for _, nbytes in ranges.whole()
        )
        while pool.nbytes < pool.limit:
            taken.append(stager.empty_pinned(min(2 * MIB, pool.limit - pool.nbytes), np.uint8))
        then()
        return copy_out(*arguments, **options)

    monkeypatch.setattr(staging, "copy_out", late)
    return taken


@pytest.mark.parametrize("one", [False, True])
def test_a_get_whose_room_for_chunks_others_take_waits_until_its_results_are_locked(
    backend: Gated, monkeypatch: pytest.MonkeyPatch, *, one: bool
) -> None:
    with xferlib.stager(backend, pinned_limit=128 * MIB) as stager:
        tree = [np.random.default_rng(1).integers(0, 255, ALONE, np.uint8)] if one else values(1)
        device = device_tree(stager, tree)
        taken = room_taken(stager, monkeypatch, backend.gate.set)
        found = stager.get(device[0] if one else device).result()
        assert_same([found] if one else found, tree)
        assert backend.knows_all([found] if one else found)
        taken.clear()


def test_what_such_a_get_has_pinned_before_is_counted_once(backend: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    with xferlib.stager(backend, pinned_limit=128 * MIB) as stager:
        tree = [np.full(LARGE_FROM_NBYTES, 1, np.uint8), *values(1)]
        device = device_tree(stager, tree)
        # Idle, and locked: the first result comes to lie there.
        stager.get(device[0]).result()
        before = stager.stats().d2h_nbytes
        copied: list[int] = []
        copy = stager._gets._copy_pinned

        def noted(*arguments: Any) -> int:
            copied.append(copy(*arguments))
            return copied[-1]

        monkeypatch.setattr(stager._gets, "_copy_pinned", noted)
        taken = room_taken(stager, monkeypatch, backend.gate.set)
        assert_same(stager.get(device).result(), tree)
        assert copied == [LARGE_FROM_NBYTES]
        assert stager.stats().d2h_nbytes - before == sum(array.nbytes for array in tree)
        taken.clear()


def test_a_get_that_finds_neither_room_for_chunks_nor_locked_memory_fails(backend: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    with xferlib.stager(backend, pinned_limit=128 * MIB) as stager:
        device = device_tree(stager, values(1))
        backend.refuses = True
        taken = room_taken(stager, monkeypatch, backend.gate.set)
        with pytest.raises(AllocationError, match="pinned memory is full"):
            stager.get(device)
        taken.clear()
        monkeypatch.undo()
        assert_same(stager.get(device).result(), values(1))


def test_a_get_behind_one_that_still_has_copies_to_start_waits_for_none_of_them() -> None:
    hooks = LockingHost()
    backend = hooks.open()
    small, large = np.arange(1000, dtype=np.uint16), np.full(100 * MIB, 7, np.uint8)
    with xferlib.stager(backend, pinned_limit=2 * ROOM) as stager:
        there, large_there = device_tree(stager, [small, large])
        stager.get(there).result()
        with hooks.hold_copies(backend) as hold:
            first = stager.get(large_there)
            # More than there are chunks, and nothing goes on.
            assert stager._ledger.jobs.is_issuing()
            trees: Tree = [there, [there, there[:0]], {"x": there}]
            after: Tree = [on_thread(partial(stager.get, tree)).result(WATCHDOG) for tree in trees]
            assert not any(transfer.done() for transfer in after)
            # Each by the engine, which has each wait for what produces its arrays.
            assert len(stager._ledger.jobs.d2h) == 1 + len(after)
            hold.release()
        assert (first.result() == 7).all()
        np.testing.assert_array_equal(after[0].result(), small)
        assert_same(after[1].result(), [small, small[:0]])
        np.testing.assert_array_equal(after[2].result()["x"], small)


def test_a_thread_that_makes_the_copies_gets_without_its_own_help(backend: Gated, stager: xferlib.Stager) -> None:
    tree = values(1)
    device = device_tree(stager, tree)
    backend.locks_by_name = True

    def get() -> Any:
        note_copy_thread()
        return stager.get(device)

    found = on_thread(get).result(WATCHDOG).result()
    assert_same(found, tree)
    assert backend.knows_all(found)


@pytest.mark.parametrize(("nbytes", "at_once"), [(LARGE_FROM_NBYTES, False), (LARGE_FROM_NBYTES - 1, True)])
def test_each_array_is_large_or_locked_at_once(backend: Gated, stager: xferlib.Stager, nbytes: int, *, at_once: bool) -> None:
    tree = [np.full(nbytes, index, np.uint8) for index in range(UNLOCKED_FROM_NBYTES // LARGE_FROM_NBYTES)]
    device = device_tree(stager, tree)
    backend.closed_for_all = not at_once
    found = stager.get(device).result()
    assert backend.knows_some(found) == at_once
    assert_same(found, tree)
    backend.gate.set()
    stager.idle()
    assert backend.knows_all(found)


def test_an_interrupt_at_any_point_loses_no_memory_that_is_locked_later() -> None:
    wanted = [((nbytes,), np.dtype(np.uint8)) for nbytes in (LEAF, LEAF, 4 * LEAF)]
    for point in itertools.count(1):
        driver = Driver()
        pool = later(driver, limit=ROOM)
        kept = pool.results(wanted[:1])
        # Only addresses: nothing touches what is there.
        if not interrupted_at(point, TABLES, lambda: pool.results(wanted)):  # noqa: B023  # Called in this turn alone.
            break
        until(lambda: not pool._at_work)  # noqa: B023  # As above.
        on_thread(pool.idle).result(WATCHDOG)
        pool.trim()
        assert not pool._growing
        assert len(pool._segments.rows) == len(pool._segments.by_number) == 1
        assert list(driver.live.values()) == [LEAF]
        assert pool.nbytes == pool.used_nbytes == LEAF
        pool.close()
        del kept
        assert not pool.settle()
        assert driver.live == {}
    assert point > 50


def later(driver: Driver, **options: Any) -> PinnedPool:
    """Return a pool over memory that is only addresses, and locked later."""
    unlocked = SimpleNamespace(map=lambda sizes: [driver.allocate(nbytes) for nbytes in sizes], lock=lambda address: None)
    return driver.pool(unlocked=unlocked, **options)


def test_a_closed_pool_grows_for_no_chunks_and_maps_nothing_that_is_locked_later() -> None:
    driver = Driver()
    pool = later(driver, limit=ROOM)
    pool.close()
    # As what an interrupted call has left running asks.
    assert pool.try_take(MIB) is None
    assert driver.live == {}
    (array,) = pool.results([((4 * LEAF,), np.dtype(np.uint8))])
    assert pool.contains(array.ctypes.data, array.nbytes)


def test_a_pool_that_is_closed_before_a_segment_is_claimed_locks_it_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    pool = later(driver, limit=ROOM)
    monkeypatch.setattr(pinned_pool, "lock_later", lambda lock: None)
    (array,) = pool.results([((4 * LEAF,), np.dtype(np.uint8))])
    closes = [pool.close]

    class Closing(AtWork):  # type: ignore[misc]  # Final, but for this one test of what comes between two steps.
        def __enter__(self) -> None:
            if closes:
                closes.pop()()
            super().__enter__()

    pool._at_work = Closing()
    assert pool.lock_next() == 0
    assert not pool.contains(array.ctypes.data, array.nbytes)


def test_results_leave_to_staging_what_arrays_do() -> None:
    driver = Driver()
    pool = later(driver, limit=16 * MIB, when_full="stage")
    kept = pool.take(6 * MIB), pool.empty((4 * MIB,), np.dtype(np.uint8))
    del kept
    held = pool.empty((4 * MIB,), np.dtype(np.uint8))
    (array,) = pool.results([((6 * MIB,), np.dtype(np.uint8))])
    assert pool.fallbacks == 1
    assert not pool.owns(array.ctypes.data, array.nbytes)
    del held


def test_what_is_derived_anew_is_locked_memory_all_the_same() -> None:
    driver = Driver()
    pool = later(driver, limit=ROOM)
    kept = pool.results([((LEAF,), np.dtype(np.uint8))] * COUNT)
    on_thread(pool.idle).result(WATCHDOG)
    places = [array.ctypes.data for array in kept]
    del kept
    assert pool.usage().used == 0
    # As an error leaves it.
    pool._torn = True
    blocks = [pool.take(LEAF) for _ in places]
    assert sorted(block.address for block in blocks) == sorted(places)


def test_what_the_system_has_not_to_be_locked_later_is_asked_for_as_ever() -> None:
    def refuse(sizes: object) -> Any:
        raise AllocationError("not there")

    driver = Driver()
    pool = driver.pool(ROOM, unlocked=SimpleNamespace(map=refuse, lock=lambda address: None))
    found = pool.results([((LEAF,), np.dtype(np.uint8))] * COUNT)
    assert sorted(array.ctypes.data for array in found) == sorted(driver.live)
    assert pool.nbytes == COUNT * LEAF
    assert not pool._growing


def test_nobody_who_keeps_the_lock_from_being_made_waits_for_it(backend: Gated, stager: xferlib.Stager) -> None:
    refused: list[Exception] = []
    pin = backend.pin

    def asking(address: int, nbytes: int) -> None:
        if nbytes == LEAF:
            with pytest.raises(AllocationError, match="Ask from ordinary code") as told:
                stager.idle()
            refused.append(told.value)
        pin(address, nbytes)

    backend.pin = asking  # type: ignore[method-assign]  # On this one alone.
    found = stager.get(device_tree(stager, values(1))).result()
    assert backend.began.wait(WATCHDOG)
    # As by a finalizer that the collector has nothing to do with.
    with pytest.raises(AllocationError, match="Ask from ordinary code"):
        on_thread(lambda: stager._pool._step(stager._pool.idle)).result(WATCHDOG)
    backend.gate.set()
    stager.idle()
    assert len(refused) == COUNT
    assert backend.knows_all(found)


def test_whoever_waits_for_room_knows_results_as_the_pools_before_they_are_locked(backend: Gated, stager: xferlib.Stager) -> None:
    found = stager.get(device_tree(stager, values(1))).result()
    assert backend.began.wait(WATCHDOG)
    assert all(stager._pool.owns(array.ctypes.data, array.nbytes) for array in found)
    assert not any(stager._pool.contains(array.ctypes.data, array.nbytes) for array in found)
    backend.gate.set()


def test_what_the_driver_refuses_is_warned_of_when_it_is_put(backend: Gated, stager: xferlib.Stager) -> None:
    backend.refuses = True
    found = stager.get(device_tree(stager, values(1))).result()
    backend.gate.set()
    stager.idle()
    with pytest.warns(xferlib.SynchronousTransferWarning):
        stager.put(found).synchronize()


def test_what_is_about_to_be_given_back_is_not_locked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_pool, "lock_later", lambda lock: None)
    driver = Driver()
    pool = later(driver, limit=ROOM)
    pool.results([((LEAF,), np.dtype(np.uint8))] * COUNT)
    assert len(driver.live) == COUNT
    assert pool._step(pool._segments.evict, None)
    assert pool._step(pool._segments.claim) is None
    # Nobody waits for it, either.
    on_thread(pool.idle).result(WATCHDOG)
    pool.trim()
    assert driver.live == {}


def test_idle_waits_for_transfers_too() -> None:
    hooks = LockingHost()
    backend = hooks.open()
    with xferlib.stager(backend, pinned_limit=ROOM) as stager:
        (there,) = device_tree(stager, [np.ones(1000, np.uint8)])
        stager.get(there).result()
        with hooks.hold_copies(backend) as hold:
            transfer = stager.get(there)
            idle = on_thread(stager.idle)
            with pytest.raises(FutureTimeout):
                idle.result(0.05)
            hold.release()
        idle.result(WATCHDOG)
        assert transfer.done()


def test_others_come_to_the_driver_behind_each_lock(
    stager: xferlib.Stager, backend: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(locker, "pause_after", pauses.append)
    backend.gate.set()
    found = stager.get(device_tree(stager, values(1))).result()
    until(lambda: len(pauses) == COUNT)
    assert pauses == [LEAF] * COUNT
    assert backend.knows_all(found)


def test_of_memory_of_which_some_cannot_be_mapped_none_is(backend: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    pages_of, reserved = HostPages(backend), list[tuple[int, int]]()

    def one(at: int | None, nbytes: int, protection: int, flags: int) -> int:
        if at is not None and at > reserved[0][0] + LEAF:
            raise OSError("no more")
        found = map_one(at, nbytes, protection, flags)
        reserved.append((found, nbytes))
        return found

    map_one = pages._mapped
    monkeypatch.setattr(pages, "_mapped", one)
    with pytest.raises(AllocationError, match="no more"):
        pages_of.map([LEAF, LEAF])
    assert len(reserved) > 1
    assert not mappings(*reserved[0])
    assert not pages_of._mapped
