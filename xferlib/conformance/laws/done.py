"""Law 4. `done()` never says yes early and never blocks, and it becomes true without anyone calling `synchronize`."""

from __future__ import annotations

import pytest

from xferlib.conformance.base import Laws
from xferlib.conformance.moves import WAYS, prepare
from xferlib.conformance.values import LARGE, SIZES, assert_same, words
from xferlib.stager import Stager

__all__ = ["DoneLaws"]


class DoneLaws(Laws):
    @pytest.mark.parametrize("way", WAYS)
    def test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before(self, stager: Stager, way: str) -> None:
        move = prepare(self, stager, way, words(1))
        # An earlier copy is done already: an event that stands for that one would say yes.
        move.start().synchronize()
        with self.hold_copies(stager.backend, move.direction) as hold:
            transfer = move.start()
            self.assert_stays_undone(transfer, hold)
        self.assert_completes(transfer)
        assert_same(move.read(transfer), move.values)

    @pytest.mark.parametrize("way", WAYS)
    def test_law04_done_does_not_block(self, stager: Stager, way: str) -> None:
        move = prepare(self, stager, way, words(1))
        with self.hold_copies(stager.backend) as hold:
            transfer = move.start()
            assert not self.assert_returns(transfer.done)
            assert hold.held

    def test_law04_a_tree_is_done_when_its_last_leaf_is(self, stager: Stager) -> None:
        values = {size: words(1, nbytes) for size, nbytes in SIZES.items()}
        for value in values.values():
            self.warm(stager, value)
        arrays = {size: self.put_values(stager, value) for size, value in values.items()}
        out = {"small": words(2), "large": self.pinned(stager, words(2, LARGE))}
        with self.hold_copies(stager.backend) as hold:
            put = stager.put({"small": values["small"], "large": self.pinned(stager, values["large"])})
            get = stager.get(arrays, out=out)
            self.assert_stays_undone(put, hold)
            self.assert_stays_undone(get, hold)
        self.assert_completes(put)
        self.assert_completes(get)
        for size, value in values.items():
            assert_same(self.to_numpy(put.value[size]), value)
            assert_same(out[size], value)
