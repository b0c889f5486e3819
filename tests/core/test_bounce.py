"""Small pageable puts pass through slots: many to a block of the pinned pool, idle ones given back where room is wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Gated, held, off_main, on_thread, tampered
from xferlib.memory.pinned_pool import SMALL
from xferlib.staging.bounce import SHARE, SIZES, SLOTS

SLOT = SIZES[0]
BLOCK = SLOTS * SLOT
SECONDS = 10.0


def numbers(nbytes: int, first: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(first, first + nbytes) % 251).astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_a_block_of_the_pool_serves_as_many_puts_as_it_has_slots(size: int) -> None:
    with xferlib.stager("host") as stager, held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        transfers = [stager.put(numbers(size - n, n)) for n in range(SLOTS)]
        assert stager._pool.usage().used == SLOTS * size
        transfers.append(stager.put(numbers(size)))
        assert stager._pool.usage().used == 2 * SLOTS * size
    for n, transfer in enumerate(transfers[:-1]):
        assert np.array_equal(transfer.result(), numbers(size - n, n))


def test_a_put_takes_the_smallest_slot_that_it_fits_into() -> None:
    small, large = SIZES
    with xferlib.stager("host") as stager, held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        used = []
        for nbytes in (small, small + 1, large, large + 1):
            stager.put(numbers(nbytes))
            used.append(stager._pool.usage().used)
    assert used[0] == SLOTS * small
    assert used[1] == used[2] == SLOTS * (small + large)
    assert SLOTS * (small + large) + large < used[3] < SLOTS * (small + large) + 2 * large


def test_under_a_small_limit_a_put_takes_what_it_needs() -> None:
    """A block of the larger slots would be more than its share."""
    small, large = SIZES
    limit = SHARE * SLOTS * large - 1
    with xferlib.stager("host", pinned_limit=limit) as stager, held(stager.backend.h2d):  # type: ignore[attr-defined]  # as above
        stager.put(numbers(small + 1))
        assert small < stager._pool.usage().used < large


def test_a_slot_is_not_used_again_while_its_copy_is_held() -> None:
    with xferlib.stager("host") as stager:
        with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
            transfers = []
            for n in range(5 * SLOTS):
                source = numbers(100, n)
                transfers.append(stager.put(source))
                source[:] = 255
                stager.trim()
        for n, transfer in enumerate(transfers):
            assert np.array_equal(transfer.result(), numbers(100, n))


def test_blocks_whose_copies_are_done_are_used_again() -> None:
    with xferlib.stager("host") as stager:
        for n in range(10 * SLOTS):
            stager.put(numbers(1, n)).synchronize()
            assert stager._pool.usage().used <= 2 * BLOCK


def test_idle_slots_go_back_when_they_are_asked_for() -> None:
    with xferlib.stager("host") as stager:
        stager.put(numbers(1)).synchronize()
        stager.trim()
        assert stager._pool.usage().used == 0
        assert stager._pool.usage().pinned == 0


def test_idle_slots_make_room_for_arrays() -> None:
    limit = SHARE * BLOCK
    with xferlib.stager("host", pinned_limit=limit) as stager:
        stager.put(numbers(1)).synchronize()
        assert stager._pool.usage().used == BLOCK
        assert stager.empty_pinned(limit, np.uint8).nbytes == limit


def test_where_the_limit_is_small_a_put_takes_what_it_needs() -> None:
    with xferlib.stager("host", pinned_limit=SHARE * BLOCK - 4096) as stager, held(stager.backend.h2d):  # type: ignore[attr-defined]
        stager.put(numbers(300))
        assert stager._pool.usage().asked == 300


def test_where_no_block_is_to_be_had_a_put_takes_what_it_needs() -> None:
    limit = SHARE * BLOCK
    with xferlib.stager("host", pinned_limit=limit) as stager:
        rest = stager.empty_pinned(limit - 4096, np.uint8)
        assert np.array_equal(stager.put(numbers(300)).result(), numbers(300))
        del rest


def test_where_the_driver_refuses_a_block_a_put_takes_what_it_needs() -> None:
    backend = tampered()
    allocate = backend.inner.alloc_pinned
    refused: list[int] = []

    def once(nbytes: int) -> int:
        if stager.stats().pool_misses:
            refused.append(nbytes)
            raise backend.inner.failures[0]("no more pages to lock")
        return int(allocate(nbytes))

    backend.alloc_pinned = once
    with xferlib.stager(backend) as stager:
        # All of the segment that small arrays share, but for less than a block of slots.
        rest = [stager.empty_pinned(SMALL - BLOCK // 4, np.uint8) for _ in range(2)]
        assert np.array_equal(stager.put(numbers(300)).result(), numbers(300))
        assert refused
        del rest


def test_room_is_waited_for_while_another_thread_fills_its_slot() -> None:
    gated = Gated(off_main)
    limit = SHARE * BLOCK
    with xferlib.stager(gated.backend, pinned_limit=limit) as stager:
        source = numbers(300)
        other = on_thread(lambda: stager.put(source))
        assert gated.entered.wait(SECONDS)
        asked = on_thread(lambda: stager.empty_pinned(limit, np.uint8))
        with pytest.raises(TimeoutError):
            asked.result(0.2)
        gated.gate.set()
        assert np.array_equal(other.result(SECONDS).value, source)
        del other
        assert asked.result(SECONDS).nbytes == limit


@pytest.mark.parametrize("nbytes", [100, SLOT + 1, SIZES[-1] + 1])
def test_the_error_of_a_copy_that_could_not_be_started_holds_no_memory(nbytes: int) -> None:
    def breaks(*_: object) -> None:
        raise OSError("no copy to be had")

    with xferlib.stager(tampered(copy_h2d=breaks, failures=(OSError,))) as stager:
        with pytest.raises(xferlib.TransferError) as caught:
            stager.put(numbers(nbytes))
        stager.trim()
        assert caught.value.__traceback__ is not None
        assert stager._pool.usage().used == 0


def test_a_small_put_records_one_event() -> None:
    recorded: list[str] = []
    backend = tampered()
    record = backend.inner.record_h2d

    def counted() -> Any:
        recorded.append("h2d")
        return record()

    backend.record_h2d = counted
    with xferlib.stager(backend) as stager:
        for tree in (numbers(10), {"image": numbers(1000), "label": numbers(8)}, numbers(100_000)):
            recorded.clear()
            stager.put(tree).synchronize()
            assert recorded == ["h2d"]
