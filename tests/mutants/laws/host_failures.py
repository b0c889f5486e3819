"""Host backends, and cores, that are wrong about copies that fail, and about memory in steady state: laws 12 and 13."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from xferlib_host._stream import CopyError
from xferlib_host.conformance import TestHost as Host

from tests.mutants.laws.broken import DEADLINE_SECONDS, BrokenBackend, BrokenEvent, BrokenEvents, broken_backend, broken_core
from xferlib.conformance.moves import WAYS
from xferlib.errors import TransferError
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__: list[str] = []

POISONS = "test_law12_a_failure_poisons_nothing_but_itself"
RAISES = "test_law12_a_failed_transfer_raises_each_time_it_is_asked"


class Swallowing(BrokenEvent):
    def done(self) -> bool:
        try:
            return self.inner.done()
        except CopyError:
            return True

    def synchronize(self) -> None:
        with suppress(CopyError):
            self.inner.synchronize()


@broken_backend(
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[put]",
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[put_pageable]",
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[get]",
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[get_out]",
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[get_pageable_out]",
    "test_law12_a_failed_put_into_raises_each_time_it_is_asked",
    hooks=Host,
)
class SwallowsFailures(BrokenEvents):
    """Reports a failed copy as done."""

    event = Swallowing


@broken_core(
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[put]",
    "test_law12_a_failed_put_into_raises_each_time_it_is_asked",
    hooks=Host,
)
def hides_the_cause(patch: pytest.MonkeyPatch) -> None:
    """The core says that a copy failed and keeps the framework's own error to itself."""
    failed = Transfer._failed

    def failed_without_cause(transfer: Transfer, cause: Exception) -> Exception:
        error = failed(transfer, cause)
        error.__cause__ = None
        return error

    patch.setattr(Transfer, "_failed", failed_without_cause)


@broken_core("test_law12_what_was_done_before_stays_done[put]", "test_law12_what_was_done_before_stays_done[get]", hooks=Host)
def blames_everybody(patch: pytest.MonkeyPatch) -> None:
    """The core takes one failure for a failure of all transfers, those before included."""
    failed, done = Transfer._failed, Transfer.done
    causes: list[Exception] = []

    def failed_for_all(transfer: Transfer, cause: Exception) -> Exception:
        causes.append(cause)
        return failed(transfer, cause)

    def done_unless_any_failed(transfer: Transfer) -> bool:
        return done(transfer) and not causes

    patch.setattr(Transfer, "_failed", failed_for_all)
    patch.setattr(Transfer, "done", done_unless_any_failed)


@broken_backend("test_law12_a_stager_whose_copies_failed_can_be_closed", hooks=Host)
class CannotBeClosed(BrokenBackend):
    """Waits, when it is closed, for what will never be."""

    def close(self) -> None:
        threading.Event().wait(4 * DEADLINE_SECONDS)
        self.inner.close()


class MendingBackend(BrokenBackend):
    """Honest: its copies fail while they are broken, and work again afterwards, as a driver's that were given a wrong address."""

    broken = False

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.refuse()
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.refuse()
        self.inner.copy_d2h(dst, src, nbytes)

    def refuse(self) -> None:
        if self.broken:
            raise CopyError("invalid argument")


class MendingHost(Host):
    """Honest hooks for it."""

    def open(self) -> Any:
        return MendingBackend(super().open())

    @contextmanager
    def break_copies(self, stager: Any) -> Iterator[None]:
        stager.broken = True
        yield
        stager.broken = False


def refuse_after_a_failure(patch: pytest.MonkeyPatch, blamed: Callable[[Stager], object]) -> None:
    """Let a stager refuse once a transfer of somebody who is blamed with it has failed."""
    failed: list[object] = []

    def tried(start: Callable[..., Any]) -> Callable[..., Any]:
        def try_it(stager: Stager, *what: Any, **options: Any) -> Any:
            if blamed(stager) in failed:
                raise TransferError("an earlier transfer has failed")
            try:
                return start(stager, *what, **options)
            except TransferError:
                failed.append(blamed(stager))
                raise

        return try_it

    patch.setattr(Stager, "put", tried(Stager.put))
    patch.setattr(Stager, "get", tried(Stager.get))


