"""`pinned_limit` counts whatever is page-locked for a stager: arrays of the pool, pins and shared rings, in every order."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from xferlib_host import open_stager

import xferlib
from tests.core.fakes import held, on_thread, tampered, until
from xferlib.memory.blocks import WhenFull

MIB = 1 << 20
LIMIT = 64 * MIB
FLAGS = dataclasses.replace(open_stager().capabilities, pinned=True)


def opened(when_full: WhenFull = "wait", **replaced: Any) -> xferlib.Stager:
    """Open a stager on host memory that is said to be page-locked, so that the figures count it."""
    return xferlib.stager(tampered(capabilities=FLAGS, **replaced), pinned_limit=LIMIT, when_full=when_full)


@pytest.fixture
def stager() -> Iterator[xferlib.Stager]:
    with opened() as stager:
        yield stager


class Refused(Exception):
    pass


def ordinary(mib: int) -> Any:
    return np.zeros(mib * MIB, np.uint8)


def pinned(stager: xferlib.Stager, mib: int) -> Any:
    return stager.empty_pinned(mib * MIB, np.uint8)


def figures(stager: xferlib.Stager) -> tuple[float, float]:
    """Return what is pinned now, and the most so far, in MiB."""
    stats = stager.stats()
    return stats.pinned_nbytes / MIB, stats.pinned_peak_nbytes / MIB


def test_a_pin_takes_its_room_from_the_pool(stager: xferlib.Stager) -> None:
    with stager.pin(ordinary(40)):
        kept = pinned(stager, 24)
        assert figures(stager) == (64, 64)
        words = r"1\.0 MiB asked, .*24\.0 MiB of 64\.0 MiB in use .*, 40\.0 MiB by pins .*Raise pinned_limit"
        with pytest.raises(xferlib.AllocationError, match=words):
            pinned(stager, 1)
    assert figures(stager) == (24, 64)
    kept = [kept, pinned(stager, 40)]
    assert figures(stager) == (64, 64)


def test_arrays_of_the_pool_leave_a_pin_no_more_than_the_rest(stager: xferlib.Stager) -> None:
    kept = pinned(stager, 40)
    words = rf"25\.0 MiB to be page-locked.*pinned_limit={LIMIT} .*40\.0 MiB of 64\.0 MiB.*Raise pinned_limit"
    with pytest.raises(xferlib.AllocationError, match=words):
        stager.pin(ordinary(25))
    assert figures(stager) == (40, 40)
    with stager.pin(ordinary(24)):
        assert figures(stager) == (64, 64)
    del kept


def test_the_limit_is_met_exactly_and_by_no_byte_more(stager: xferlib.Stager) -> None:
    with stager.pin(ordinary(64)):
        assert figures(stager) == (64, 64)
    with pytest.raises(xferlib.AllocationError, match="Raise pinned_limit"):
        stager.pin(np.zeros(LIMIT + 1, np.uint8))
    assert figures(stager) == (0, 64)


def test_pins_count_together(stager: xferlib.Stager) -> None:
    first, second = stager.pin(ordinary(30)), stager.pin(ordinary(30))
    with pytest.raises(xferlib.AllocationError, match=r"60\.0 MiB by pins"):
        stager.pin(ordinary(5))
    first.close()
    with stager.pin(ordinary(34)):
        assert figures(stager) == (64, 64)
    second.close()
    second.close()
    assert figures(stager) == (0, 64)


def test_idle_memory_of_the_pool_makes_room_for_a_pin(stager: xferlib.Stager) -> None:
    kept = pinned(stager, 10)
    idle = [pinned(stager, 20), pinned(stager, 20)]
    idle.clear()
    assert figures(stager) == (50, 50)
    with stager.pin(ordinary(30)):
        # One of both was enough.
        assert figures(stager) == (60, 60)
        with stager.pin(ordinary(20)):
            assert figures(stager) == (60, 60)
    assert len(kept) == 10 * MIB


def test_memory_that_staging_keeps_for_later_makes_room_for_a_pin() -> None:
    with xferlib.stager(tampered(capabilities=FLAGS), pinned_limit=LIMIT, staging="2x4MiB") as stager:
        stager.put(ordinary(30)).synchronize()
        assert figures(stager)[0] > 4
        with stager.pin(ordinary(62)):
            assert figures(stager)[0] <= 64


def test_memory_of_copies_that_are_done_makes_room_for_a_pin(stager: xferlib.Stager) -> None:
    stager.put(pinned(stager, 40)).synchronize()
    with stager.pin(ordinary(60)):
        assert figures(stager) == (60, 60)


def test_an_array_in_a_reference_cycle_makes_room_for_a_pin(stager: xferlib.Stager) -> None:
    gc.disable()
    try:
        knot: list[Any] = [pinned(stager, 40)]
        knot.append(knot)
        del knot
        with stager.pin(ordinary(60)):
            assert figures(stager) == (60, 60)
    finally:
        gc.enable()


def test_a_pin_waits_for_no_transfer(stager: xferlib.Stager) -> None:
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        stager.put(pinned(stager, 40))
        with pytest.raises(xferlib.AllocationError):
            on_thread(lambda: stager.pin(ordinary(60))).result(10)


def test_the_pool_waits_for_a_transfer_where_pins_have_the_rest(stager: xferlib.Stager) -> None:
    with stager.pin(ordinary(20)):
        with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
            stager.put(pinned(stager, 40))
            waiting = on_thread(lambda: pinned(stager, 30))
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            gate.set()
            assert waiting.result(10).nbytes == 30 * MIB
        assert stager.stats().pool_waits == 1
        # The memory of the copy itself.
        assert figures(stager) == (60, 60)


@pytest.mark.parametrize("when_full", ["raise", "stage"])
def test_the_pool_does_as_it_was_told_where_pins_have_the_room(when_full: WhenFull) -> None:
    with opened(when_full) as stager, stager.pin(ordinary(60)):
        if when_full == "raise":
            with pytest.raises(xferlib.AllocationError, match="waits for nothing"):
                pinned(stager, 8)
        else:
            assert pinned(stager, 8).nbytes == 8 * MIB
            assert stager.stats().pool_fallbacks == 1
        assert figures(stager) == (60, 60)


@pytest.mark.parametrize("then", ["trim", "close"])
@pytest.mark.parametrize("borrow", [False, True])
def test_a_put_that_finds_no_room_to_stage_keeps_no_device_memory(*, borrow: bool, then: str) -> None:
    with opened("wait") as stager:
        with stager.pin(ordinary(64)), pytest.raises(xferlib.XferError, match="pinned memory is full"):
            stager.put(ordinary(8), borrow=borrow).result()
        assert stager.stats().device_nbytes == 8 * MIB
        getattr(stager, then)()
        gc.collect()
        if then == "trim":
            stager.trim()
        assert until(lambda: stager.stats().device_nbytes == 0)


def test_a_lock_that_the_driver_refuses_is_not_counted() -> None:
    def refuse(address: int, nbytes: int) -> None:
        if nbytes == 40 * MIB:
            raise Refused

    with opened(pin=refuse, unpin=lambda address: None, failures=(Refused,)) as stager:
        with pytest.raises(xferlib.AllocationError, match="could not be page-locked"):
            stager.pin(ordinary(40))
        assert figures(stager) == (0, 0)
        with stager.pin(ordinary(64)):
            assert figures(stager) == (64, 64)


def test_an_unlock_that_the_driver_refuses_stays_counted() -> None:
    refused = [True]

    def unpin(address: int) -> None:
        if refused:
            refused.clear()
            raise Refused

    with opened(pin=lambda address, nbytes: None, unpin=unpin) as stager:
        pin = stager.pin(ordinary(40))
        with pytest.raises(Refused):
            pin.close()
        assert figures(stager) == (40, 40)
        pin.close()
        assert figures(stager) == (0, 40)


def test_a_pin_that_was_dropped_counts_until_it_is_unlocked(stager: xferlib.Stager) -> None:
    pin = stager.pin(ordinary(40))
    with pytest.warns(ResourceWarning, match="never closed"):
        del pin
    assert figures(stager) == (40, 40)
    with stager.pin(ordinary(60)):
        assert figures(stager) == (60, 60)


def test_nothing_is_counted_behind_a_closed_stager() -> None:
    with opened() as stager:
        pin = stager.pin(ordinary(40))
    assert figures(stager) == (0, 40)
    pin.close()
    assert figures(stager) == (0, 40)


def ring(stager: xferlib.Stager) -> xferlib.SharedRing:
    return xferlib.SharedRing(stager, ((15 * MIB,), np.uint8), slots=4)


def test_a_shared_ring_takes_its_room_from_the_pool_and_gives_it_back(stager: xferlib.Stager) -> None:
    with ring(stager):
        assert figures(stager) == (60, 60)
        with pytest.raises(xferlib.AllocationError, match=r"60\.0 MiB by pins and shared rings"):
            pinned(stager, 8)
    assert figures(stager) == (0, 60)
    assert pinned(stager, 60).nbytes == 60 * MIB


def test_a_shared_ring_finds_no_room_beside_arrays_and_room_beside_idle_memory(stager: xferlib.Stager) -> None:
    kept = pinned(stager, 40)
    with pytest.raises(xferlib.AllocationError, match="fewer or smaller slots"):
        ring(stager)
    assert figures(stager) == (40, 40)
    del kept
    with ring(stager):
        assert figures(stager) == (60, 60)


def test_what_pins_lock_alone_was_asked_for(stager: xferlib.Stager) -> None:
    with stager.pin(ordinary(30)):
        pass
    stats = stager.stats()
    assert (stats.pinned_asked_nbytes, stats.pinned_asked_peak_nbytes) == (0, 30 * MIB)
    assert stats.waste_at_peak == 0


def test_the_share_that_nobody_asked_for_counts_pins_as_asked_for(stager: xferlib.Stager) -> None:
    with stager.pin(ordinary(30)):
        idle = pinned(stager, 10)
        assert stager.stats().waste == stager.stats().waste_at_peak == 0
        del idle
        assert stager.stats().waste == 0.25
        assert stager.stats().waste_at_peak == 0


def test_a_backend_that_locks_nothing_keeps_the_same_limit() -> None:
    with xferlib.stager("host", pinned_limit=LIMIT) as stager, stager.pin(ordinary(40)):
        with pytest.raises(xferlib.AllocationError, match=r"40\.0 MiB by pins"):
            pinned(stager, 30)
        assert figures(stager) == (0, 0)
