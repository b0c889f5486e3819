"""Small pageable puts pass through buffers: many to a block of the pinned pool, idle ones given back where room is wanted."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Gated, held, off_main, on_thread, succeeds, tampered
from xferlib.memory.blocks import PAGE
from xferlib.memory.pinned_pool import KEPT_SHARE, LARGE_FROM_NBYTES
from xferlib.staging.bounce import BUFFERS as SIZES
from xferlib.staging.bounce import COPY_STEP_NBYTES, LARGEST_BUFFER_NBYTES
from xferlib.staging.profile import StagingProfile

BUFFER = min(SIZES)
BUFFERS = SIZES[BUFFER]
BLOCK = BUFFERS * BUFFER
SECONDS = 10.0


def numbers(nbytes: int, first: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(first, first + nbytes) % 251).astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_a_block_of_the_pool_serves_as_many_puts_as_it_has_buffers(size: int) -> None:
    with xferlib.stager("host") as stager, held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        transfers = [stager.put(numbers(size - n, n)) for n in range(SIZES[size])]
        assert stager._pool.usage().used == SIZES[size] * size
        transfers.append(stager.put(numbers(size)))
        assert stager._pool.usage().used == 2 * SIZES[size] * size
    for n, transfer in enumerate(transfers[:-1]):
        assert np.array_equal(transfer.result(), numbers(size - n, n))


def test_a_put_takes_the_smallest_slot_that_it_fits_into() -> None:
    with xferlib.stager("host") as stager, held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        expected = 0
        for size, count in SIZES.items():
            expected += count * size
            for nbytes in (size - 1, size):
                stager.put(numbers(nbytes))
                assert stager._pool.usage().used == expected


def test_under_a_small_limit_a_put_takes_what_it_needs() -> None:
    """A block of the larger buffers would be more than its share."""
    small, large, *_ = SIZES
    limit = KEPT_SHARE * SIZES[large] * large - 1
    with xferlib.stager("host", pinned_limit=limit) as stager, held(stager.backend.h2d):  # type: ignore[attr-defined]  # as above
        stager.put(numbers(small + 1))
        assert small < stager._pool.usage().used < large


def test_what_is_larger_than_any_slot_passes_in_pieces() -> None:
    """Where the caller copies so much at all."""
    nbytes = 3 * LARGEST_BUFFER_NBYTES + 5
    profile = StagingProfile(2, 1 << 20, hand_off_nbytes=nbytes)
    with xferlib.stager("host", staging=profile) as stager:
        with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
            transfers = [stager.put(numbers(nbytes, n)) for n in range(2)]
            transfers.append(stager.put([numbers(nbytes - 1000), numbers(7)]))
            # A buffer for each of three pieces, and one of the smallest for what is left.
            blocks = -(-3 * len(transfers) // SIZES[LARGEST_BUFFER_NBYTES])
            assert stager._pool.usage().used == BLOCK + blocks * SIZES[LARGEST_BUFFER_NBYTES] * LARGEST_BUFFER_NBYTES
        for n, transfer in enumerate(transfers[:-1]):
            assert np.array_equal(transfer.result(), numbers(nbytes, n))
        large, small = transfers[-1].result()
        assert np.array_equal(large, numbers(nbytes - 1000))
        assert np.array_equal(small, numbers(7))


def test_many_small_arrays_that_take_more_than_any_slot_arrive() -> None:
    arrays = [numbers(12_000, n) for n in range(100)]
    with xferlib.stager("host", staging=StagingProfile(2, 1 << 20, hand_off_nbytes=2 << 20)) as stager:
        for there, array in zip(stager.put(arrays).result(), arrays, strict=True):
            assert np.array_equal(there, array)


def test_a_slot_is_not_used_again_while_its_copy_is_held() -> None:
    with xferlib.stager("host") as stager:
        with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
            transfers = []
            for n in range(5 * BUFFERS):
                source = numbers(100, n)
                transfers.append(stager.put(source))
                source[:] = 255
                stager.trim()
        for n, transfer in enumerate(transfers):
            assert np.array_equal(transfer.result(), numbers(100, n))


@pytest.mark.parametrize("nbytes", [100, BUFFER + 1, LARGEST_BUFFER_NBYTES])
def test_buffers_whose_copies_are_done_are_used_again_without_the_pool(nbytes: int) -> None:
    with xferlib.stager("host") as stager:
        stager.put(numbers(nbytes)).synchronize()
        before = stager.stats()
        for n in range(3 * BUFFERS):
            assert np.array_equal(stager.put(numbers(nbytes, n)).result(), numbers(nbytes, n))
        after = stager.stats()
    assert (after.pool_hits, after.pool_misses) == (before.pool_hits, before.pool_misses)


def test_buffers_are_kept_again_when_puts_of_trees_have_used_up_those_of_before() -> None:
    with xferlib.stager("host") as stager:
        pinned = stager.empty_pinned(100, np.uint8)
        pinned[:] = 7
        for n in range(2 * BUFFERS):
            one, other = stager.put([pinned, numbers(100, n)]).result()
            assert (one == 7).all()
            assert np.array_equal(other, numbers(100, n))
        stager.put(numbers(100)).synchronize()
        before = stager.stats()
        for n in range(3 * BUFFERS):
            assert np.array_equal(stager.put(numbers(100, n)).result(), numbers(100, n))
        after = stager.stats()
    assert (after.pool_hits, after.pool_misses) == (before.pool_hits, before.pool_misses)


def test_after_a_rush_no_more_buffers_are_kept_than_before_it() -> None:
    with xferlib.stager("host") as stager:
        with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
            transfers = [stager.put(numbers(100, n)) for n in range(5 * BUFFERS)]
            assert stager._pool.usage().used == 5 * BLOCK
        for n, transfer in enumerate(transfers):
            assert np.array_equal(transfer.result(), numbers(100, n))
        transfers.clear()
        stager._ledger.reap()
        assert stager._pool.usage().used == BLOCK


def test_one_large_array_is_copied_by_the_device_while_the_cpu_copies_its_rest() -> None:
    copies: list[int] = []
    backend = tampered()

    def copy(dst: int, src: int, nbytes: int) -> None:
        copies.append(nbytes)
        backend.inner.copy_h2d(dst, src, nbytes)

    backend.copy_h2d = copy
    odd = numbers(2 * COPY_STEP_NBYTES).reshape(2, -1).T
    with xferlib.stager(backend) as stager:
        assert np.array_equal(stager.put(numbers(COPY_STEP_NBYTES + 5)).result(), numbers(COPY_STEP_NBYTES + 5))
        assert np.array_equal(stager.put(odd).result(), odd)
    assert copies == [COPY_STEP_NBYTES, 5, 2 * COPY_STEP_NBYTES]


def test_blocks_whose_copies_are_done_are_used_again() -> None:
    with xferlib.stager("host") as stager:
        for n in range(10 * BUFFERS):
            stager.put(numbers(1, n)).synchronize()
            assert stager._pool.usage().used <= 2 * BLOCK


def test_idle_buffers_go_back_when_they_are_asked_for() -> None:
    with xferlib.stager("host") as stager:
        stager.put(numbers(1)).synchronize()
        stager.trim()
        assert stager._pool.usage().used == 0
        assert stager._pool.usage().pinned == 0


def test_idle_buffers_make_room_for_arrays() -> None:
    limit = KEPT_SHARE * BLOCK
    with xferlib.stager("host", pinned_limit=limit) as stager:
        stager.put(numbers(1)).synchronize()
        assert stager._pool.usage().used == BLOCK
        assert stager.empty_pinned(limit, np.uint8).nbytes == limit


def test_where_the_limit_is_small_a_put_takes_what_it_needs() -> None:
    with xferlib.stager("host", pinned_limit=KEPT_SHARE * BLOCK - 4096) as stager, held(stager.backend.h2d):  # type: ignore[attr-defined]
        stager.put(numbers(300))
        assert stager._pool.usage().asked == 300


def test_where_no_block_is_to_be_had_a_put_takes_what_it_needs() -> None:
    limit = KEPT_SHARE * BLOCK
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
        # All of the segment that small arrays share, but for less than a block of buffers.
        rest = [stager.empty_pinned(LARGE_FROM_NBYTES - BLOCK // 4, np.uint8) for _ in range(2)]
        assert np.array_equal(stager.put(numbers(300)).result(), numbers(300))
        assert refused
        del rest


def test_room_is_waited_for_while_another_thread_fills_its_buffer() -> None:
    gated = Gated(off_main)
    limit = KEPT_SHARE * BLOCK
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


@pytest.mark.parametrize("nbytes", [100, BUFFER + 1, LARGEST_BUFFER_NBYTES + 1])
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


def test_what_nobody_can_know_the_end_of_keeps_the_array_that_it_was_put_into() -> None:
    def breaks() -> Any:
        raise OSError("no event to be had")

    target = np.zeros(1000, np.uint8)
    with xferlib.stager(tampered(record_h2d=breaks, failures=(OSError,))) as stager:
        with pytest.raises(xferlib.TransferError):
            stager.put(numbers(1000), into=target)
        kept = weakref.ref(target)
        del target
        gc.collect()
        assert kept() is not None


@pytest.mark.parametrize("count", [2, 100])
def test_a_tree_with_a_leaf_whose_file_was_cut_off_fails_its_put_alone(tmp_path: Path, count: int) -> None:
    """A process of its own: the signal would end this one."""
    succeeds(f"""
        import os, warnings
        import numpy as np
        import xferlib
        warnings.simplefilter("ignore")
        path, count = {str(tmp_path / "source")!r}, {count}
        with open(path, "wb") as file:
            file.write((np.arange(count * 5000) % 251).astype(np.uint8).tobytes())
        source = np.asarray(np.memmap(path, np.uint8, "r"))
        leaves = [source[n * 5000 : (n + 1) * 5000 - n % 2] for n in range(count)]
        odd = np.zeros((5, 7), np.float32)
        with xferlib.stager("host") as stager:
            for _ in range(2):
                for got, want in zip(stager.put([*leaves, odd, odd.T]).result(), [*leaves, odd, odd.T], strict=True):
                    assert np.array_equal(got, want)
            os.truncate(path, 4096)
            try:
                stager.put(leaves)
            except xferlib.TransferError as error:
                assert "its file was cut off" in str(error)
                stager.trim()
                assert stager._pool.usage().used == 0
            else:
                raise AssertionError("the put has not failed")
            assert stager.put([np.full(5, 3), odd]).result()[0].tolist() == [3] * 5
    """)


SHORT, LONG = 8_000, 1 << 20
STRIDED = {
    "alone": (SHORT, "put(x[::2])"),
    "backwards": (SHORT, "put(x[::-1])"),
    "by columns": (LONG, "put(x.reshape(-1, 8).T)"),
    "in a buffer": (LONG, "put(np.frombuffer(x, np.uint16)[::3])"),
    "beside others": (SHORT, "put([x[5:-3:4], x[:8], x.reshape(-1, 16)[:, 3:7], odd, x.view(np.uint8)[::2]])"),
    "beside what the engine copies": (LONG, "put([x[:2000], x[::2], x[::-3], x[9:]])"),
    "borrowed": (LONG, "put(x[::2], borrow=True)"),
}


@pytest.mark.parametrize(("items", "way"), STRIDED.values(), ids=STRIDED)
def test_a_strided_source_whose_file_was_cut_off_fails_its_put_alone(tmp_path: Path, items: int, way: str) -> None:
    """A process of its own, as above."""
    succeeds(f"""
        import os, warnings
        import numpy as np
        import xferlib
        warnings.simplefilter("ignore")
        path, items = {str(tmp_path / "source")!r}, {items}
        np.arange(items, dtype=np.float32).tofile(path)
        x, odd, given = np.memmap(path, np.float32, "r"), np.zeros((5, 7), np.float32), []
        with xferlib.stager("host") as stager:
            def put(tree, **options):
                given[:] = [np.array(leaf) for leaf in (tree if isinstance(tree, list) else [tree])] if whole else []
                return stager.put(tree, **options).result()
            whole = True
            found = {way}
            found = found if isinstance(found, list) else [found]
            assert all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in zip(found, given, strict=True))
            del found
            whole = False
            os.truncate(path, 4096)
            try:
                {way}
            except xferlib.TransferError as error:
                assert "its file was cut off" in str(error)
            else:
                raise AssertionError("the put has not failed")
            stager.trim()
            assert stager._pool.usage().used == 0
            assert stager.put(odd.T).result().shape == (7, 5)
    """)


@pytest.mark.parametrize("cut", [False, True])
def test_a_source_whose_file_was_cut_off_fails_its_put_alone(tmp_path: Path, cut: bool) -> None:
    file = tmp_path / "source"
    file.write_bytes(bytes(numbers(3 * PAGE)))
    source = np.memmap(file, np.uint8, "r+")
    with xferlib.stager("host") as stager:
        if cut:
            os.truncate(file, PAGE)
            with pytest.raises(xferlib.TransferError, match="its file was cut off"):
                stager.put(np.asarray(source))
        else:
            assert np.array_equal(stager.put(np.asarray(source)).result(), numbers(3 * PAGE))
        assert np.array_equal(stager.put(numbers(100)).result(), numbers(100))
        stager.trim()
        assert stager._pool.usage().used == 0
