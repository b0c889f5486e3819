"""An interrupt of whatever a ring does: no lock is held afterwards, no slot is lost, and it can be closed, twice."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

import xferlib
from tests.core.fakes import held, on_thread
from tests.pipeline.interrupts import at_line, by_signal
from tests.pipeline.steps import PATIENCE, busy, h2d, until

SPEC = {"x": ((512,), np.uint8)}
FILES = ("xferlib/pipeline/ring.py", "xferlib/tickets.py")
ALARMS = 300


def is_whole(ring: xferlib.Ring) -> bool:
    """Tell whether another thread can have all slots at once, of different memory."""

    def all_slots() -> int:
        slots = [ring.acquire() for _ in range(ring.slots)]
        return len({slot["x"].ctypes.data for slot in slots})

    return on_thread(all_slots).result(PATIENCE) == ring.slots


def acquire(ring: xferlib.Ring) -> None:
    ring.acquire()


def release(ring: xferlib.Ring) -> None:
    ring.acquire().release()


def release_with_arrays(ring: xferlib.Ring) -> None:
    with ring.acquire() as slot:
        array = slot["x"]
    del array


def put(ring: xferlib.Ring) -> None:
    for number in range(3):
        slot = ring.acquire()
        slot["x"][:] = number
        assert (slot.put().result()["x"] == number).all()


def put_and_wait_for_the_oldest(ring: xferlib.Ring) -> None:
    with held(h2d(ring.stager)) as gate:
        kept = [ring.acquire().put(), ring.acquire().put()]

        def open_gate() -> None:
            until(lambda: busy(ring._waiting))
            gate.set()

        opening = on_thread(open_gate)
        ring.acquire()
        opening.result(PATIENCE)
    del kept


@pytest.mark.parametrize("step", [acquire, release, release_with_arrays, put, put_and_wait_for_the_oldest])
def test_an_interrupt_in_front_of_any_line_loses_no_slot(stager: xferlib.Stager, step: Callable[[xferlib.Ring], None]) -> None:
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        for number in itertools.count(1):
            if not at_line(number, FILES, lambda: step(ring)):
                break
            assert not busy(ring._waiting)
            assert is_whole(ring), number
        assert number > 20


def test_an_interrupt_of_whoever_waits_for_a_slot_to_be_let_go_of_loses_none(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        kept: list[xferlib.Slot] = []
        let_go = kept.clear
        for number in itertools.count(1):
            kept += [ring.acquire(), ring.acquire()]
            with monkeypatch.context() as patch:
                patch.setattr(ring, "_changed", SimpleNamespace(wait_for=lambda reached, seconds: let_go()))
                waited = at_line(number, FILES, lambda: acquire(ring))
            kept.clear()
            if not waited:
                break
            assert not busy(ring._waiting)
            assert is_whole(ring), number
        assert number > 40


def test_an_interrupt_of_closing_leaves_a_ring_that_can_be_closed(stager: xferlib.Stager) -> None:
    for number in itertools.count(1):
        ring = xferlib.Ring(stager, SPEC, slots=3)
        slot = ring.acquire()
        for _ in range(2):
            ring.acquire().put()
        cut = at_line(number, FILES, ring.close)
        for _ in range(2):
            ring.close()
        with pytest.raises(xferlib.ClosedError):
            ring.acquire()
        assert (slot["x"] == slot["x"]).all()
        del ring, slot
        stager.trim()
        assert stager._pool.usage().used == 0, number
        if not cut:
            break
    assert number > 10


def go_round(ring: xferlib.Ring) -> None:
    while True:
        first, second = ring.acquire(), ring.acquire()
        first.release()
        with second as slot:
            slot["x"][:] = 1
        del first, second, slot


def test_real_signals_lose_no_slot(stager: xferlib.Stager) -> None:
    rng = random.Random(1)
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        for number in range(ALARMS):
            by_signal(rng.uniform(10e-6, 400e-6), lambda: go_round(ring))
            assert not busy(ring._waiting)
            if number % 10 == 0:
                assert is_whole(ring)
        ring.close()
        ring.close()


class Knot:
    """Part of a reference cycle. Its finalizer looks at the slot's arrays, and keeps what it finds."""

    def __init__(self, slot: xferlib.Slot, found: list[int]) -> None:
        self.slot = slot
        self.me = self
        self.found = found

    def __del__(self) -> None:
        self.found.append(int(self.slot["x"][0]))


def test_a_slot_that_dies_in_a_cycle_comes_back_behind_all_finalizers_of_it(stager: xferlib.Stager) -> None:
    found: list[int] = []
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        for number in range(5):
            slot = ring.acquire()
            slot["x"][:] = number
            Knot(slot, found)
            del slot
            gc.collect()
        assert is_whole(ring)
    assert found == list(range(5))


def test_a_slot_that_a_finalizer_brings_back_to_life_stays_out(stager: xferlib.Stager) -> None:
    alive: list[xferlib.Slot] = []

    class Lazarus:
        def __init__(self, slot: xferlib.Slot) -> None:
            self.slot = slot
            self.me = self

        def __del__(self) -> None:
            alive.append(self.slot)

    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        slot = ring.acquire()
        Lazarus(slot)
        del slot
        gc.collect()
        other = ring.acquire()
        assert not np.shares_memory(other["x"], alive[0]["x"])
        following = on_thread(ring.acquire)
        until(lambda: busy(ring._waiting))
        assert not following.done()
        alive.clear()
        following.result(PATIENCE)


@pytest.mark.parametrize("end", [xferlib.Slot.put, xferlib.Slot.release])
def test_a_slot_of_which_an_interrupt_cut_the_end_is_its_holder_s_or_the_ring_s(
    stager: xferlib.Stager, end: Callable[[xferlib.Slot], object]
) -> None:
    for number in itertools.count(1):
        with xferlib.Ring(stager, SPEC, slots=2) as ring:
            slots = [ring.acquire()]
            kept = slots[0]["x"]
            cut = at_line(number, FILES, lambda: end(slots[0]))  # noqa: B023
            stager.put(np.zeros(3)).synchronize()
            others = [ring.acquire()["x"] for _ in range(2) if ring._idle or ring._put or ring._used]
            # Whoever may write to it has it for himself.
            assert not (kept.flags.writeable and any(np.shares_memory(kept, other) for other in others))
            assert cut or not kept.flags.writeable
            del kept, others
            slots.clear()
        if not cut:
            break
    assert number > 5