# A get into pageable memory fails behind its start.
@broken_core(*(f"{POISONS}[{way}]" for way in WAYS if way != "get_pageable_out"), hooks=MendingHost)
def blames_the_stager(patch: pytest.MonkeyPatch) -> None:
    """After a failure the core takes the whole stager for lost, though its backend is not."""
    refuse_after_a_failure(patch, id)


@broken_core(f"{POISONS}[put]", hooks=MendingHost)
def blames_all_stagers(patch: pytest.MonkeyPatch) -> None:
    """After a failure the core takes every stager for lost."""
    refuse_after_a_failure(patch, lambda stager: stager.name)


@broken_core(f"{POISONS}[put]", f"{POISONS}[get_out]", "test_law12_a_failed_transfer_raises_each_time_it_is_asked[get]", hooks=Host)
def tells_a_failure_once(patch: pytest.MonkeyPatch) -> None:
    """Who asks again after a failure is told that all is done."""
    failed = Transfer._failed

    def failed_once(transfer: Transfer, cause: Exception) -> Exception:
        error = failed(transfer, cause)
        transfer._finished = True
        return error

    patch.setattr(Transfer, "_failed", failed_once)


SMALL_AND_LARGE = [
    f"test_law13_a_hundred_transfers_call_for_no_memory[{size}-{way}]"
    for size in ("small", "large")
    for way in ("put", "put_pageable", "get", "get_out", "get_pageable_out")
]


@broken_backend(*SMALL_AND_LARGE, "test_law13_a_hundred_puts_into_an_array_call_for_no_memory", hooks=Host)
class AllocatesForEachCopy(BrokenBackend):
    """Takes memory for each copy, and gives it back."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.free_pinned(self.inner.alloc_pinned(1))
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.free_pinned(self.inner.alloc_pinned(1))
        self.inner.copy_d2h(dst, src, nbytes)


def tells_only(*questions: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what lets a transfer that failed answer all other questions as if it were done."""

    def patch_others(patch: pytest.MonkeyPatch) -> None:
        honest = {name: getattr(Transfer, name) for name in ("synchronize", "done", "result")}
        instead: dict[str, object] = {"synchronize": None, "done": True, "result": None}

        def answered(name: str) -> Callable[..., Any]:
            def answer(transfer: Transfer, *what: Any) -> Any:
                return instead[name] if transfer._error is not None else honest[name](transfer, *what)

            return answer

        for name in set(honest) - set(questions):
            patch.setattr(Transfer, name, answered(name))

    return patch_others


@broken_core(f"{RAISES}[put]", f"{RAISES}[get]", hooks=Host)
def fails_in_synchronize_only(patch: pytest.MonkeyPatch) -> None:
    """Who polls a transfer that has failed is told that it is done."""
    tells_only("synchronize", "result")(patch)


@broken_core(f"{RAISES}[put]", f"{RAISES}[get]", hooks=Host)
def fails_in_done_only(patch: pytest.MonkeyPatch) -> None:
    """Who waits for a transfer that has failed is told that it is done."""
    tells_only("done", "result")(patch)


@broken_core(f"{RAISES}[put]", f"{RAISES}[get]", hooks=Host)
def returns_what_failed(patch: pytest.MonkeyPatch) -> None:
    """The result of a transfer that has failed is returned."""
    tells_only("done", "synchronize")(patch)


@broken_backend(
    "test_law13_a_hundred_transfers_call_for_no_memory[small-put]",
    "test_law13_a_hundred_transfers_call_for_no_memory[small-get]",
    hooks=Host,
)
class AllocatesNowAndThen(BrokenBackend):
    """Takes memory for one copy in ninety-nine, and gives it back: of a hundred in a row one does so, or two."""

    copies = 0

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.allocate()
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.allocate()
        self.inner.copy_d2h(dst, src, nbytes)

    def allocate(self) -> None:
        self.copies += 1
        if self.copies % 99 == 0:
            self.inner.free_pinned(self.inner.alloc_pinned(1))


@broken_backend(
    "test_law13_a_hundred_transfers_call_for_no_memory[small-put]",
    "test_law13_a_hundred_transfers_call_for_no_memory[large-put_pageable]",
    hooks=Host,
)
class LosesItsBlocks(BrokenBackend):
    """Says of every block that it is lost, so that each put takes a new one."""

    def lost(self, block: Any) -> bool:
        return True
