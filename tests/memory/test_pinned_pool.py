"""The bounded pool of pinned memory, against a model and in its corners."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.core.fakes import on_thread, until
from xferlib.errors import AllocationError
from xferlib.memory import pinned_pool
from xferlib.memory.blocks import HostBlock, WhenFull
from xferlib.memory.pinned_pool import PinnedPool
from xferlib.memory.ranges import Ranges
from xferlib.reaper import start_reaper

MIB = 1 << 20
U8 = np.dtype(np.uint8)


class Driver:
    """Pinned memory that is only addresses, and what is in flight."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.peak = 0
        self.frees = 0
        self.in_flight: deque[object] = deque()
        self.on_free: Callable[[], object] = lambda: None
        self.refuse_allocation: BaseException | None = None
        self.refuse_free: BaseException | None = None
        self._next = 1 << 30
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> int:
        if self.refuse_allocation is not None:
            raise self.refuse_allocation
        with self._lock:
            start = self._next
            # Side by side, as a kernel often hands memory out.
            self._next += -(-nbytes // 4096) * 4096
            self.live[start] = nbytes
            self.peak = max(self.peak, sum(self.live.values()))
        return start

    def free(self, address: int) -> None:
        self.on_free()
        if self.refuse_free is not None:
            raise self.refuse_free
        with self._lock:
            del self.live[address]
            self.frees += 1

    def wait_for_pinned(self, owns: object) -> bool:
        try:
            self.in_flight.popleft()
        except IndexError:
            return False
        return True

    def pool(self, limit: int, when_full: WhenFull = "wait", **options: Any) -> PinnedPool:
        # It also plays what the pool asks of the ledger.
        ledger: Any = self
        return PinnedPool(allocate=self.allocate, free=self.free, ledger=ledger, limit=limit, when_full=when_full, **options)


class PoolMachine(RuleBasedStateMachine):
    """Allocate, start, end, drop and trim in any order: live blocks never overlap, the limit holds, everything comes back."""

    LIMIT = 12 * MIB

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.pool = self.driver.pool(self.LIMIT)
        self.blocks: list[HostBlock] = []
        self.asked: dict[int, int] = {}
        self.most_asked = 0

    @rule(nbytes=st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.sampled_from([MIB - 1, MIB, MIB + 1, 12 * MIB])))
    def allocate(self, nbytes: int) -> None:
        try:
            block = self.pool.take(nbytes)
        except AllocationError:
            assert not self.driver.in_flight
            assert self.blocks
            return
        assert nbytes <= block.nbytes < nbytes + 256
        self.asked[block.address] = nbytes
        assert block.address % 256 == 0
        assert any(start <= block.address and block.address + block.nbytes <= start + n for start, n in self.driver.live.items())
        assert self.pool.contains(block.address, block.nbytes)
        others = [*self.blocks, *self.driver.in_flight]
        assert all(
            block.address + block.nbytes <= other.address or other.address + other.nbytes <= block.address
            for other in others
            if isinstance(other, HostBlock)
        )
        self.blocks.append(block)

    @precondition(lambda self: self.blocks)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        self.blocks.pop(which % len(self.blocks))

    @precondition(lambda self: self.blocks)
    @rule(which=st.integers(0, 99))
    def start_and_drop(self, which: int) -> None:
        self.driver.in_flight.append(self.blocks.pop(which % len(self.blocks)))

    @rule()
    def end(self) -> None:
        self.driver.wait_for_pinned(None)

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @invariant()
    def the_accounts_are_right(self) -> None:
        pinned, peak, used, asked, asked_peak = self.pool.usage()
        assert pinned == sum(self.driver.live.values()) <= self.LIMIT
        assert peak == self.driver.peak <= self.LIMIT
        held = [*self.blocks, *(block for block in self.driver.in_flight if isinstance(block, HostBlock))]
        assert used == sum(block.nbytes for block in held) <= pinned
        assert asked == sum(self.asked[block.address] for block in held) <= used
        self.most_asked = max(self.most_asked, asked)
        assert self.most_asked <= asked_peak <= peak

    def teardown(self) -> None:
        self.blocks.clear()
        self.driver.in_flight.clear()
        self.pool.trim()
        assert self.driver.live == {}
        assert self.pool.usage()[0] == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_sizes_are_exact_up_to_alignment() -> None:
    driver = Driver()
    pool = driver.pool(100 * MIB)
    block = pool.take(33 * MIB + 1)
    assert list(driver.live.values()) == [33 * MIB + 4096]
    assert block.nbytes == 33 * MIB + 256


