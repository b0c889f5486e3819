"""Staging where the pool has no room: who can be served waits for what comes back, and who cannot is told. Nobody hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Gated, held, off_main, on_thread, tampered
from xferlib.staging import land
from xferlib.staging.parts import pick_up
from xferlib.staging.profile import StagingProfile

MIB = 1 << 20
LIMIT = 4 * MIB
RING = StagingProfile(1, MIB)
SECONDS = 10.0

pytestmark = pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")


def numbers(nbytes: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + nbytes // 4, dtype=np.uint32)


def fill(stager: xferlib.Stager) -> list[Any]:
    """Take all of the pinned memory."""
    return [stager.empty_pinned(MIB, np.uint8) for _ in range(LIMIT // MIB)]


def test_a_lent_put_that_finds_no_room_fails() -> None:
    with xferlib.stager(tampered(), pinned_limit=LIMIT, staging=RING) as stager:
        arrays = fill(stager)
        transfer = stager.put(numbers(3 * MIB), borrow=True)
        with pytest.raises(xferlib.TransferError, match="pinned memory is full"):
            on_thread(transfer.synchronize).result(SECONDS)
        del arrays


def test_a_get_whose_chunks_were_given_away_in_the_middle_fails() -> None:
    """By a `trim` beside it, and arrays that took what it gave back."""
    with xferlib.stager(tampered(), pinned_limit=LIMIT, staging=RING, when_full="raise") as stager:
        ring: Any = stager._staging
        chunks = ring._chunks
        arrays: list[Any] = []
        give = chunks.give

        def given(direction: int, chunk: Any) -> None:
            give(direction, chunk)
            if threading.current_thread().name == "xferlib-landing":
                stager.trim()
                while True:
                    try:
                        arrays.append(stager.empty_pinned(64 << 10, np.uint8))
                    except xferlib.AllocationError:
                        return

        chunks.give = given
        transfer = stager.get(numbers(8 * MIB), out=np.zeros(2 * MIB, np.uint32))
        with pytest.raises(xferlib.TransferError, match="pinned memory is full"):
            on_thread(transfer.synchronize).result(SECONDS)
        assert arrays


@pytest.mark.parametrize("way", ["put", "get small", "get large"])
def test_two_threads_that_find_no_room_do_not_wait_for_each_other(way: str) -> None:
    source, out = numbers(3 * MIB), np.zeros(3 * MIB // 4, np.uint32)
    calls: dict[str, Callable[[xferlib.Stager], Any]] = {
        "put": lambda stager: stager.put(source),
        "get small": lambda stager: stager.get(source[:9], out=np.zeros(9, np.uint32)).result(),
        "get large": lambda stager: stager.get(source, out=out).result(),
    }
    with xferlib.stager("host", pinned_limit=LIMIT, staging=RING) as stager:
        arrays = fill(stager)
        engine = getattr(stager.backend, "h2d" if way == "put" else "d2h")
        # Something is in flight, so that both get as far as waiting.
        with held(engine) as gate:
            transfer = stager.put(arrays[0]) if way == "put" else stager.get(np.ones(MIB, np.uint8), out=arrays[0])
            both = [on_thread(lambda: calls[way](stager)) for _ in range(2)]
            with pytest.raises(TimeoutError):
                both[0].result(0.1)
            with pytest.raises(TimeoutError):
                both[1].result(0.1)
            gate.set()
        for call in both:
            with pytest.raises(xferlib.AllocationError, match="pinned memory is full"):
                call.result(SECONDS)
        transfer.synchronize()


def test_a_put_waits_for_a_chunk_that_another_thread_has() -> None:
    gated = Gated(off_main, once=True)
    with xferlib.stager(gated.backend, pinned_limit=2 * MIB, staging=StagingProfile(1, MIB, 64 << 10)) as stager:
        source = numbers(3 * MIB)
        large = on_thread(lambda: stager.put(source).result())
        assert gated.entered.wait(SECONDS)
        # The chunks that are idle come back at once, that one does not.
        ring: Any = stager._staging
        array = stager.empty_pinned(2 * MIB - ring._chunks.nbytes, np.uint8)
        small = on_thread(lambda: stager.put(source[:9]).result())
        with pytest.raises(TimeoutError):
            small.result(0.2)
        gated.gate.set()
        assert np.array_equal(small.result(SECONDS), source[:9])
        assert np.array_equal(large.result(SECONDS), source)
        del array


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_finalizer_on_a_thread_that_has_a_chunk_does_not_wait_for_it(direction: str) -> None:
    """It gets its memory, or is told that there is none: the chunk comes back after it has returned."""
    backend = tampered()
    told: list[BaseException] = []

    def copy(dst: int, src: int, nbytes: int) -> None:
        if not told:
            try:
                # What a finalizer may do that the collector runs just here.
                stager.empty_pinned(LIMIT, np.uint8)
            except xferlib.AllocationError as error:
                told.append(error)
        getattr(backend.inner, f"copy_{direction}")(dst, src, nbytes)

    setattr(backend, f"copy_{direction}", copy)
    with xferlib.stager(backend, pinned_limit=LIMIT, staging=RING) as stager:
        source, out = numbers(3 * MIB), np.zeros(3 * MIB // 4, np.uint32)
        call = {"h2d": lambda: stager.put(source).result(), "d2h": lambda: stager.get(source, out=out).result()}[direction]
        assert np.array_equal(on_thread(call).result(SECONDS), source)
        assert told


def test_many_tiny_leaves_count_with_what_their_alignment_adds() -> None:
    with xferlib.stager("host", pinned_limit=MIB, staging=RING) as stager:
        leaves = [np.uint8(number % 251) * np.ones(1, np.uint8) for number in range(5000)]
        arrays = stager.put(leaves).result()
        assert [int(array[0]) for array in arrays] == [number % 251 for number in range(5000)]


def test_a_thread_that_asks_for_its_first_chunk_waits_for_another_s() -> None:
    gated = Gated(off_main, once=True)
    with xferlib.stager(gated.backend, pinned_limit=LIMIT, staging=RING) as stager:
        # Room for one chunk, once both have found that there is none.
        arrays = [stager.empty_pinned(LIMIT // 8, np.uint8) for _ in range(8)]
        source = numbers(3 * MIB)
        with held(gated.backend.inner.h2d) as gate:
            transfer = stager.put(arrays[0])
            both = [on_thread(lambda: stager.put(source).result()) for _ in range(2)]
            for call in both:
                with pytest.raises(TimeoutError):
                    call.result(0.1)
            arrays.pop()
            gate.set()
        assert gated.entered.wait(SECONDS)
        for call in both:
            with pytest.raises(TimeoutError):
                call.result(0.1)
        gated.gate.set()
        for call in both:
            assert np.array_equal(call.result(SECONDS), source)
        transfer.synchronize()


def test_memory_on_its_way_into_flight_is_waited_for() -> None:
    gated = Gated()
    with xferlib.stager(gated.backend, pinned_limit=LIMIT, staging=RING) as stager:
        small = on_thread(lambda: stager.put(numbers(MIB)).result())
        assert gated.entered.wait(SECONDS)
        array = on_thread(lambda: stager.empty_pinned(LIMIT, np.uint8))
        with pytest.raises(TimeoutError):
            array.result(0.2)
        gated.gate.set()
        assert np.array_equal(small.result(SECONDS), numbers(MIB))
        assert array.result(SECONDS).nbytes == LIMIT


def test_memory_that_waits_to_be_landed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = threading.Event(), threading.Event()

    def slow(source: Any, part: Any) -> None:
        entered.set()
        go.wait(SECONDS)
        pick_up(source, part)

    monkeypatch.setattr(land, "pick_up", slow)
    with xferlib.stager(tampered(), pinned_limit=LIMIT, staging=RING) as stager:
        out = np.zeros(MIB // 4, np.uint32)
        transfer = stager.get(numbers(MIB), out=out)
        assert entered.wait(SECONDS)
        array = on_thread(lambda: stager.empty_pinned(LIMIT, np.uint8))
        with pytest.raises(TimeoutError):
            array.result(0.2)
        go.set()
        transfer.synchronize()
        assert np.array_equal(out, numbers(MIB))
        assert array.result(SECONDS).nbytes == LIMIT
