"""The pinned pool where the driver refuses, or the user interrupts: no memory and no room under the limit is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.core.fakes import WATCHDOG, on_thread
from tests.memory.test_pinned_pool import MIB, Driver
from xferlib.errors import AllocationError
from xferlib.memory.pinned_pool import PinnedPool
from xferlib.memory.segments import Segment, Segments
from xferlib.memory.table import Growth


class Failing(Driver):
    """Fails the first time that memory is to be freed: before it is, as a driver that refuses, or after, as an interrupt."""

    def __init__(self, *, before: BaseException | None = None, after: BaseException | None = None) -> None:
        super().__init__()
        self._before = [before] if before else []
        self._after = [after] if after else []

    def free(self, address: int) -> None:
        if self._before:
            raise self._before.pop()
        super().free(address)
        if self._after:
            raise self._after.pop()


def idle_segments(driver: Driver) -> PinnedPool:
    """Return a pool that is full of four idle segments."""
    pool = driver.pool(8 * MIB)
    blocks = [pool.take(2 * MIB) for _ in range(4)]
    del blocks
    return pool


def ask_for_more(pool: PinnedPool) -> None:
    pool.take(8 * MIB)


@pytest.mark.parametrize("call", [PinnedPool.trim, PinnedPool.close, ask_for_more])
def test_a_segment_that_the_driver_refuses_to_free_is_the_only_one_left(call: Callable[[PinnedPool], None]) -> None:
    driver = Failing(before=OSError("busy"))
    pool = idle_segments(driver)
    with pytest.raises(OSError, match="busy"):
        call(pool)
    assert list(driver.live.values()) == [2 * MIB]
    assert pool.usage()[:3] == (2 * MIB, 8 * MIB, 0)
    assert all(pool.contains(start, nbytes) for start, nbytes in driver.live.items())
    pool.trim()
    assert driver.live == {}
    assert pool.usage()[0] == 0


def test_a_segment_that_the_driver_has_refused_to_free_is_not_freed_by_whoever_had_found_it_before() -> None:
    driver = Failing(before=OSError("busy"))
    pool = driver.pool(8 * MIB)
    pool.take(2 * MIB)
    pool._step(pool._segments.evict, None)
    (segment,) = pool._segments.freeable()
    with pytest.raises(OSError, match="busy"):
        pool._unpin(segment)
    # It may be handed out again by now.
    block = pool.take(2 * MIB)
    pool._unpin(segment)
    assert driver.live == {block.address: 2 * MIB}


def test_a_segment_that_the_driver_never_frees_keeps_no_other_locked_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said at last, when nothing else is left: what a table raises ends the looking after it."""

    class Stuck(Driver):
        def free(self, address: int) -> None:
            if address == stuck:
                raise OSError("busy")
            super().free(address)

    driver = Stuck()
    pool = driver.pool(8 * MIB)
    blocks = [pool.take(2 * MIB), pool.take(3 * MIB)]
    stuck = blocks.pop().address
    watched: list[PinnedPool] = []
    monkeypatch.setattr("xferlib.memory.pinned_pool.watch", watched.append)
    with pytest.raises(OSError, match="busy"):
        pool.close()
    assert watched == [pool]
    assert pool.settle()
    blocks.clear()
    with pytest.raises(OSError, match="busy"):
        pool.settle()
    assert list(driver.live) == [stuck]


def test_what_could_not_be_freed_is_handed_out_again() -> None:
    driver = Failing(before=OSError("busy"))
    pool = idle_segments(driver)
    with pytest.raises(OSError, match="busy"):
        pool.trim()
    assert pool.take(2 * MIB).address in driver.live
    assert pool.take(8 * MIB).nbytes == 8 * MIB


@pytest.mark.parametrize("call", [PinnedPool.trim, ask_for_more])
def test_what_may_be_gone_when_the_call_was_interrupted_is_handed_out_to_nobody(call: Callable[[PinnedPool], None]) -> None:
    driver = Failing(after=KeyboardInterrupt())
    pool = idle_segments(driver)
    with pytest.raises(KeyboardInterrupt):
        call(pool)
    assert driver.live == {}
    assert pool.usage()[0] == 0
    assert pool.take(8 * MIB).address in driver.live


def test_what_was_refused_counts_neither_for_the_peak_nor_as_a_miss() -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    driver.refuse_allocation = AllocationError("no")
    takes: list[Callable[[int], object]] = [pool.take, pool.try_take]
    for take in takes:
        with pytest.raises(AllocationError, match="no"):
            take(4 * MIB)
    assert (pool.usage().peak, pool.misses) == (0, 0)
    driver.refuse_allocation = None
    kept = pool.take(2 * MIB)
    assert (pool.usage().peak, pool.misses) == (kept.nbytes, 1)


