"""Host backends that copy wrongly: laws 1, 2 and 3."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from xferlib_host.conformance import TestHost as Host

from tests.mutants.laws.arena import ArenaHost
from tests.mutants.laws.broken import BrokenBackend, broken_backend, broken_core
from tests.mutants.laws.host_ownership import stand_before
from xferlib.in_flight import Entry, InFlight
from xferlib.protocol import DeviceRange, Event
from xferlib.stager import Stager
from xferlib.staging.pageable import BorrowedCopy, Staging
from xferlib.transfer import Transfer

__all__: list[str] = []

SIDE_BY_SIDE = "test_law01_leaves_that_lie_side_by_side_arrive_whole"
STARTS_NOTHING = "test_law01_a_tree_with_a_leaf_that_is_refused_starts_nothing"
SLOW_SECONDS = 1e-3
"""How long an engine takes that loses races for certain."""
STAGED_IS_FREE = "test_law02_a_source_that_is_staged_is_free_while_its_copies_are_held"
BEHIND_OTHERS = "test_law02_a_source_is_staged_behind_others_whose_copies_are_held"
UNREAD = "test_law02_a_source_of_which_bytes_are_unread_is_not_staged"
EACH_TIME = "test_law02_a_source_may_be_rewritten_each_time_that_it_is_staged"
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


@broken_backend(f"{GET_KEEPS}[int32]", hooks=Host)
class DescribesSignedAsUnsigned(BrokenBackend):
    """Says of arrays of signed integers that theirs are unsigned."""

    @staticmethod
    def describe(array: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return array.shape, np.dtype(array.dtype.char.upper() if array.dtype.kind == "i" else array.dtype)


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

    def as_source(self, array: Any, stream: object | None = None) -> DeviceRange:
        return DeviceRange(array.__array_interface__["data"][0], array.nbytes, array)


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


@broken_core("test_law01_threads_do_not_mix_their_data", hooks=Host)
def puts_what_another_thread_had(patch: pytest.MonkeyPatch) -> None:
    """The core remembers the last pinned source in one place for all threads."""
    put = Stager.put
    last: list[tuple[int, Any]] = []

    def put_last(stager: Stager, tree: Any, **options: Any) -> Any:
        if isinstance(tree, np.ndarray) and stager.backend.is_pinned(tree.ctypes.data, tree.nbytes):
            before = list(last)
            last[:] = [(threading.get_ident(), tree)]
            for thread, source in before:
                if thread != threading.get_ident() and source.shape == tree.shape:
                    tree = source
        return put(stager, tree, **options)

    patch.setattr(Stager, "put", put_last)


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


@broken_backend(
    "test_law02_a_pageable_source_is_free_when_put_returns",
    f"{STAGED_IS_FREE}[small]",
    f"{STAGED_IS_FREE}[large]",
    BEHIND_OTHERS,
    hooks=Host,
)
class CallsEverythingPinned(BrokenBackend):
    """Says that any memory is pinned, so that the copy reads memory that the caller may write."""

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return True


@broken_core(f"{STAGED_IS_FREE}[small]", f"{STAGED_IS_FREE}[large]", hooks=Host)
def is_staged_when_it_is_done(patch: pytest.MonkeyPatch) -> None:
    """The core gives a source back with the end of its transfer, which the CPU has copied long before."""
    patch.setattr(Transfer, "wait_staged", Transfer.synchronize)


@broken_core(BEHIND_OTHERS, hooks=Host)
def is_staged_behind_the_end_of_others(patch: pytest.MonkeyPatch) -> None:
    """The core stages a source when the copies of those before it are done."""
    wait_staged = BorrowedCopy.wait_staged

    def wait_in_turn(copy: BorrowedCopy) -> None:
        if copy._job is not None:
            for number, job in list(copy._job.jobs.items()):
                if number < copy._job.id:
                    job.wait()
        wait_staged(copy)

    patch.setattr(BorrowedCopy, "wait_staged", wait_in_turn)


class Slow(BrokenBackend):
    """An engine that is slower than any CPU: what was not copied when the source is rewritten is copied afterwards."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_h2d(dst, src, nbytes)
        self.inner.h2d.submit(lambda: time.sleep(SLOW_SECONDS))


@broken_core(UNREAD, EACH_TIME, hooks=Host)
def is_staged_at_once(patch: pytest.MonkeyPatch) -> None:
    """The core gives a source back before the CPU has copied it."""
    stand_before(patch, Slow)
    patch.setattr(BorrowedCopy, "wait_staged", lambda copy: None)


@broken_core(UNREAD, EACH_TIME, hooks=Host)
def is_staged_with_its_first_copy(patch: pytest.MonkeyPatch) -> None:
    """The core gives a source back when the first copy of a part of it is done, and waits for no other."""
    borrow, made = Staging.borrow, threading.Event()

    class TellsOfCopies(Slow):
        def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
            super().copy_h2d(dst, src, nbytes)
            self.inner.h2d.submit(made.set)

    def borrow_anew(staging: Staging, staged: Any, **given: Any) -> BorrowedCopy:
        made.clear()
        return borrow(staging, staged, **given)

    stand_before(patch, TellsOfCopies)
    patch.setattr(Staging, "borrow", borrow_anew)
    patch.setattr(BorrowedCopy, "wait_staged", lambda copy: made.wait())


HELD = (
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
)
"""What goes wrong where nothing in flight is held."""


class LocksBehindCopies(BrokenBackend):
    """Honest: page-locks when the copies under way are done, as a driver may."""

    def alloc_pinned(self, nbytes: int) -> int:
        self.inner.record_h2d().synchronize()
        self.inner.record_d2h().synchronize()
        address: int = self.inner.alloc_pinned(nbytes)
        return address


class LocksBehindCopiesHost(Host):
    """Honest hooks for it."""

    def open(self) -> Any:
        return LocksBehindCopies(super().open())


@broken_core(*HELD, hooks=Host)
def holds_nothing_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The core holds nothing while a copy uses it."""
    add = InFlight.add

    def add_without(queue: InFlight, nbytes: int, *held: object, **more: object) -> Entry:
        return add(queue, nbytes, ())

    patch.setattr(InFlight, "add", add_without)


@broken_core(*HELD, hooks=LocksBehindCopiesHost)
def holds_nothing_where_locking_waits(patch: pytest.MonkeyPatch) -> None:
    """The core holds nothing while a copy uses it, and laws page-lock nothing more under a hold."""
    holds_nothing_in_flight(patch)


@broken_backend(
    "test_law03_get_survives_the_loss_of_its_array[small]",
    "test_law03_get_survives_the_loss_of_its_array[large]",
    "test_law08_memory_that_another_stager_reads_is_not_rewritten[get]",
    "test_law08_memory_that_another_stager_reads_is_not_rewritten[get_pageable_out]",
    hooks=Host,
)
class ForgetsTheArray(BrokenBackend):
    """Gives the core nothing to hold while it reads an array."""

    def as_source(self, array: Any, stream: object | None = None) -> DeviceRange:
        source: DeviceRange = self.inner.as_source(array, stream)
        return source._replace(keepalive=None)

    def place(self, array: Any, stream: object | None = None) -> DeviceRange:
        source: DeviceRange = self.inner.place(array, stream)
        return source._replace(keepalive=None)
