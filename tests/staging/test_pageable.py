"""Pageable memory by way of pinned blocks: any size under any limit, free when it should be, at rest when a start fails."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Gated, held, off_main, on_thread, succeeds, tampered
from xferlib.pending import Fill, Jobs
from xferlib.staging.profile import StagingProfile

MIB = 1 << 20
PIECE = 8 * MIB
RING = StagingProfile(4, 1 * MIB, MIB // 2)
RING_OF_FOUR = StagingProfile(4, 1 * MIB, 4 * MIB)
"""Threads that help, whatever this machine has, and small chunks, so that every transfer takes several."""


def numbers(nbytes: int) -> np.ndarray[Any, Any]:
    return np.arange(nbytes // 4, dtype=np.uint32)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("limit", [MIB, 3 * MIB, 8 * MIB, 64 * MIB])
def test_a_put_larger_than_the_pinned_limit_arrives(limit: int, threads: int) -> None:
    with xferlib.stager("host", pinned_limit=limit, staging=StagingProfile(threads, MIB)) as stager:
        source = numbers(20 * MIB)
        assert np.array_equal(stager.put(source).value, source)
        assert stager.stats().h2d_nbytes == source.nbytes


@pytest.mark.parametrize("limit", [1, 3, 8, 64])
def test_a_get_larger_than_the_pinned_limit_arrives(limit: int) -> None:
    succeeds(
        f"""
        import numpy as np, xferlib
        from xferlib.staging.profile import StagingProfile
        with xferlib.stager("host", pinned_limit={limit} << 20, staging=StagingProfile(4, 1 << 20)) as s:
            x = np.arange(10 << 20, dtype=np.uint32)
            for _ in range(3):
                out = np.zeros_like(x)
                s.get(x, out=out).synchronize()
                assert (out == x).all()
            assert s.stats().d2h_nbytes == 3 * x.nbytes
        """
    )


def test_a_view_that_is_not_contiguous_and_larger_than_the_limit_arrives() -> None:
    with xferlib.stager("host", pinned_limit=8 * MIB, staging=RING) as stager:
        source = numbers(24 * MIB).reshape(1024, -1).T
        assert np.array_equal(stager.put(source).value, source)


@pytest.mark.parametrize("view", [np.s_[::2], np.s_[::-1], np.s_[:, 1], np.s_[1:3, ::3]])
def test_views_that_are_not_contiguous_arrive(stager: xferlib.Stager, view: Any) -> None:
    source = np.arange(600.0).reshape(20, 30)[view]
    assert np.array_equal(stager.put(source).value, source)
    pinned = stager.empty_pinned((20, 30), np.float64)
    pinned[:] = np.arange(600.0).reshape(20, 30)
    assert np.array_equal(stager.put(pinned[view]).value, source)


def test_matrices_larger_than_a_piece_arrive() -> None:
    with xferlib.stager("host", pinned_limit=2 * PIECE, staging=RING) as stager:
        with pytest.warns(PendingDeprecationWarning):
            source = np.matrix(numbers(3 * PIECE))
        assert np.array_equal(stager.put(source).value, np.asarray(source))


def test_what_several_threads_get_at_once_is_counted_exactly(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    staged, small, turns, workers = stager._staging, (0, np.zeros(4, np.uint8)), 2000, 4
    # On a GPU it fills them.
    monkeypatch.setattr(staged._small_gets, "takes", lambda transfers: True)
    monkeypatch.setattr(staged._small_gets, "fill", lambda transfers, sources, after: True)
    monkeypatch.setattr(type(staged._lanes[0]), "has_chunks", True)

    def fill() -> None:
        for _ in range(turns):
            assert staged.fill_small((small,), (), None)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for call in [on_thread(fill) for _ in range(workers)]:
            call.result()
    finally:
        sys.setswitchinterval(before)
    assert stager.stats().synchronous == turns * workers
    assert stager.stats().d2h_nbytes == 4 * turns * workers


def test_a_pageable_source_is_free_when_put_returns(stager: xferlib.Stager) -> None:
    source = np.full(1000, 7)
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.put(source)
        source[:] = 0
        assert not transfer.done()
    assert (transfer.value == 7).all()


def test_a_pageable_source_is_not_kept_alive_by_its_copy(stager: xferlib.Stager) -> None:
    source = np.full(1000, 7)
    alive = weakref.ref(source)
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.put(source)
        del source
        assert alive() is None
    assert (transfer.value == 7).all()


def test_a_get_into_pageable_memory_is_done_without_anyone_waiting_for_it(stager: xferlib.Stager) -> None:
    out = np.zeros(1000)
    transfer = stager.get(np.arange(1000.0), out=out)
    ended = threading.Event()

    def ask() -> None:
        while not transfer.done():
            ended.wait(1e-4)

    on_thread(ask).result(10)
    assert np.array_equal(out, np.arange(1000.0))


def test_a_get_into_pageable_memory_is_not_done_before_it_landed(stager: xferlib.Stager) -> None:
    out = np.zeros(1000)
    with held(stager.backend.d2h):  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.get(np.arange(1000.0), out=out)
        assert not transfer.done()
        assert not out.any()
    transfer.synchronize()
    assert np.array_equal(out, np.arange(1000.0))


def test_everything_may_be_dropped_while_a_get_is_in_flight(stager: xferlib.Stager) -> None:
    memory = np.zeros(3 * MIB, np.uint8)
    source = stager.put(np.full(3 * MIB, 5, np.uint8)).value
    with held(stager.backend.d2h):  # type: ignore[attr-defined]  # the host backend's
        stager.get(source, out=memory[:])
        del source
        rest = stager.put(np.full(3 * MIB, 6, np.uint8)).value
    stager.get(np.zeros(1)).synchronize()
    stager.close()
    assert (memory == 5).all()
    assert (rest == 6).all()


def test_leaves_that_are_pinned_and_pageable_come_as_one(stager: xferlib.Stager) -> None:
    pinned = stager.empty_pinned(5, np.int64)
    outs = {"pinned": pinned, "pageable": np.zeros(5, np.int64), "empty": np.zeros((0, 3))}
    device = {"pinned": np.arange(5), "pageable": np.arange(5, 10), "empty": np.zeros((0, 3))}
    transfer = stager.get(device, out=outs)
    assert transfer.result() is outs
    assert outs["pinned"].tolist() + outs["pageable"].tolist() == list(range(10))
    assert stager.stats().synchronous == 1


class CopyBroke(Exception):
    """What the backend raises."""


def breaks_once(at: int, copy: Any) -> Any:
    """Return a copy call that fails at its use of this number."""
    calls = iter(range(10**9))

    def call(dst: int, src: int, nbytes: int) -> None:
        if next(calls) == at:
            raise CopyBroke("no more")
        copy(dst, src, nbytes)

    return call


def test_a_put_that_fails_in_the_middle_leaves_memory_at_rest() -> None:
    backend = tampered(failures=(CopyBroke,))
    backend.copy_h2d = breaks_once(2, backend.inner.copy_h2d)
    events: list[Any] = []

    def record() -> Any:
        events.append(backend.inner.record_h2d())
        return events[-1]

    backend.record_h2d = record
    with xferlib.stager(backend, pinned_limit=64 * MIB, staging=RING) as stager:
        with pytest.raises(xferlib.TransferError, match="could not be started: no more"):
            stager.put(numbers(4 * PIECE))
        assert all(event.done() for event in events)
        assert np.array_equal(stager.put(numbers(PIECE)).result(), numbers(PIECE))
        stager.trim()
        assert stager._pool.usage().used == 0


def test_a_get_that_fails_in_the_middle_leaves_memory_at_rest() -> None:
    backend = tampered(failures=(CopyBroke,))
    backend.copy_d2h = breaks_once(2, backend.inner.copy_d2h)
    with xferlib.stager(backend, pinned_limit=64 * MIB, staging=RING) as stager:
        out = np.zeros_like(numbers(4 * PIECE))
        with pytest.raises(xferlib.TransferError, match="no more"):
            stager.get(numbers(4 * PIECE), out=out).synchronize()
        seen = out.copy()
        other = stager.get(numbers(PIECE)).result()
        assert np.array_equal(out, seen)
        assert np.array_equal(other, numbers(PIECE))


def test_small_leaves_of_one_get_land_in_turn_where_there_is_room_for_one() -> None:
    values = [np.full(MIB, number, np.uint8) for number in range(4)]
    with xferlib.stager("host", pinned_limit=10 * MIB, staging=RING_OF_FOUR) as stager:
        arrays = [stager.put(value).result() for value in values]
        stager.trim()
        held = stager.empty_pinned(9 * MIB, np.uint8)
        found = [np.zeros(MIB, np.uint8) for _ in values]
        stager.get(arrays, out=found).synchronize()
        for value, landed in zip(values, found, strict=True):
            np.testing.assert_array_equal(landed, value)
        del held


def test_what_is_made_read_only_meanwhile_is_written_all_the_same(stager: xferlib.Stager) -> None:
    out = np.zeros(1000)
    with held(stager.backend.d2h):  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.get(np.arange(1000.0), out=out)
        out.setflags(write=False)
    assert transfer.result() is out
    assert (out == np.arange(1000.0)).all()
    with pytest.raises(ValueError, match="out is read-only"):
        stager.get(np.arange(1000.0), out=out)


@pytest.mark.parametrize("threads", [4])
def test_threads_that_stage_at_once_under_a_small_limit_wait_for_each_other(threads: int) -> None:
    with xferlib.stager("host", pinned_limit=2 * PIECE, staging=RING) as stager:
        source = numbers(3 * PIECE)

        def work() -> bool:
            device = stager.put(source).value
            out = np.zeros_like(source)
            stager.get(device, out=out).synchronize()
            return np.array_equal(out, source)

        futures = [on_thread(work) for _ in range(threads)]
        assert all(future.result(30) for future in futures)


def test_who_is_told_that_a_block_is_filled_finds_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    remove = Jobs.remove

    def removed(jobs: Jobs, fill: Fill) -> None:
        assert fill.over
        stager._ledger.h2d.wait_all()
        used.append(stager._pool.usage().used)
        remove(jobs, fill)

    monkeypatch.setattr(Jobs, "remove", removed)
    with xferlib.stager("host", pinned_limit=2 * MIB) as stager:
        # Of one part, and of two. There are no slots, which would stay.
        stager.put(np.zeros(10_000)).synchronize()
        stager.put([np.zeros(10_000), np.zeros(10_000)]).synchronize()
    assert len(used) == 3
    assert not any(used)


def test_room_is_waited_for_while_another_thread_is_between_taking_and_starting() -> None:
    """Neither in flight nor the caller's: that pinned memory comes back by itself, so nobody may be told that the pool is full."""
    gated = Gated(off_main)
    with xferlib.stager(gated.backend, pinned_limit=PIECE, staging=StagingProfile(1, PIECE, PIECE)) as stager:
        source = numbers(PIECE)
        other = on_thread(lambda: stager.put(source))
        assert gated.entered.wait(10)
        mine = on_thread(lambda: stager.put(source + 1))
        with pytest.raises(TimeoutError):
            mine.result(0.2)
        gated.gate.set()
        assert np.array_equal(other.result(10).value, source)
        assert np.array_equal(mine.result(10).value, source + 1)