class Gated(Driver):
    """Locks or unlocks when a gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate, self.asked = threading.Event(), threading.Event(), threading.Event()
        self.shut = ""

    def allocate(self, nbytes: int) -> int:
        self._pass("allocate")
        return super().allocate(nbytes)

    def free(self, address: int) -> None:
        self._pass("free")
        super().free(address)

    def wait_for_pinned(self, owns: object) -> bool:
        if self.shut:
            self.asked.set()
        return False

    def _pass(self, what: str) -> None:
        if what == self.shut:
            self.entered.set()
            assert self.gate.wait(WATCHDOG)


REQUESTS: list[Callable[[PinnedPool], object]] = [
    lambda pool: pool.take(8 * MIB),
    lambda pool: pool.empty((8 * MIB,), np.dtype(np.uint8)),
    lambda pool: pool.reserve(1 << 20, 8 * MIB),
]


@pytest.mark.parametrize("ask", REQUESTS, ids=["take", "empty", "reserve"])
def test_who_finds_no_room_waits_for_what_another_thread_unlocks(ask: Callable[[PinnedPool], object]) -> None:
    driver = Gated()
    pool = driver.pool(8 * MIB)
    pool.take(8 * MIB - 4096)
    driver.shut = "free"
    trimming = on_thread(pool.trim)
    assert driver.entered.wait(WATCHDOG)
    asking = on_thread(lambda: ask(pool))
    # It has looked, and found nothing in flight; or would, were it to wait for that.
    driver.asked.wait(0.2)
    with pytest.raises(TimeoutError):
        asking.result(0.1)
    driver.gate.set()
    asking.result(WATCHDOG)
    trimming.result(WATCHDOG)
    assert pool.nbytes == 8 * MIB


@pytest.mark.parametrize("ask", REQUESTS, ids=["take", "empty", "reserve"])
def test_what_an_interrupted_request_still_locks_is_had_by_the_next(ask: Callable[[PinnedPool], object]) -> None:
    driver = Gated()
    pool = driver.pool(8 * MIB)
    driver.shut = "allocate"

    def send() -> None:
        assert driver.entered.wait(WATCHDOG)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sending = on_thread(send)
    with pytest.raises(KeyboardInterrupt):
        pool.take(8 * MIB)
    sending.result(WATCHDOG)
    asking = on_thread(lambda: ask(pool))
    driver.asked.wait(0.2)
    with pytest.raises(TimeoutError):
        asking.result(0.1)
    driver.shut = ""
    driver.gate.set()
    asking.result(WATCHDOG)
    assert pool.nbytes == 8 * MIB


def test_a_finalizer_inside_the_unlocking_does_not_wait_for_its_end() -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    told: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(AllocationError) as caught:
            pool.take(8 * MIB)
        told.append(caught.value)

    pool.take(8 * MIB - 4096)
    driver.on_free = ask
    on_thread(pool.trim).result(WATCHDOG)
    assert len(told) == 1


def test_a_trim_inside_the_unlocking_of_one_segment_unlocks_the_others_once() -> None:
    driver = Driver()
    pool = idle_segments(driver)
    driver.on_free = pool.trim
    on_thread(pool.trim).result(WATCHDOG)
    assert driver.live == {}
    assert driver.frees == 4
    assert pool.nbytes == 0


def test_memory_that_is_entered_counts_once_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads ask for figures without a lock, and note peaks."""
    driver = Driver()
    pool = driver.pool(8 * MIB)
    seen: list[int] = []
    reindex = Segments._reindex

    def look(segments: Segments) -> None:
        pool.note_peaks()
        seen.extend((pool.nbytes, pool.usage().pinned))
        reindex(segments)

    monkeypatch.setattr(Segments, "_reindex", look)
    block = pool.take(6 * MIB)
    assert seen == [6 * MIB] * 2
    assert pool.usage().peak == block.nbytes


def test_a_segment_that_is_entered_while_the_reaper_looks_is_looked_at_again() -> None:
    """As one that an interrupted request still locked when its stager was closed."""
    driver = Driver()
    pool = driver.pool(8 * MIB)
    pool.close()
    segments = pool._segments
    pool._growing[7] = Growth(MIB)

    class Entered(dict[int, Segment]):
        def __len__(self) -> int:
            seen = super().__len__()
            if pool._growing.pop(7, None) is not None:
                self[7] = Segment(7, driver.allocate(MIB), MIB, segments.large)
            return seen

    segments.by_number = Entered()
    assert pool.settle()
