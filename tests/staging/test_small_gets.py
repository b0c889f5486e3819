"""Gets into small pageable arrays: filled by the caller where that is a matter of microseconds, by the engine where it is not."""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import xferlib_host
from xferlib_host._stream import CopyError

import xferlib
from tests.core.fakes import WATCHDOG, held, on_thread, tampered
from tests.core.points import interrupted_at
from xferlib.engine.lanes import Lane
from xferlib.errors import AllocationError, CapabilityError, TransferError
from xferlib.memory.blocks import HostBlock
from xferlib.memory.pinned_pool import KEPT_SHARE
from xferlib.staging import small_gets
from xferlib.staging.profile import StagingProfile

KIB, MIB = 1 << 10, 1 << 20
LARGEST = StagingProfile(1, MIB).hand_off_nbytes
LEAST_LIMIT = KEPT_SHARE * small_gets.FEWER_NBYTES


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for as long as a slow machine may take; tests in which something never comes say so."""
    monkeypatch.setattr(small_gets, "PRODUCER_SECONDS", WATCHDOG)
    monkeypatch.setattr(small_gets, "COPY_SECONDS", WATCHDOG)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine was given."""
    given: list[Any] = []
    submit = Lane.submit

    def noted(lane: Lane, job: Any, pieces: Any) -> None:
        given.append(job)
        submit(lane, job, pieces)

    monkeypatch.setattr(Lane, "submit", noted)
    return given


class Refusals:
    """Calls of the host backend that may be refused, by name."""

    def __init__(self, *names: str) -> None:
        self.left: dict[str, int] = {}
        """How often each is let through before it is refused; for good where it is not in here."""
        self.backend = tampered(on_gpu=True, **{name: partial(self._call, name) for name in names})

    def _call(self, name: str, *arguments: Any) -> Any:
        left = self.left.get(name)
        if left is not None:
            if left == 0:
                raise CopyError("refused")
            self.left[name] = left - 1
        return getattr(self.backend.inner, name)(*arguments)


def opened(backend: Any = None, **options: Any) -> xferlib.Stager:
    """Open a stager that says that it is a GPU's. Its first get, by the engine, is behind it."""
    stager = xferlib.Stager(backend or tampered(on_gpu=True), **options)
    stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
    return stager


@pytest.fixture
def stager(jobs: list[Any]) -> Iterator[xferlib.Stager]:
    with opened(pinned_limit=64 << 20) as stager:
        jobs.clear()
        yield stager


def d2h(stager: xferlib.Stager) -> Any:
    """Return the host backend's engine of this direction."""
    return stager.backend.d2h  # type: ignore[attr-defined]  # the host backend's


def ramp(nbytes: int, seed: int = 0) -> Any:
    return ((np.arange(nbytes) * 7 + seed) % 251).astype(np.uint8)


def test_a_get_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert small_gets.PRODUCER_SECONDS + small_gets.COPY_SECONDS < 0.0005


@pytest.mark.parametrize("nbytes", [1, 64, 4096, 256 * KIB])
def test_a_small_get_has_filled_its_array_when_it_returns(stager: xferlib.Stager, jobs: list[Any], nbytes: int) -> None:
    before = stager.stats()
    for seed in range(3):
        out = np.zeros(nbytes, np.uint8)
        transfer = stager.get(ramp(nbytes, seed), out=out)
        assert transfer.done()
        assert np.array_equal(out, ramp(nbytes, seed))
        assert transfer.result() is out
    assert not jobs
    assert stager.stats().d2h_nbytes == before.d2h_nbytes + 3 * nbytes
    assert stager.stats().synchronous == before.synchronous + 3


def test_no_stream_can_wait_for_it_as_for_any_other_into_pageable_memory(stager: xferlib.Stager) -> None:
    stream = xferlib_host.Stream()
    with pytest.raises(CapabilityError, match="no stream can wait for this get"):
        stager.get(ramp(64), out=np.zeros(64, np.uint8)).stream_wait(stream)
    stream.close()


