"""What the pool does when it is full, what it wastes, and what it says about both."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import psutil
import pytest

import xferlib
from tests.core.fakes import held, on_thread
from tests.memory.test_pinned_pool import MIB, U8, Driver
from xferlib.errors import AllocationError
from xferlib.memory.blocks import HostBlock, WhenFull
from xferlib.memory.pinned_pool import MOST_LOOKS, STAGING_NBYTES
from xferlib.stats import Stats


def test_with_raise_an_array_waits_for_nothing() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB, "raise")
    driver.in_flight.append(pool.take(3 * MIB))
    with pytest.raises(AllocationError, match="when_full='raise' waits for nothing"):
        pool.empty((2 * MIB,), U8)
    assert driver.in_flight
    assert (pool.waits, pool.wait_seconds) == (0, 0.0)


def test_memory_that_staging_uses_again_and_again_is_waited_for() -> None:
    """Other threads use it whenever it is asked for, and are done whenever it is asked what is under way."""
    looks: list[int] = []

    class Busy(Driver):
        def wait_for_pinned(self, owns: object) -> bool:
            looks.append(len(looks))
            if len(looks) == 20:
                blocks.clear()
            return False

    pool = Busy().pool(4 * MIB)
    blocks = [pool.take(3 * MIB)]
    assert pool.empty((2 * MIB,), U8).nbytes == 2 * MIB
    assert len(looks) == 20


@pytest.mark.parametrize("staged", [False, True])
def test_memory_that_staging_never_gives_back_is_not_waited_for_for_ever(staged: bool) -> None:
    """Nor at all where arrays have it."""
    asked: list[int] = []

    class Counting(Driver):
        def wait_for_pinned(self, owns: object) -> bool:
            asked.append(1)
            return False

    pool = Counting().pool(4 * MIB)
    held = pool.take(3 * MIB) if staged else pool.empty((3 * MIB,), U8)
    with pytest.raises(AllocationError, match="nothing is in flight"):
        pool.empty((2 * MIB,), U8)
    assert len(asked) == (MOST_LOOKS + 2 if staged else 2)
    del held


def test_what_whole_pages_take_beyond_the_limit_is_refused_at_once() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB + 1000)
    driver.in_flight.append(pool.take(MIB))
    with pytest.raises(AllocationError, match=f"more than pinned_limit={4 * MIB + 1000}"):
        pool.take(4 * MIB + 500)
    assert driver.in_flight


def test_idle_memory_of_either_kind_makes_room_and_is_freed_by_trim() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB, allocate_write_combined=driver.allocate)
    for combined in (True, False, True):
        # Dropped at once, and there is no room for the next one beside it.
        assert pool.empty((3 * MIB,), U8, write_combined=combined).nbytes == 3 * MIB
        assert driver.peak <= 4 * MIB
    pool.trim()
    assert pool.nbytes == 0
    assert driver.live == {}


@pytest.mark.parametrize("nbytes", [1, 1000, MIB, 3 * MIB])
def test_memory_of_one_kind_is_never_handed_out_as_the_other(nbytes: int) -> None:
    """Of every size: reading write-combined memory takes many times as long."""
    driver = Driver()
    combined: dict[int, int] = {}

    def combine(size: int) -> int:
        start = driver.allocate(size)
        combined[start] = size
        return start

    pool = driver.pool(64 * MIB, allocate_write_combined=combine)
    # The second of each kind finds what the first has left.
    for wanted in (True, False, True, False):
        address = pool.empty((nbytes,), U8, write_combined=wanted).ctypes.data
        assert any(start <= address < start + size for start, size in combined.items()) == wanted


@pytest.mark.parametrize("when_full", ["wait", "raise", "stage"])
def test_staging_itself_waits_whatever_arrays_do(when_full: WhenFull) -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB, when_full)
    driver.in_flight.append(pool.take(3 * MIB))
    assert pool.take(3 * MIB).nbytes == 3 * MIB
    assert not driver.in_flight
    assert pool.waits == 1
    held = pool.take(3 * MIB)
    with pytest.raises(AllocationError, match="nothing is in flight that could free more"):
        pool.take(3 * MIB)
    del held


def test_with_raise_memory_that_is_idle_is_found_and_makes_room() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB, "raise")
    assert pool.empty((4 * MIB,), U8).nbytes == 4 * MIB
    assert pool.empty((3 * MIB,), U8).nbytes == 3 * MIB
    assert pool.take(MIB).nbytes == MIB


def test_with_stage_an_array_that_finds_no_room_is_ordinary_memory() -> None:
    driver = Driver()
    pool = driver.pool(8 * MIB, "stage")
    inside = pool.empty((3 * MIB,), U8)
    outside = pool.empty((2 * MIB,), U8)
    assert pool.contains(inside.ctypes.data, inside.nbytes)
    assert not pool.contains(outside.ctypes.data, 1)
    assert pool.fallbacks == 1
    outside[:] = 7
    del inside
    assert pool.contains(pool.empty((4 * MIB,), U8).ctypes.data, 4 * MIB)
    assert pool.fallbacks == 1


def test_with_stage_an_array_beyond_the_limit_is_ordinary_memory_too() -> None:
    pool = Driver().pool(MIB, "stage")
    assert pool.empty((9 * MIB,), U8).nbytes == 9 * MIB
    assert pool.fallbacks == 1


@pytest.mark.parametrize(("limit", "share"), [(8 * MIB, 4 * MIB), (4 * STAGING_NBYTES, STAGING_NBYTES)])
def test_with_stage_arrays_leave_room_for_what_stages_them(limit: int, share: int) -> None:
    pool = Driver().pool(limit, "stage")
    arrays = []
    while not pool.fallbacks:
        arrays.append(pool.empty((MIB,), U8))
    pieces = [pool.take(MIB) for _ in range(share // MIB)]
    assert len(pieces) == share // MIB
    assert pool.waits == 0


def test_with_stage_arrays_count_with_what_rounds_them_up() -> None:
    pool = Driver().pool(8 * MIB, "stage")
    # Together they are more than 256 bytes short of their half, all of which they have.
    arrays = [pool.empty((2 * MIB - 200,), U8) for _ in range(2)]
    assert (len(arrays), pool.used_nbytes, pool.fallbacks) == (2, 4 * MIB, 0)
    assert pool.empty((1,), U8).nbytes == 1
    assert pool.fallbacks == 1


def test_with_stage_nobody_waits_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Driver().pool(2 * MIB, "stage")
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("a collection for each array that is staged"))
    assert pool.empty((2 * MIB,), U8).nbytes == 2 * MIB
    assert pool.fallbacks == 1


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="when_full is 'wait', 'raise' or 'stage', got 'hope'"):
        xferlib.stager("host", when_full="hope")  # type: ignore[arg-type]  # that is the point


def test_a_request_tells_whether_it_may_wait() -> None:
    driver = Driver()
    pool = driver.pool(4 * MIB)
    driver.in_flight.append(pool.take(3 * MIB))
    assert pool.try_take(3 * MIB) is None
    assert driver.in_flight
    block = pool.try_take(MIB)
    assert block is not None
    assert block.nbytes == MIB
    assert driver.frees == 0


def test_waiting_is_counted_and_timed() -> None:
    with xferlib.stager("host", pinned_limit=4 * MIB) as stager:
        array = stager.empty_pinned(3 * MIB, np.uint8)
        with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
            stager.put(array)
            del array
            waiting = on_thread(lambda: stager.empty_pinned(3 * MIB, np.uint8))
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            gate.set()
            waiting.result(10)
        stats = stager.stats()
        assert stats.pool_waits >= 1
        assert 0.05 < stats.pool_wait_seconds < 20


@pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")
def test_results_of_get_give_way_too() -> None:
    with xferlib.stager("host", pinned_limit=4 * MIB, when_full="stage") as stager:
        values = np.arange(MIB, dtype=np.int32)
        array = stager.put(values).result()
        results = [stager.get(array).result() for _ in range(3)]
        again = [stager.put(result).result() for result in results]
        assert all(np.array_equal(got, values) for got in [*results, *again])
        stats = stager.stats()
        assert stats.pool_fallbacks == 3
        assert stats.pinned_nbytes <= stats.pinned_limit_nbytes == 4 * MIB


SIZES = {
    "log": lambda rng, n: np.exp(rng.uniform(np.log(256), np.log(8 * MIB), n)).astype(int),
    "uniform": lambda rng, n: rng.integers(1, 4 * MIB, n),
    "small": lambda rng, n: rng.integers(1, 64 << 10, n),
    "frames": lambda rng, n: rng.integers(4 * MIB, 16 * MIB, n),
}


@pytest.mark.parametrize("kind", SIZES)
def test_random_arrays_fill_the_limit_and_waste_little_at_the_peak(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)
    limit = 256 * MIB
    driver = Driver()
    pool = driver.pool(limit, "raise")
    rng = np.random.default_rng(11)
    blocks: list[tuple[HostBlock, int]] = []
    for nbytes in SIZES[kind](rng, 12_000).tolist():
        while True:
            try:
                blocks.append((pool.take(nbytes, for_array=True), nbytes))
                break
            except AllocationError:
                blocks[rng.integers(len(blocks))] = blocks[-1]
                blocks.pop()
    figures = pool.usage()
    assert figures.peak == driver.peak <= limit
    assert figures.peak > 0.95 * limit
    assert 1 - figures.asked_peak / figures.peak < 0.05
    assert figures.asked == sum(nbytes for _, nbytes in blocks)
    blocks.clear()
    pool.trim()
    assert driver.live == {}


def test_the_figures_tell_what_is_wasted() -> None:
    with xferlib.stager("host", pinned_limit=64 * MIB) as stager:
        # A backend that page-locks nothing wastes nothing.
        stager.empty_pinned(5 * MIB, np.uint8)
        assert (stager.stats().waste, stager.stats().waste_at_peak) == (0.0, 0.0)
    figures: dict[str, Any] = dict.fromkeys(Stats.__dataclass_fields__, 0)
    stats = Stats(**figures | {"pinned_nbytes": 100, "pinned_asked_nbytes": 80})
    assert stats.waste == pytest.approx(0.2)
    stats = Stats(**figures | {"pinned_peak_nbytes": 100, "pinned_asked_peak_nbytes": 99})
    assert stats.waste_at_peak == pytest.approx(0.01)


def test_figures_may_be_asked_for_while_others_allocate() -> None:
    with xferlib.stager("host", pinned_limit=16 * MIB) as stager:
        stop = threading.Event()

        def allocate() -> None:
            while not stop.is_set():
                stager.empty_pinned(MIB, np.uint8)

        working = on_thread(allocate)
        for _ in range(500):
            stats = stager.stats()
            assert 0 <= stats.pinned_used_nbytes <= stats.pinned_limit_nbytes
        stop.set()
        working.result(10)


def test_trimmed_memory_is_back_with_the_system() -> None:
    process = psutil.Process()
    with xferlib.stager("host", pinned_limit=256 * MIB) as stager:
        before = process.memory_info().rss
        array = stager.empty_pinned(128 * MIB, np.uint8)
        array[:] = 1
        assert process.memory_info().rss - before > 120 * MIB
        del array
        assert process.memory_info().rss - before > 120 * MIB
        stager.trim()
        assert process.memory_info().rss - before < 8 * MIB
