"""Arrays of the caller's as sources and targets: what they wait for, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream
from xferlib_host._stager import NumpyStager

from tests.host.work import SECONDS, Gate, address


def test_a_scalar_of_numpy_is_an_array_but_no_target(stager: NumpyStager) -> None:
    source = stager.as_source(np.ones(3, np.float32).sum())
    assert source.nbytes == 4
    assert source.keepalive == 3
    with pytest.raises(TypeError, match="are NumPy arrays without a mask"):
        stager.as_target(np.float32(1))  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("wrong", [[1.0], 3.0, None, b"bytes", np.ma.masked_array([1, 2], [True, False])])
def test_what_is_not_a_numpy_array_is_refused(stager: NumpyStager, wrong: Any) -> None:
    for call in (stager.as_source, stager.as_target):
        with pytest.raises(TypeError, match="are NumPy arrays without a mask"):
            call(wrong)


def test_an_array_of_objects_is_never_read_as_bytes(stager: NumpyStager) -> None:
    for call in (stager.as_source, stager.as_target):
        with pytest.raises(TypeError, match="not dtype object"):
            call(np.array([None, 1]))


def test_without_a_stream_a_source_has_nothing_to_wait_for(stager: NumpyStager, stream: Stream, gate: Gate) -> None:
    stream.submit(gate.stand)
    array = np.arange(6.0)
    source = stager.as_source(array)
    assert (source.address, source.nbytes) == (address(array), 48)
    assert source.keepalive is array
    stager.record_d2h().synchronize()


@pytest.mark.parametrize("current", [True, False], ids=["current", "given"])
def test_a_source_waits_for_its_stream_and_a_target_too(stager: NumpyStager, stream: Stream, gate: Gate, current: bool) -> None:
    array = np.zeros(3)
    stream.submit(gate.stand)
    if current:
        with stream:
            stager.as_source(array)
            stager.as_target(array)
    else:
        stager.as_source(array, stream)
        stager.as_target(array, stream)
    later = Gate()
    stream.submit(later.stand)
    events = [stager.record_h2d(), stager.record_d2h()]
    gate.arrived.wait(SECONDS)
    assert not any(event.done() for event in events)
    gate.open()
    # Reached with the later gate shut: only what had been enqueued is waited for.
    for event in events:
        event.synchronize()
    later.open()


@pytest.mark.parametrize(
    "view", [lambda a: a[::2], lambda a: a[::-1], lambda a: a.reshape(4, 5).T, lambda a: a.reshape(4, 5)[:, 1:3]]
)
def test_a_view_that_is_not_contiguous_is_copied_on_its_stream(
    stager: NumpyStager, stream: Stream, gate: Gate, view: Callable[[Any], Any]
) -> None:
    array, out = np.zeros(20), np.empty(20)
    stream.submit(gate.stand)
    stream.submit(np.copyto, array, np.arange(20.0))
    source = stager.as_source(view(array), stream)
    stager.copy_d2h(address(out), source.address, source.nbytes)
    event = stager.record_d2h()
    gate.open()
    event.synchronize()
    expected = view(np.arange(20.0))
    assert out[: expected.size].tolist() == expected.ravel().tolist()


def test_without_a_stream_a_view_that_is_not_contiguous_is_copied_at_once(stager: NumpyStager) -> None:
    array, out = np.arange(20.0), np.empty(10)
    source = stager.as_source(array[::2])
    array[:] = -1
    stager.copy_d2h(address(out), source.address, source.nbytes)
    stager.record_d2h().synchronize()
    assert out.tolist() == list(range(0, 20, 2))


@pytest.mark.parametrize("length", [4, 0], ids=["", "empty"])
def test_a_target_that_cannot_be_written_in_place_is_refused(stager: NumpyStager, length: int) -> None:
    frozen = np.zeros(length)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="is read-only"):
        stager.as_target(frozen)
    with pytest.raises(ValueError, match=r"strides \(16,\), not C order"):
        stager.as_target(np.zeros(8)[::2])
    assert stager.as_source(frozen).nbytes == 8 * length


def test_a_source_that_is_refused_leaves_the_engine_alone(stager: NumpyStager, stream: Stream, gate: Gate) -> None:
    stream.submit(gate.stand)
    with pytest.raises(TypeError):
        stager.as_source(np.array([None]), stream)
    with pytest.raises(ValueError, match="not C order"):
        stager.as_target(np.zeros(8)[::2], stream)
    stager.record_d2h().synchronize()
    stager.record_h2d().synchronize()
