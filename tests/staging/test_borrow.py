"""Sources that are lent: the put returns at once, and nothing is early, lost or overwritten."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import Gated, Point, held, off_main, on_thread, tampered, until
from xferlib.engine.jobs import Job
from xferlib.engine.lanes import Lane
from xferlib.engine.native import ISSUED, STAGED
from xferlib.pipeline.memory_users import MemoryUsers
from xferlib.staging.bounce import BounceBuffers
from xferlib.staging.profile import StagingProfile

MIB = 1 << 20
RING = StagingProfile(4, MIB, MIB // 2)


def numbers(nbytes: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + nbytes // 4, dtype=np.uint32)


@pytest.fixture
def gated() -> Gated:
    return Gated()


@pytest.fixture
def stager(gated: Gated) -> Iterator[xferlib.Stager]:
    with xferlib.stager(gated.backend, pinned_limit=64 * MIB, staging=RING) as stager:
        yield stager
        gated.gate.set()


def test_a_put_that_borrows_returns_before_anything_is_copied(gated: Gated, stager: xferlib.Stager) -> None:
    source = numbers(32 * MIB)
    transfer = stager.put(source, borrow=True)
    assert not transfer.done()
    gated.gate.set()
    assert np.array_equal(transfer.result(), source)
    assert transfer.done()
    assert stager.stats().h2d_nbytes == source.nbytes
    assert stager.stats().synchronous == 0


def leave_one_idle_and_one_to_settle(stager: xferlib.Stager, tree: Any) -> None:
    first, second = (stager.put(tree, borrow=True).result() for _ in range(2))
    del first
    stager._blocks.settle_posted()
    del second


@pytest.mark.parametrize(("leaves", "kind"), [(1, "pageable"), (3, "pageable"), (3, "pinned"), (3, "strided")])
def test_what_came_back_is_fenced_when_the_copies_are_under_way(monkeypatch: pytest.MonkeyPatch, leaves: int, kind: str) -> None:
    """Before that the link has nothing to do, and a fence takes some frameworks as long as all else that a put does."""
    order: list[str] = []
    with xferlib.stager("host", pinned_limit=64 * MIB, staging=RING) as stager:
        tree = [numbers(2 * MIB, number) for number in range(leaves)]
        if kind == "pinned":
            tree = [stager.get(stager.put(leaf).value).result() for leaf in tree]
        if kind == "strided":
            tree = [leaf[::2] for leaf in tree]
        leave_one_idle_and_one_to_settle(stager, tree)
        submit, copy, retire = Lane.submit, stager._puts._copy_h2d, stager._blocks._retire

        def noted(name: str, call: Any) -> Any:
            def note(*arguments: Any) -> Any:
                order.append(name)
                return call(*arguments)

            return note

        monkeypatch.setattr(Lane, "submit", noted("copy", submit))
        monkeypatch.setattr(stager._puts, "_copy_h2d", noted("copy", copy))
        monkeypatch.setattr(BounceBuffers, "__call__", noted("copy", BounceBuffers.__call__))
        monkeypatch.setattr(stager._blocks, "_retire", noted("fence", retire))
        got = stager.put(tree, borrow=True).result()
        assert all(np.array_equal(array, leaf) for array, leaf in zip(got, tree, strict=True))
        copies = order.index("fence")
        assert copies >= (1 if kind == "pageable" else leaves)
        assert order == ["copy"] * copies + ["fence"] * (len(order) - copies)


def test_a_put_that_is_interrupted_while_its_copies_are_under_way_starts_no_more(
    monkeypatch: pytest.MonkeyPatch, gated: Gated, stager: xferlib.Stager
) -> None:
    source = numbers(8 * MIB)
    gated.gate.set()
    leave_one_idle_and_one_to_settle(stager, source)
    gated.gate.clear()
    make = Lane.job
    started: list[Job] = []

    def noted(lane: Lane, *, owner: int | None) -> Job:
        started.append(make(lane, owner=owner))
        return started[-1]

    def interrupted(streams: Any) -> Any:
        # The put raises only when nothing of it is under way any more, and a thread may have started a copy.
        gated.gate.set()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Lane, "job", noted)
        patch.setattr(stager._blocks, "_retire", interrupted)
        stager.put(source, borrow=True)
    (job,) = started
    assert job.submitted
    assert job.abandoned
    assert job.has_reached(STAGED)
    stager.idle()
    assert np.array_equal(stager.put(source, borrow=True).result(), source)
    assert stager.stats().device_nbytes == 2 * source.nbytes


def test_no_event_is_asked_whether_a_borrowed_put_is_done_that_the_engine_has_finished(
    gated: Gated, stager: xferlib.Stager
) -> None:
    """A driver's answer may come late: whoever asks gives up the interpreter meanwhile."""
    transfer = stager.put(numbers(8 * MIB), borrow=True)
    (job,) = stager._ledger.jobs.h2d.values()
    assert not transfer.done()
    gated.gate.set()
    assert until(job.reached)
    real, never = job.event, Point()
    job.event = never
    assert transfer.done()
    assert never.asked == 0
    job.event = real
    assert np.array_equal(transfer.result(), numbers(8 * MIB))


