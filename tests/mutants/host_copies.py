"""Host backends that copy wrongly: laws 1, 2, 3, 12 and 13."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from xferlib_host._stream import CopyError
from xferlib_host.conformance import TestHost as Host

from tests.mutants.broken import DEADLINE_SECONDS, BrokenBackend, BrokenEvent, BrokenEvents, broken_backend, broken_core
from xferlib.inflight import InFlight
from xferlib.protocol import Event, Source
from xferlib.transfer import Transfer

__all__: list[str] = []

SLOW_SECONDS = 1e-3
"""How long an engine takes that loses races for certain."""
PUT_KEEPS = "test_law01_put_keeps_values_shape_and_dtype"
GET_KEEPS = "test_law01_get_keeps_values_shape_and_dtype"


@broken_backend(f"{PUT_KEEPS}[float64]", f"{PUT_KEEPS}[complex128]", hooks=Host)
class NarrowsDoubles(BrokenBackend):
    """Accepts double precision and makes it single."""

    def as_array(self, block: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], **rest: Any) -> Any:
        narrow = np.dtype({"d": "f", "D": "F"}.get(dtype.char, dtype))
        return self.inner.as_array(block, offset, shape, narrow, **rest)


@broken_backend(
    f"{PUT_KEEPS}[bool]",
    f"{PUT_KEEPS}[bfloat16]",
    f"{GET_KEEPS}[uint8]",
    f"{GET_KEEPS}[complex64]",
    "test_law01_large_arrays_arrive_whole[put]",
    "test_law01_large_arrays_arrive_whole[get_pageable_out]",
    "test_law01_put_takes_any_layout[pageable]",
    "test_law01_put_into_overwrites_the_array_of_the_caller",
    hooks=Host,
)
class DropsTheLastByte(BrokenBackend):
    """Copies one byte less than it is asked to."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_h2d(dst, src, nbytes - 1)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_d2h(dst, src, nbytes - 1)


@broken_backend(
    "test_law01_get_fills_what_it_is_given_and_nothing_else[pinned]",
    hooks=Host,
)
class RoundsUp(BrokenBackend):
    """Copies to the host in multiples of what its engine likes, as many as it takes."""

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_d2h(dst, src, nbytes + 64)


@broken_backend(f"{PUT_KEEPS}[int32]", hooks=Host)
class FlattensScalars(BrokenBackend):
    """Gives arrays without an axis one."""

    def as_array(self, block: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], **rest: Any) -> Any:
        return self.inner.as_array(block, offset, shape or (1,), dtype, **rest)


@broken_backend("test_law01_trees_keep_their_structure", hooks=Host)
class IgnoresOffsets(BrokenBackend):
    """Makes every array at the start of its block."""

    def as_array(self, block: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], **rest: Any) -> Any:
        return self.inner.as_array(block, 0, shape, dtype, **rest)


@broken_backend("test_law01_get_takes_views_and_aliases", hooks=Host)
class IgnoresStrides(BrokenBackend):
    """Reads a view that is not contiguous as if it were."""

    def as_source(self, array: Any, stream: object | None = None) -> Source:
        return Source(array.__array_interface__["data"][0], array.nbytes, array)


@broken_backend("test_law01_put_takes_any_layout[pinned]", hooks=Host)
class WantsAlignment(BrokenBackend):
    """Rounds source addresses down to what its engine likes."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_h2d(dst, src & ~3, nbytes)


@broken_backend("test_law01_threads_do_not_mix_their_data", hooks=Host)
class SharesAPlace(BrokenBackend):
    """Notes what to copy in one place for all threads, and reads it when the copy runs."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.noted = dst, src, nbytes
        self.inner.h2d.submit(self.copy_what_is_noted)

    def copy_what_is_noted(self) -> None:
        time.sleep(SLOW_SECONDS)
        ctypes.memmove(*self.noted)


@broken_backend(f"{PUT_KEEPS}[float64]", f"{GET_KEEPS}[float64]", hooks=Host)
class TakesWhatItRefused(BrokenBackend):
    """Says that it would narrow a dtype when it is asked first, and takes it all the same."""

    asked = False

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        first, self.asked = not self.asked, True
        if first:
            raise TypeError(f"{dtype} would be narrowed")


@broken_backend(
    "test_law02_a_pinned_source_is_free_once_done[small]", "test_law02_an_array_is_free_once_its_get_is_done[get]", hooks=Host
)
class CopiesTwice(BrokenBackend):
    """Makes each copy again before the next one of its direction, whatever the source holds by then."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.again: dict[str, tuple[int, int, int]] = {}

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.copy("h2d", self.inner.copy_h2d, dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.copy("d2h", self.inner.copy_d2h, dst, src, nbytes)

    def copy(self, direction: str, start: Callable[[int, int, int], None], *what: int) -> None:
        if direction in self.again:
            start(*self.again[direction])
        dst, src, nbytes = what
        self.again[direction] = dst, src, nbytes
        start(dst, src, nbytes)


@broken_backend("test_law02_a_pageable_source_is_free_when_put_returns", hooks=Host)
class CallsEverythingPinned(BrokenBackend):
    """Says that any memory is pinned, so that the copy reads memory that the caller may write."""

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return True


@broken_core(
    "test_law03_put_survives_the_loss_of_its_source[small]",
    "test_law03_put_survives_the_loss_of_its_source[large]",
    "test_law03_put_survives_the_loss_of_source_and_transfer",
    "test_law03_put_into_survives_the_loss_of_source_and_transfer",
    "test_law03_get_survives_the_loss_of_its_array[small]",
    "test_law03_get_survives_the_loss_of_result_and_transfer",
    "test_law08_a_pinned_slot_is_not_handed_out_while_a_put_reads_it[small]",
    "test_law08_a_pinned_slot_is_not_handed_out_while_a_put_reads_it[large]",
    "test_law08_a_pinned_slot_is_not_handed_out_while_a_get_writes_it[small]",
    "test_law08_a_pinned_slot_is_not_handed_out_while_a_get_writes_it[large]",
    hooks=Host,
)
def holds_nothing_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The core holds nothing while a copy uses it."""
    add = InFlight.add

    def add_without(queue: InFlight, nbytes: int, *held: object) -> Event:
        return add(queue, nbytes, None)

    patch.setattr(InFlight, "add", add_without)


@broken_backend(
    "test_law03_get_survives_the_loss_of_its_array[small]", "test_law03_get_survives_the_loss_of_its_array[large]", hooks=Host
)
class ForgetsTheArray(BrokenBackend):
    """Gives the core nothing to hold while it reads an array."""

    def as_source(self, array: Any, stream: object | None = None) -> Source:
        source: Source = self.inner.as_source(array, stream)
        return source._replace(keepalive=None)


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


@broken_backend(
    "test_law13_a_hundred_transfers_call_for_no_memory[small-put]",
    "test_law13_a_hundred_transfers_call_for_no_memory[large-put_pageable]",
    hooks=Host,
)
class LosesItsBlocks(BrokenBackend):
    """Says of every block that it is lost, so that each put takes a new one."""

    def lost(self, block: Any) -> bool:
        return True
