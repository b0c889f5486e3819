"""Putting into arrays of the caller's: what is refused holds up nothing, and what fails is not under way any more."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import xferlib_host

import xferlib
from tests.core.fakes import WATCHDOG, held, on_thread, tampered


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


@pytest.mark.parametrize("bad", [np.zeros(7), np.zeros(3, np.int64), "text"])
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
