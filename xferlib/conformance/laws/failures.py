"""Law 12. A failed transfer raises `TransferError`, at once or from every later question; it is never done without the data."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from xferlib.conformance.base import POLL_SECONDS, Laws
from xferlib.conformance.moves import WAYS, Move, prepare
from xferlib.conformance.values import assert_same, words
from xferlib.errors import CapabilityError, TransferError
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["FailureLaws"]


class FailureLaws(Laws):
    @pytest.mark.parametrize("way", WAYS)
    def test_law12_a_failed_transfer_raises_each_time_it_is_asked(self, stager: Stager, way: str) -> None:
        self.assert_fails(stager, prepare(self, stager, way, words(1)))

    def test_law12_a_failed_put_into_raises_each_time_it_is_asked(self, stager: Stager) -> None:
        if not stager.capabilities.put_into:
            with pytest.raises(CapabilityError):
                stager.put(words(1), into=self.from_numpy(words(2)))
            return
        self.assert_fails(stager, prepare(self, stager, "put_into", words(1)))

    @pytest.mark.parametrize("way", ["put", "get"])
    def test_law12_what_was_done_before_stays_done(self, stager: Stager, way: str) -> None:
        move = prepare(self, stager, way, words(1))
        transfer = move.start()
        transfer.synchronize()
        before = move.read(transfer)
        with self.break_copies(stager.backend):
            broken = self.start_or_fail(stager, move)
            if broken is not None:
                self.await_failure(broken)
        assert transfer.done()
        transfer.synchronize()
        assert_same(before, move.values)

    def test_law12_a_stager_whose_copies_failed_can_be_closed(self, stager: Stager) -> None:
        move = prepare(self, stager, "put", words(1))
        with self.break_copies(stager.backend):
            self.start_or_fail(stager, move)
        self.assert_returns(stager.close)

    def assert_fails(self, stager: Stager, move: Move) -> None:
        """Start the move where copies fail, and assert that nobody can take it for done."""
        with self.break_copies(stager.backend):
            transfer = self.start_or_fail(stager, move)
            if transfer is None:
                return
            self.await_failure(transfer)
        questions: list[Callable[[], object]] = [transfer.synchronize, transfer.done, transfer.result, lambda: transfer.value]
        for question in (*questions, *questions):
            with pytest.raises(TransferError) as caught:
                question()
            assert isinstance(caught.value.__cause__, stager.backend.failures)

    def start_or_fail(self, stager: Stager, move: Move) -> Transfer | None:
        """Start the move, or return None if it fails at once, as it should."""
        try:
            return self.assert_returns(move.start)
        except TransferError as error:
            cause = error.__cause__
        assert isinstance(cause, stager.backend.failures)
        return None

    def await_failure(self, transfer: Transfer) -> None:
        """Ask until the transfer fails. It may take its time to, but it is never done."""
        deadline = time.monotonic() + self.deadline_seconds
        with pytest.raises(TransferError):
            while time.monotonic() < deadline:
                assert not transfer.done(), "the transfer is done, but its copy has failed"
                time.sleep(POLL_SECONDS)
