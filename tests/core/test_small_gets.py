"""Gets into small pageable arrays: filled by the caller where that is a matter of microseconds, by the engine where it is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import xferlib_host
from xferlib_host._stream import CopyError

import xferlib
from tests.core.fakes import WATCHDOG, held, on_thread, tampered
from xferlib.engine.lanes import Lane
from xferlib.errors import AllocationError, CapabilityError, TransferError
from xferlib.memory.blocks import HostBlock
from xferlib.staging import small_gets

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for as long as a slow machine may take; tests in which something never comes say so."""
    monkeypatch.setattr(small_gets, "PRODUCER_SECONDS", WATCHDOG)
    monkeypatch.setattr(small_gets, "COPY_SECONDS", WATCHDOG)


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine was given."""
    given: list[Any] = []
    submit = Lane.submit

    def noted(lane: Lane, job: Any, pieces: Any) -> None:
        given.append(job)
        submit(lane, job, pieces)

    monkeypatch.setattr(Lane, "submit", noted)
    return given


def ramp(nbytes: int, seed: int = 0) -> Any:
    return ((np.arange(nbytes) * 7 + seed) % 251).astype(np.uint8)


@pytest.mark.parametrize("nbytes", [1, 64, 4096, 256 * KIB])
def test_a_small_get_has_filled_its_array_when_it_returns(stager: xferlib.Stager, jobs: list[Any], nbytes: int) -> None:
    for seed in range(3):
        out = np.zeros(nbytes, np.uint8)
        transfer = stager.get(ramp(nbytes, seed), out=out)
        assert transfer.done()
        assert np.array_equal(out, ramp(nbytes, seed))
        assert transfer.result() is out
    assert not jobs
    assert stager.stats().d2h_nbytes == 3 * nbytes
    assert stager.stats().synchronous == 3


def test_no_stream_can_wait_for_it_as_for_any_other_into_pageable_memory(stager: xferlib.Stager) -> None:
    stream = xferlib_host.Stream()
    with pytest.raises(CapabilityError, match="no stream can wait for this get"):
        stager.get(ramp(64), out=np.zeros(64, np.uint8)).stream_wait(stream)
    stream.close()


def test_small_leaves_of_one_get_are_filled_together(stager: xferlib.Stager, jobs: list[Any]) -> None:
    tree = {"image": np.arange(1000.0).reshape(10, 100), "label": np.array(3), "none": np.empty((0, 2)), "odd": ramp(257)}
    out = {name: np.zeros_like(array) for name, array in tree.items()}
    assert stager.get(tree, out=out).done()
    assert all(np.array_equal(out[name], array) for name, array in tree.items())
    assert not jobs


@pytest.mark.parametrize(
    "shapes", [[(256 * KIB + 1,)], [(128 * KIB,), (128 * KIB + 1,)], [(8,)] * 17], ids=["large", "together", "many"]
)
def test_what_is_large_or_many_is_left_to_the_engine(stager: xferlib.Stager, jobs: list[Any], shapes: list[tuple[int]]) -> None:
    out = [np.zeros(shape, np.uint8) for shape in shapes]
    stager.get([ramp(*shape) for shape in shapes], out=out).synchronize()
    assert all(np.array_equal(array, ramp(*shape)) for array, shape in zip(out, shapes, strict=True))
    assert len(jobs) == 1


def test_sixteen_arrays_are_not_many(stager: xferlib.Stager, jobs: list[Any]) -> None:
    out = [np.zeros(8, np.uint8) for _ in range(16)]
    assert stager.get([ramp(8)] * 16, out=out).done()
    assert not jobs


def test_a_stager_with_little_room_keeps_none_for_small_gets(jobs: list[Any]) -> None:
    for limit, engine in ((16 * 256 * KIB, 0), (16 * 256 * KIB - 4096, 1)):
        jobs.clear()
        with xferlib.stager("host", pinned_limit=limit) as stager:
            out = np.zeros(64, np.uint8)
            stager.get(ramp(64), out=out).synchronize()
        assert len(jobs) == engine
        assert np.array_equal(out, ramp(64))


def test_a_get_whose_producer_has_not_ended_does_not_wait_for_it(
    stager: xferlib.Stager, jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_gets, "PRODUCER_SECONDS", 0.0)
    stream = xferlib_host.Stream()
    array, out = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    with held(stream):
        stream.submit(array.fill, 7)
        transfer = stager.get(array, out=out, stream=stream)
        assert not transfer.done()
        assert not out.any()
    transfer.synchronize()
    assert (out == 7).all()
    assert len(jobs) == 1
    stream.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_behind_a_copy_of_another_get_the_engine_takes_it(
    stager: xferlib.Stager, jobs: list[Any], monkeypatch: pytest.MonkeyPatch, *, pinned: bool
) -> None:
    monkeypatch.setattr(small_gets.SmallGets, "_start", None)
    with held(stager.backend.d2h):  # type: ignore[attr-defined]  # the host backend's
        before = stager.get(ramp(MIB), out=stager.empty_pinned(MIB, np.uint8) if pinned else np.zeros(MIB, np.uint8))
        jobs.clear()
        out = np.zeros(64, np.uint8)
        transfer = stager.get(ramp(64), out=out)
        assert not transfer.done()
    transfer.synchronize()
    before.synchronize()
    assert np.array_equal(out, ramp(64))
    assert len(jobs) == 1


def test_beside_a_put_that_borrows_the_engine_takes_it(stager: xferlib.Stager, jobs: list[Any]) -> None:
    """It may still read what the get would write."""
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        before = stager.put(ramp(2 * MIB), borrow=True)
        out = np.zeros(64, np.uint8)
        stager.get(ramp(64), out=out).synchronize()
    assert len(jobs) == 2
    assert np.array_equal(out, ramp(64))
    before.synchronize()


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_job_that_has_finished_and_that_nobody_asked_is_in_nobody_s_way(
    stager: xferlib.Stager, jobs: list[Any], direction: str
) -> None:
    under_way = getattr(stager._ledger.jobs, direction)

    class Finished:
        row, owner = -1, None

        def reached(self) -> bool:
            return under_way.pop(self.row, None) is not None

    under_way[-1] = Finished()
    assert stager.get(ramp(64), out=np.zeros(64, np.uint8)).done()
    assert not jobs


def test_a_copy_that_does_not_come_is_the_engine_s_and_its_memory_nobody_s_until_it_has(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_gets, "COPY_SECONDS", 0.0)
    with xferlib.stager("host", pinned_limit=16 * 256 * KIB, when_full="raise") as stager:
        out = np.zeros(256 * KIB, np.uint8)
        others: list[Any] = []
        with held(stager.backend.d2h):  # type: ignore[attr-defined]  # the host backend's
            transfer = stager.get(ramp(256 * KIB), out=out)
            assert len(jobs) == 1
            assert not transfer.done()
            assert not out.any()
            # All that there is left.
            with pytest.raises(AllocationError):
                while True:
                    others.append(stager.empty_pinned(64 * KIB, np.uint8))
                    others[-1][...] = 5
            assert others
        transfer.synchronize()
        assert np.array_equal(out, ramp(256 * KIB))
        assert all((other == 5).all() for other in others)


def test_the_array_is_known_as_read_until_the_copy_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_gets, "COPY_SECONDS", 0.0)
    with xferlib.stager("host") as stager:
        device = stager.put(ramp(64)).result()
        with held(stager.backend.d2h):  # type: ignore[attr-defined]  # the host backend's
            stager.get(device, out=np.zeros(64, np.uint8))
            (entry,) = stager._ledger.d2h.entries()
            (source,) = entry.device
            assert source.address == device.ctypes.data
            assert isinstance(entry.keepalive, HostBlock)


def test_its_memory_is_used_again_and_goes_back_when_asked_for(stager: xferlib.Stager) -> None:
    out = np.zeros(64, np.uint8)
    stager.get(ramp(64), out=out).synchronize()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stager._pool, "try_take", None)
        for _ in range(20):
            stager.get(ramp(64), out=out).synchronize()
    assert stager._pool.nbytes
    stager.trim()
    assert not stager._pool.nbytes


@pytest.mark.parametrize("failing", ["copy_d2h", "record_d2h"])
def test_a_copy_that_cannot_be_started_is_said_and_nothing_is_under_way(failing: str) -> None:
    def refuse(*arguments: Any) -> Any:
        raise CopyError("refused")

    with xferlib.Stager(tampered(**{failing: refuse})) as stager:
        out = np.zeros(64, np.uint8)
        with pytest.raises(TransferError, match="refused"):
            stager.get(ramp(64), out=out)
        assert not out.any()
        stager._ledger.reap()
        assert not stager._ledger.busy


def test_a_copy_that_breaks_is_said_by_the_transfer(stager: xferlib.Stager) -> None:
    stager.backend.d2h.submit(lambda: 1 / 0)  # type: ignore[attr-defined]  # the host backend's
    out = np.zeros(64, np.uint8)
    transfer = stager.get(ramp(64), out=out)
    with pytest.raises(TransferError, match="division by zero"):
        transfer.synchronize()
    assert not out.any()


def test_a_later_get_into_the_same_array_comes_later(stager: xferlib.Stager) -> None:
    stream = xferlib_host.Stream()
    out = np.zeros(64, np.uint8)
    first, second = np.zeros(64, np.uint8), np.full(64, 2, np.uint8)
    with held(stream) as gate:
        stream.submit(first.fill, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(small_gets, "PRODUCER_SECONDS", 0.0)
            before = stager.get(first, out=out, stream=stream)
        late = on_thread(lambda: stager.get(second, out=out).synchronize())
        with pytest.raises(TimeoutError):
            late.result(0.1)
        gate.set()
        late.result(WATCHDOG)
    before.synchronize()
    assert (out == 2).all()
    stream.close()


def test_threads_get_at_once(stager: xferlib.Stager) -> None:
    def work(seed: int) -> bool:
        out = np.zeros(1000, np.uint8)
        for number in range(50):
            stager.get(ramp(1000, seed + number), out=out).synchronize()
            if not np.array_equal(out, ramp(1000, seed + number)):
                return False
        return True

    assert all(one.result(60) for one in [on_thread(partial(work, seed)) for seed in range(4)])
