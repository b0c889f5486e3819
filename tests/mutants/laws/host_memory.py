"""Host backends that are wrong about memory, about their flags, or about their end: laws 5, 8, 9, 10 and 11."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from xferlib_host.conformance import TestHost as Host

from tests.mutants.laws.broken import BrokenBackend, BrokenEvent, BrokenEvents, broken_backend, broken_core
from tests.mutants.laws.host_copies import holds_nothing_in_flight
from tests.mutants.laws.locking import LockingBackend, LockingHost
from xferlib.errors import ClosedError
from xferlib.in_flight import Entry, InFlight
from xferlib.ledger import Ledger
from xferlib.memory.device_pool import DevicePool
from xferlib.pending import Jobs
from xferlib.protocol import Capabilities, DeviceRange, Event, Stream
from xferlib.stager import Stager
from xferlib.staging.pageable import Staging
from xferlib.stats import Stats
from xferlib.transfer import Transfer

__all__: list[str] = []

UNDER_A_READER = "test_law08_memory_of_a_dropped_array_is_not_rewritten_under_a_reader"
INTO_WAITS = "test_law08_put_into_waits_for_gets_of_any_stager"
NAMED = "test_law08_work_on_a_stream_that_was_named_is_waited_for"
BOTH_ENDS = "test_law09_pinned_arrays_are_page_locked_at_both_ends"
TRIMMED = "test_law14_memory_that_nobody_holds_is_released_by_trim"
LARGE = 3145740


@broken_backend(f"{UNDER_A_READER}[small]", f"{UNDER_A_READER}[large]", "test_law08_every_reader_is_waited_for", hooks=Host)
class ForgetsReaders(BrokenBackend):
    """Calls memory free as soon as no array reaches it, whoever still reads it."""

    def retire(self, streams: Iterable[Stream]) -> Event | None:
        return None


@broken_backend("test_law08_every_reader_is_waited_for", hooks=Host)
class WaitsForOneReader(BrokenBackend):
    """Waits for the readers on one stream, where several were named."""

    def retire(self, streams: Iterable[Stream]) -> Event | None:
        event: Event | None = self.inner.retire(list(streams)[:1])
        return event


class NotesNoCurrentStream(BrokenEvent):
    def stream_wait(self, stream: object | None = None) -> Stream | None:
        found = self.inner.stream_wait(stream)
        return None if stream is None else found


@broken_core(f"{NAMED}[result]", hooks=Host)
def names_no_stream_in_result(patch: pytest.MonkeyPatch) -> None:
    """`result` waits, and tells nobody of the stream that will read the arrays, as `value` does."""

    def result(transfer: Transfer, timeout: float | None = None) -> Any:
        transfer.synchronize()
        return transfer._arrays()

    patch.setattr(Transfer, "result", result)


@broken_backend(f"{NAMED}[value]", f"{NAMED}[result]", hooks=Host)
class ForgetsTheCurrentStream(BrokenEvents):
    """Says of no current stream that it was told to wait."""

    event = NotesNoCurrentStream


class NotesNoNamedStream(BrokenEvent):
    def stream_wait(self, stream: object | None = None) -> Stream | None:
        found = self.inner.stream_wait(stream)
        return found if stream is None else None


@broken_backend(*(f"{NAMED}[{name}]" for name in ("value_on", "stream=", "stream_wait", "put(into=)")), hooks=Host)
class ForgetsNamedStreams(BrokenEvents):
    """Says of no stream that was named that it was told to wait."""

    event = NotesNoNamedStream


@broken_core(f"{NAMED}[put(into=)]", hooks=Host)
def forgets_readers_of_what_was_overwritten(patch: pytest.MonkeyPatch) -> None:
    """The core does not note who reads an array that the caller had overwritten, though its memory is the core's."""
    patch.setattr(DevicePool, "note", lambda blocks, place, stream: True)


@broken_backend(f"{INTO_WAITS}[the same stager-get]", f"{INTO_WAITS}[another stager-get]", hooks=Host)
class OverwritesAtOnce(BrokenBackend):
    """Lets no copy to the device wait for an event."""

    def order_h2d(self, after: Event) -> None:
        pass


@broken_core(f"{INTO_WAITS}[the same stager-get_pageable_out]", f"{INTO_WAITS}[another stager-get_pageable_out]", hooks=Host)
def overlooks_what_is_not_enqueued(patch: pytest.MonkeyPatch) -> None:
    """The core looks for those who read an array among the copies that are enqueued, and not among those that will be."""
    patch.setattr(Jobs, "wait_issued", lambda jobs, *what: None)
    patch.setattr("xferlib.h2d.uses", lambda *what: False)


