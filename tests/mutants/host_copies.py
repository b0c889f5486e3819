"""Host backends that copy wrongly: laws 1, 2, 3, 12 and 13."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from xferlib_host._stream import CopyError
from xferlib_host.conformance import TestHost as Host

from tests.mutants.arena import ArenaHost
from tests.mutants.broken import DEADLINE_SECONDS, BrokenBackend, BrokenEvent, BrokenEvents, broken_backend, broken_core
from tests.mutants.host_ownership import stand_before
from xferlib.conformance.moves import WAYS
from xferlib.errors import TransferError
from xferlib.inflight import InFlight
from xferlib.protocol import Event, Source
from xferlib.stager import Stager
from xferlib.staging.ring import Staging
from xferlib.transfer import Transfer

__all__: list[str] = []

SIDE_BY_SIDE = "test_law01_leaves_that_lie_side_by_side_arrive_whole"
STARTS_NOTHING = "test_law01_a_tree_with_a_leaf_that_is_refused_starts_nothing"
POISONS = "test_law12_a_failure_poisons_nothing_but_itself"
RAISES = "test_law12_a_failed_transfer_raises_each_time_it_is_asked"
SLOW_SECONDS = 1e-3
"""How long an engine takes that loses races for certain."""
PUT_KEEPS = "test_law01_put_keeps_values_shape_and_dtype"
GET_KEEPS = "test_law01_get_keeps_values_shape_and_dtype"


FLIPPED_TO_DEVICE = (
    "test_law01_put_into_overwrites_the_array_of_the_caller",
    "test_law01_put_takes_any_layout[file]",
    f"{SIDE_BY_SIDE}[pinned]",
    "test_law01_trees_keep_their_structure",
    "test_law02_a_pinned_source_is_free_once_done[small]",
    "test_law02_a_pageable_source_is_free_when_put_returns",
    "test_law03_put_survives_the_loss_of_its_source[small]",
    "test_law03_put_survives_the_loss_of_source_and_transfer",
    "test_law03_put_into_survives_the_loss_of_source_and_transfer",
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[put]",
    "test_law04_a_tree_is_done_when_its_last_leaf_is",
    "test_law05_starting_returns_while_compute_is_held[small-put]",
    "test_law05_starting_returns_while_copies_are_held[small-put]",
    "test_law05_put_into_returns_while_compute_and_copies_are_held",
    "test_law05_stream_wait_does_not_stop_the_host",
    "test_law05_the_first_put_of_a_size_returns_while_compute_is_held[tree]",
    "test_law06_a_transfer_completes_while_compute_is_held[small-put]",
    "test_law06_put_into_completes_while_compute_is_held",
    "test_law06_a_transfer_completes_while_the_opposite_direction_is_held[put]",
    "test_law06_put_completes_while_a_get_waits_for_its_producer",
    "test_law07_value_can_be_used_at_once",
    "test_law07_work_behind_stream_wait_sees_the_data",
    "test_law07_put_lets_its_stream_wait_for_the_copy",
    "test_law07_put_into_waits_for_readers_that_were_enqueued",
    "test_law08_memory_of_a_dropped_array_is_not_rewritten_under_a_reader[small]",
    "test_law08_every_reader_is_waited_for",
    "test_law08_leaves_of_one_tree_keep_their_memory",
    "test_law08_a_pinned_slot_is_not_handed_out_while_a_put_reads_it[small]",
    "test_law10_close_waits_for_what_is_in_flight",
    "test_law10_close_after_an_interrupt_waits_as_ever",
    "test_law10_arrays_outlive_the_stager",
    "test_law11_pinned_describes_the_memory_and_changes_no_program",
    "test_law11_put_into_overwrites_in_place_or_is_refused",
    "test_law12_what_was_done_before_stays_done[put]",
    f"{POISONS}[get]",
)
FLIPPED_TO_HOST = (
    "test_law01_get_takes_views_and_aliases",
    "test_law01_get_takes_any_layout",
    "test_law01_trees_keep_their_structure",
    "test_law01_get_fills_what_it_is_given_and_nothing_else[pageable]",
    "test_law02_an_array_is_free_once_its_get_is_done[get]",
    "test_law03_get_survives_the_loss_of_its_array[small]",
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[get]",
    "test_law04_a_tree_is_done_when_its_last_leaf_is",
    "test_law05_starting_returns_while_compute_is_held[small-get]",
    "test_law05_starting_returns_while_copies_are_held[small-get]",
    "test_law05_get_returns_while_its_producer_is_held",
    "test_law06_a_transfer_completes_while_compute_is_held[small-get]",
    "test_law06_a_transfer_completes_while_the_opposite_direction_is_held[get]",
    "test_law06_put_completes_while_a_get_waits_for_its_producer",
    "test_law07_get_reads_after_its_producer[fresh]",
    "test_law10_close_waits_for_what_is_in_flight",
    "test_law10_close_after_an_interrupt_waits_as_ever",
    "test_law10_arrays_outlive_the_stager",
    "test_law11_streams_are_waited_for_or_refused",
    "test_law12_what_was_done_before_stays_done[get]",
    f"{POISONS}[put]",
)


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


@broken_backend(*FLIPPED_TO_DEVICE, hooks=Host)
class FlipsToTheDevice(BrokenBackend):
    """Copies a byte of each transfer to the device wrongly."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_h2d(dst, src, nbytes)
        self.inner.h2d.submit(lambda: flip(dst + nbytes // 2))


@broken_backend(*FLIPPED_TO_HOST, hooks=Host)
class FlipsToTheHost(BrokenBackend):
    """Copies a byte of each transfer to the host wrongly."""

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_d2h(dst, src, nbytes)
        self.inner.d2h.submit(lambda: flip(dst + nbytes // 2))


@broken_core(
    "test_law01_get_keeps_values_shape_and_dtype[int32]",
    "test_law04_a_tree_is_done_when_its_last_leaf_is",
    "test_law10_close_waits_for_what_is_in_flight",
    "test_law10_close_after_an_interrupt_waits_as_ever",
    hooks=Host,
)
def lands_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """What a get is to write into ordinary memory goes to a copy of it."""
    land = Staging.land

    def land_elsewhere(staging: Staging, pageable: Any, *what: Any, **rest: Any) -> Any:
        return land(staging, [(address, array.copy()) for address, array in pageable], *what, **rest)

    patch.setattr(Staging, "land", land_elsewhere)


@broken_core("test_law01_put_into_overwrites_the_array_of_the_caller", hooks=Host)
def overwrites_from_pinned_memory_only(patch: pytest.MonkeyPatch) -> None:
    """A put of ordinary memory into an array of the caller's does nothing."""
    put = Stager.put

    def put_unless_pageable(stager: Stager, tree: Any, *, into: Any = None, **options: Any) -> Any:
        if into is not None and not stager._pool.contains(tree.ctypes.data, tree.nbytes):
            return put(stager, stager.get(into).result(), into=into, **options)
        return put(stager, tree, into=into, **options)

    patch.setattr(Stager, "put", put_unless_pageable)


class RefusesDoubles(BrokenBackend):
    """Honest: would narrow what is double, and says so."""

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        if dtype.char in "dD":
            raise TypeError(f"{dtype} would be narrowed")
        self.inner.check_dtype(dtype)


class RefusingHost(Host):
    """Honest hooks for it."""

    def open(self) -> Any:
        return RefusesDoubles(super().open())


@broken_core(f"{PUT_KEEPS}[float64]", f"{STARTS_NOTHING}[put]", hooks=RefusingHost)
def starts_before_it_refuses(patch: pytest.MonkeyPatch) -> None:
    """A put that is refused has copied something."""
    put = Stager.put

    def put_something(stager: Stager, tree: Any, **options: Any) -> Any:
        try:
            return put(stager, tree, **options)
        except TypeError:
            put(stager, np.zeros(8, np.uint8)).synchronize()
            raise

    patch.setattr(Stager, "put", put_something)


@broken_backend("test_law07_get_reads_after_its_producer[pinned]", hooks=Host)
class WritesEarly(BrokenBackend):
    """Copies to the host at once, and again when it is time."""

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        ctypes.memmove(dst, src, nbytes)
        self.inner.copy_d2h(dst, src, nbytes)


def flip(address: int) -> None:
    ctypes.c_ubyte.from_address(address).value ^= 1


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


@broken_backend(
    "test_law01_trees_keep_their_structure",
    *(f"test_law01_put_takes_any_layout[{memory}]" for memory in ("pinned", "pageable", "registered", "file")),
    hooks=Host,
)
class IgnoresOffsets(BrokenBackend):
    """Makes every array at the start of its block."""

    def as_array(self, block: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], **rest: Any) -> Any:
        return self.inner.as_array(block, 0, shape, dtype, **rest)


@broken_backend("test_law01_get_takes_views_and_aliases", "test_law01_get_takes_any_layout", hooks=Host)
class IgnoresStrides(BrokenBackend):
    """Reads a view that is not contiguous as if it were."""

    def as_source(self, array: Any, stream: object | None = None) -> Source:
        return Source(array.__array_interface__["data"][0], array.nbytes, array)


@broken_backend("test_law01_put_takes_any_layout[pinned]", "test_law01_put_takes_any_layout[registered]", hooks=Host)
class WantsAlignment(BrokenBackend):
    """Rounds source addresses down to what its engine likes."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_h2d(dst, src & ~3, nbytes)


class Joining(BrokenBackend):
    """Makes one copy of several whose sources and destinations lie one behind the other."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.kept: tuple[int, int, int] | None = None

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        if self.kept is not None and self.kept[0] + self.kept[2] == dst:
            self.kept = *self.kept[:2], self.kept[2] + nbytes
            return
        self.flush()
        self.kept = dst, src, nbytes

    def record_h2d(self) -> Event:
        self.flush()
        event: Event = self.inner.record_h2d()
        return event

    def flush(self) -> None:
        kept, self.kept = self.kept, None
        if kept is not None:
            self.inner.copy_h2d(*kept)


@broken_core(f"{SIDE_BY_SIDE}[pinned]", hooks=ArenaHost)
def joins_what_lies_side_by_side(patch: pytest.MonkeyPatch) -> None:
    """The core makes one copy over two allocations, which a driver refuses."""
    stand_before(patch, Joining)


@broken_core(f"{STARTS_NOTHING}[put]", f"{STARTS_NOTHING}[put_into]", f"{STARTS_NOTHING}[get]", hooks=Host)
def starts_what_it_can(patch: pytest.MonkeyPatch) -> None:
    """The core starts one leaf after the other, and raises at the first that it refuses."""
    put, get = Stager.put, Stager.get

    def put_one_by_one(stager: Stager, tree: Any, *, into: Any = None, **options: Any) -> Any:
        if isinstance(tree, list):
            for index, leaf in enumerate(tree):
                put(stager, leaf, into=None if into is None else into[index], **options).synchronize()
        return put(stager, tree, into=into, **options)

    def get_one_by_one(stager: Stager, tree: Any, *, out: Any = None, **options: Any) -> Any:
        if isinstance(tree, list):
            for index, leaf in enumerate(tree):
                get(stager, leaf, out=None if out is None else out[index], **options).synchronize()
        return get(stager, tree, out=out, **options)

    patch.setattr(Stager, "put", put_one_by_one)
    patch.setattr(Stager, "get", get_one_by_one)


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

    def add_without(queue: InFlight, nbytes: int, *held: object, **more: object) -> Event:
        return add(queue, nbytes, ())

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


@broken_core(*(f"{POISONS}[{way}]" for way in WAYS), hooks=MendingHost)
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
    """Takes memory for one copy in a few dozen, and gives it back."""

    copies = 0

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.allocate()
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.allocate()
        self.inner.copy_d2h(dst, src, nbytes)

    def allocate(self) -> None:
        self.copies += 1
        if self.copies % 37 == 0:
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