def test_a_dropped_block_is_found_again_without_a_driver_call() -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    address = pool.take(2 * MIB).address
    assert pool.take(2 * MIB).address == address
    assert (pool.hits, pool.misses) == (1, 1)
    assert driver.frees == 0


def test_a_full_pool_waits_for_what_is_in_flight() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB)
    driver.in_flight.append(pool.take(3 * MIB))
    again = pool.take(3 * MIB)
    assert again.nbytes == 3 * MIB
    assert not driver.in_flight
    assert driver.peak <= 4 * MIB


def test_a_full_pool_says_that_what_is_free_lies_in_pieces() -> None:
    pool = Driver().pool(4 * MIB)
    pool.take(3 * MIB)
    first, second = pool.take(3 * MIB // 2 - 4096), pool.take(3 * MIB // 2 - 4096)
    with pytest.raises(AllocationError, match=r"has 3\.0 MiB of 4\.0 MiB in use by arrays, and nothing"):
        pool.take(2 * MIB)
    del first
    with pytest.raises(AllocationError, match=r"has 1\.5 MiB of 4\.0 MiB .*\(and no piece of 2\.0 MiB is free between them\)"):
        pool.take(2 * MIB)
    del second


def test_a_full_pool_raises_when_nothing_in_flight_can_help() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB)
    kept = pool.take(3 * MIB)
    with pytest.raises(AllocationError, match=r"pinned memory is full: 2\.0 MiB asked.*Raise pinned_limit"):
        pool.take(2 * MIB)
    assert pool.usage()[:3] == (3 * MIB, 3 * MIB, kept.nbytes)


def test_a_request_above_the_limit_says_so_at_once() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB)
    with pytest.raises(AllocationError, match=r"more than pinned_limit=4194304 .*, or open the stager with when_full='stage'"):
        pool.take(4 * MIB + 1)
    assert driver.peak == 0


def test_the_error_does_not_claim_that_more_is_free_than_was_asked() -> None:
    pool = Driver().pool(4 * MIB)
    small = pool.take(1)
    with pytest.raises(AllocationError) as caught:
        pool.take(3 * MIB)
    del small
    assert "4.0 MiB of 4.0 MiB free" not in str(caught.value)


def test_a_small_request_fits_what_is_left_under_the_limit() -> None:
    pool = Driver().pool(5 * MIB)
    kept = pool.take(4 * MIB)
    assert pool.take(100).nbytes == 256
    assert kept.nbytes == 4 * MIB


def test_idle_segments_are_released_to_make_room() -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    blocks = [pool.take(2 * MIB) for _ in range(4)]
    blocks.clear()
    big = pool.take(7 * MIB)
    assert driver.frees == 4
    assert list(driver.live.values()) == [big.nbytes]
    assert driver.peak == 8 * MIB


def test_arrays_in_reference_cycles_are_collected_before_failing() -> None:
    pool = Driver().pool(4 * MIB)
    gc.collect()
    cycle: list[object] = [pool.take(4 * MIB)]
    cycle.append(cycle)
    del cycle
    assert pool.take(4 * MIB).nbytes == 4 * MIB


def test_the_limit_holds_while_trim_is_still_unpinning() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB)
    pool.take(4 * MIB)
    taken: list[HostBlock] = []

    def ask_for_more() -> None:
        driver.on_free = lambda: None
        # Another thread's request, at the worst moment. It may be refused; it may not pin more than the limit.
        try:
            taken.append(pool.take(4 * MIB))
        except AllocationError:
            return

    driver.on_free = ask_for_more
    pool.trim()
    assert driver.peak <= 4 * MIB
    taken.clear()
    pool.trim()
    assert pool.usage()[:3] == (0, driver.peak, 0)


def test_a_failed_allocation_leaves_the_accounts_right() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB)
    for error in (AllocationError("no"), KeyboardInterrupt()):
        driver.refuse_allocation = error
        with pytest.raises(type(error)):
            pool.take(3 * MIB)
        assert pool.usage()[0] == 0
    driver.refuse_allocation = None
    assert pool.take(4 * MIB).nbytes == 4 * MIB


def test_a_failed_release_leaves_the_accounts_right() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB)
    pool.take(2 * MIB)
    driver.refuse_free = OSError("busy")
    with pytest.raises(OSError, match="busy"):
        pool.take(3 * MIB)
    driver.refuse_free = None
    assert pool.usage()[0] <= 2 * MIB
    assert pool.usage()[2] == 0


def test_arrays_outlive_close_and_are_unpinned_when_the_last_view_goes() -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    first, second = pool.take(MIB), pool.take(2 * MIB)
    idle = pool.take(3 * MIB)
    del idle
    start_reaper()
    pool.close()
    assert sum(driver.live.values()) == 3 * MIB
    del first
    assert until(lambda: sum(driver.live.values()) == 2 * MIB)
    del second
    assert until(lambda: driver.live == {})
    assert pool.usage()[0] == 0


