"""Laws 2 and 3. The source is free once the transfer is done, or staged, and nothing that the caller drops can harm a copy.

The core holds what a copy under way still needs, and nobody needs what the copy has left behind. To find memory that was let go of
too early, the tests ask for memory of the same size and write other bytes into it.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from xferlib.conformance.base import SCARCE, Laws
from xferlib.conformance.values import LARGE, SIZES, Array, assert_same, words
from xferlib.stager import Stager

__all__ = ["FreedomLaws"]

TURNS = 8


class FreedomLaws(Laws):
    @pytest.mark.parametrize("size", SIZES)
    def test_law02_a_pinned_source_is_free_once_done(self, stager: Stager, size: str) -> None:
        values = words(1, SIZES[size])
        self.warm(stager, values)
        source = self.pinned(stager, values)
        transfer = stager.put(source)
        self.assert_completes(transfer)
        source[...] = words(2, SIZES[size])
        # Anything else that was queued for this source would have to run before this is done.
        self.put_values(stager, words(3, values.nbytes))
        assert_same(self.to_numpy(transfer.value), values)

    def test_law02_a_pageable_source_is_free_when_put_returns(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        source = values.copy()
        with self.hold_copies(stager.backend, "h2d") as hold:
            transfer = self.assert_returns(lambda: stager.put(source))
            source[...] = words(2)
            assert hold.held
        transfer.synchronize()
        assert_same(self.to_numpy(transfer.value), values)

    @pytest.mark.parametrize("size", SIZES)
    def test_law02_a_source_that_is_staged_is_free_while_its_copies_are_held(self, stager: Stager, size: str) -> None:
        values = words(1, SIZES[size])
        self.warm(stager, values)
        source = values.copy()
        with self.hold_copies(stager.backend, "h2d") as hold:
            transfer = self.assert_returns(lambda: stager.put(source, borrow="staged"))
            self.assert_returns(transfer.wait_staged)
            source[...] = words(2, values.nbytes)
            assert not transfer.done()
            assert hold.held
        transfer.synchronize()
        assert_same(self.to_numpy(transfer.value), values)

    def test_law02_a_source_is_staged_behind_others_whose_copies_are_held(self, stager: Stager) -> None:
        # Together they are less than what may be staged at once.
        values = [words(seed, LARGE // 3) for seed in (1, 2, 3)]
        self.warm(stager, values[0])
        # Room is made now: under a hold, a request for it might wait.
        stager.put(words(99, 10 * LARGE), borrow=True).synchronize()
        source: Array = np.empty_like(values[0])
        transfers = []
        with self.hold_copies(stager.backend, "h2d") as hold:
            for value in values:
                source[...] = value
                transfers.append(self.assert_returns(lambda: stager.put(source, borrow="staged")))
                self.assert_returns(transfers[-1].wait_staged)
            source[...] = words(90, source.nbytes)
            assert not transfers[0].done()
            assert hold.held
        for transfer, value in zip(transfers, values, strict=True):
            transfer.synchronize()
            assert_same(self.to_numpy(transfer.value), value)

    def test_law02_a_source_of_which_bytes_are_unread_is_not_staged(self, stager: Stager) -> None:
        values = words(1, LARGE)
        with self.new_stager(pinned_limit=SCARCE) as scarce:
            self.warm_staging(scarce)
            source = values.copy()
            with self.hold_copies(scarce.backend, "h2d") as hold:
                transfer = scarce.put(source, borrow="staged")

                def rewrite() -> None:
                    transfer.wait_staged()
                    source[...] = words(2, values.nbytes)

                staged = self.calls.start(rewrite)
                self.assert_stays(lambda: not staged.done(), hold)
            staged.result(self.deadline_seconds)
            transfer.synchronize()
            assert_same(self.to_numpy(transfer.value), values)

    def test_law02_a_source_may_be_rewritten_each_time_that_it_is_staged(self, stager: Stager) -> None:
        values = [words(seed, LARGE) for seed in range(1, 1 + TURNS)]
        with self.new_stager(pinned_limit=SCARCE) as scarce:
            self.warm_staging(scarce)
            source: Array = np.empty_like(values[0])
            transfers = []
            for value in values:
                source[...] = value
                transfers.append(scarce.put(source, borrow="staged"))
                transfers[-1].wait_staged()
            source[...] = words(90, LARGE)
            for transfer, value in zip(transfers, values, strict=True):
                transfer.synchronize()
                assert_same(self.to_numpy(transfer.value), value)

    @pytest.mark.parametrize("way", ["get", "get_out", "get_pageable_out"])
    def test_law02_an_array_is_free_once_its_get_is_done(self, stager: Stager, way: str) -> None:
        values = words(1)
        self.warm(stager, values)
        out = {"get": None, "get_out": self.pinned(stager, words(2)), "get_pageable_out": words(2)}[way]
        array = self.put_values(stager, values)
        transfer = stager.get(array, out=out)
        self.assert_completes(transfer)
        if stager.capabilities.put_into:
            stager.put(words(4), into=array).synchronize()
        del array
        gc.collect()
        self.put_others(stager, values)
        # Anything else that was queued for this array would have to run before this is done.
        stager.get(self.from_numpy(words(3))).synchronize()
        assert_same(transfer.value, values)

    @pytest.mark.parametrize("size", SIZES)
    def test_law03_put_survives_the_loss_of_its_source(self, stager: Stager, size: str) -> None:
        values = words(1, SIZES[size])
        self.warm(stager, values)
        with self.hold_copies(stager.backend, "h2d") as hold:
            transfer = stager.put(self.pinned(stager, values))
            kept = self.overwrite_free_pinned(stager, values)
            assert hold.held
        self.assert_completes(transfer)
        assert_same(self.to_numpy(transfer.value), values)
        del kept

    def test_law03_put_survives_the_loss_of_source_and_transfer(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        started = threading.Event()

        def put_and_forget() -> Any:
            transfer = stager.put(self.pinned(stager, values))
            started.set()
            # If this waits on the host, it does so on this thread.
            return transfer.value

        with self.hold_copies(stager.backend, "h2d") as hold:
            array = self.calls.start(put_and_forget)
            assert started.wait(self.deadline_seconds)
            kept = self.overwrite_free_pinned(stager, values)
            assert hold.held
        assert_same(self.to_numpy(array.result(self.deadline_seconds)), values)
        del kept

    def test_law03_put_into_survives_the_loss_of_source_and_transfer(self, stager: Stager) -> None:
        if self.put_into_is_refused(stager):
            return
        values = words(1)
        self.warm(stager, values)
        array = self.from_numpy(words(2))
        with self.hold_copies(stager.backend, "h2d") as hold:
            stager.put(self.pinned(stager, values), into=array)
            kept = self.overwrite_free_pinned(stager, values)
            assert hold.held
        # A direction is first in, first out: what was started before this is done when this is.
        self.put_values(stager, words(3, values.nbytes))
        assert_same(self.to_numpy(array), values)
        del kept

    @pytest.mark.parametrize("size", SIZES)
    def test_law03_get_survives_the_loss_of_its_array(self, stager: Stager, size: str) -> None:
        values = words(1, SIZES[size])
        self.warm(stager, values)
        array = self.put_values(stager, values)
        with self.hold_copies(stager.backend, "d2h") as hold:
            transfer = stager.get(array)
            del array
            gc.collect()
            kept = self.put_others(stager, values)
            assert hold.held
        self.assert_completes(transfer)
        assert_same(transfer.value, values)
        del kept

    def test_law03_get_survives_the_loss_of_result_and_transfer(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        array = self.from_numpy(words(2))
        with self.hold_copies(stager.backend, "d2h") as hold:
            stager.get(array)
            stager.get(array, out=self.pinned(stager, values))
            kept = self.overwrite_free_pinned(stager, values)
            assert hold.held
        stager.get(array).synchronize()
        for memory, want in kept:
            assert_same(memory, want)

    def overwrite_free_pinned(self, stager: Stager, values: Array) -> list[tuple[Array, Array]]:
        """Write other bytes into pinned memory of this size, several times, and keep it all with what was written."""
        gc.collect()
        others = [words(seed, values.nbytes) for seed in range(50, 56)]
        return [(self.pinned(stager, other), other) for other in others]
