"""Staging where the pool has no room: who can be served waits for what comes back, and who cannot is told. Nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Gated, held, off_main, on_thread, tampered, until
from xferlib.engine.native import H2D
from xferlib.staging.pageable import LEAST_CHUNKS
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
    with xferlib.stager("host", pinned_limit=LIMIT, staging=RING) as stager:
        arrays = fill(stager)
        with pytest.raises(xferlib.AllocationError, match="pinned memory is full"):
            on_thread(lambda: stager.put(numbers(3 * MIB), borrow=True)).result(SECONDS)
        del arrays


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
        staging: Any = stager._staging
        lane = staging._lanes[H2D]
        assert until(lambda: len(lane._blocks) == LEAST_CHUNKS)
        array = stager.empty_pinned(2 * MIB - LEAST_CHUNKS * lane.nbytes, np.uint8)
        small = on_thread(lambda: stager.put(source[:9]).result())
        with pytest.raises(TimeoutError):
            small.result(0.2)
        gated.gate.set()
        assert np.array_equal(small.result(SECONDS), source[:9])
        assert np.array_equal(large.result(SECONDS), source)
        del array


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


@pytest.mark.parametrize("nbytes", [64 << 10, MIB])
def test_memory_on_its_way_into_flight_is_waited_for(nbytes: int) -> None:
    gated = Gated()
    with xferlib.stager(gated.backend, pinned_limit=LIMIT, staging=RING) as stager:
        small = on_thread(lambda: stager.put(numbers(nbytes)).result())
        assert gated.entered.wait(SECONDS)
        array = on_thread(lambda: stager.empty_pinned(LIMIT, np.uint8))
        with pytest.raises(TimeoutError):
            array.result(0.2)
        gated.gate.set()
        assert np.array_equal(small.result(SECONDS), numbers(nbytes))
        assert array.result(SECONDS).nbytes == LIMIT


def test_chunks_make_room_for_whoever_asks_the_pool() -> None:
    with xferlib.stager("host", pinned_limit=16 * MIB, staging=RING) as stager:
        stager.put(numbers(32 * MIB)).synchronize()
        assert stager._pool.usage().used >= 2 * MIB
        assert stager.empty_pinned(16 * MIB, np.uint8).nbytes == 16 * MIB


def test_chunks_make_room_where_nobody_waits() -> None:
    with xferlib.stager("host", pinned_limit=16 * MIB, staging=RING, when_full="raise") as stager:
        stager.put(numbers(32 * MIB)).synchronize()
        assert stager.empty_pinned(16 * MIB, np.uint8).nbytes == 16 * MIB


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


def test_sources_of_several_puts_are_free_while_the_copies_of_all_are_held() -> None:
    with xferlib.stager("host", pinned_limit=64 * MIB) as stager, held(stager.backend.h2d):  # type: ignore[attr-defined]
        # Together they have no more parts than there are chunks, however many threads the process has.
        sources = [numbers(MIB, first) for first in range(2)]
        transfers = []
        for source in sources:
            transfers.append(stager.put(source, borrow="staged"))
            on_thread(transfers[-1].wait_staged).result(SECONDS)
            source[:] = 0
        assert not transfers[0].done()
    for first, transfer in enumerate(transfers):
        assert np.array_equal(transfer.result(), numbers(MIB, first))
