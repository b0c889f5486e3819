"""The right to wait: time-outs, failures that are raised every time, streams."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Point, held, on_thread
from xferlib.landing import Landing
from xferlib.transfer import Transfer


class Broke(Exception):
    """What the backend raises."""


def transfer(point: Point, *, on_host: bool = False) -> Transfer:
    return Transfer("value", point, (Broke,), on_host)


def test_a_result_comes_in_time_or_not_at_all(stager: xferlib.Stager) -> None:
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        started = stager.put(np.ones(3))
        for timeout in (0, 0.001):
            with pytest.raises(TimeoutError, match=f"not done after {timeout} seconds"):
                started.result(timeout)
        assert "started" in repr(started)
    assert started.result(10).tolist() == [1] * 3
    assert started.result(0).tolist() == [1] * 3
    assert "done" in repr(started)


def test_a_done_event_is_not_asked_again() -> None:
    point = Point(reached=True)
    ended = transfer(point)
    assert [ended.done() for _ in range(3)] == [True] * 3
    assert point.asked == 1


@pytest.mark.parametrize("on_host", [True, False])
def test_a_failure_is_raised_every_time_with_its_cause(on_host: bool) -> None:
    point = Point(error=Broke("down"))
    failed = transfer(point, on_host=on_host)
    waits: list[Callable[[], object]] = [
        failed.done,
        failed.synchronize,
        failed.result,
        lambda: failed.result(1),
        failed.stream_wait,
    ]
    for wait in waits * 2:
        with pytest.raises(xferlib.TransferError, match="the copy failed: down") as caught:
            wait()
        assert isinstance(caught.value.__cause__, Broke)
    assert "failed" in repr(failed)


def test_what_is_not_a_failure_of_the_framework_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        transfer(Point(error=ZeroDivisionError())).done()


def test_a_failed_transfer_keeps_nothing_alive_once_it_is_dropped() -> None:
    failed = transfer(Point(error=Broke("down")))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(xferlib.TransferError):
            failed.synchronize()
        alive = weakref.ref(failed)
        del failed
        assert alive() is None
    finally:
        gc.enable()


def test_the_int_0_is_refused(stager: xferlib.Stager) -> None:
    started = stager.put(np.ones(3))
    with pytest.raises(ValueError, match="stream=0 is ambiguous"):
        started.stream_wait(0)


def test_no_stream_can_wait_for_a_get_that_ends_with_a_cpu_copy(stager: xferlib.Stager) -> None:
    started = stager.get(np.ones(3), out=np.zeros(3))
    for _ in range(2):
        with pytest.raises(xferlib.CapabilityError, match=r"pageable memory.*empty_pinned"):
            started.stream_wait()
    assert started.result().tolist() == [1] * 3


def test_a_landing_is_an_event() -> None:
    landing = Landing()
    assert not landing.done()
    waiting = on_thread(landing.synchronize)
    landing.reach()
    waiting.result(10)
    assert landing.done()
    broken = Landing()
    broken.fail(Broke("first"))
    broken.fail(Broke("second"))
    assert not broken.done()
    broken.reach()
    for wait in (broken.done, broken.synchronize):
        with pytest.raises(Broke, match="first"):
            wait()


def test_a_transfer_outlives_its_stager(stager: xferlib.Stager) -> None:
    started = stager.put(np.ones(3))
    stager.close()
    assert started.done()
    assert started.result().tolist() == [1] * 3
