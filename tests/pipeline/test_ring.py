"""`Ring` and `Slot`: who has a slot, when it comes back, and what is refused."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import held, on_thread, succeeds, tampered
from tests.pipeline.failing import failing_copies
from tests.pipeline.steps import PATIENCE, busy, h2d, part, until
from xferlib import latch
from xferlib.pipeline import ring as ring_module

SPEC = {"image": ((4, 3), "float32"), "label": ((4,), "int64")}
LEAF = ((4,), "uint8")


def address(slot: xferlib.Slot) -> int:
    return int(slot["image"].ctypes.data)


def test_a_batch_is_written_in_place_and_put(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC) as ring:
        slot = ring.acquire()
        np.stack([np.full(3, row, np.float32) for row in range(4)], out=slot["image"])
        slot.tree["label"][:] = range(4)
        tree = slot.put().result()
        assert tree["image"].tolist() == [[row] * 3 for row in range(4)]
        assert tree["label"].tolist() == [0, 1, 2, 3]
    assert stager.stats().synchronous == 0


class Pair(NamedTuple):
    first: Any
    second: Any


class Shaped:
    shape = (2, 3)
    dtype = "int16"


@pytest.mark.parametrize("leaf", [((2, 3), "int16"), np.zeros((2, 3), np.int16), Shaped()], ids=["pair", "array", "spec"])
def test_a_spec_is_a_tree_of_pairs_or_of_anything_with_shape_and_dtype(stager: xferlib.Stager, leaf: Any) -> None:
    with xferlib.Ring(stager, Pair(((5,), np.uint8), {"a": leaf})) as ring:
        tree = ring.acquire().tree
    assert (tree.first.shape, tree.first.dtype) == ((5,), np.uint8)
    assert (tree.second["a"].shape, tree.second["a"].dtype) == ((2, 3), np.int16)


def test_acquire_blocks_on_the_oldest_slot_and_hands_it_out_when_its_copy_is_done(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        with held(h2d(stager)) as gate:
            first = ring.acquire()
            oldest = address(first)
            first["image"][:] = 1
            transfer = first.put()
            ring.acquire().put()
            third = on_thread(ring.acquire)
            until(lambda: busy(ring._waiting))
            assert not third.done()
            gate.set()
            slot = third.result(PATIENCE)
        assert transfer.done()
        assert address(slot) == oldest
        slot["image"][:] = 2
        assert set(transfer.value["image"].ravel().tolist()) == {1}


def test_a_slot_in_flight_is_not_handed_out_though_others_are(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC, slots=3) as ring, held(h2d(stager)):
        first = ring.acquire()
        flying = address(first)
        first.put()
        assert flying not in [address(slot) for slot in [ring.acquire(), ring.acquire()]]


def test_a_slot_that_was_dropped_without_a_put_comes_back(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        for _ in range(5):
            ring.acquire()
        with ring.acquire():
            pass
        ring.acquire().release()
        ring.acquire()


def test_a_dropped_slot_stays_out_while_a_view_of_it_lives(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        row = ring.acquire()["image"][1:][0]
        other = ring.acquire()
        assert not np.shares_memory(row, other["image"])
        waiting = on_thread(ring.acquire)
        until(lambda: busy(ring._waiting))
        assert not waiting.done()
        mine = row.ctypes.data
        del row
        assert address(waiting.result(PATIENCE)) <= mine


def test_a_slot_in_a_reference_cycle_comes_back(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "COLLECT_AFTER_SECONDS", 0.01)
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        gc.disable()
        try:
            cycle: list[Any] = [ring.acquire()]
            cycle.append(cycle)
            del cycle
            ring.acquire()
        finally:
            gc.enable()


@pytest.mark.parametrize("whole", [True, False], ids=["the tree", "a view"])
def test_a_slot_that_the_stager_was_given_comes_back_when_the_copy_is_done(stager: xferlib.Stager, whole: bool) -> None:
    # So few and small that the stager would never ask about them by itself.
    with xferlib.Ring(stager, SPEC, slots=2) as ring:

        def loop() -> list[int]:
            seen = []
            for number in range(6):
                slot = ring.acquire()
                slot["label"][:] = number
                tree = stager.put(slot.tree if whole else {"label": slot["label"][1:]}).result()
                seen.append(int(tree["label"].max()))
            return seen

        assert on_thread(loop).result(PATIENCE) == list(range(6))


def test_a_copy_of_another_stager_gives_a_slot_back(stager: xferlib.Stager) -> None:
    # As two stagers of one GPU do: what either has pinned is pinned.
    with xferlib.stager(tampered(is_pinned=lambda address, nbytes: True)) as other, xferlib.Ring(stager, SPEC, slots=1) as ring:
        for _ in range(2):
            tree = on_thread(ring.acquire).result(PATIENCE).tree
            other.put(tree).synchronize()
            del tree


def test_acquire_waits_for_a_copy_that_the_stager_was_asked_for(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "COLLECT_AFTER_SECONDS", 1000.0)
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        with held(h2d(stager)) as gate:
            slot = ring.acquire()
            slot["image"][:] = 1
            transfer = stager.put(slot.tree)
            del slot
            waiting = on_thread(ring.acquire)
            until(lambda: busy(ring._waiting))
            assert not waiting.done()
            gate.set()
            waiting.result(PATIENCE)["image"][:] = 2
        assert set(transfer.result()["image"].ravel().tolist()) == {1}


def test_who_waits_for_slots_that_nobody_gives_back_is_told_who_has_them(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_module, "STUCK_SECONDS", 0.01)
    with xferlib.Ring(stager, SPEC, slots=3) as ring:
        held_here = [ring.acquire()]
        held_there = on_thread(lambda: [ring.acquire(), ring.acquire()]).result(PATIENCE)
        name = threading.current_thread().name
        with pytest.raises(RuntimeWarning, match=rf"all 3 are held, .*1 on '{name}', 2 on .*release one"):
            on_thread(ring.acquire).result(PATIENCE)
        # Nothing was lost, and the ring goes on.
        held_there.clear()
        assert len([*held_here, ring.acquire(), ring.acquire()]) == 3


@pytest.mark.parametrize("call", ["acquire", "collate"])
def test_who_waits_is_told_at_the_line_that_asks_for_a_slot(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(ring_module, "STUCK_SECONDS", 0.01)
    with xferlib.Ring(stager, ((4,), np.uint8), slots=1) as ring:
        held = [ring.acquire()]
        lines: list[int] = []

        def ask() -> xferlib.Slot[Any]:
            lines.append(sys._getframe().f_lineno + 1)
            return ring.acquire() if call == "acquire" else ring.collate([np.uint8(1)])

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            waiting = on_thread(ask)
            until(lambda: told)
            held.clear()
            waiting.result(PATIENCE)
        assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, lines[0])]


def test_a_thread_that_waits_for_what_it_holds_itself_is_told_so(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "STUCK_SECONDS", 0.01)
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        held_here = [ring.acquire(), ring.acquire()]
        name = threading.current_thread().name
        with pytest.raises(RuntimeWarning, match=rf"all 2 are held, .*\(2 on '{name}', the thread that waits here for another\)"):
            ring.acquire()
    assert len(held_here) == 2


def test_who_waits_is_told_once(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[None] = []
    monkeypatch.setattr(ring_module, "STUCK_SECONDS", 0.01)
    monkeypatch.setattr(ring_module, "reap_all", lambda: turns.append(None))
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        slots = [ring.acquire()]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            waiting = on_thread(ring.acquire)
            until(lambda: told)
            later = len(turns) + 5
            until(lambda: len(turns) > later)
            slots.clear()
            waiting.result(PATIENCE)
        assert [warning.category for warning in told] == [RuntimeWarning]


def test_another_thread_may_put_the_slot_that_is_waited_for(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "COLLECT_AFTER_SECONDS", 1000.0)
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        slot = ring.acquire()
        waiting = on_thread(ring.acquire)
        until(lambda: busy(ring._waiting))
        slot.put()
        assert waiting.result(PATIENCE)["label"].shape == (4,)


@pytest.mark.parametrize("how", ["put", "release", "close"])
def test_who_waits_for_a_slot_is_woken_by_another_thread(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    for module, name in ((ring_module, "FIRST_NAP_SECONDS"), (ring_module, "LONGEST_NAP_SECONDS"), (latch, "WAIT_SECONDS")):
        monkeypatch.setattr(module, name, 1000.0)
    ring = xferlib.Ring(stager, SPEC, slots=1)
    slot = ring.acquire()
    waiting = on_thread(ring.acquire)
    until(lambda: ring._changed._sleepers)
    ways: dict[str, Callable[[], object]] = {"put": slot.put, "release": slot.release, "close": ring.close}
    ways[how]()
    if how == "close":
        with pytest.raises(xferlib.ClosedError):
            waiting.result(PATIENCE)
    else:
        waiting.result(PATIENCE)
        ring.close()


@pytest.mark.parametrize("how", ["put", "release", "release of one that is back", "close"])
def test_who_waits_is_woken_behind_the_change_and_not_before(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ring = xferlib.Ring(stager, SPEC, slots=1)
    slot = ring.acquire()
    seen: list[bool] = []
    monkeypatch.setattr(ring, "_changed", SimpleNamespace(wake=lambda: seen.append(ring._has_changed())))
    if how == "put":
        slot.put()
    elif how == "close":
        ring.close()
    else:
        if how != "release":
            ring._land(slot._number)
        slot.release()
    assert seen == [True]
    ring.close()


def test_a_slot_that_is_dropped_in_front_of_a_nap_is_seen_by_it(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        slots = [ring.acquire()]
        found: list[bool] = []

        def nap(reached: Callable[[], object], seconds: float) -> None:
            slots.clear()
            found.append(bool(reached()))

        monkeypatch.setattr(ring, "_changed", SimpleNamespace(wait_for=nap, wake=lambda: None))
        ring.acquire()
        assert found == [True]


def test_nobody_is_told_of_a_slot_that_has_just_come_back(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        slots = [ring.acquire()]

        def nap(reached: Callable[[], object], seconds: float) -> None:
            nonlocal now
            now += 11
            slots.clear()

        monkeypatch.setattr(ring_module, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))
        monkeypatch.setattr(ring, "_changed", SimpleNamespace(wait_for=nap, wake=lambda: None))
        with monkeypatch.context() as patch:
            patch.setattr(ring_module, "gc", SimpleNamespace(collect=lambda: None))
            # A warning is an error.
            ring.acquire()


def test_who_waits_for_a_slot_looks_ever_less_often(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds itself may come back only by a look, and to look all the time would take a tenth of a core."""
    now, naps, collections = 0.0, list[float](), list[float]()

    def nap(reached: Callable[[], object], seconds: float) -> None:
        nonlocal now
        assert not reached()
        assert seconds >= ring_module.FIRST_NAP_SECONDS
        naps.append(seconds)
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now)
    with xferlib.Ring(stager, SPEC, slots=1) as ring, ring.acquire():
        monkeypatch.setattr(ring_module, "time", clock)
        monkeypatch.setattr(ring_module, "gc", SimpleNamespace(collect=lambda: collections.append(now)))
        with monkeypatch.context() as patch, pytest.raises(RuntimeWarning, match="for 10 seconds"):
            patch.setattr(ring, "_changed", SimpleNamespace(wait_for=nap))
            ring.acquire()
    # Whatever comes back by a look comes a sixteenth of the wait later at most, or a tenth of a millisecond.
    assert all(seconds <= max(1e-4, sum(naps[:index]) / 15) for index, seconds in enumerate(naps))
    first_second = next(index for index in range(len(naps)) if sum(naps[:index]) >= 1)
    assert first_second < 200
    assert all(seconds >= 0.02 for seconds in naps[first_second:])
    assert [round(at) for at in collections] == [1, 2, 4, 8]