@broken_core(
    "test_law08_a_pinned_slot_is_nobody_elses_while_another_stager_uses_it[put]",
    "test_law08_a_pinned_slot_is_nobody_elses_while_another_stager_uses_it[get]",
    hooks=LockingHost,
)
def holds_no_slot_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The core holds nothing while a copy uses it, whoever's it is."""
    holds_nothing_in_flight(patch)


@broken_core("test_law08_memory_for_a_put_that_is_not_enqueued_yet_is_nobody_elses", hooks=Host)
def holds_only_what_is_enqueued(patch: pytest.MonkeyPatch) -> None:
    """The core lets go of a block that a borrowed source is still to be copied to."""
    borrow = Staging.borrow

    def borrow_without(staging: Staging, staged: Any, **given: Any) -> Any:
        held: dict[str, Any] = {name: None if name.startswith("until") else what for name, what in given.items()}
        return borrow(staging, staged, **held)

    patch.setattr(Staging, "borrow", borrow_without)


@broken_backend("test_law08_views_and_aliases_keep_the_memory", hooks=Host)
class LeasesToTheArray(BrokenBackend):
    """Lets the lease end with the array that it made, views or not."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.leases: dict[int, object] = {}

    def as_array(self, block: Any, offset: int, shape: Any, dtype: Any, *, after: Event, lease: object) -> Any:
        array = self.inner.as_array(block, offset, shape, dtype, after=after, lease=None)
        self.leases[id(array)] = lease
        weakref.finalize(array, self.leases.pop, id(array))
        return array


@broken_backend("test_law08_leaves_of_one_tree_keep_their_memory", hooks=Host)
class LeasesToTheFirstLeaf(BrokenBackend):
    """Lets the lease of a block end with the first of several arrays in it."""

    def as_array(self, block: Any, offset: int, shape: Any, dtype: Any, *, after: Event, lease: object) -> Any:
        return self.inner.as_array(block, offset, shape, dtype, after=after, lease=None if offset else lease)


@broken_core("test_law08_a_pinned_slot_is_handed_out_again_when_it_is_free", hooks=Host)
def never_lets_go(patch: pytest.MonkeyPatch) -> None:
    """The core holds what a copy used for ever."""
    add = InFlight.add
    for_ever = []

    def add_and_hold(queue: InFlight, nbytes: int, *held: Any, **more: Any) -> Entry:
        for_ever.append(held)
        return add(queue, nbytes, *held, **more)

    patch.setattr(InFlight, "add", add_and_hold)


# What follows is built on a host backend that page-locks, so to speak, and is honest about it.


@broken_backend(
    "test_law05_starting_returns_while_copies_are_held[small-put]",
    "test_law05_starting_returns_while_copies_are_held[large-get]",
    "test_law05_starting_returns_while_copies_are_held[large-get_out]",
    f"{BOTH_ENDS}[1]",
    f"{BOTH_ENDS}[4096]",
    f"{BOTH_ENDS}[{LARGE}]",
    "test_law09_results_of_get_are_page_locked[1]",
    "test_law09_results_of_get_are_page_locked[4]",
    "test_law09_starting_does_not_wait_behind_held_copies[put]",
    "test_law09_starting_does_not_wait_behind_held_copies[get]",
    "test_law09_starting_does_not_wait_behind_held_copies[get_out]",
    hooks=LockingHost,
)
class SellsPageableMemory(BrokenBackend):
    """Sells pageable memory as pinned: copies from and to it are not asynchronous."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.capabilities = dataclasses.replace(inner.capabilities, register=False)

    def alloc_pinned(self, nbytes: int) -> int:
        address: int = self.inner.alloc_pinned(nbytes)
        self.inner.locked[address] = address
        return address


@broken_backend("test_law09_starting_does_not_wait_behind_held_copies[put]", hooks=LockingHost)
class QueuesTwo(BrokenBackend):
    """Has a place for two copies to the device, and lets whoever starts the next one wait for the first."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.queued: list[Event] = []

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.queued = [event for event in self.queued if not event.done()]
        if len(self.queued) > 1:
            self.queued[0].synchronize()
        self.inner.copy_h2d(dst, src, nbytes)
        self.queued.append(self.inner.record_h2d())


@broken_backend(f"{BOTH_ENDS}[{LARGE}]", "test_law09_results_of_get_are_page_locked[1]", hooks=LockingHost)
class LocksHalf(BrokenBackend):
    """Locks the first half of what it was asked for."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.capabilities = dataclasses.replace(inner.capabilities, register=False)

    def alloc_pinned(self, nbytes: int) -> int:
        address: int = self.inner.alloc_pinned(nbytes)
        self.inner.locked[address] = address + nbytes // 2
        return address