def test_small_leaves_of_one_get_are_filled_together(stager: xferlib.Stager, jobs: list[Any]) -> None:
    odd = np.arange(600.0).reshape(20, 30).T[::2]
    tree = {
        "image": np.arange(1000.0).reshape(10, 100),
        "label": np.array(3),
        "none": np.empty((0, 2)),
        "odd": odd,
        "last": ramp(257),
    }
    out = {name: np.zeros(array.shape, array.dtype) for name, array in tree.items()}
    assert stager.get(tree, out=out).done()
    assert all(np.array_equal(out[name], array) for name, array in tree.items())
    assert not jobs


@pytest.mark.parametrize(
    "shapes",
    [[(LARGEST + 1,)], [(LARGEST // 2,), (LARGEST // 2 + 1,)], [(8,)] * 17],
    ids=["large", "together", "many"],
)
def test_what_is_large_or_many_is_left_to_the_engine(stager: xferlib.Stager, jobs: list[Any], shapes: list[tuple[int]]) -> None:
    out = [np.zeros(shape, np.uint8) for shape in shapes]
    stager.get([ramp(*shape) for shape in shapes], out=out).synchronize()
    assert all(np.array_equal(array, ramp(*shape)) for array, shape in zip(out, shapes, strict=True))
    assert len(jobs) == 1


def test_a_get_of_as_much_as_a_caller_copies_is_not_large(stager: xferlib.Stager, jobs: list[Any]) -> None:
    out = np.zeros(LARGEST, np.uint8)
    assert stager.get(ramp(LARGEST), out=out).done()
    assert np.array_equal(out, ramp(LARGEST))
    assert not jobs


def test_sixteen_arrays_are_not_many(stager: xferlib.Stager, jobs: list[Any]) -> None:
    out = [np.zeros(8, np.uint8) for _ in range(16)]
    assert stager.get([ramp(8)] * 16, out=out).done()
    assert not jobs


def test_where_the_cpu_makes_the_copies_the_engine_takes_all(jobs: list[Any]) -> None:
    with xferlib.stager("host") as stager:
        for _ in range(2):
            stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
    assert len(jobs) == 2


def test_a_stager_with_little_room_keeps_none_for_small_gets(jobs: list[Any]) -> None:
    for limit, engine in ((LEAST_LIMIT, 0), (LEAST_LIMIT - 4096, 1)):
        with opened(pinned_limit=limit) as stager:
            jobs.clear()
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
    with held(d2h(stager)):
        large = ramp(2 * MIB)
        before = stager.get(large, out=stager.empty_pinned(2 * MIB, np.uint8) if pinned else np.zeros(2 * MIB, np.uint8))
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
        id, owner, memory = -1, None, ()

        def reached(self) -> bool:
            return under_way.pop(self.id, None) is not None

        def has_reached(self, _stage: int) -> bool:
            """As above, to the dispatcher, which may be awake."""
            return self.reached()

    under_way[-1] = Finished()
    assert stager.get(ramp(64), out=np.zeros(64, np.uint8)).done()
    assert not jobs


def test_a_copy_that_does_not_come_is_the_engine_s_and_its_memory_nobody_s_until_it_has(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(pinned_limit=LEAST_LIMIT, when_full="raise") as stager:
        jobs.clear()
        out = np.zeros(256 * KIB, np.uint8)
        others: list[Any] = []
        with held(d2h(stager)):
            monkeypatch.setattr(small_gets, "COPY_SECONDS", 0.0)
            transfer = stager.get(ramp(256 * KIB), out=out)
            assert len(jobs) == 1
            assert not transfer.done()
            assert not out.any()
            # Also for the next small get, of a thread that saw nothing in flight.
            monkeypatch.setattr(type(stager._ledger.d2h), "busy", property(lambda _: False))
            ((block, event),) = stager._staging._small_gets._idle
            assert not stager._staging._small_gets.fill([(out.ctypes.data, out)], (), None)
            assert stager._staging._small_gets._idle[0] == (block, event)
            monkeypatch.undo()
            # All that there is left.
            with pytest.raises(AllocationError):
                while True:
                    others.append(stager.empty_pinned(64 * KIB, np.uint8))
                    others[-1][...] = 5
            assert others
        transfer.synchronize()
        assert np.array_equal(out, ramp(256 * KIB))
        assert all((other == 5).all() for other in others)


def test_after_a_copy_that_did_not_come_in_time_the_next_is_the_caller_s_again(
    stager: xferlib.Stager, jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(d2h(stager)):
        monkeypatch.setattr(small_gets, "COPY_SECONDS", 0.0)
        transfer = stager.get(ramp(64), out=np.zeros(64, np.uint8))
    transfer.synchronize()
    monkeypatch.setattr(small_gets, "COPY_SECONDS", WATCHDOG)
    assert len(jobs) == 1
    for _ in range(2):
        out = np.zeros(64, np.uint8)
        assert stager.get(ramp(64, 3), out=out).done()
        assert np.array_equal(out, ramp(64, 3))
    assert len(jobs) == 1


def test_the_array_is_known_as_read_until_the_copy_has_come(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_gets, "COPY_SECONDS", 0.0)
    device = stager.put(ramp(64)).result()
    with held(d2h(stager)):
        stager.get(device, out=np.zeros(64, np.uint8))
        (entry,) = stager._ledger.d2h.entries()
        (source,) = entry.device_ranges
        assert source.address == device.ctypes.data
        assert isinstance(entry.keepalive, HostBlock)


def test_the_array_is_nobody_s_when_the_get_has_returned(stager: xferlib.Stager) -> None:
    device = stager.put(ramp(64)).result()
    known = weakref.ref(device)
    stager.get(device, out=np.zeros(64, np.uint8))
    del device
    gc.collect()
    assert known() is None


def test_nothing_is_page_locked_after_the_first_get(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    misses = stager.stats().pool_misses
    stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
    monkeypatch.setattr(small_gets, "COPY_SECONDS", 0.0)
    with held(d2h(stager)):
        transfer = stager.get(ramp(64), out=np.zeros(64, np.uint8))
    transfer.synchronize()
    assert stager.stats().pool_misses == misses


def test_its_memory_goes_back_when_asked_for_and_is_had_again(stager: xferlib.Stager, jobs: list[Any]) -> None:
    assert stager._pool.nbytes
    stager.trim()
    assert not stager._pool.nbytes
    for engine in (1, 1, 1):
        out = np.zeros(64, np.uint8)
        stager.get(ramp(64), out=out).synchronize()
        assert np.array_equal(out, ramp(64))
        assert len(jobs) == engine


def test_a_closed_stager_keeps_no_memory() -> None:
    stager = opened()
    pool = stager._pool
    stager.close()
    assert not pool.nbytes


def test_who_needs_room_waits_for_a_small_get() -> None:
    """Its memory is neither idle nor in flight yet: whoever needs it must find something to wait for."""
    with opened(pinned_limit=LEAST_LIMIT) as stager:
        comes = small_gets._comes
        waiting: list[Any] = []
        # All but this memory, and a little of it.
        room = stager._pool.limit - small_gets.FEWER_NBYTES

        def asked_meanwhile(event: Any, seconds: float) -> bool:
            if not waiting and event is not None:
                waiting.append(on_thread(lambda: stager.empty_pinned(room + 64 * KIB, np.uint8)))
                with pytest.raises(TimeoutError):
                    waiting[0].result(0.2)
            return comes(event, seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(small_gets, "_comes", asked_meanwhile)
            assert stager.get(ramp(64), out=np.zeros(64, np.uint8)).done()
        assert waiting[0].result(WATCHDOG).nbytes == room + 64 * KIB


@pytest.mark.parametrize("failing", ["copy_d2h", "record_d2h"])
def test_a_copy_that_cannot_be_started_is_said_and_nothing_is_under_way(failing: str) -> None:
    refusals = Refusals(failing)
    with opened(refusals.backend) as stager:
        refusals.left[failing] = 0
        out = np.zeros(64, np.uint8)
        with pytest.raises(TransferError, match="refused"):
            stager.get(ramp(64), out=out)
        assert not out.any()
        del refusals.left[failing]
        stager._ledger.reap()
        assert not stager._ledger.busy


def test_where_a_second_copy_cannot_be_started_the_first_has_come_before_its_memory_is_used_again() -> None:
    refusals = Refusals("copy_d2h")
    with opened(refusals.backend, pinned_limit=LEAST_LIMIT) as stager:
        refusals.left["copy_d2h"] = 1
        with held(d2h(stager)) as gate:
            late = on_thread(lambda: stager.get([ramp(64)] * 2, out=[np.zeros(64, np.uint8) for _ in range(2)]))
            with pytest.raises(TimeoutError):
                late.result(0.2)
            assert not stager._staging._small_gets._idle
            kept = [entry.keepalive for entry in stager._ledger.d2h.entries() if isinstance(entry.keepalive, tuple)]
            assert any(isinstance(each, HostBlock) for each in kept[0])
            kept.clear()
            gate.set()
        with pytest.raises(TransferError, match="refused") as failure:
            late.result(WATCHDOG)
        # What is raised refers to none of it.
        stager._ledger.reap()
        stager.trim()
        assert not stager._pool.nbytes
        assert failure.value is not None


def test_a_copy_that_breaks_is_said_by_the_transfer(stager: xferlib.Stager) -> None:
    d2h(stager).submit(lambda: 1 / 0)
    out = np.zeros(64, np.uint8)
    transfer = stager.get(ramp(64), out=out)
    with pytest.raises(TransferError, match="division by zero"):
        transfer.synchronize()
    assert not out.any()


def test_memory_whose_file_was_cut_off_is_said_by_the_transfer(stager: xferlib.Stager) -> None:
    with tempfile.NamedTemporaryFile() as file:
        os.truncate(file.name, 8192)
        out = np.memmap(file.name, np.uint8, "r+")
        os.truncate(file.name, 0)
        transfer = stager.get(ramp(8192), out=out)
        with pytest.raises(TransferError, match="cut off"):
            transfer.synchronize()


def test_what_is_refused_is_refused_in_its_own_words(stager: xferlib.Stager) -> None:
    with pytest.raises(TypeError, match="without a mask") as refused:
        stager.get(np.ma.masked_array(ramp(64)), out=np.zeros(64, np.uint8))
    # It stands in no tree.
    assert not hasattr(refused.value, "__notes__")


def test_what_the_backend_refuses_is_refused_in_its_own_words(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise ValueError("of another device")

    monkeypatch.setattr(stager.backend, "place", refuse)
    with pytest.raises(ValueError, match="of another device") as refused:
        stager.get(ramp(64), out=np.zeros(64, np.uint8))
    assert not hasattr(refused.value, "__notes__")


def test_while_the_engine_has_no_chunk_it_takes_all_and_gets_one(stager: xferlib.Stager, jobs: list[Any]) -> None:
    """Else it would have to wait for the memory of a copy that is given up."""
    assert stager._staging._lanes[1].release()
    for engine in (1, 1):
        stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
        assert len(jobs) == engine
    assert len(stager._staging._small_gets._idle) == 1


@pytest.mark.parametrize("first", [False, True])
def test_an_interrupt_at_any_point_loses_the_short_way_for_no_longer_than_a_get(jobs: list[Any], first: bool) -> None:
    files = ("staging/small_gets.py", "staging/pageable.py", "xferlib/in_flight.py")
    with opened() as stager:
        small = stager._staging._small_gets
        for point in itertools.count(1):
            if first:
                # The engine gets a chunk, and small gets their memory, in the one that is interrupted.
                assert stager._staging._lanes[1].release()
                small.release()
            cut = interrupted_at(point, files, lambda: stager.get(ramp(64), out=np.zeros(64, np.uint8)))
            stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
            # What a copy that was cut off still needs.
            stager._ledger.wait_all()
            stager._ledger.reap()
            stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
            jobs.clear()
            out = np.zeros(64, np.uint8)
            assert stager.get(ramp(64), out=out).done()
            assert np.array_equal(out, ramp(64))
            assert not jobs, point
            assert len(small._idle) == 1
            if not cut:
                break
        # The newest interpreters let an interrupt in at fewer points.
        assert point > 10
        stager._ledger.reap()
        stager.trim()
        assert not stager._pool.nbytes


def test_a_copy_that_could_not_be_started_costs_the_short_way_for_no_longer_than_a_get(jobs: list[Any]) -> None:
    refusals = Refusals("copy_d2h")
    with opened(refusals.backend) as stager:
        refusals.left["copy_d2h"] = 0
        with pytest.raises(TransferError, match="refused"):
            stager.get(ramp(64), out=np.zeros(64, np.uint8))
        del refusals.left["copy_d2h"]
        stager._ledger.reap()
        stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
        jobs.clear()
        assert stager.get(ramp(64), out=np.zeros(64, np.uint8)).done()
        assert not jobs


def test_memory_that_went_back_for_others_is_not_taken_from_them_again(stager: xferlib.Stager) -> None:
    small = stager._staging._small_gets
    assert small.release()
    for _ in range(small_gets.ASK_AGAIN_AFTER_GETS - 1):
        stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
        assert not small._idle


def test_memory_that_went_back_for_others_comes_back_when_many_gets_have_missed_it(stager: xferlib.Stager, jobs: list[Any]) -> None:
    small = stager._staging._small_gets
    for _ in range(2):
        assert small.release()
        for _ in range(small_gets.ASK_AGAIN_AFTER_GETS):
            assert not small._idle
            stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
        jobs.clear()
        assert stager.get(ramp(64), out=np.zeros(64, np.uint8)).done()
        assert not jobs


def test_while_a_thread_uses_the_memory_no_other_takes_more_of_it(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    small = stager._staging._small_gets
    used = small._idle.pop()
    monkeypatch.setattr(stager._pool, "try_take", lambda nbytes, taken: asked.append(nbytes))
    small.prepare()
    del used
    assert asked == []
    small.prepare()
    assert len(asked) == 1


def test_of_two_threads_that_take_the_memory_at_once_one_does(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    small, try_take = stager._staging._small_gets, stager._pool.try_take

    def take(nbytes: int, taken: Any) -> Any:
        monkeypatch.setattr(stager._pool, "try_take", try_take)
        # Another thread, in the middle.
        on_thread(small.prepare).result(WATCHDOG)
        return try_take(nbytes, taken)

    assert small.release()
    used = stager._pool.used_nbytes
    monkeypatch.setattr(stager._pool, "try_take", take)
    small.prepare()
    stager._ledger.reap()
    assert len(small._idle) == 1
    assert stager._pool.usage().used <= used + LARGEST


def test_where_there_is_no_room_for_it_it_is_asked_for_seldom(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(stager._pool, "try_take", lambda nbytes, taken: asked.append(nbytes))
    small = stager._staging._small_gets
    assert small.release()
    for _ in range(3 * small_gets.ASK_AGAIN_AFTER_GETS):
        stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
    assert len(asked) == 3


def test_where_no_memory_can_be_had_for_small_gets_the_engine_takes_all(jobs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AllocationError("refused")

    with xferlib.Stager(tampered(on_gpu=True)) as stager:
        monkeypatch.setattr(stager._pool, "try_take", refuse)
        for engine in (1, 2):
            stager.get(ramp(64), out=np.zeros(64, np.uint8)).synchronize()
            assert len(jobs) == engine


def test_on_a_thread_that_makes_the_copies_it_is_not_waited_for(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_gets, "is_copy_thread", lambda: True)
    assert not stager._staging._small_gets.takes([(0, ramp(64))])


def test_a_later_get_into_the_same_array_comes_later(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = xferlib_host.Stream()
    out = np.zeros(64, np.uint8)
    first, second = np.zeros(64, np.uint8), np.full(64, 2, np.uint8)
    with held(stream) as gate:
        stream.submit(first.fill, 1)
        monkeypatch.setattr(small_gets, "PRODUCER_SECONDS", 0.0)
        before = stager.get(first, out=out, stream=stream)
        monkeypatch.setattr(small_gets, "PRODUCER_SECONDS", WATCHDOG)
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