def test_a_slot_is_put_once_and_not_touched_afterwards(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC) as ring:
        slot = ring.acquire()
        image = slot["image"]
        slot.put()
        with pytest.raises(RuntimeError, match="was put already"):
            slot.put()
        with pytest.raises(RuntimeError, match="was put already"):
            slot["image"]
        with pytest.raises(ValueError, match="read-only"):
            image[:] = 1
        slot.release()
        given_back = ring.acquire()
        label = given_back["label"]
        given_back.release()
        with pytest.raises(RuntimeError, match="given back"):
            given_back.put()
        with pytest.raises(ValueError, match="read-only"):
            label[:] = 1


def test_arrays_beside_a_slots_own_stay_as_they_are(stager: xferlib.Stager) -> None:
    label, pinned = np.arange(4), stager.empty_pinned(4, np.uint8)
    pinned[:] = 7
    with xferlib.Ring(stager, SPEC) as ring:
        slot: xferlib.Slot[Any] = ring.acquire()
        image = slot["image"]
        slot.tree.update({"labels": label, "pinned": pinned, "number": np.float32(3), "name": "a.png"})
        got = slot.put().result()
        assert not image.flags.writeable
        assert label.flags.writeable
        assert pinned.flags.writeable
        assert got["labels"].tolist() == [0, 1, 2, 3]
        assert got["pinned"].tolist() == [7] * 4
        assert (got["number"], got["name"]) == (3, "a.png")


