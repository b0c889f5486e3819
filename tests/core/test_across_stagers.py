"""Two of everything: memory that another stager's copies use, blocks that lie side by side, pins of several stagers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import WATCHDOG, held, on_thread, tampered, until
from xferlib.stager import Stager

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def stagers() -> Iterator[tuple[Stager, Stager]]:
    with xferlib.stager("host") as one, xferlib.stager("host") as other:
        yield one, other


def other_backend(**replaced: Any) -> Stager:
    """Open a stager whose events no stream of the host backend's may wait for: it says that it is of another backend."""
    return xferlib.stager(tampered(name="another", **replaced))


def filled(stager: Stager, value: int, nbytes: int = MIB) -> np.ndarray:
    array = stager.empty_pinned(nbytes, np.uint8)
    array[:] = value
    return array


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_what_is_put_into_an_array_waits_on_the_device_for_a_get_of_another_stager(
    stagers: tuple[Stager, Stager], tree: bool, staged: bool
) -> None:
    one, other = stagers
    x, new = one.put(filled(one, 1)).result(), filled(one, 2)
    out = np.zeros(MIB, np.uint8) if staged else filled(other, 0)
    with held(other.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
        got = other.get(x, out=out)
        transfer = on_thread(lambda: one.put([new], into=[x]) if tree else one.put(new, into=x)).result(WATCHDOG)
        assert not until(transfer.done, 0.1)
        gate.set()
        assert (got.result() == 1).all()
        transfer.synchronize()
    assert (x == 2).all()


def test_what_is_put_into_an_array_comes_after_what_another_stager_puts_into_it(stagers: tuple[Stager, Stager]) -> None:
    one, other = stagers
    x = one.put(filled(one, 1)).result()
    with held(other.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
        first = other.put(filled(other, 2), into=x)
        second = on_thread(lambda: one.put(filled(one, 3), into=x)).result(WATCHDOG)
        assert not until(second.done, 0.1)
        gate.set()
        first.synchronize()
        second.synchronize()
    assert (x == 3).all()


def test_a_get_of_another_part_holds_nobody_up(stagers: tuple[Stager, Stager]) -> None:
    one, other = stagers
    x = one.put(filled(one, 1)).result()
    with held(other.backend.d2h):  # type: ignore[attr-defined]  # the host backend's
        got = other.get(x[: MIB // 2], out=filled(other, 0, MIB // 2))
        transfer = one.put(filled(one, 2, MIB // 2), into=x[MIB // 2 :])
        assert until(transfer.done)
    assert (got.result() == 1).all()


@pytest.mark.parametrize("direction", ["get", "put"])
def test_for_a_copy_of_another_backend_the_host_waits(direction: str) -> None:
    with xferlib.stager("host") as one, other_backend() as other:
        backend: Any = other.backend
        x, out = one.put(filled(one, 1)).result(), filled(other, 0)
        engine = backend.inner.d2h if direction == "get" else backend.inner.h2d
        with held(engine) as gate:
            first = other.get(x, out=out) if direction == "get" else other.put(filled(other, 9), into=x)
            putting = on_thread(lambda: one.put(filled(one, 2), into=x))
            assert not until(putting.done, 0.1)
            gate.set()
            putting.result(WATCHDOG).synchronize()
            first.synchronize()
        assert (x == 2).all()
        assert (out == (1 if direction == "get" else 0)).all()


def test_a_full_pool_waits_for_what_another_stager_reads_of_it() -> None:
    with xferlib.stager("host", pinned_limit=4 * MIB) as one, xferlib.stager("host") as other:
        backend: Any = other.backend
        array = one.empty_pinned(3 * MIB, np.uint8)
        # As a driver would say of memory that anybody has locked.
        backend.pin(array.ctypes.data, array.nbytes)
        with held(backend.h2d) as gate:
            reading = other.put(array)
            address = array.ctypes.data
            del array
            asking = on_thread(lambda: one.empty_pinned(3 * MIB, np.uint8))
            assert not until(asking.done, 0.1)
            gate.set()
            assert asking.result(WATCHDOG).ctypes.data == address
        reading.synchronize()
        backend.unpin(address)


def test_a_full_pool_does_not_wait_for_a_stranger_that_holds_none_of_it() -> None:
    with xferlib.stager("host", pinned_limit=4 * MIB) as one, xferlib.stager("host") as other:
        with held(other.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
            strange = other.put(filled(other, 1))
            kept = one.empty_pinned(3 * MIB, np.uint8)
            with pytest.raises(xferlib.AllocationError, match="nothing is in flight that could free more"):
                on_thread(lambda: one.empty_pinned(3 * MIB, np.uint8)).result(WATCHDOG)
            assert not strange.done()
        del kept


def test_a_full_pool_does_not_wait_for_a_stranger_that_stages_none_of_it() -> None:
    with xferlib.stager("host", pinned_limit=4 * MIB) as one, xferlib.stager("host") as other:
        with held(other.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
            strange = other.put(np.zeros(3 * MIB, np.uint8), borrow=True)
            kept = one.empty_pinned(3 * MIB, np.uint8)
            with pytest.raises(xferlib.AllocationError, match="nothing is in flight that could free more"):
                on_thread(lambda: one.empty_pinned(3 * MIB, np.uint8)).result(WATCHDOG)
            assert not strange.done()
        del kept


def test_device_memory_at_its_limit_waits_for_what_another_stager_reads_of_it() -> None:
    with xferlib.stager("host", device_limit=MIB) as one, xferlib.stager("host") as other:
        x = one.put(filled(one, 1)).result()
        with held(other.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
            got = other.get(x)
            del x
            putting = on_thread(lambda: one.put(filled(one, 2)).result())
            assert not until(putting.done, 0.1)
            gate.set()
            assert (putting.result(WATCHDOG) == 2).all()
        assert (got.result() == 1).all()


def test_device_memory_at_its_limit_waits_for_what_another_stager_gets_of_it_into_pageable_memory() -> None:
    with xferlib.stager("host", device_limit=MIB) as one, xferlib.stager("host") as other:
        x = one.put(filled(one, 1)).result()
        out = np.zeros(MIB, np.uint8)
        with held(other.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
            got = other.get(x, out=out)
            del x
            putting = on_thread(lambda: one.put(filled(one, 2)).result())
            assert not until(putting.done, 0.1)
            gate.set()
            assert (putting.result(WATCHDOG) == 2).all()
        got.synchronize()
        assert (out == 1).all()


@pytest.mark.parametrize("direction", ["put", "get"])
def test_a_full_pool_waits_for_what_another_stager_stages_of_it(direction: str) -> None:
    with xferlib.stager("host", pinned_limit=4 * MIB) as one, other_backend() as other:
        backend: Any = other.backend
        array = one.empty_pinned(3 * MIB, np.uint8)
        array[:] = 1
        x = other.put(np.full(3 * MIB, 2, np.uint8)).result()
        assert not other.backend.is_pinned(array.ctypes.data, array.nbytes)
        with held(backend.inner.h2d if direction == "put" else backend.inner.d2h) as gate:
            under_way = other.put(array, borrow=True) if direction == "put" else other.get(x, out=array)
            address = array.ctypes.data
            end = under_way.completion
            del array, under_way
            asking = on_thread(lambda: one.empty_pinned(3 * MIB, np.uint8))
            assert not until(asking.done, 0.1)
            gate.set()
            assert asking.result(WATCHDOG).ctypes.data == address
        end.synchronize()


class SideBySide:
    """A host backend whose blocks lie side by side, and that refuses, as drivers do, a copy that spans two of them."""

    def __init__(self) -> None:
        self.arena = np.zeros(64 * MIB, np.uint8)
        self.blocks: list[tuple[int, int]] = []
        self.copies = 0
        self.backend = tampered(alloc_device=self._alloc, free_device=lambda block: None, copy_h2d=self._copy)

    def _alloc(self, nbytes: int) -> Any:
        start = self.blocks[-1][1] if self.blocks else -(-self.arena.ctypes.data // 256) * 256
        self.blocks.append((start, start + nbytes))
        block = Block()
        block.address, block.nbytes = start, nbytes
        return block

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        self.copies += 1
        assert any(start <= dst and dst + nbytes <= end for start, end in self.blocks), "a copy spans two allocations"
        self.backend.inner.copy_h2d(dst, src, nbytes)


class Block:
    address: int
    nbytes: int
    ready = None


@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("nbytes", [65 << 10, 72 << 10, (128 << 10) - 8, 128 << 10, 256 << 10])
def test_small_leaves_are_not_joined_over_two_blocks_that_lie_side_by_side(nbytes: int, borrow: bool) -> None:
    played = SideBySide()
    with xferlib.stager(played.backend) as stager:
        for leaves in (2, 3, 12, 40):
            tree = [np.full(nbytes, 41 + number, np.uint8) for number in range(leaves)]
            arrays = stager.put(tree, borrow=borrow).result()
            assert all((array == source).all() for array, source in zip(arrays, tree, strict=True))


def test_small_leaves_of_one_block_still_cross_together() -> None:
    played = SideBySide()
    with xferlib.stager(played.backend) as stager:
        stager.put([np.ones(1000, np.uint8) for _ in range(50)]).synchronize()
        assert played.copies == 1


def test_targets_that_lie_side_by_side_are_written_one_by_one() -> None:
    played = SideBySide()
    with xferlib.stager(played.backend) as stager:
        targets = [stager.put(np.zeros(256, np.uint8)).result() for _ in range(3)]
        before, played.blocks[:] = played.copies, sorted(played.blocks)
        stager.put([np.full(256, 5, np.uint8) for _ in targets], into=targets).synchronize()
        assert played.copies - before == 3
        assert all((target == 5).all() for target in targets)


def test_memory_whose_ends_two_stagers_have_pinned_and_whose_middle_nobody_has_is_staged() -> None:
    with xferlib.stager("host") as one, xferlib.stager("host") as other, other_backend() as third:
        raw = np.empty(600 * PAGE, np.uint8)
        start = -raw.ctypes.data % PAGE
        x = raw[start : start + 512 * PAGE]
        x[:] = np.arange(len(x), dtype=np.uint32).astype(np.uint8)
        backend: Any = third.backend
        # A driver is asked about both ends, and knows the pins of everybody.
        backend.is_pinned = lambda address, nbytes: True
        third._puts._host._is_pinned = backend.is_pinned
        with one.pin(x[: 64 * PAGE]), other.pin(x[-64 * PAGE :]):
            assert (third.put(x).result() == x).all()
            assert third.stats().synchronous == 1
        with one.pin(x):
            third.put(x).synchronize()
            assert third.stats().synchronous == 1


def test_a_block_that_another_stager_reads_is_not_used_again(stagers: tuple[Stager, Stager]) -> None:
    one, other = stagers
    x = one.put(filled(one, 1)).result()
    with held(other.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
        got = other.get(x)
        address = x.ctypes.data
        del x
        later = [one.put(filled(one, 2)).result() for _ in range(5)]
        assert address not in [array.ctypes.data for array in later]
        gate.set()
        assert (got.result() == 1).all()
    assert ctypes.c_uint8.from_address(later[0].ctypes.data).value == 2
