"""Law 13. After warm-up, a hundred transfers in a row allocate, free, pin and unpin nothing: the driver counts."""

from __future__ import annotations

import gc
from collections import deque

import pytest

from xferlib.conformance.base import Laws
from xferlib.conformance.moves import WAYS, prepare
from xferlib.conformance.values import SIZES, words
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["QuietLaws"]

TRANSFERS = 100
ROUNDS = 6
"""Each is of so many transfers, and the first warms up. Each of the others may need a few blocks more, since more transfers are in
flight than ever before. How many depends on when it is seen what is done, and a busy machine may put that off at any time."""
DEPTH = 3


class QuietLaws(Laws):
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("size", SIZES)
    def test_law13_a_hundred_transfers_call_for_no_memory(self, stager: Stager, way: str, size: str) -> None:
        self.assert_quiet(stager, way, SIZES[size])

    def test_law13_a_hundred_puts_into_an_array_call_for_no_memory(self, stager: Stager) -> None:
        if not self.put_into_is_refused(stager):
            self.assert_quiet(stager, "put_into", SIZES["small"])

    def assert_quiet(self, stager: Stager, way: str, nbytes: int) -> None:
        """Assert it with a few transfers in flight at a time, as in a loop that overlaps."""
        move = prepare(self, stager, way, words(1, nbytes))
        ahead: deque[Transfer] = deque()
        calls: list[int] = []
        while len(calls) < ROUNDS and 0 not in calls[1:]:
            gc.collect()
            before = self.memory_calls(stager.backend)
            for _ in range(TRANSFERS):
                ahead.append(move.start())
                if len(ahead) == DEPTH:
                    ahead.popleft().result()
            calls.append(self.memory_calls(stager.backend) - before)
        assert calls[-1] == 0, f"no {TRANSFERS} transfers without calls for memory; these had, the first to warm up: {calls}"
        while ahead:
            ahead.popleft().synchronize()