def test_a_put_that_fails_leaves_the_slot_with_its_holder(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        slot = ring.acquire()
        with pytest.raises(TypeError):
            slot.put(stream="no stream")
        slot["image"][:] = 3
        assert set(slot.put().result()["image"].ravel().tolist()) == {3}


def test_a_last_batch_may_have_fewer_rows(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC) as ring:
        slot = ring.acquire()
        slot.rows = 2
        tree = slot.put().result()
        assert (tree["image"].shape, tree["label"].shape) == ((2, 3), (2,))
        with pytest.raises(ValueError, match="room for 0 to 4"):
            ring.acquire().rows = 5


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_slot_has_room_for_as_many_rows_as_its_shortest_array(stager: xferlib.Stager, rows: int) -> None:
    with xferlib.Ring(stager, {"image": ((4, 3), "float32"), "label": ((3,), "int64")}) as ring:
        slot = ring.acquire()
        with pytest.raises(ValueError, match="room for 0 to 3"):
            slot.rows = 4
        slot.rows = rows
        tree = slot.put().result()
        assert (tree["image"].shape, tree["label"].shape) == ((rows, 3), (rows,))


def test_a_slot_with_an_array_that_has_no_axis_has_no_room_for_rows(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, {"image": ((4, 3), "float32"), "scale": ((), "float32")}) as ring:
        slot = ring.acquire()
        with pytest.raises(ValueError, match="room for 0 to 0"):
            slot.rows = 1
        assert slot.put().result()["image"].shape == (4, 3)


@pytest.mark.parametrize("then", [xferlib.Ring.acquire, xferlib.Ring.close])
def test_a_copy_that_failed_gives_its_slot_back_and_only_its_transfer_says_so(then: Callable[[xferlib.Ring], object]) -> None:
    with xferlib.stager(failing_copies("h2d", {0})) as stager, xferlib.Ring(stager, SPEC, slots=1) as ring:
        transfer = ring.acquire().put()
        with pytest.raises(xferlib.TransferError, match="copy 0 is lost"):
            transfer.synchronize()
        then(ring)
        with pytest.raises(xferlib.TransferError, match="copy 0 is lost"):
            transfer.result()


def test_a_ring_may_take_all_that_the_limit_allows() -> None:
    with xferlib.stager("host", pinned_limit=3 << 20) as stager, xferlib.Ring(stager, ((1 << 20,), "uint8"), slots=3) as ring:
        assert ring.bill.pinned_nbytes == stager.stats().pinned_limit_nbytes
        assert len([ring.acquire() for _ in range(3)]) == 3


def test_a_ring_that_does_not_fit_is_refused_with_what_would(stager: xferlib.Stager) -> None:
    with pytest.raises(xferlib.AllocationError, match=r"30\.0 MiB need 90\.0 MiB .* Use slots=2"):
        xferlib.Ring(stager, ((30 << 20,), "uint8"), slots=3)
    with pytest.raises(ValueError, match="slots=0"):
        xferlib.Ring(stager, SPEC, slots=0)
    with xferlib.Ring(stager, ((1 << 20,), "uint8"), slots=3) as ring:
        assert str(ring.bill) == "3.0 MiB pinned: 3 x 1.0 MiB slots"
        assert stager.stats().pinned_limit_nbytes >= ring.bill.pinned_nbytes
    with xferlib.Ring(stager, ((1 << 20,), "uint8"), slots=1) as alone:
        assert str(alone.bill) == "1.0 MiB pinned: slots"


def test_close_waits_for_copies_and_wakes_who_waits_for_a_slot(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "COLLECT_AFTER_SECONDS", 1000.0)
    ring = xferlib.Ring(stager, SPEC, slots=1)
    slot = ring.acquire()
    waiting = on_thread(ring.acquire)
    until(lambda: busy(ring._waiting))
    ring.close()
    with pytest.raises(xferlib.ClosedError):
        waiting.result(PATIENCE)
    with held(h2d(stager)) as gate:
        transfer = slot.put()
        closing = on_thread(ring.close)
        assert not closing.done()
        gate.set()
        closing.result(PATIENCE)
    assert transfer.done()


def test_the_ring_keeps_no_device_array(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, ((8,), "uint8")) as ring:
        tree = ring.acquire().put().result()
        alive = weakref.ref(tree)
        del tree
        assert alive() is None


def slots_of(ring: xferlib.Ring, count: int, asked: list[int]) -> Iterator[xferlib.Slot]:
    for number in range(count):
        asked.append(number)
        slot = ring.acquire()
        slot["image"][:] = number
        yield slot


def test_prefetch_puts_the_slots_that_a_source_gives(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        batches = xferlib.prefetch(slots_of(ring, 20, []), stager)
        assert batches.bill.pinned_nbytes == ring.bill.pinned_nbytes
        assert [set(tree["image"].ravel().tolist()) for tree in batches] == [{number} for number in range(20)]
    assert batches.report().batches == 20


def test_prefetch_takes_the_arrays_of_slots_as_well(stager: xferlib.Stager) -> None:
    with (
        xferlib.Ring(stager, SPEC, slots=3) as ring,
        xferlib.prefetch((slot.tree for slot in slots_of(ring, 20, [])), stager) as batches,
    ):
        taken = on_thread(lambda: [set(tree["image"].ravel().tolist()) for tree in batches])
        assert taken.result(PATIENCE) == [{number} for number in range(20)]


def test_prefetch_over_a_ring_waits_for_the_copy_that_reads_the_oldest_slot(stager: xferlib.Stager) -> None:
    asked: list[int] = []
    with xferlib.Ring(stager, SPEC, slots=2) as ring, Stream() as stream, held(h2d(stager)) as gate:
        batches = xferlib.prefetch(slots_of(ring, 5, asked), stager, 3)
        kept = [next(batches)]
        until(lambda: len(asked) == 3 and part(batches) == "source" and busy(ring._waiting))
        assert not gate.is_set()
        gate.set()
        kept += batches
        stream.synchronize()
        assert [set(tree["image"].ravel().tolist()) for tree in kept] == [{number} for number in range(5)]
        assert batches.report().parts["slot"] > 0
    stream.close()


def test_prefetch_refuses_a_slot_of_another_stager(stager: xferlib.Stager) -> None:
    with xferlib.stager("host") as other, xferlib.Ring(other, SPEC) as ring:
        batches = xferlib.prefetch(slots_of(ring, 2, []), stager)
        assert repr(other) == repr(stager)
        with pytest.raises(ValueError, match="a slot of a ring of another stager"):
            next(batches)
        # It came back.
        for _ in range(4):
            ring.acquire()


def test_decoders_on_several_threads_share_a_ring(stager: xferlib.Stager) -> None:
    results: dict[int, Any] = {}
    with xferlib.Ring(stager, SPEC, slots=2) as ring:

        def decode(first: int) -> None:
            for number in range(first, first + 25):
                slot = ring.acquire()
                slot["image"][:] = number
                results[number] = slot.put()

        threads = [on_thread(lambda first=first: decode(first)) for first in (0, 25, 50)]  # type: ignore[misc]
        for thread in threads:
            thread.result(PATIENCE)
    assert threading.active_count() < 20
    assert {number: set(transfer.result()["image"].ravel().tolist()) for number, transfer in results.items()} == {
        number: {number} for number in range(75)
    }


def test_what_is_misspelt_or_assigned_at_a_slot_is_refused_in_words(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, {"x": ((4,), np.uint8)}, slots=2) as ring:
        slot = ring.acquire()
        with pytest.raises(AttributeError):
            slot.row = 1  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=r"rows=2\.5: expected an int, or None for all"):
            slot.rows = 2.5  # type: ignore[assignment]
        # As of every special method, the class decides.
        odd = SimpleNamespace(__index__=lambda: 2)
        with pytest.raises(TypeError, match="expected an int, or None for all"):
            slot.rows = odd  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"written in place: slot\.tree\[\.\.\.\] = values, or slot\.tree\[name\]"):
            slot[:] = 1
        with pytest.raises(TypeError, match=r"slot\['x'\]\[\.\.\.\] = values\. Names go beside them: slot\.tree\['x'\] = text"):
            slot["x"] = np.ones(4, np.uint8)
        slot["x"][:] = 3
        slot.tree["file"] = ["a.jpg"]
        assert slot.put().value["file"] == ["a.jpg"]


