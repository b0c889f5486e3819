"""Law 9. Where `pinned` is declared, the driver says so of the memory, and starting does not wait even behind held copies.

Where it is not declared, the tests only check that the statistics claim nothing.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest

from xferlib.conformance.base import Laws
from xferlib.conformance.moves import FROM_PINNED, prepare
from xferlib.conformance.values import LARGE, Array, assert_same, words
from xferlib.stager import Stager

__all__ = ["PinnedLaws"]


class PinnedLaws(Laws):
    @pytest.mark.parametrize("nbytes", [1, 4096, LARGE], ids=str)
    def test_law09_pinned_arrays_are_page_locked_at_both_ends(self, stager: Stager, nbytes: int) -> None:
        arrays = [stager.empty_pinned(nbytes, np.uint8) for _ in range(3)]
        if stager.capabilities.pinned:
            for array in arrays:
                self.assert_page_locked(array)
            assert stager.stats().pinned_nbytes >= 3 * nbytes
        else:
            assert stager.stats().pinned_nbytes == 0

    @pytest.mark.parametrize("leaves", [1, 4])
    def test_law09_results_of_get_are_page_locked(self, stager: Stager, leaves: int) -> None:
        """Large results are page-locked soon after the get, and only `idle` waits for that."""
        expected = [words(seed, LARGE) for seed in range(leaves)]
        got = stager.get([self.from_numpy(values) for values in expected]).result()
        stager.idle()
        for array, values in zip(got, expected, strict=True):
            if stager.capabilities.pinned:
                self.assert_page_locked(array)
            assert_same(array, values)
        assert stager.capabilities.pinned or stager.stats().pinned_nbytes == 0

    def test_law09_memory_pinned_in_place_is_page_locked_meanwhile(self, stager: Stager) -> None:
        array = words(1, LARGE)
        if not (stager.capabilities.pinned and stager.capabilities.register):
            assert stager.stats().pinned_nbytes == 0
            return
        first = array.ctypes.data
        assert not self.page_locked(first + array.nbytes // 2)
        with stager.pin(array):
            self.assert_page_locked(array)
        assert not self.page_locked(first + array.nbytes // 2)

    @pytest.mark.parametrize("way", FROM_PINNED)
    def test_law09_starting_does_not_wait_behind_held_copies(self, stager: Stager, way: str) -> None:
        move = prepare(self, stager, way, words(1, LARGE))
        if not stager.capabilities.pinned:
            assert stager.stats().pinned_nbytes == 0
            return
        with self.hold_copies(stager.backend) as hold:
            transfers = [self.assert_returns(move.start) for _ in range(3)]
            assert hold.held
        transfers[-1].synchronize()
        assert_same(move.read(transfers[-1]), move.values)

    def test_law09_pinned_memory_is_moved_without_staging(self, stager: Stager) -> None:
        values = words(1, LARGE)
        stager.get(stager.put(self.pinned(stager, values)).result()).synchronize()
        gc.collect()
        assert stager.stats().synchronous == 0

    def assert_page_locked(self, array: Array) -> None:
        """Assert that the driver, and the backend, know both ends of the array as page-locked."""
        start = array.ctypes.data
        for address in (start, start + array.nbytes - 1):
            assert self.page_locked(address), f"the byte {address - start} of {array.nbytes} is pageable"
