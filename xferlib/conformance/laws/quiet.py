"""Law 13. After warm-up, a hundred transfers allocate, free, pin and unpin nothing: the driver counts."""

from __future__ import annotations

import gc
from collections import deque

import pytest

from xferlib.conformance.base import Laws
from xferlib.conformance.moves import WAYS, prepare
from xferlib.conformance.values import SIZES, words
from xferlib.errors import CapabilityError
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["QuietLaws"]

TRANSFERS = 100
WARM_UP = 100
"""Transfers. Several rounds of looking for what is done: until then each round may find that a few blocks more are needed."""
DEPTH = 3


class QuietLaws(Laws):
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("size", SIZES)
    def test_law13_a_hundred_transfers_call_for_no_memory(self, stager: Stager, way: str, size: str) -> None:
        self.assert_quiet(stager, way, SIZES[size])

    def test_law13_a_hundred_puts_into_an_array_call_for_no_memory(self, stager: Stager) -> None:
        if not stager.capabilities.put_into:
            with pytest.raises(CapabilityError):
                stager.put(words(1), into=self.from_numpy(words(2)))
            return
        self.assert_quiet(stager, "put_into", SIZES["small"])

    def assert_quiet(self, stager: Stager, way: str, nbytes: int) -> None:
        """Assert it with a few transfers in flight at a time, as in a loop that overlaps."""
        move = prepare(self, stager, way, words(1, nbytes))
        ahead: deque[Transfer] = deque()
        before = 0
        for turn in range(WARM_UP + TRANSFERS):
            if turn == WARM_UP:
                gc.collect()
                before = self.memory_calls(stager.backend)
            ahead.append(move.start())
            if len(ahead) == DEPTH:
                ahead.popleft().result()
        assert self.memory_calls(stager.backend) - before == 0
        while ahead:
            ahead.popleft().synchronize()