def test_a_slot_travels_with_the_arrays_that_it_has(stager: xferlib.Stager) -> None:
    spec = {"x": ((4,), np.uint8), "y": ((2, 3), np.float32), "none": ((0,), np.int32)}
    with xferlib.Ring(stager, spec, slots=1) as ring:
        slot = ring.acquire()
        slot["x"][:], slot["y"][:] = 1, 2
        array = slot.tree["y"]
        for other in (np.zeros((2, 3), np.float32), None, "text"):
            slot.tree["y"] = other
            with pytest.raises(TypeError, match=r"gone from slot\.tree, .* written in place, as slot\[name\]"):
                slot.put()
        del slot.tree["y"]
        with pytest.raises(TypeError, match="gone from slot"):
            slot.put()
        # It is the caller's still. A view of what it has lies in the slot.
        slot.tree["y"] = array[:1]
        slot.tree["beside"] = np.full(3, 5)
        batch = slot.put().value
        assert [stager.get(batch[name]).result().tolist() for name in ("x", "y", "beside")] == [[1] * 4, [[2.0] * 3], [5] * 3]


def test_a_slot_without_its_arrays_goes_back_from_a_loop(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, {"x": ((4,), np.uint8)}, slots=1) as ring:

        def batches() -> Iterator[Any]:
            slot = ring.acquire()
            slot.tree["x"] = np.ones(4, np.uint8)
            yield slot

        with pytest.raises(TypeError, match="gone from slot"):
            next(xferlib.prefetch(batches(), stager))
        ring.acquire().release()


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ({"x": LEAF, "z": {"y": LEAF}}, KeyError, r"there is no 'y' in this slot: there are 'x', 'z'\"$"),
        ({f"n{number}": LEAF for number in range(40)}, KeyError, r"there are 'n0', .*'n15', \.\.\.\"$"),
        ({f"n{number}": LEAF for number in range(16)}, KeyError, r"there are 'n0', .*'n15'\"$"),
        (LEAF, TypeError, r"slot\['y'\]: no names in uint8\[4\], 4 bytes\. Look at slot\.tree$"),
        ([LEAF], TypeError, r"no names in \[uint8\[4\]\],"),
        (Pair(LEAF, LEAF), TypeError, r"no names in Pair\(first=uint8\[4\]"),
    ],
)
def test_a_name_that_a_slot_has_not_is_told_those_that_it_has(
    stager: xferlib.Stager, spec: Any, error: type[Exception], words: str
) -> None:
    with xferlib.Ring(stager, spec, slots=1) as ring, ring.acquire() as slot:
        with pytest.raises(error, match=words) as caught:
            slot["y"]
        assert caught.value.__suppress_context__
        # Whatever else is asked of a tree is the tree's to refuse.
        if not isinstance(spec, dict):
            with pytest.raises(IndexError, match="out of "):
                slot[7]


