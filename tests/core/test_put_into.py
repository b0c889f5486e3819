"""Putting into arrays of the caller's: what is refused holds up nothing, and what fails is not under way any more."""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import xferlib_host

import xferlib
from tests.core.fakes import WATCHDOG, held, on_thread, tampered, until
from xferlib import ledger
from xferlib.in_flight import REAP_FROM_NBYTES


class Broke(Exception):
    """What the backend raises."""


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("tree", [True, False])
def test_a_put_into_an_array_that_fails_after_its_start_raises_when_nothing_is_under_way(tree: bool, pinned: bool) -> None:
    backend = tampered(failures=(Broke,))
    gate = threading.Event()

    class Deaf:
        """An event that no stream can be told to wait for. Who waits for it on the host opens the gate."""

        def __init__(self) -> None:
            self._event = backend.inner.record_h2d()
            self.done = self._event.done

        def synchronize(self) -> None:
            gate.set()
            self._event.synchronize()

        def stream_wait(self, stream: object | None = None) -> Any:
            raise Broke("no more")

    backend.record_h2d = Deaf
    with xferlib.stager(backend) as stager, closing(xferlib_host.Stream()) as stream:
        backend.inner.h2d.submit(lambda: gate.wait(WATCHDOG))
        source = stager.empty_pinned(1000, np.uint8) if pinned else np.empty(1000, np.uint8)
        source[:] = 7
        target = np.zeros(1000, np.uint8)
        with pytest.raises(xferlib.TransferError, match="no more"):
            stager.put([source] if tree else source, into=[target] if tree else target, stream=stream)
        assert gate.is_set()
        assert (target == 7).all()


@pytest.mark.parametrize("bad", [np.zeros(7), np.zeros(3, np.int64), {1}])
def test_targets_of_which_one_is_refused_hold_up_nothing(bad: Any) -> None:
    backend = tampered()
    asked: list[object] = []

    def as_target(array: Any, stream: object | None = None) -> Any:
        asked.append(array)
        return backend.inner.as_target(array, stream)

    backend.as_target = as_target
    with xferlib.stager(backend) as stager, closing(xferlib_host.Stream()) as stream, held(stream):
        source = stager.empty_pinned(3, np.float64)
        with pytest.raises((TypeError, ValueError)) as caught:
            stager.put([source, {"a": source}], into=[np.zeros(3), {"a": bad}], stream=stream)
        assert caught.value.__notes__ == ["into: tree[1].a"]
        assert asked == []
        stager.put(source).synchronize()


def test_what_the_backend_refuses_says_where_it_stands(stager: xferlib.Stager) -> None:
    with pytest.raises(ValueError, match="read-only") as caught:
        stager.put([np.ones(3), np.ones(3)], into=[np.zeros(3), np.frombuffer(bytes(24))])
    assert caught.value.__notes__ == ["into: tree[1]"]


@pytest.mark.parametrize("read", [0, 1, 2])
def test_targets_are_not_overwritten_while_a_get_reads_any_of_them(stager: xferlib.Stager, read: int) -> None:
    targets = [np.zeros(100, np.uint8) for _ in range(3)]
    sources = [stager.empty_pinned(100, np.uint8) for _ in range(3)]
    for source in sources:
        source[:] = 1
    with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's own
        getting = stager.get(targets[read])
        putting = stager.put(sources, into=targets)
        waiting = on_thread(putting.synchronize)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        gate.set()
        waiting.result(10)
    assert not getting.result().any()
    assert all(target.all() for target in targets)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_the_only_stager_of_a_process_waits_for_its_own_gets(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch, staged: bool, tree: bool
) -> None:
    """Where there is another, each transfer of all of them is looked at."""
    monkeypatch.setattr(ledger, "_open", {0: stager._ledger})
    nbytes = 64 << 20 if staged else 1 << 20
    target, new = np.full(nbytes, 1, np.uint8), stager.empty_pinned(1 << 20, np.uint8)
    new[:] = 2
    part = target[-len(new) :]
    out = np.zeros(nbytes, np.uint8) if staged else stager.empty_pinned(nbytes, np.uint8)
    with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's own
        getting = stager.get(target, out=out)
        putting = on_thread(lambda: stager.put([new], into=[part]) if tree else stager.put(new, into=part))
        assert not until(lambda: putting.done() and putting.result().done(), 0.2)
        gate.set()
        assert (getting.result() == 1).all()
        putting.result(WATCHDOG).synchronize()
    assert (part == 2).all()


def test_a_put_into_a_view_of_host_memory_comes_after_a_get_that_writes_it(stager: xferlib.Stager) -> None:
    memory, new = stager.empty_pinned(1000, np.uint8), stager.empty_pinned(1000, np.uint8)
    view, new[:] = stager.mapped(memory), 2
    with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's own
        getting = stager.get(np.full(1000, 1, np.uint8), out=memory)
        putting = stager.put(new, into=view)
        assert not until(putting.done, 0.1)
        gate.set()
        getting.synchronize()
        putting.synchronize()
    assert (memory == 2).all()