def test_parts_of_a_shared_segment_outlive_close_together() -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    first, second = pool.take(100), pool.take(100)
    pool.close()
    del first
    assert pool.settle()
    assert len(driver.live) == 1
    del second
    assert not pool.settle()
    assert driver.live == {}


def test_what_is_taken_back_while_close_unpins_something_else_is_unpinned() -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    live, idle = [pool.take(2 * MIB)], pool.take(3 * MIB)
    del idle

    def look() -> None:
        # Another thread that asks for figures settles it.
        live.clear()
        assert pool.usage().used == 0

    driver.on_free = look
    start_reaper()
    pool.close()
    assert until(lambda: driver.live == {})
    assert pool.usage().pinned == 0


def test_what_an_idle_stager_has_done_with_is_unpinned_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    driver.in_flight.append(pool.take(MIB))
    pool.close()
    assert pool.settle()
    monkeypatch.setattr(pinned_pool, "reap_all", lambda: driver.wait_for_pinned(None))
    assert not pool.settle()
    assert driver.live == {}


class DropsInside:
    """A lock that lets something die while it is held, as the garbage collector does."""

    def __init__(self, lock: Any, drop: Callable[[], object]) -> None:
        self._lock = lock
        self._drop: Callable[[], object] | None = drop

    def acquire(self, blocking: bool = True) -> bool:
        return bool(self._lock.acquire(blocking=blocking))

    def release(self) -> None:
        drop, self._drop = self._drop, None
        if drop is not None:
            drop()
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@pytest.mark.parametrize("call", ["close", "usage"])
def test_a_block_that_dies_inside_the_lock_after_close_is_unpinned(call: str) -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    live = [pool.take(MIB)]
    if call == "usage":
        pool.close()
    pool._lock = DropsInside(pool._lock, live.clear)  # type: ignore[assignment]  # stands in for the collector
    getattr(pool, call)()
    assert not pool.settle()
    assert driver.live == {}


def test_a_block_that_dies_inside_the_lock_is_not_lost() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB)
    live = [pool.take(4 * MIB)]
    pool._lock = DropsInside(pool._lock, live.clear)  # type: ignore[assignment]  # stands in for the collector
    pool.usage()
    assert pool.take(4 * MIB).nbytes == 4 * MIB
    assert driver.peak == 4 * MIB


def test_room_that_was_made_while_nothing_was_in_flight_is_found() -> None:
    """Another thread's copy may end between two looks: that is no reason to raise."""
    driver = Driver()
    pool = driver.pool(4 * MIB)
    kept = [pool.take(4 * MIB)]
    looks = [False, True, True, True]

    def wait(owns: object) -> bool:
        kept.clear()
        if looks and looks.pop():
            kept.append(pool.take(4 * MIB))
        return False

    driver.wait_for_pinned = wait  # type: ignore[method-assign]  # what other threads do meanwhile
    assert pool.take(4 * MIB).nbytes == 4 * MIB
    assert looks == []


def test_room_that_was_made_behind_the_last_look_is_found() -> None:
    """Also where the collector has run already, and nothing is left to be tried."""
    driver = Driver()
    pool = driver.pool(4 * MIB)
    kept = [pool.take(4 * MIB)]
    asked = 0

    def wait(owns: object) -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            kept.clear()
        return False

    driver.wait_for_pinned = wait  # type: ignore[method-assign]  # as above
    assert pool.take(4 * MIB).nbytes == 4 * MIB
    assert asked == 2


