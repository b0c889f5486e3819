"""Law 11. Flags are honest both ways: what is declared works, what is not declared is refused.

The laws themselves say which flags they need; here is what a flag itself promises.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest

from xferlib.conformance.base import Laws
from xferlib.conformance.values import LARGE, assert_same, words
from xferlib.errors import CapabilityError
from xferlib.stager import Stager

__all__ = ["FlagLaws"]


class FlagLaws(Laws):
    def test_law11_pinned_describes_the_memory_and_changes_no_program(self, stager: Stager) -> None:
        array = stager.empty_pinned(LARGE, np.uint8)
        array[...] = 7
        assert (array == 7).all()
        assert_same(self.to_numpy(stager.put(array).result()), np.full(LARGE, 7, np.uint8))
        stats = stager.stats()
        # The pool and its limit are there either way.
        assert stats.pinned_used_nbytes >= LARGE
        if stager.capabilities.pinned:
            assert stats.pinned_nbytes >= LARGE
            assert stats.pinned_peak_nbytes >= LARGE
        else:
            assert (stats.pinned_nbytes, stats.pinned_peak_nbytes) == (0, 0)

    def test_law11_register_page_locks_memory_of_the_caller_or_is_refused(self, stager: Stager) -> None:
        values = words(1, LARGE)
        array = values.copy()
        if not stager.capabilities.register:
            with pytest.raises(CapabilityError):
                stager.pin(array)
            return
        start = array.ctypes.data
        assert not stager.backend.is_pinned(start, array.nbytes)
        with stager.pin(array):
            assert stager.backend.is_pinned(start, array.nbytes)
            assert_same(self.to_numpy(stager.put(array).result()), values)
            assert stager.stats().synchronous == 0, "memory that is pinned was staged"
        assert not stager.backend.is_pinned(start, array.nbytes)

    def test_law11_streams_are_waited_for_or_refused(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        array = self.from_numpy(values)
        with self.hold_compute(stager.backend) as hold:
            if not stager.capabilities.streams:
                stream = object() if hold.stream is None else hold.stream
                with pytest.raises(CapabilityError):
                    stager.put(values, stream=stream)
                with pytest.raises(CapabilityError):
                    stager.get(array, stream=stream)
                return
            transfer = self.assert_returns(lambda: stager.get(array, stream=hold.stream))
            self.assert_stays_undone(transfer, hold)
        self.assert_completes(transfer)
        assert_same(transfer.value, values)

    def test_law11_put_into_overwrites_in_place_or_is_refused(self, stager: Stager) -> None:
        old, new = words(1), words(2)
        array = self.from_numpy(old)
        if not stager.capabilities.put_into:
            with pytest.raises(CapabilityError):
                stager.put(new, into=array)
            gc.collect()
            assert_same(self.to_numpy(array), old)
            return
        assert stager.put(new, into=array).result() is array
        assert_same(self.to_numpy(array), new)
