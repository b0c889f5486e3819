"""The chunk ring: several threads, both directions at once, memory that comes back, threads that end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

import xferlib
from tests.core.fakes import held, on_thread, succeeds, tampered
from xferlib.staging.profile import StagingProfile

MIB = 1 << 20
RING = StagingProfile(4, MIB, MIB // 2)

pytestmark = pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")


def numbers(nbytes: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + nbytes // 4, dtype=np.uint32)


Copy: TypeAlias = Callable[[int, int, int], None]


def meeting(copy: Copy, threads: int, *, free: threading.Thread | None) -> tuple[Copy, threading.Barrier]:
    """Return a copy call in which so many threads must be at the same time before any but the free one gets on, once."""
    barrier = threading.Barrier(threads)
    met: set[int] = set()

    def call(dst: int, src: int, nbytes: int) -> None:
        if threading.get_ident() not in met and threading.current_thread() is not free:
            met.add(threading.get_ident())
            if len(met) <= threads:
                barrier.wait(10)
        copy(dst, src, nbytes)

    return call, barrier


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_several_threads_share_a_transfer(direction: str) -> None:
    backend = tampered()
    # Of the gets' copies the caller starts as many as there are chunks.
    free = threading.main_thread() if direction == "d2h" else None
    copy, barrier = meeting(getattr(backend.inner, f"copy_{direction}"), 2, free=free)
    setattr(backend, f"copy_{direction}", copy)
    with xferlib.stager(backend, pinned_limit=512 * MIB, staging=RING) as stager:
        source, out = numbers(64 * MIB), np.zeros(16 * MIB, np.uint32)
        if direction == "h2d":
            out = stager.put(source).result()
        else:
            stager.get(source, out=out).synchronize()
        assert not barrier.broken
        assert np.array_equal(out, source)


def test_a_get_is_not_held_up_by_a_put_whose_copies_are_held(stager_with_ring: xferlib.Stager) -> None:
    stager = stager_with_ring
    source, out = numbers(64 * MIB), np.zeros(8 * MIB, np.uint32)
    device = numbers(32 * MIB, first=7)
    with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
        put = on_thread(lambda: stager.put(source))
        get = on_thread(lambda: stager.get(device, out=out).result(10))
        assert np.array_equal(get.result(10), device)
        assert not put.done()
        gate.set()
    assert np.array_equal(put.result(10).result(), source)


def test_a_put_is_not_held_up_by_a_get_whose_producer_is_held(stager_with_ring: xferlib.Stager) -> None:
    stager = stager_with_ring
    source, out = numbers(32 * MIB), np.zeros(16 * MIB, np.uint32)
    device = numbers(64 * MIB, first=7)
    with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
        get = stager.get(device, out=out)
        assert np.array_equal(stager.put(source).result(10), source)
        assert not get.done()
        gate.set()
    assert np.array_equal(get.result(), device)


def test_a_get_starts_behind_one_that_still_has_copies_to_start() -> None:
    first, second = numbers(64 * MIB), numbers(64 * MIB, first=3)
    outs = np.zeros_like(first), np.zeros_like(second)
    with xferlib.stager(tampered(), pinned_limit=64 * MIB, staging=RING) as stager:
        with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
            one = stager.get(first, out=outs[0])
            two = on_thread(lambda: stager.get(second, out=outs[1]))
            with pytest.raises(TimeoutError):
                two.result(0.1)
            gate.set()
        two.result(10).synchronize()
        assert one.done()
        assert np.array_equal(outs[0], first)
        assert np.array_equal(outs[1], second)


def test_memory_that_a_large_get_still_reads_is_not_overwritten(stager_with_ring: xferlib.Stager) -> None:
    stager = stager_with_ring
    values, others = numbers(64 * MIB), numbers(64 * MIB, first=5)
    device = stager.put(values).result()
    out = np.zeros_like(values)
    with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
        get = stager.get(device, out=out)
        put = on_thread(lambda: stager.put(others, into=device))
        with pytest.raises(TimeoutError):
            put.result(0.1)
        gate.set()
    put.result(10).synchronize()
    get.synchronize()
    assert np.array_equal(out, values)
    assert np.array_equal(device, others)


def test_chunks_take_no_more_than_their_budget() -> None:
    with xferlib.stager("host", pinned_limit=1 << 30, staging=StagingProfile(24, 4 * MIB)) as stager:
        source = numbers(160 * MIB)
        stager.get(stager.put(source).result(), out=np.zeros_like(source)).synchronize()
        assert stager._pool.usage().peak <= 64 * MIB


def test_chunks_make_room_for_whoever_asks_the_pool() -> None:
    with xferlib.stager("host", pinned_limit=16 * MIB, staging=RING) as stager:
        stager.put(numbers(32 * MIB)).synchronize()
        assert stager._pool.usage().used >= 2 * MIB
        assert stager.empty_pinned(16 * MIB, np.uint8).nbytes == 16 * MIB


def test_chunks_make_room_where_nobody_waits() -> None:
    with xferlib.stager("host", pinned_limit=16 * MIB, staging=RING, when_full="raise") as stager:
        stager.put(numbers(32 * MIB)).synchronize()
        assert stager.empty_pinned(16 * MIB, np.uint8).nbytes == 16 * MIB


def test_a_ring_page_locks_nothing_for_what_it_has_carried_before() -> None:
    """However many chunks were busy at a time then, and are now."""
    backend = tampered()

    def copy_at_once(dst: int, src: int, nbytes: int) -> None:
        backend.inner.copy_h2d(dst, src, nbytes)
        backend.inner.record_h2d().synchronize()

    backend.copy_h2d = copy_at_once
    with xferlib.stager(backend, pinned_limit=128 * MIB, staging=StagingProfile(1, MIB, MIB // 2)) as stager:
        source = numbers(16 * MIB)
        stager.put(source).synchronize()
        misses = stager.stats().pool_misses
        backend.copy_h2d = backend.inner.copy_h2d
        with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
            put = on_thread(lambda: stager.put(source))
            with pytest.raises(TimeoutError):
                put.result(0.2)
            gate.set()
        assert np.array_equal(put.result(10).result(), source)
        assert stager.stats().pool_misses == misses


def test_a_transfer_gets_on_with_the_chunks_that_the_driver_grants() -> None:
    class Refused(Exception): ...

    backend = tampered(failures=(Refused,))
    granted: list[int] = []

    def alloc(nbytes: int) -> int:
        if len(granted) == 2:
            raise Refused("no more pages")
        granted.append(nbytes)
        address: int = backend.inner.alloc_pinned(nbytes)
        return address

    backend.alloc_pinned = alloc
    with xferlib.stager(backend, pinned_limit=128 * MIB, staging=RING) as stager:
        source = numbers(16 * MIB)
        assert np.array_equal(stager.put(source).result(), source)
        assert len(granted) == 2


def test_trim_gives_idle_chunks_back(stager_with_ring: xferlib.Stager) -> None:
    stager_with_ring.put(numbers(32 * MIB)).synchronize()
    assert stager_with_ring._pool.usage().used > 0
    stager_with_ring.trim()
    assert stager_with_ring._pool.usage().pinned == 0


def test_a_transfer_gets_on_with_whatever_chunk_the_user_leaves() -> None:
    with xferlib.stager("host", pinned_limit=16 * MIB, staging=RING) as stager:
        kept = stager.empty_pinned(15 * MIB, np.uint8)
        source = numbers(32 * MIB)
        out = np.zeros_like(source)
        stager.get(stager.put(source).result(), out=out).synchronize()
        assert np.array_equal(out, source)
        del kept


def test_no_room_for_a_single_chunk_is_an_error_that_says_so() -> None:
    with xferlib.stager("host", pinned_limit=16 * MIB, staging=RING) as stager:
        kept = stager.empty_pinned(16 * MIB, np.uint8)
        with pytest.raises(xferlib.AllocationError, match="pinned memory is full"):
            stager.put(numbers(4 * MIB))
        with pytest.raises(xferlib.AllocationError, match="pinned memory is full"):
            stager.get(numbers(4 * MIB), out=numbers(4 * MIB))
        del kept
        assert np.array_equal(stager.put(numbers(4 * MIB)).result(), numbers(4 * MIB))


def test_stagers_share_the_threads_and_the_last_one_ends_them() -> None:
    source = numbers(16 * MIB)
    first = xferlib.stager(tampered(), staging=RING)
    first.put(source).synchronize()
    helpers = {thread for thread in threading.enumerate() if thread.name.startswith("xferlib-to-device")}
    assert len(helpers) == 3
    with xferlib.stager(tampered(), staging=RING) as second:
        second.put(source).synchronize()
        assert {thread for thread in threading.enumerate() if thread.name.startswith("xferlib-to-device")} == helpers
        first.close()
        assert all(thread.is_alive() for thread in helpers)
        assert np.array_equal(second.put(source).result(), source)
    assert not any(thread.is_alive() for thread in helpers)


def test_a_stager_that_was_never_closed_does_not_keep_the_process() -> None:
    succeeds(
        """
        import warnings, numpy as np, xferlib
        from xferlib.staging.profile import StagingProfile
        warnings.simplefilter("ignore")
        s = xferlib.stager("host", staging=StagingProfile(4, 1 << 20))
        x = np.ones(16 << 20, np.uint8)
        s.get(s.put(x).value, out=np.zeros_like(x)).synchronize()
        s.put(x, borrow=True)
        """
    )


def test_a_forked_child_has_threads_of_its_own() -> None:
    succeeds(
        """
        import os, warnings, numpy as np, xferlib
        from xferlib.staging.profile import StagingProfile
        warnings.simplefilter("ignore")
        def moves(s):
            x = np.arange(4 << 20, dtype=np.uint32)
            out = np.zeros_like(x)
            s.get(s.put(x, borrow=True).value, out=out).synchronize()
            return (out == x).all()
        with xferlib.stager("host", staging=StagingProfile(4, 1 << 20)) as s:
            assert moves(s)
            child = os.fork()
            if not child:
                with xferlib.stager("host", staging=StagingProfile(4, 1 << 20)) as mine:
                    os._exit(0 if moves(mine) else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert moves(s)
        """
    )


def test_an_interrupted_put_leaves_the_source_at_rest() -> None:
    backend = tampered()
    reading, go = threading.Event(), threading.Event()

    def copy(dst: int, src: int, nbytes: int) -> None:
        if threading.current_thread() is threading.main_thread():
            # The others still copy when the caller is interrupted.
            reading.wait(10)
            go.set()
            raise KeyboardInterrupt
        reading.set()
        go.wait(10)
        backend.inner.copy_h2d(dst, src, nbytes)

    backend.copy_h2d = copy
    with xferlib.stager(backend, pinned_limit=64 * MIB, staging=RING) as stager:
        with pytest.raises(KeyboardInterrupt):
            stager.put(numbers(32 * MIB))
        assert not stager._traffic.landings.busy
        backend.copy_h2d = backend.inner.copy_h2d
        assert np.array_equal(stager.put(numbers(8 * MIB)).result(), numbers(8 * MIB))


@pytest.fixture
def stager_with_ring() -> Any:
    with xferlib.stager("host", pinned_limit=128 * MIB, staging=RING) as stager:
        yield stager
