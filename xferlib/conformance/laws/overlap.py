"""Laws 5 and 6. Starting does not wait, and a transfer completes while compute that was enqueued before it is still held.

No clock decides: compute is held, and the transfer must start, or finish, before the compute is released.
"""

from __future__ import annotations

from typing import Any

import pytest

from xferlib.conformance.base import SCARCE, Laws
from xferlib.conformance.moves import FROM_PINNED, WAYS, prepare
from xferlib.conformance.values import LARGE, SIZES, SMALL, assert_same, words
from xferlib.errors import CapabilityError
from xferlib.stager import Stager

__all__ = ["OverlapLaws"]


class OverlapLaws(Laws):
    @pytest.mark.parametrize("way", FROM_PINNED)
    @pytest.mark.parametrize("size", SIZES)
    def test_law05_starting_returns_while_compute_is_held(self, stager: Stager, way: str, size: str) -> None:
        move = prepare(self, stager, way, words(1, SIZES[size]))
        with self.hold_compute(stager.backend) as hold:
            transfer = self.assert_returns(move.start)
            assert hold.held
        transfer.synchronize()
        assert_same(move.read(transfer), move.values)

    @pytest.mark.parametrize("way", FROM_PINNED)
    @pytest.mark.parametrize("size", SIZES)
    def test_law05_starting_returns_while_copies_are_held(self, stager: Stager, way: str, size: str) -> None:
        move = prepare(self, stager, way, words(1, SIZES[size]))
        with self.hold_copies(stager.backend) as hold:
            transfer = self.assert_returns(move.start)
            self.assert_returns(move.start)
            assert hold.held
        transfer.synchronize()
        assert_same(move.read(transfer), move.values)

    @pytest.mark.parametrize("borrow", [True, "staged"])
    def test_law05_a_put_that_borrows_returns_while_copies_are_held(self, stager: Stager, borrow: Any) -> None:
        values = words(1, LARGE)
        with self.new_stager(pinned_limit=SCARCE) as scarce:
            self.warm_staging(scarce)
            with self.hold_copies(scarce.backend) as hold:
                transfer = self.assert_returns(lambda: scarce.put(values, borrow=borrow))
                assert hold.held
            transfer.synchronize()
            assert_same(self.to_numpy(transfer.value), values)

    @pytest.mark.parametrize("what", ["array", "tree"])
    def test_law05_the_first_put_of_a_size_returns_while_compute_is_held(self, stager: Stager, what: str) -> None:
        self.warm(stager, words(1))
        sizes = (5 * SMALL,) if what == "array" else (2 * SMALL, 64, LARGE, 3 * SMALL)
        values = [words(seed, nbytes) for seed, nbytes in enumerate(sizes)]
        sources = [self.pinned(stager, value) for value in values]
        taken = stager.stats().device_nbytes
        with self.hold_compute(stager.backend) as hold:
            # There is no device memory of this size yet.
            transfer = self.assert_returns(lambda: stager.put(sources[0] if what == "array" else sources))
            assert stager.stats().device_nbytes > taken
            # The law does not say when it completes: a framework may have to wait until the memory that it gives out was let go of.
            assert hold.held
        arrays = [transfer.value] if what == "array" else transfer.value
        for array, value in zip(arrays, values, strict=True):
            assert_same(self.to_numpy(array), value)

    def test_law05_get_returns_while_its_producer_is_held(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        with self.held_array(stager.backend, values) as held:
            transfer = self.assert_returns(lambda: stager.get(held.array, stream=held.stream))
            assert held.held
        assert_same(transfer.result(), values)

    def test_law05_put_into_returns_while_compute_and_copies_are_held(self, stager: Stager) -> None:
        if self.put_into_is_refused(stager):
            return
        move = prepare(self, stager, "put_into", words(1))
        move.start().synchronize()
        with self.hold_compute(stager.backend) as compute, self.hold_copies(stager.backend) as copies:
            transfer = self.assert_returns(move.start)
            assert compute.held
            assert copies.held
        transfer.synchronize()
        assert_same(move.read(transfer), move.values)

    def test_law05_stream_wait_does_not_stop_the_host(self, stager: Stager) -> None:
        move = prepare(self, stager, "put", words(1))
        with self.hold_compute(stager.backend) as compute, self.hold_copies(stager.backend, "h2d") as copies:
            transfer = move.start()
            if stager.capabilities.streams:
                self.assert_returns(lambda: transfer.stream_wait(compute.stream))
            else:
                with pytest.raises(CapabilityError):
                    stager.put(move.values, stream=object())
            assert compute.held
            assert copies.held
        assert_same(move.read(transfer), move.values)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("size", SIZES)
    def test_law06_a_transfer_completes_while_compute_is_held(self, stager: Stager, way: str, size: str) -> None:
        move = prepare(self, stager, way, words(1, SIZES[size]))
        with self.hold_compute(stager.backend) as hold:
            transfer = self.assert_returns(move.start)
            self.assert_completes(transfer)
            assert hold.held
        assert_same(move.read(transfer), move.values)

    def test_law06_put_into_completes_while_compute_is_held(self, stager: Stager) -> None:
        if self.put_into_is_refused(stager):
            return
        move = prepare(self, stager, "put_into", words(1))
        with self.hold_compute(stager.backend) as hold:
            transfer = self.assert_returns(move.start)
            self.assert_completes(transfer)
            assert hold.held
        assert_same(move.read(transfer), move.values)

    @pytest.mark.parametrize("way", ["put", "get"])
    def test_law06_a_transfer_completes_while_the_opposite_direction_is_held(self, stager: Stager, way: str) -> None:
        move = prepare(self, stager, way, words(1))
        opposite = prepare(self, stager, "get" if way == "put" else "put", words(2))
        with self.hold_copies(stager.backend, opposite.direction) as hold:
            waiting = self.assert_returns(opposite.start)
            transfer = self.assert_returns(move.start)
            self.assert_completes(transfer)
            assert not waiting.done()
            assert hold.held
        assert_same(move.read(transfer), move.values)

    def test_law06_put_completes_while_a_get_waits_for_its_producer(self, stager: Stager) -> None:
        move = prepare(self, stager, "put", words(1))
        with self.held_array(stager.backend, words(2)) as held:
            waiting = self.assert_returns(lambda: stager.get(held.array, stream=held.stream))
            transfer = self.assert_returns(move.start)
            self.assert_completes(transfer)
            assert held.held
        assert_same(move.read(transfer), move.values)
        assert_same(waiting.result(), words(2))