def test_what_an_interrupt_leaves_unsettled_is_settled_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without anything else having been let go of meanwhile."""
    pool = Driver().pool(16 * MIB)
    blocks = [pool.take(3 * MIB), pool.take(3 * MIB)]
    give_back, interrupts = Ranges.give_back, [KeyboardInterrupt()]

    def interrupted(ranges: Ranges, start: int, nbytes: int) -> None:
        if interrupts:
            raise interrupts.pop()
        give_back(ranges, start, nbytes)

    monkeypatch.setattr(Ranges, "give_back", interrupted)
    blocks.clear()
    with pytest.raises(KeyboardInterrupt):
        pool.usage()
    pool.usage()
    assert pool.used_nbytes == 0
    pool.trim()
    assert pool.nbytes == 0


def test_what_arrays_have_is_counted_anew_after_an_interrupt() -> None:
    """Else they would be said to have for good what they have given back, and leave staging more than its share."""

    class Cut(dict[int, Any]):
        def pop(self, *arguments: Any) -> Any:
            found = super().pop(*arguments)
            if interrupts:
                raise interrupts.pop()
            return found

    pool = Driver().pool(8 * MIB, "stage")
    array = pool.empty((4 * MIB,), U8)
    assert pool.has_arrays
    pool._segments.rows, interrupts = Cut(pool._segments.rows), [KeyboardInterrupt()]
    del array
    with pytest.raises(KeyboardInterrupt):
        pool.usage()
    pool.usage()
    assert not pool.has_arrays
    assert pool.empty((4 * MIB,), U8).nbytes == 4 * MIB
    assert pool.fallbacks == 0


@pytest.mark.parametrize("where", ["take", "trim", "usage", "grow"])
def test_a_finalizer_inside_the_pool_is_refused_and_harms_nothing(where: str) -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    kept, dropped = pool.take(2 * MIB), pool.take(2 * MIB)
    del dropped
    asked: list[None] = []
    refused: list[str] = []

    def reindex(done: Callable[[], None] = pool._segments._reindex) -> None:
        done()
        ask()

    def take_back(number: int, fences: list[Any], done: Callable[[int, list[Any]], bool] = pool._take_back) -> bool:
        ask()
        return done(number, fences)

    def ask() -> None:
        asked.append(None)
        try:
            pool.take(2 * MIB)
        except AllocationError as error:
            refused.append(str(error))

    if where in ("trim", "grow"):
        pool._segments._reindex = reindex  # type: ignore[method-assign]  # stands in for the collector
    else:
        pool._take_back = take_back  # type: ignore[method-assign]  # stands in for the collector
    calls: dict[str, Callable[[], object]] = {
        "take": lambda: pool.take(2 * MIB),
        "trim": pool.trim,
        "usage": pool.usage,
        "grow": lambda: pool.take(3 * MIB),
    }
    calls[where]()
    assert len(refused) == len(asked) > 0
    assert all("finalizer" in error for error in refused)
    vars(pool._segments if where in ("trim", "grow") else pool).pop("_reindex" if where in ("trim", "grow") else "_take_back")
    assert pool.usage()[:3] == (sum(driver.live.values()), driver.peak, kept.nbytes)
    assert pool.take(4 * MIB).nbytes == 4 * MIB


def test_finalizers_run_on_other_threads() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB)
    live = [pool.take(4 * MIB)]
    on_thread(live.clear).result(10)
    assert pool.take(4 * MIB).nbytes == 4 * MIB
    assert driver.frees == 0


def test_several_threads_never_share_a_byte() -> None:
    driver = Driver()
    pool = driver.pool(16 * MIB)
    owners: dict[int, int] = {}
    wrong: list[str] = []

    def work(seed: int) -> None:
        sizes = np.random.default_rng(seed).integers(1, 2 * MIB, 150)
        mine: deque[HostBlock] = deque()
        for nbytes in sizes:
            block = pool.take(int(nbytes))
            if owners.setdefault(block.address, seed) != seed:
                wrong.append(f"{block.address:#x}")
            mine.append(block)
            while len(mine) > 1:
                owners.pop(mine[0].address)
                mine.popleft()
        while mine:
            owners.pop(mine[0].address)
            mine.popleft()

    for future in [on_thread(lambda seed=seed: work(seed)) for seed in range(4)]:  # type: ignore[misc]  # a default binds the seed
        future.result(30)
    assert not wrong
    assert driver.peak <= 16 * MIB
    pool.trim()
    assert driver.live == {}
    assert pool.usage()[:3] == (0, driver.peak, 0)


def test_contains_knows_the_borders_of_segments() -> None:
    driver = Driver()
    pool = driver.pool(16 * MIB)
    blocks = [pool.take(2 * MIB), pool.take(2 * MIB)]
    first, second = sorted(block.address for block in blocks)
    assert second == first + 2 * MIB
    assert pool.contains(first, 2 * MIB)
    assert not pool.contains(first, 2 * MIB + 1)
    assert not pool.contains(first - 1, 2)
    assert not pool.contains(0, 1)
    blocks.clear()
    pool.trim()
    assert not pool.contains(first, 1)


def test_an_empty_array_takes_nothing() -> None:
    driver = Driver()
    pool = driver.pool(MIB)
    array = pool.empty((3, 0, 2), U8)
    assert array.shape == (3, 0, 2)
    assert driver.peak == 0


def test_a_forked_child_frees_nothing() -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB)
    block = pool.take(2 * MIB)
    pool.forget()
    pool.close()
    del block
    pool.trim()
    assert driver.frees == 0