def test_value_waits_for_the_start_and_gives_the_same_arrays_each_time(gated: Gated, stager: xferlib.Stager) -> None:
    transfer = stager.put({"a": numbers(8 * MIB), "b": numbers(4)}, borrow=True)
    asked = on_thread(lambda: transfer.value)
    with pytest.raises(TimeoutError):
        asked.result(0.1)
    gated.gate.set()
    value = asked.result(10)
    assert transfer.value is value
    assert np.array_equal(value["a"], numbers(8 * MIB))
    assert np.array_equal(value["b"], numbers(4))


def test_arrays_of_lent_sources_are_made_once() -> None:
    """A backend that is asked again would lay a second array over the same memory."""
    made: list[object] = []

    def as_array(*args: Any, **options: Any) -> Any:
        made.append(args)
        return backend.inner.as_array(*args, **options)

    backend = tampered(as_array=as_array)
    with xferlib.stager(backend, pinned_limit=64 * MIB, staging=RING) as stager:
        transfer = stager.put(numbers(8 * MIB), borrow=True)
        value = transfer.value
        assert transfer.value is transfer.result() is value
    assert transfer.value is value
    assert len(made) == 1


def test_a_borrowed_source_may_be_dropped_with_its_transfer(gated: Gated, stager: xferlib.Stager) -> None:
    stager.put(numbers(32 * MIB), borrow=True)
    gc.collect()
    gated.gate.set()
    later = numbers(32 * MIB, first=9)
    assert np.array_equal(stager.put(later, borrow=True).result(), later)


def test_device_memory_of_a_dropped_transfer_is_not_used_again_before_its_copies_are_started() -> None:
    """Else the last of them would overwrite what the next put has copied there."""
    gated = Gated()
    with xferlib.stager(gated.backend, pinned_limit=64 * MIB, staging=RING) as stager:
        pinned = stager.empty_pinned(2 * MIB, np.uint32)
        pinned[:] = 7
        stager.put(numbers(8 * MIB), borrow=True)
        gc.collect()
        # As large as the dropped one, from pinned memory: it is started at once.
        gated.backend.copy_h2d = gated.backend.inner.copy_h2d
        stager._puts._copy_h2d = gated.backend.inner.copy_h2d
        device = stager.put(pinned).result()
        gated.gate.set()
        stager.put(numbers(8 * MIB), borrow=True).synchronize()
        assert (device == 7).all()


def test_batches_that_follow_each_other_are_copied_in_turn(gated: Gated, stager: xferlib.Stager) -> None:
    sources = [numbers(8 * MIB, first=index) for index in range(6)]
    transfers = [stager.put(source, borrow=True) for source in sources]
    gated.gate.set()
    for source, transfer in zip(sources, transfers, strict=True):
        assert np.array_equal(transfer.result(), source)