def test_trim_gives_back_what_ordinary_memory_passed_through() -> None:
    with xferlib.stager("host", staging="2x64KiB") as stager:
        stager.put(np.zeros(100_000, np.uint8)).synchronize()
        calls = stager.backend.memory.calls  # type: ignore[attr-defined]  # the host backend's
        assert calls().pinned_allocations > calls().pinned_frees
        stager.trim()
        assert calls().pinned_allocations == calls().pinned_frees


def test_a_get_of_many_parts_that_is_done_holds_its_array_no_longer() -> None:
    with xferlib.stager("host", staging=RING) as stager:
        array = stager.put(numbers(PIECE)).result()
        stager.get(array, out=np.zeros_like(array)).synchronize()
        del array
        stager.trim()
        assert stager.stats().device_nbytes == 0


def test_chunks_take_no_more_than_their_budget() -> None:
    with xferlib.stager("host", pinned_limit=1 << 30, staging=StagingProfile(24, 4 * MIB)) as stager:
        source = numbers(160 * MIB)
        stager.get(stager.put(source).result(), out=np.zeros_like(source)).synchronize()
        assert stager._pool.usage().peak <= 64 * MIB


def test_staging_page_locks_nothing_for_what_it_has_carried_before() -> None:
    """However many chunks were busy at a time then, and are now."""
    backend, at_once = tampered(), True

    def copy_at_once(dst: int, src: int, nbytes: int) -> None:
        backend.inner.copy_h2d(dst, src, nbytes)
        if at_once:
            backend.inner.record_h2d().synchronize()

    backend.copy_h2d = copy_at_once
    with xferlib.stager(backend, pinned_limit=128 * MIB, staging=StagingProfile(1, MIB, MIB // 2)) as stager:
        source = numbers(40 * MIB)
        stager.put(source).synchronize()
        misses = stager.stats().pool_misses
        at_once = False
        with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
            put = on_thread(lambda: stager.put(source))
            with pytest.raises(TimeoutError):
                put.result(0.2)
            gate.set()
        assert np.array_equal(put.result(10).result(), source)
        assert stager.stats().pool_misses == misses


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
