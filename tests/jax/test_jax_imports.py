"""On which of JAX's streams an import goes, where they come in turn: not behind work that holds one of them up."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tests.core.fakes import on_thread
from xferlib.conformance.values import assert_same, words
from xferlib.handles import unreferenced
from xferlib.stager import Stager

STREAMS = (11, 12, 13, 14)


class Device:
    """Hands out streams as JAX's devices do, and counts the turns."""

    def __init__(self, streams: Iterable[int]) -> None:
        self.turns = 0
        self._streams = iter(streams)

    def get_stream_for_external_ready_events(self) -> int:
        self.turns += 1
        return next(self._streams)


class Driver:
    """Says of each stream whether it has nothing to do, and notes which one waits for which event."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.waits: list[tuple[int, int]] = []
        self.fails = False

    def is_idle(self, stream: int) -> bool:
        return stream not in self.busy

    def wait(self, stream: int, event: int) -> None:
        if self.fails:
            raise OSError("no")
        self.waits.append((stream, event))


def opened(device: Device, driver: Driver) -> Any:
    from xferlib_jax._imports import Imports

    return Imports(device, (2, 0), None, driver)  # type: ignore[arg-type]  # No memory is imported.


@pytest.mark.parametrize("idle", STREAMS)
def test_an_import_goes_on_a_stream_that_is_idle(stager: Stager, idle: int) -> None:
    driver = Driver()
    imports = opened(Device(itertools.cycle(STREAMS)), driver)
    driver.busy = set(STREAMS) - {idle}
    assert imports._idle_stream() == idle


@pytest.mark.parametrize("idle", STREAMS)
def test_turns_are_taken_until_the_next_one_is_idle(stager: Stager, idle: int) -> None:
    driver, device = Driver(), Device(itertools.cycle(STREAMS))
    imports = opened(device, driver)
    driver.busy = set(STREAMS) - {idle}
    imports._skip_busy()
    assert device.get_stream_for_external_ready_events() == idle


def test_where_all_are_busy_it_looks_once_around(stager: Stager) -> None:
    driver, device = Driver(), Device(itertools.cycle(STREAMS))
    imports = opened(device, driver)
    driver.busy = set(STREAMS)
    before = device.turns
    assert imports._idle_stream() in STREAMS
    imports._skip_busy()
    assert device.turns - before <= 2 * len(STREAMS)


def test_the_arrays_of_one_put_are_behind_one_wait(stager: Stager) -> None:
    from xferlib_jax._events import CudaEvent

    driver: Any = Driver()
    imports = opened(Device(itertools.cycle(STREAMS)), driver)
    event = CudaEvent(7, driver)
    stream = imports._stream_behind(event.hold_back)
    # It waits, and is busy now.
    driver.busy = {stream}
    assert [imports._stream_behind(event.hold_back) for _ in range(3)] == [stream] * 3
    assert driver.waits == [(stream, 7)]
    # Another event, which happens to look the same.
    other = imports._stream_behind(CudaEvent(7, driver).hold_back)
    assert other != stream
    assert driver.waits[1:] == [(other, 7)]
    assert imports._stream_behind(None) in set(STREAMS) - {stream}


def test_a_wait_that_failed_is_tried_again(stager: Stager) -> None:
    from xferlib_jax._events import CudaEvent

    driver: Any = Driver()
    imports = opened(Device(itertools.cycle(STREAMS)), driver)
    event = CudaEvent(7, driver)
    driver.fails = True
    with pytest.raises(OSError, match="no"):
        imports._stream_behind(event.hold_back)
    driver.fails = False
    stream = imports._stream_behind(event.hold_back)
    assert driver.waits == [(stream, 7)]


def test_an_event_that_imports_are_behind_is_not_recorded_anew(stager: Stager) -> None:
    """A later import would take the stream for one that waits for its event."""
    from xferlib_jax._events import CudaEvent

    driver: Any = Driver()
    imports = opened(Device(itertools.cycle(STREAMS)), driver)
    owned = [CudaEvent(number, driver) for number in range(3)]
    imports._stream_behind(owned[1].hold_back)
    assert [event.handle for event in unreferenced(owned)] == [0, 2]


def test_streams_that_do_not_come_in_turn_are_taken_as_they_come(stager: Stager) -> None:
    driver = Driver()
    imports = opened(Device(itertools.cycle((11, 12, 11, 13, 12))), driver)
    driver.busy = {11, 12, 13}
    assert imports._idle_stream() == 12


def test_imports_wait_for_other_threads_that_release_memory(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX would wait for the driver's lock, which they have, and keep the interpreter's meanwhile."""
    from xferlib_jax import _driver

    looks: list[int] = []
    another, source = threading.get_ident(), words(1)
    # Its own, lest a failure here hold up whoever imports next.
    releasing = deque([another])
    monkeypatch.setattr(_driver, "_releasing", releasing)

    def look_again(seconds: float) -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            releasing.remove(another)

    monkeypatch.setattr(_driver, "sleep", look_again)
    stager.put(source).result()
    # This thread's own, in a finalizer that runs while it releases memory.
    assert looks == []
    assert_same(np.asarray(on_thread(lambda: stager.put(source).result()).result(5)), source)
    assert looks == [0, 1, 2]
    assert not releasing
