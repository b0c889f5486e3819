"""Pins that could not be undone at once, and pins that outlive their stager."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import xferlib
from tests.core.fakes import tampered
from tests.memory.test_registered import pinned


class Once:
    """Raises the first time, then calls."""

    def __init__(self, error: BaseException, call: Callable[..., None]) -> None:
        self._errors = [error]
        self._call = call

    def __call__(self, *args: object) -> None:
        if self._errors:
            raise self._errors.pop()
        self._call(*args)


def test_closing_that_was_interrupted_may_be_finished(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager._ledger, "wait_all", Once(KeyboardInterrupt(), stager._ledger.wait_all))
    array = np.zeros(10)
    pin = stager.pin(array)
    with pytest.raises(KeyboardInterrupt):
        pin.close()
    assert pinned(stager, array)
    pin.close()
    assert not pinned(stager, array)
    assert stager._pool.usage().asked == 0


def test_what_was_interrupted_before_it_was_locked_is_not_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may take that for a mistake, or unlock what somebody else has locked since."""
    backend = tampered()
    unlocked: list[int] = []

    def unpin(address: int) -> None:
        unlocked.append(address)
        backend.inner.unpin(address)

    backend.unpin = unpin
    array = np.zeros(10)
    with xferlib.stager(backend) as stager:
        with monkeypatch.context() as patch:
            patch.setattr(stager._pins, "_sort", Once(KeyboardInterrupt(), stager._pins._sort))
            with pytest.raises(KeyboardInterrupt):
                stager.pin(array)
        # With its frames goes what would have been the pin's.
        gc.collect()
        stager.trim()
        assert unlocked == []
        with stager.pin(array):
            assert pinned(stager, array)
    assert unlocked == [array.ctypes.data]


def test_closing_that_was_refused_may_be_tried_again() -> None:
    backend = tampered(failures=(OSError,))
    backend.unpin = Once(OSError("error 713"), backend.inner.unpin)
    array = np.zeros(10)
    with xferlib.stager(backend) as stager:
        pin = stager.pin(array)
        with pytest.raises(xferlib.XferError, match="713"):
            pin.close()
        assert (pinned(stager, array), stager._pool.usage().asked) == (True, 80)
        pin.close()
        assert (pinned(stager, array), stager._pool.usage().asked) == (False, 0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_a_dropped_pin_that_could_not_be_unlocked_is_held_and_tried_again(kind: type[BaseException]) -> None:
    backend = tampered(failures=(OSError,))
    backend.unpin = Once(kind(), backend.inner.unpin)
    with xferlib.stager(backend) as stager:
        array = np.zeros(10)
        pin, memory, address = stager.pin(array), weakref.ref(array), array.ctypes.data
        del array
        with pytest.warns(ResourceWarning, match="never closed"):
            del pin
        with pytest.raises(KeyboardInterrupt if kind is KeyboardInterrupt else xferlib.XferError):
            stager.trim()
        assert memory() is not None
        assert stager.backend.is_pinned(address, 80)
        stager.trim()
        # What was raised, and its frames, may have been in a cycle.
        gc.collect()
        assert memory() is None
        assert not stager.backend.is_pinned(address, 80)


def test_a_dropped_pin_that_is_never_unlocked_keeps_no_other_locked() -> None:
    backend = tampered(failures=(OSError,))
    first, second = np.zeros(10), np.zeros(20)
    refuses = True

    def unpin(address: int) -> None:
        if refuses and address == first.ctypes.data:
            raise OSError("error 713")
        backend.inner.unpin(address)

    backend.unpin = unpin
    with xferlib.stager(backend) as stager:
        pins = [stager.pin(first), stager.pin(second)]
        while pins:
            with pytest.warns(ResourceWarning, match="never closed"):
                del pins[0]
        for _ in range(2):
            with pytest.raises(xferlib.XferError, match="713"):
                stager.trim()
        assert pinned(stager, first)
        assert not pinned(stager, second)
        refuses = False
        stager.trim()
        assert not pinned(stager, first)


def test_a_pin_that_is_dropped_after_the_stager_was_closed_says_nothing_and_holds_nothing() -> None:
    with xferlib.stager("host") as stager:
        array = np.zeros(10)
        pin, memory = stager.pin(array), weakref.ref(array)
    del array
    with warnings.catch_warnings(record=True, action="always") as said:
        del pin
    assert said == []
    assert memory() is None