def test_what_a_tree_that_is_no_mapping_says_of_a_key_stands(stager: xferlib.Stager) -> None:
    @dataclass
    class Record:
        x: Any

        def __getitem__(self, name: str) -> Any:
            return {"x": self.x}[name]

    with xferlib.Ring(stager, Record(LEAF), slots=1) as ring, ring.acquire() as slot:
        assert slot["x"].shape == (4,)
        with pytest.raises(KeyError, match=r"^'y'$"):
            slot["y"]


def test_a_slot_says_how_many_rows_it_puts(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, {"x": ((4, 3), np.uint8)}) as ring, ring.acquire() as slot:
        assert repr(slot) == "<Slot: {'x': uint8[4, 3]}, 12 bytes, acquired>"
        slot.rows = 1
        assert repr(slot) == "<Slot: {'x': uint8[4, 3]}, 12 bytes, 1 row, acquired>"


@pytest.mark.parametrize("held_slots", [0, 2])
def test_a_forked_child_gets_no_slot_whose_memory_is_the_parent_s(held_slots: int) -> None:
    """Pages of a ring may be shared with the parent, whose copies read them. A thread of the parent's may wait in `acquire`."""
    shown = succeeds(f"""
        import os, threading, time, xferlib
        with xferlib.stager("host") as stager, xferlib.Ring(stager, ((4,), "u1"), slots=2) as ring:
            slots = [ring.acquire() for _ in range({held_slots})]
            waiting = threading.Thread(target=lambda: ring.acquire().release())
            if slots:
                waiting.start()
                while not ring._changed._sleepers:
                    time.sleep(0.001)
            child = os.fork()
            if child == 0:
                try:
                    ring.acquire()
                except xferlib.BackendUnavailableError as error:
                    print("SharedRing" in str(error))
                ring.close()
                print("closed", flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            for slot in slots:
                slot.release()
            if slots:
                waiting.join()
            ring.acquire().release()
            print("parent")
    """)
    assert shown.split() == ["True", "closed", "parent"]