def test_close_waits_for_what_is_lent(gated: Gated, stager: xferlib.Stager) -> None:
    source = numbers(8 * MIB)
    transfer = stager.put(source, borrow=True)
    closed = on_thread(stager.close)
    with pytest.raises(TimeoutError):
        closed.result(0.1)
    gated.gate.set()
    closed.result(10)
    assert transfer.done()
    assert np.array_equal(transfer.value, source)


def test_a_failure_on_a_thread_of_ours_is_raised_every_time() -> None:
    class CopyBroke(Exception): ...

    def copy(dst: int, src: int, nbytes: int) -> None:
        raise CopyBroke("no more")

    backend = tampered(failures=(CopyBroke,), copy_h2d=copy)
    with xferlib.stager(backend, pinned_limit=64 * MIB, staging=RING) as stager:
        transfer = stager.put(numbers(8 * MIB), borrow=True)
        for ask in (transfer.synchronize, transfer.result, lambda: transfer.value, transfer.done):
            with pytest.raises(xferlib.TransferError, match="no more"):
                ask()
        backend.copy_h2d = backend.inner.copy_h2d


def test_small_sources_are_copied_at_once(gated: Gated, stager: xferlib.Stager) -> None:
    gated.gate.set()
    source = numbers(4096)
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.put(source, borrow=True)
        source[:] = 0
    assert np.array_equal(transfer.result(), numbers(4096))


def test_a_small_source_beside_large_pinned_memory_is_copied_at_once(gated: Gated, stager: xferlib.Stager) -> None:
    gated.gate.set()
    pinned = stager.empty_pinned(8 * MIB, np.uint8)
    pinned[:] = 3
    source = numbers(4096)
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.put([pinned, source], borrow=True)
        # No thread was asked for it.
        assert stager.stats().synchronous == 1
        source[:] = 0
    large, small = transfer.result()
    assert (large == 3).all()
    assert np.array_equal(small, numbers(4096))


def test_pinned_leaves_beside_lent_ones_arrive(gated: Gated, stager: xferlib.Stager) -> None:
    gated.gate.set()
    pinned = stager.empty_pinned(1000, np.int64)
    pinned[:] = 3
    got = stager.put({"lent": numbers(8 * MIB), "pinned": pinned, "none": np.zeros((0, 2))}, borrow=True).result()
    assert (got["pinned"] == 3).all()
    assert got["none"].shape == (0, 2)
    assert np.array_equal(got["lent"], numbers(8 * MIB))


def test_pinned_leaves_beside_lent_ones_are_in_use_until_their_copies_are_done() -> None:
    """As whoever hands out a slot of a ring asks. That all copies are started is not enough."""
    gated = Gated(off_main)
    with xferlib.stager(gated.backend, staging=RING) as stager, held(gated.backend.inner.h2d) as gate:
        pinned = stager.empty_pinned(100, np.uint8)
        transfer = stager.put([pinned, np.ones(2 * MIB, np.uint8)], borrow=True)
        users = MemoryUsers(pinned.ctypes.data, pinned.nbytes)
        gated.gate.set()
        assert until(lambda: all(job.has_reached(ISSUED) for job in stager._ledger.jobs.h2d.values()))
        assert not users.done()
        gate.set()
        transfer.synchronize()
        assert users.done()


@pytest.mark.parametrize("count", [1, 3])
def test_the_stream_that_is_named_waits_for_borrowed_leaves_too(count: int) -> None:
    seen = threading.Event()
    stream = Stream()
    leaves = [np.full(2 * MIB // count, index, np.uint8) for index in range(count)]
    with xferlib.stager("host", staging=RING) as stager:
        with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's own
            transfer = stager.put(leaves[0] if count == 1 else leaves, borrow=True, stream=stream)
            stream.submit(seen.set)
            assert not seen.wait(0.2)
            gate.set()
            assert seen.wait(10)
        transfer.synchronize()
    stream.close()
