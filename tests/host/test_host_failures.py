"""Copies that fail: every later event of the direction says so, whoever asks, and as often as it is asked."""

from __future__ import annotations

import numpy as np
import pytest
from xferlib_host import Stream
from xferlib_host._stager import NumpyStager
from xferlib_host._stream import CopyError

from tests.host.work import Gate, address, engine_of, raise_error


def test_a_failure_stays_and_spares_what_was_recorded_before(stager: NumpyStager, direction: str) -> None:
    engine = engine_of(stager, direction)
    source, target = np.arange(4), np.zeros(4, int)
    before = engine.record()
    engine.submit(lambda: raise_error(OSError("the link is down")))
    engine.copy(address(target), address(source), source.nbytes)
    events = [engine.record(), engine.record()]
    for event in events:
        for ask in (event.synchronize, event.done, event.stream_wait):
            with pytest.raises(CopyError, match=r"OSError\('the link is down'\)") as caught:
                ask()
            assert isinstance(caught.value, stager.failures)
            assert isinstance(caught.value.__cause__, OSError)
    assert before.done()
    assert not target.any()


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_one_failed_direction_leaves_the_other_whole(stager: NumpyStager, direction: str, error: type[BaseException]) -> None:
    broken, whole = engine_of(stager, direction), engine_of(stager, "d2h" if direction == "h2d" else "h2d")
    broken.submit(lambda: raise_error(error()))
    with pytest.raises(CopyError):
        broken.record().synchronize()
    whole.record().synchronize()


def test_an_engine_that_waits_for_a_failed_event_fails(stager: NumpyStager) -> None:
    stager.d2h.submit(lambda: raise_error(ValueError("inside")))
    stager.order_h2d(stager.record_d2h())
    with pytest.raises(CopyError, match="inside"):
        stager.record_h2d().synchronize()


def test_a_copy_that_fails_behind_a_waiting_stream_comes_out_of_the_stream(stager: NumpyStager, stream: Stream, gate: Gate) -> None:
    stager.h2d.submit(gate.stand)
    stager.h2d.submit(lambda: raise_error(ValueError("late")))
    stager.record_h2d().stream_wait(stream)
    gate.open()
    with pytest.raises(CopyError, match="late"):
        stream.synchronize()


def test_asking_a_failed_event_again_and_again_piles_up_no_traceback(stager: NumpyStager) -> None:
    stager.h2d.submit(lambda: raise_error(ValueError()))
    event = stager.record_h2d()
    errors = []
    for _ in range(3):
        with pytest.raises(CopyError) as caught:
            event.synchronize()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3
