"""Law 12. A failed transfer raises `TransferError`, at once or from every later question; it is never done without the data."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from xferlib.conformance.base import POLL_SECONDS, Laws
from xferlib.conformance.moves import WAYS, Move, prepare
from xferlib.conformance.values import assert_same, words
from xferlib.errors import TransferError
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["FailureLaws"]


class FailureLaws(Laws):
    @pytest.mark.parametrize("way", WAYS)
    def test_law12_a_failed_transfer_raises_each_time_it_is_asked(self, stager: Stager, way: str) -> None:
        self.assert_fails(stager, prepare(self, stager, way, words(1)))

    def test_law12_a_failed_put_into_raises_each_time_it_is_asked(self, stager: Stager) -> None:
        if not self.put_into_is_refused(stager):
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

    @pytest.mark.parametrize("way", WAYS)
    def test_law12_a_failure_poisons_nothing_but_itself(self, stager: Stager, way: str) -> None:
        move = prepare(self, stager, way, words(1))
        with self.break_copies(stager.backend):
            failed = self.start_or_fail(stager, move)
            if failed is not None:
                self.await_failure(failed)
        for direction in ("put", "get"):
            if self.can_go_on(stager, direction):
                self.assert_moves(stager, direction)
        with self.new_stager() as other:
            self.assert_moves(other, "put")
            self.assert_moves(other, "get")
        if failed is not None:
            # Later successes must not hide the failure.
            for question in (failed.synchronize, failed.done):
                with pytest.raises(TransferError):
                    question()

    def test_law12_a_stager_whose_copies_failed_can_be_closed(self, stager: Stager) -> None:
        move = prepare(self, stager, "put", words(1))
        with self.break_copies(stager.backend):
            self.start_or_fail(stager, move)
        self.assert_returns(stager.close)

    def can_go_on(self, stager: Stager, direction: str) -> bool:
        """Tell whether the backend's own copies of this direction still work, asked without the core."""
        source, target = self.pinned(stager, words(3)), self.from_numpy(words(4))
        try:
            place = stager.backend.as_source(target)
            if direction == "put":
                stager.backend.copy_h2d(place.address, source.ctypes.data, source.nbytes)
                stager.backend.record_h2d().synchronize()
            else:
                stager.backend.copy_d2h(source.ctypes.data, place.address, source.nbytes)
                stager.backend.record_d2h().synchronize()
        except stager.backend.failures:
            return False
        return True

    def assert_moves(self, stager: Stager, way: str) -> None:
        """Assert that transfers of every kind arrive, one after another."""
        values = words(5)
        array, pinned, pageable = self.from_numpy(values), self.pinned(stager, values), values.copy()
        outs = (None, self.pinned(stager, words(6)), words(6))
        for _ in range(2):
            if way == "put":
                for source in (pinned, pageable):
                    assert_same(self.to_numpy(self.assert_arrives(lambda: stager.put(source))), values)  # noqa: B023
            else:
                for out in outs:
                    assert_same(self.assert_arrives(lambda: stager.get(array, out=out)), values)  # noqa: B023

    def assert_fails(self, stager: Stager, move: Move) -> None:
        """Start the move while copies fail, and assert that nobody can take it for done."""
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
        """Ask until the transfer fails. It may take some time, but the transfer is never done."""
        deadline = time.monotonic() + self.deadline_seconds
        with pytest.raises(TransferError):
            while time.monotonic() < deadline:
                assert not transfer.done(), "the transfer is done, but its copy has failed"
                time.sleep(POLL_SECONDS)