@broken_backend(
    "test_law09_memory_pinned_in_place_is_page_locked_meanwhile",
    # The core has its own pages locked in the same way.
    f"{BOTH_ENDS}[4096]",
    hooks=LockingHost,
)
class PinsInWordsOnly(BrokenBackend):
    """Notes what it should pin, and answers from its notes."""

    def pin(self, address: int, nbytes: int) -> None:
        self.inner.pin(address, nbytes)
        self.inner.locked[address] = address


@broken_core("test_law09_pinned_memory_is_moved_without_staging", hooks=LockingHost)
def stages_everything(patch: pytest.MonkeyPatch) -> None:
    """The core takes all memory for pageable."""
    patch.setattr("xferlib.memory.segments.Segments.contains", lambda segments, address, nbytes: False)
    patch.setattr(LockingBackend, "is_pinned", lambda backend, address, nbytes: False)


@broken_backend("test_law10_pinned_memory_stays_pinned_until_its_last_reference_goes", hooks=LockingHost)
class UnlocksTooEarly(BrokenBackend):
    """Unlocks everything when it is closed, arrays or not."""

    def close(self) -> None:
        for address in self.inner.locked:
            self.inner.locked[address] = address
        self.inner.close()


@broken_backend(
    "test_law10_pinned_memory_stays_pinned_until_its_last_reference_goes",
    "test_law10_memory_pinned_in_place_is_unpinned_by_close",
    hooks=LockingHost,
)
class NeverUnlocks(BrokenBackend):
    """Leaves memory locked that nobody reaches any more."""

    def free_pinned(self, address: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass


@broken_backend("test_law10_close_gives_back_what_nobody_reaches", hooks=Host)
class GivesNothingBack(BrokenBackend):
    """Keeps all memory that it ever had."""

    def free_pinned(self, address: int) -> None:
        pass

    def free_device(self, block: Any) -> None:
        pass


@broken_backend("test_law10_arrays_outlive_the_stager", hooks=Host)
class FreesTooEarly(BrokenBackend):
    """Lets others have its memory once it is closed, arrays or not."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.blocks: dict[int, Any] = {}

    def alloc_device(self, nbytes: int) -> Any:
        block = self.inner.alloc_device(nbytes)
        self.blocks[block.address] = block
        return block

    def free_device(self, block: Any) -> None:
        self.blocks.pop(block.address, None)
        self.inner.free_device(block)

    def close(self) -> None:
        self.inner.close()
        for block in self.blocks.values():
            ctypes.memset(block.address, 0, block.nbytes)


@broken_core("test_law10_close_waits_for_what_is_in_flight", "test_law10_close_after_an_interrupt_waits_as_ever", hooks=Host)
def closes_at_once(patch: pytest.MonkeyPatch) -> None:
    """Closing waits for nothing."""
    patch.setattr(Ledger, "wait_all", lambda ledger: None)
    patch.setattr("xferlib.memory.device_pool.DevicePool.close", lambda blocks: None)
    patch.setattr("xferlib.staging.pageable.Staging.close", lambda staging: None)
    patch.setattr("xferlib_host._engine.Engine.close", lambda engine: None)


@broken_core("test_law10_closing_twice_is_fine", hooks=Host)
def closes_once(patch: pytest.MonkeyPatch) -> None:
    """Closing again is an error."""
    close = Stager.close
    closed: list[Stager] = []

    def close_once(stager: Stager) -> None:
        assert stager not in closed, "this stager is closed already"
        closed.append(stager)
        close(stager)

    patch.setattr(Stager, "close", close_once)


@broken_core("test_law10_close_after_an_interrupt_waits_as_ever", hooks=Host)
def closes_by_halves(patch: pytest.MonkeyPatch) -> None:
    """An interrupt while it waits counts as the end of closing."""
    close = Stager.close
    over: list[Stager] = []

    def close_unless_interrupted(stager: Stager) -> None:
        if stager in over:
            return
        try:
            close(stager)
        except KeyboardInterrupt:
            over.append(stager)
            raise

    patch.setattr(Stager, "close", close_unless_interrupted)


@broken_core("test_law10_close_after_an_interrupt_waits_as_ever", hooks=Host)
def gives_up_what_lands(patch: pytest.MonkeyPatch) -> None:
    """An interrupt while closing waits for what lands in pageable memory, and only then, counts as the end of closing."""
    close, wait_all = Stager.close, Jobs.wait_all
    given_up: list[Jobs] = []

    def wait_or_give_up(jobs: Jobs) -> None:
        try:
            wait_all(jobs)
        except KeyboardInterrupt:
            given_up.append(jobs)
            raise

    def close_unless_given_up(stager: Stager) -> None:
        if stager._ledger.jobs not in given_up:
            close(stager)

    patch.setattr(Jobs, "wait_all", wait_or_give_up)
    patch.setattr(Stager, "close", close_unless_given_up)


@broken_core("test_law10_a_stager_that_was_never_closed_says_so", hooks=Host)
def says_nothing(patch: pytest.MonkeyPatch) -> None:
    """A stager that goes away open is closed without a word."""
    patch.setattr(Stager, "__del__", Stager.close)


@broken_core("test_law10_a_closed_stager_refuses_everything", hooks=Host)
def refuses_nothing(patch: pytest.MonkeyPatch) -> None:
    """A closed stager can be used as long as nobody below objects."""
    patch.setattr(Stager, "_check_open", lambda stager: None)
    patch.setattr(Stager, "_admit", lambda stager: None)


@broken_core("test_law10_a_closed_stager_refuses_everything", hooks=Host)
def trims_when_closed(patch: pytest.MonkeyPatch) -> None:
    """A closed stager takes a trim for done, and refuses the rest."""
    trim = Stager.trim

    def trim_anyway(stager: Stager) -> None:
        with suppress(ClosedError):
            trim(stager)

    patch.setattr(Stager, "trim", trim_anyway)


@broken_backend("test_law11_register_page_locks_memory_of_the_caller_or_is_refused", hooks=Host)
class RegistersNothing(BrokenBackend):
    """Declares `register`, and does nothing about it."""

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass


@broken_backend(
    "test_law03_put_into_survives_the_loss_of_source_and_transfer",
    "test_law11_put_into_overwrites_in_place_or_is_refused",
    hooks=Host,
)
class PutsElsewhere(BrokenBackend):
    """Declares `put_into`, and overwrites a copy."""

    def as_target(self, array: Any, stream: object | None = None) -> DeviceRange:
        target: DeviceRange = self.inner.as_target(np.copy(array), stream)
        return target


@broken_core("test_law10_close_gives_back_what_nobody_reaches", f"{TRIMMED}[small]", hooks=Host)
def counts_what_is_gone(patch: pytest.MonkeyPatch) -> None:
    """The statistics count device memory that was given back."""
    stats = Stager.stats
    patch.setattr(Stager, "stats", lambda stager: dataclasses.replace(stats(stager), device_nbytes=LARGE))


@broken_core(
    "test_law11_pinned_describes_the_memory_and_changes_no_program",
    "test_law10_close_gives_back_what_nobody_reaches",
    "test_law10_pinned_memory_stays_pinned_until_its_last_reference_goes",
    "test_law10_memory_pinned_in_place_is_unpinned_by_close",
    "test_law09_results_of_get_are_page_locked[1]",
    hooks=Host,
)
def claims_to_be_pinned(patch: pytest.MonkeyPatch) -> None:
    """The statistics count memory as pinned that no backend has page-locked."""
    stats = Stager.stats

    def claiming(stager: Stager) -> Stats:
        return dataclasses.replace(stats(stager), pinned_nbytes=LARGE)

    patch.setattr(Stager, "stats", claiming)


@broken_core("test_law11_pinned_describes_the_memory_and_changes_no_program", hooks=Host)
def hides_what_is_used(patch: pytest.MonkeyPatch) -> None:
    """The statistics show none of a pool that locks nothing, though its limit holds."""
    stats = Stager.stats
    patch.setattr(Stager, "stats", lambda stager: dataclasses.replace(stats(stager), pinned_used_nbytes=0))


@broken_core("test_law11_pinned_describes_the_memory_and_changes_no_program", hooks=LockingHost)
def denies_to_be_pinned(patch: pytest.MonkeyPatch) -> None:
    """The statistics hide memory that is page-locked."""
    stats = Stager.stats
    patch.setattr(Stager, "stats", lambda stager: dataclasses.replace(stats(stager), pinned_nbytes=0))


@broken_core(
    "test_law11_register_page_locks_memory_of_the_caller_or_is_refused",
    "test_law11_streams_are_waited_for_or_refused",
    "test_law11_put_into_overwrites_in_place_or_is_refused",
    hooks=Host,
)
def declares_nothing(patch: pytest.MonkeyPatch) -> None:
    """Every flag is off, and all that the flags stand for is done all the same."""
    patch.setattr(Stager, "capabilities", property(lambda stager: Capabilities()))
