"""Pinning memory of the caller's, in place."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import held, on_thread, tampered


def pinned(stager: xferlib.Stager, array: np.ndarray[Any, Any]) -> bool:
    return stager.backend.is_pinned(array.ctypes.data, array.nbytes)


def test_memory_is_pinned_inside_and_not_outside(stager: xferlib.Stager) -> None:
    array = np.arange(1000.0)
    with stager.pin(array) as same:
        assert same is array
        assert pinned(stager, array)
        assert np.array_equal(stager.put(array).value, array)
        assert stager.stats().synchronous == 0
    assert not pinned(stager, array)


@pytest.mark.parametrize("part", [np.s_[:], np.s_[5:], np.s_[:5], np.s_[3:7]])
def test_pinning_twice_is_refused(stager: xferlib.Stager, part: slice) -> None:
    array = np.arange(10.0)
    with stager.pin(array), pytest.raises(ValueError, match="pinned already"):
        stager.pin(array[part])
    with stager.pin(array[part]):
        assert pinned(stager, array[part])


def test_memory_of_the_pool_is_pinned_already(stager: xferlib.Stager) -> None:
    with pytest.raises((ValueError, xferlib.AllocationError), match="pinned already"):
        stager.pin(stager.empty_pinned(10, np.float64))


def test_neighbours_may_be_pinned_each(stager: xferlib.Stager) -> None:
    array = np.arange(10.0)
    with stager.pin(array[:5]), stager.pin(array[5:]):
        assert pinned(stager, array)


@pytest.mark.parametrize(
    ("array", "error", "words"),
    [
        (np.empty(0), ValueError, "empty array has no memory"),
        (np.arange(10)[::2], ValueError, "not contiguous"),
        ([1, 2], TypeError, "numpy.asarray"),
        (np.ma.masked_array([1]), TypeError, "mask"),
    ],
)
def test_what_is_not_one_range_of_memory_is_refused(stager: xferlib.Stager, array: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        stager.pin(array)


def test_fortran_order_is_one_range_too(stager: xferlib.Stager) -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    with stager.pin(array):
        assert pinned(stager, array)


def test_a_backend_that_cannot_says_what_to_use() -> None:
    with (
        xferlib.stager(tampered(capabilities=xferlib.Capabilities())) as stager,
        pytest.raises(xferlib.CapabilityError, match=r"cannot page-lock memory of yours. Use stager\.empty_pinned"),
    ):
        stager.pin(np.zeros(3))


def test_a_driver_s_refusal_is_an_allocation_error_and_may_be_tried_again() -> None:
    backend = tampered(failures=(OSError,))

    def refuse(address: int, nbytes: int) -> None:
        raise OSError("error 712")

    backend.pin = refuse
    with xferlib.stager(backend) as stager:
        array = np.zeros(3)
        with pytest.raises(xferlib.AllocationError, match="24 bytes could not be page-locked: error 712") as caught:
            stager.pin(array)
        assert isinstance(caught.value.__cause__, OSError)
        backend.pin = backend.inner.pin
        with stager.pin(array):
            assert pinned(stager, array)


def test_closing_a_pin_waits_for_what_is_in_flight(stager: xferlib.Stager) -> None:
    array = np.full(1000, 3.0)
    pin = stager.pin(array)
    with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.put(array)
        closing = on_thread(pin.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        assert pinned(stager, array)
        gate.set()
        closing.result(10)
    assert not pinned(stager, array)
    assert transfer.done()
    pin.close()


def test_closing_the_stager_unpins_and_the_pin_may_be_closed_later(stager: xferlib.Stager) -> None:
    array = np.zeros(10)
    pin = stager.pin(array)
    stager.close()
    assert not pinned(stager, array)
    pin.close()


def test_a_pin_that_is_dropped_says_so(stager: xferlib.Stager) -> None:
    array = np.zeros(10)
    pin = stager.pin(array)
    with pytest.warns(ResourceWarning, match="pin of 80 bytes was never closed"):
        del pin
    stager.trim()
    assert not pinned(stager, array)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_pin_is_unpinned_where_warnings_are_errors(stager: xferlib.Stager) -> None:
    array = np.zeros(10)
    pin = stager.pin(array)
    del pin
    gc.collect()
    stager.trim()
    assert not pinned(stager, array)


def test_one_pin_that_cannot_be_undone_does_not_keep_the_stager_open() -> None:
    backend = tampered(failures=(OSError,))
    closed: list[bool] = []

    def close() -> None:
        closed.append(True)
        backend.inner.close()

    def refuse(address: int) -> None:
        raise OSError("error 713")

    backend.close = close
    stager = xferlib.stager(backend)
    array, other = np.zeros(3), np.zeros(4)
    pins = stager.pin(array), stager.pin(other)
    broken = array.ctypes.data
    backend.unpin = lambda address: refuse(address) if address == broken else backend.inner.unpin(address)
    with pytest.raises(OSError, match="713"):
        stager.close()
    stager.close()
    assert closed == [True]
    assert not pinned(stager, other)
    for pin in pins:
        pin.close()