def test_leaves_that_lie_side_by_side_share_nothing(stager: xferlib.Stager) -> None:
    """As the parts of one array do."""
    memory = np.zeros(6)
    stager.put([np.ones(3), np.full(3, 2.0)], into=[memory[:3], memory[3:]]).synchronize()
    assert memory.tolist() == [1, 1, 1, 2, 2, 2]
    out = np.zeros(6)
    stager.get([memory[3:], memory[:3]], out=[out[:3], out[3:]]).synchronize()
    assert out.tolist() == [2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("by", ["its own stager", "another stager"])
def test_memory_that_a_named_stream_reads_after_a_put_into_it_is_not_used_again(by: str) -> None:
    """By its own stager, whoever has overwritten it."""
    gate = threading.Event()
    with (
        xferlib.stager("host") as owner,
        xferlib.stager("host") as other,
        closing(xferlib_host.Stream()) as stream,
    ):
        sources = [owner.empty_pinned(70_000, np.uint8) for _ in range(3)]
        for number, source in enumerate(sources):
            source[:] = number
        target = owner.put(sources[0]).result()
        put = (owner if by == "its own stager" else other).put(sources[1], into=target)
        put.synchronize()
        stream.submit(gate.wait, WATCHDOG)
        put.stream_wait(stream)
        seen: list[bytes] = []
        # By address: a reader on the device holds nothing.
        address, nbytes = target.ctypes.data, target.nbytes
        stream.submit(lambda: seen.append(ctypes.string_at(address, nbytes)))
        del target, put
        fresh = owner.put(sources[2]).result()
        gate.set()
        stream.synchronize()
        assert seen == [bytes([1]) * 70_000]
        assert (fresh == 2).all()


@pytest.mark.parametrize("how", ["as it is", "backwards", "every other", "a column"])
def test_a_target_is_not_overwritten_before_a_get_has_gathered_it(how: str, stager: xferlib.Stager) -> None:
    gate = threading.Event()
    values = np.arange(6000, dtype=np.int32).reshape(60, 100)
    cuts: dict[str, Any] = {"as it is": np.s_[:], "backwards": np.s_[::-1], "every other": np.s_[:, ::2], "a column": np.s_[:, 99]}
    cut = cuts[how]
    with closing(xferlib_host.Stream()) as stream:
        target = stager.put(values).result()
        out, source = stager.empty_pinned(values[cut].shape, np.int32), stager.empty_pinned(values.shape, np.int32)
        source[:] = -1
        stream.submit(gate.wait, WATCHDOG)
        got = stager.get(target[cut], out=out, stream=stream)
        put = stager.put(source, into=target)
        # It waits for the get, which waits for the stream.
        with pytest.raises(TimeoutError):
            put.result(timeout=0.2)
        gate.set()
        assert (got.result() == values[cut]).all()
        put.synchronize()
        assert (target == -1).all()


def test_what_gets_have_read_long_ago_costs_a_put_into_it_nothing() -> None:
    backend = tampered()
    ordered: list[object] = []
    order = backend.inner.order_h2d

    def counted(event: Any) -> None:
        ordered.append(event)
        order(event)

    backend.order_h2d = counted
    with xferlib.stager(backend) as stager:
        source = stager.empty_pinned(8, np.uint8)
        target = stager.put(source).result()
        out = stager.empty_pinned(8, np.uint8)
        for _ in range(20):
            stager.get(target, out=out).result()
        stager.put(source, into=target).synchronize()
        assert ordered == []


def test_a_target_is_let_go_of_by_the_next_large_put_into_another() -> None:
    with xferlib.stager("host") as stager:
        first, second = np.zeros(REAP_FROM_NBYTES, np.uint8), np.zeros(REAP_FROM_NBYTES, np.uint8)
        source = np.ones(REAP_FROM_NBYTES, np.uint8)
        stager.put(source, into=first).synchronize()
        gone = weakref.ref(first)
        del first
        stager.put(source, into=second).synchronize()
        assert gone() is None
        assert (second == 1).all()


def test_what_another_stager_still_writes_from_pageable_memory_is_not_overtaken() -> None:
    target = np.zeros(1000, np.uint8)
    with xferlib.stager("host") as one, xferlib.stager("host") as other:
        with held(one.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
            earlier = one.put(np.full(1000, 1, np.uint8), into=target)
            later = on_thread(lambda: other.put(np.full(1000, 2, np.uint8), into=target).synchronize())
            with pytest.raises(TimeoutError):
                later.result(0.2)
        earlier.synchronize()
        later.result(WATCHDOG)
        assert (target == 2).all()
