"""Laws 1, 3, 8, 10 and 11 for host memory that the device works on in place, and law 11 for write-combined memory.

To tell a view from a copy, the tests write to the memory after the view was made, on either side. Memory that was let go of too
early shows up by its address among new pinned arrays.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from xferlib.conformance.base import Laws
from xferlib.conformance.hooks import Hold
from xferlib.conformance.values import LARGE, SIZES, Array, assert_same, pattern, words
from xferlib.errors import CapabilityError
from xferlib.stager import Stager

__all__ = ["MappedLaws"]

MOST = 2000
TURNS = 100


class MappedLaws(Laws):
    @pytest.mark.parametrize("size", SIZES)
    def test_law01_the_device_reads_and_writes_mapped_memory(self, stager: Stager, size: str) -> None:
        old, new = words(1, SIZES[size]), words(2, SIZES[size])
        array = self.pinned(stager, old)
        if self.refuses_to_map(stager, array):
            return
        self.warm(stager, old)
        view = stager.mapped(array)
        assert_same(self.to_numpy(view), old)
        array[...] = new
        with self.hold_compute(stager.backend) as hold:
            read = self.read_later(view, hold)
            hold.release()
            assert_same(read(), new)
        self.write(view, old)
        assert_same(array, old)

    @pytest.mark.parametrize("dtype", ["bool", "uint8", "float32", "complex64"])
    def test_law01_views_keep_shape_and_dtype_and_begin_where_the_array_does(self, stager: Stager, dtype: str) -> None:
        values = pattern((4, 3, 7), np.dtype(dtype), 1)
        array = self.pinned(stager, values)
        if self.refuses_to_map(stager, array):
            return
        for part in (array, array[1:], array[2]):
            view = stager.mapped(part)
            assert_same(self.to_numpy(view), np.array(part))

    def test_law03_a_view_and_its_aliases_keep_the_host_memory(self, stager: Stager) -> None:
        values = words(1)
        if self.refuses_to_map(stager, self.pinned(stager, values)):
            return
        names = [name for name, _ in self.aliases(stager.mapped(self.pinned(stager, values)))]
        kept: list[Array] = []
        for name in names:
            view = stager.mapped(self.pinned(stager, values))
            (alias,) = [alias for known, alias in self.aliases(view) if known == name]
            want = self.to_numpy(alias)
            del view
            kept += self.new_arrays(stager, values)
            assert_same(self.to_numpy(alias), want)
            del alias

    @pytest.mark.parametrize("size", SIZES)
    def test_law08_mapped_memory_is_not_handed_out_under_a_reader(self, stager: Stager, size: str) -> None:
        values = words(1, SIZES[size])
        array = self.pinned(stager, values)
        if self.refuses_to_map(stager, array):
            return
        self.warm(stager, values)
        busy = array.ctypes.data
        with self.hold_compute(stager.backend) as hold:
            view = self.mapped_on(stager, array, hold)
            read = self.read_later(view, hold)
            del view, array
            fresh = self.new_arrays(stager, values)
            for other in fresh:
                start = other.ctypes.data
                assert start + other.nbytes <= busy or busy + values.nbytes <= start, "this memory is read by work under way"
            assert hold.held
            hold.release()
            assert_same(read(), values)

    def test_law08_mapped_memory_is_handed_out_again_when_it_is_free(self, stager: Stager) -> None:
        values = words(1, LARGE)
        if self.refuses_to_map(stager, self.pinned(stager, values)):
            return
        addresses: list[int] = []
        # The law does not say how soon.
        while len(addresses) == len(set(addresses)):
            assert len(addresses) < TURNS, "views that are gone keep the memory"
            array = self.pinned(stager, values)
            addresses.append(array.ctypes.data)
            view = stager.mapped(array)
            assert_same(self.to_numpy(view), values)
            del view, array

    def test_law10_a_view_outlives_the_stager(self, stager: Stager) -> None:
        values = words(1, LARGE)
        array = self.pinned(stager, values)
        if self.refuses_to_map(stager, array):
            return
        view, first = stager.mapped(array), array.ctypes.data
        del array
        stager.close()
        gc.collect()
        if stager.capabilities.pinned:
            assert self.page_locked(first)
        assert_same(self.to_numpy(view), values)

    def test_law11_only_pinned_memory_is_mapped(self, stager: Stager) -> None:
        array = self.pinned(stager, words(1))
        if self.refuses_to_map(stager, array):
            return
        frozen = array[:]
        frozen.flags.writeable = False
        for wrong in (words(1, LARGE), array[::2], frozen, stager.empty_pinned(0, np.int32)):
            with pytest.raises(ValueError, match=r"array"):
                stager.mapped(wrong)

    def test_law11_write_combined_memory_is_what_it_says_or_is_refused(self, stager: Stager) -> None:
        values = words(1, LARGE)
        if not stager.capabilities.write_combined:
            with pytest.raises(CapabilityError):
                stager.empty_pinned(values.shape, values.dtype, write_combined=True)
            return
        array = stager.empty_pinned(values.shape, values.dtype, write_combined=True)
        array[...] = values
        first = array.ctypes.data
        for address in (first, first + array.nbytes - 1):
            assert self.page_locked(address)
            assert self.write_combined(address), "the flag was ignored"
        assert_same(self.to_numpy(stager.put(array).result()), values)
        assert stager.stats().synchronous == 0

    def test_law11_write_combined_memory_is_for_those_who_ask_for_it(self, stager: Stager) -> None:
        values = words(1, LARGE)
        if not stager.capabilities.write_combined:
            with pytest.raises(CapabilityError):
                stager.empty_pinned(values.shape, values.dtype, write_combined=True)
            return
        for _ in range(2):
            # Dropped at once, so that the next request might take it.
            stager.empty_pinned(values.shape, values.dtype, write_combined=True)
        kept = [*self.new_arrays(stager, values), stager.get(self.from_numpy(values)).result()]
        assert not any(self.write_combined(array.ctypes.data) for array in kept), (
            "memory that is slow to read was given to a caller who did not ask for it"
        )
        assert stager.stats().pinned_nbytes >= 2 * LARGE

    def refuses_to_map(self, stager: Stager, array: Array) -> bool:
        """Assert that a backend which does not declare `mapped` refuses, and tell whether it is such a one."""
        if stager.capabilities.mapped:
            return False
        with pytest.raises(CapabilityError):
            stager.mapped(array)
        return True

    def mapped_on(self, stager: Stager, array: Array, hold: Hold) -> Any:
        """Return a view for work on the hold's stream."""
        return stager.mapped(array, stream=hold.stream if stager.capabilities.streams else None)

    def new_arrays(self, stager: Stager, like: Array) -> list[Array]:
        """Return new pinned arrays of this size with other values, made after dropped memory is gone and until none was free."""
        gc.collect()
        arrays: list[Array] = []
        misses = stager.stats().pool_misses
        while stager.stats().pool_misses == misses:
            assert len(arrays) < MOST, f"{MOST} arrays share memory that was free after the first few"
            arrays.append(self.pinned(stager, pattern(like.shape, like.dtype, 60 + len(arrays))))
        return arrays
