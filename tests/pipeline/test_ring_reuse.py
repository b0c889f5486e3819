"""A slot is not handed out again while anything of any stager, or a device view, still uses its memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream
from xferlib_host._stream import CopyError

import xferlib
from tests.core.fakes import held, interrupted_twice, on_thread, tampered
from tests.pipeline.steps import PATIENCE, busy, d2h, h2d, until
from xferlib.memory.mapped import Views
from xferlib.pipeline import memory_users
from xferlib.protocol import Event

SIZE = 1 << 16
SPEC = {"x": ((SIZE,), np.uint8)}

End = Callable[[xferlib.Slot], object]
ENDS: dict[str, End] = {"put": xferlib.Slot.put, "release": xferlib.Slot.release}
both = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)


@pytest.fixture
def ring(stager: xferlib.Stager) -> Iterator[xferlib.Ring]:
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        yield ring


@pytest.fixture
def other() -> Iterator[xferlib.Stager]:
    """A stager of the same device: what one has pinned is pinned for the other."""
    with xferlib.stager(tampered(is_pinned=lambda address, nbytes: True)) as other:
        yield other


def filled(ring: xferlib.Ring, value: int) -> xferlib.Slot:
    slot = ring.acquire()
    slot["x"][:] = value
    return slot


def waiting(ring: xferlib.Ring) -> Future[xferlib.Slot]:
    """Have another thread wait for a slot, which it does not get."""
    following = on_thread(ring.acquire)
    until(lambda: busy(ring._waiting))
    with pytest.raises(TimeoutError):
        following.result(0.1)
    return following


@both
def test_the_put_of_another_stager(ring: xferlib.Ring, other: xferlib.Stager, end: End) -> None:
    with held(h2d(other)) as gate:
        slot = filled(ring, 1)
        transfer = other.put(slot["x"])
        end(slot)
        following = waiting(ring)
        assert not transfer.done()
        gate.set()
        following.result(PATIENCE)["x"][:] = 2
    assert (transfer.result() == 1).all()


@both
def test_the_put_of_a_part_by_another_stager(ring: xferlib.Ring, other: xferlib.Stager, end: End) -> None:
    with held(h2d(other)) as gate:
        slot = filled(ring, 1)
        transfer = other.put({"a": [np.zeros(3), slot["x"][-1:]]})
        end(slot)
        following = waiting(ring)
        gate.set()
        following.result(PATIENCE)["x"][:] = 2
    assert transfer.result()["a"][1].tolist() == [1]


@both
def test_the_get_into_a_slot(ring: xferlib.Ring, stager: xferlib.Stager, end: End) -> None:
    with held(d2h(stager)) as gate:
        slot = filled(ring, 1)
        transfer = stager.get(np.full(SIZE, 7, np.uint8), out=slot["x"])
        end(slot)
        following = waiting(ring)
        gate.set()
        again = following.result(PATIENCE)
        again["x"][:] = 2
    assert transfer.done()
    assert (again["x"] == 2).all()


@pytest.mark.parametrize("way", ["put", "get"])
@both
def test_a_stager_to_which_the_slot_is_ordinary_memory(stager: xferlib.Stager, end: End, way: str) -> None:
    nbytes = 1 << 22
    # In so few and small chunks that it comes to no end before the first copy does.
    with (
        xferlib.stager("host", staging="1x64KiB") as other,
        xferlib.Ring(stager, ((nbytes,), np.uint8), slots=1) as ring,
        held(h2d(other)) as up,
        held(d2h(other)) as down,
    ):
        slot = ring.acquire()
        slot.tree[:] = 1
        device = np.full(nbytes, 7, np.uint8)
        transfer = other.put(slot.tree, borrow=True) if way == "put" else other.get(device, out=slot.tree)
        end(slot)
        following = waiting(ring)
        up.set()
        down.set()
        again = following.result(PATIENCE)
        again.tree[:] = 2
        result = transfer.result()
        assert (result == 1).all() if way == "put" else (again.tree == 2).all()


@pytest.mark.parametrize("gone", ["before", "behind"])
@both
def test_work_on_a_view_that_is_gone(ring: xferlib.Ring, stager: xferlib.Stager, end: End, gone: str) -> None:
    gate, seen = threading.Event(), []
    with Stream() as stream:
        slot = filled(ring, 1)
        views = [stager.mapped(slot["x"], stream=stream)]
        address = views[0].ctypes.data
        stream.submit(lambda: gate.wait(PATIENCE))
        # As a kernel does, it holds no view.
        stream.submit(lambda: seen.append(set(ctypes.string_at(address, SIZE))))
        if gone == "before":
            views.clear()
        end(slot)
        following = waiting(ring)
        views.clear()
        with pytest.raises(TimeoutError):
            following.result(0.1)
        gate.set()
        following.result(PATIENCE)["x"][:] = 2
        stream.synchronize()
    stream.close()
    assert seen == [{1}]


@both
def test_work_on_a_view_that_goes_while_the_ring_asks_who_uses_the_slot(
    ring: xferlib.Ring, stager: xferlib.Stager, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, seen, readers = threading.Event(), [], Views.readers

    def and_then_it_goes(asked: Views, address: int, nbytes: int) -> list[Event]:
        found = readers(asked, address, nbytes)
        views.clear()
        return found

    with Stream() as stream:
        slot = filled(ring, 1)
        views = [stager.mapped(slot["x"], stream=stream)]
        address = views[0].ctypes.data
        stream.submit(lambda: gate.wait(PATIENCE))
        stream.submit(lambda: seen.append(set(ctypes.string_at(address, SIZE))))
        monkeypatch.setattr(Views, "readers", and_then_it_goes)
        end(slot)
        following = waiting(ring)
        assert views == []
        gate.set()
        following.result(PATIENCE)["x"][:] = 2
        stream.synchronize()
    stream.close()
    assert seen == [{1}]


@both
def test_a_view_of_which_nobody_can_say_when_work_on_it_ends(end: End) -> None:
    def refuse(streams: object) -> Event:
        raise CopyError("the device is lost")

    with Stream() as stream, xferlib.stager(tampered(retire=refuse)) as stager, xferlib.Ring(stager, SPEC, slots=1) as ring:
        slot = filled(ring, 1)
        view = stager.mapped(slot["x"], stream=stream)
        end(slot)
        del view
        following = waiting(ring)
        ring.close()
        with pytest.raises(xferlib.ClosedError):
            following.result(PATIENCE)
    stream.close()


def test_a_finalizer_that_asks_while_others_are_asked_hides_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        def __init__(self, *, over: bool) -> None:
            self.over = over
            self.times = 0

        def done(self) -> bool:
            self.times += 1
            if self.over and self.times == 1:
                assert not users.done()
            return self.over

    monkeypatch.setattr(memory_users, "_users_of", lambda address, nbytes: [Asked(over=False).done, Asked(over=True).done])
    users = memory_users.MemoryUsers(0, 1)
    assert not users.done()


@both
def test_a_view_that_lives(ring: xferlib.Ring, other: xferlib.Stager, end: End) -> None:
    slot = filled(ring, 1)
    views: list[Any] = [other.mapped(slot["x"])]
    end(slot)
    following = waiting(ring)
    assert (np.array(views[0]) == 1).all()
    views.clear()
    following.result(PATIENCE)


@both
def test_a_view_that_outlives_its_stager(ring: xferlib.Ring, end: End) -> None:
    slot = filled(ring, 1)
    with xferlib.stager(tampered(is_pinned=lambda address, nbytes: True)) as closed:
        views: list[Any] = [closed.mapped(slot["x"])]
    end(slot)
    following = waiting(ring)
    assert (np.array(views[0]) == 1).all()
    views.clear()
    following.result(PATIENCE)


def test_slots_that_nothing_else_uses_go_round_meanwhile(stager: xferlib.Stager, other: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        slot = filled(ring, 1)
        place = slot["x"].ctypes.data
        view = other.mapped(slot["x"])
        slot.put()
        with held(h2d(other)) as gate:
            for number in range(5):
                slot = on_thread(lambda number=number: filled(ring, number)).result(PATIENCE)  # type: ignore[misc]
                assert slot["x"].ctypes.data != place
                assert (slot.put().result()["x"] == number).all()
            gate.set()
        del view, slot
        assert place in [ring_slot["x"].ctypes.data for ring_slot in [ring.acquire(), ring.acquire()]]


def test_one_use_that_ends_before_another(ring: xferlib.Ring, stager: xferlib.Stager, other: xferlib.Stager) -> None:
    with held(h2d(other)) as gate, held(h2d(stager)) as own:
        slot = filled(ring, 1)
        view = stager.mapped(slot["x"])
        transfer = other.put(slot["x"])
        slot.put()
        following = waiting(ring)
        for step in (own.set, gate.set):
            step()
            with pytest.raises(TimeoutError):
                following.result(0.1)
        del view
        following.result(PATIENCE)["x"][:] = 2
    assert (transfer.result() == 1).all()


def test_closing_does_not_wait_for_what_others_use_and_they_keep_it(stager: xferlib.Stager, other: xferlib.Stager) -> None:
    with held(h2d(other)) as gate:
        ring = xferlib.Ring(stager, SPEC, slots=1)
        slot = filled(ring, 1)
        transfer = other.put(slot["x"])
        slot.put()
        del slot
        on_thread(ring.close).result(PATIENCE)
        for _ in range(3):
            stager.empty_pinned(SIZE, np.uint8)[:] = 2
        gate.set()
    assert (transfer.result() == 1).all()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("way", ["put", "get"])
def test_a_transfer_that_is_interrupted_and_interrupted_again_as_it_settles(way: str, alone: bool) -> None:
    backend, interrupts = interrupted_twice("h2d" if way == "put" else "d2h")
    spec = SPEC if alone else {**SPEC, "y": ((4,), np.uint8)}
    with xferlib.stager(backend) as stager, xferlib.Ring(stager, spec, slots=1) as ring:
        slot = filled(ring, 1)
        device = {name: np.full(shape, 7, np.uint8) for name, (shape, _) in spec.items()}
        # From the second on one array goes a way of its own.
        stager.get(stager.put(np.zeros(3, np.uint8)).result()).result()
        interrupts += [None, None]
        with held((h2d if way == "put" else d2h)(stager)) as gate:
            with pytest.raises(KeyboardInterrupt):
                if way == "put":
                    slot.put()
                elif alone:
                    stager.get(device["x"], out=slot["x"])
                else:
                    stager.get(device, out=slot.tree)
            assert interrupts == []
            slot.release()
            following = waiting(ring)
            gate.set()
            assert following.result(PATIENCE)["x"].nbytes == SIZE
