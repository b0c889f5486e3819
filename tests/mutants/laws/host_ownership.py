"""Host backends, and cores, that are wrong about who owns memory: law 14.

A core that gives memory back wrongly is an honest one behind a wall of its own, between it and the backend.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.mutants.laws.arena import ArenaHost
from tests.mutants.laws.broken import BrokenBackend, KeepsTheInterpreter, broken_backend, broken_core
from xferlib.protocol import Event
from xferlib.stager import Stager
from xferlib.tickets import ticket

__all__: list[str] = []

IN_A_CYCLE = "test_law14_an_array_that_dies_in_a_cycle_is_whole_for_its_finalizers"
BEFORE, AFTER = "before the array", "after the array"
OUTLIVES = "test_law14_an_array_outlives_the_stager_that_it_dies_with"
BY_TRIM = "test_law14_memory_that_nobody_holds_is_released_by_trim"
REACHED = "test_law14_nothing_is_released_that_an_array_or_an_alias_reaches"
WRITTEN = "test_law14_nothing_is_released_that_a_put_writes"
READ = "test_law14_nothing_is_released_that_a_get_reads"
CLOSED = "test_law14_a_closed_stager_releases_what_its_last_array_leaves"
FAILED = "test_law14_memory_of_a_failed_transfer_is_released"
HOST_MEMORY = "test_law14_host_memory_is_given_back_once"
OTHERS_RUN = "test_law14_other_threads_run_while_memory_is_released"
OF_OTHERS = "test_law14_memory_of_others_is_never_written"
MARK_NBYTES = 64


def stand_before(patch: pytest.MonkeyPatch, wall: Callable[[Any], Any]) -> None:
    """Let every core see its backend through the wall only."""
    set_up = Stager.__init__

    def set_up_behind(stager: Stager, backend: Any, **options: Any) -> None:
        set_up(stager, wall(backend), **options)

    patch.setattr(Stager, "__init__", set_up_behind)


class EndsWhenFinalized:
    def __init__(self, ticket: object) -> None:
        self.ticket: object = ticket

    def __del__(self) -> None:
        self.ticket = None


@broken_core(
    f"{IN_A_CYCLE}[{BEFORE}-here]",
    f"{IN_A_CYCLE}[{AFTER}-here]",
    f"{IN_A_CYCLE}[{BEFORE}-elsewhere]",
    f"{IN_A_CYCLE}[{AFTER}-elsewhere]",
    hooks=ArenaHost,
)
def lets_the_collector_end_leases(patch: pytest.MonkeyPatch) -> None:
    """A lease is a plain object with a finalizer, which runs among those of everything in its cycle."""
    patch.setattr("xferlib.memory.device_pool.ticket", lambda post, number: EndsWhenFinalized(ticket(post, number)))


class EndsWhenFinalizedElsewhere:
    def __init__(self, ticket: object) -> None:
        self.ticket: object = ticket

    def __del__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.ticket = None


@broken_core(f"{IN_A_CYCLE}[{BEFORE}-elsewhere]", f"{IN_A_CYCLE}[{AFTER}-elsewhere]", hooks=ArenaHost)
def lets_the_collector_of_other_threads_end_leases(patch: pytest.MonkeyPatch) -> None:
    """A lease ends among the finalizers of its cycle where the collector runs on another thread than the main one."""
    patch.setattr("xferlib.memory.device_pool.ticket", lambda post, number: EndsWhenFinalizedElsewhere(ticket(post, number)))


class Leaseless(BrokenBackend):
    def as_array(self, *what: Any, lease: object, **rest: Any) -> Any:
        return self.inner.as_array(*what, lease=None, **rest)


@broken_core(REACHED, "test_law08_views_and_aliases_keep_the_memory", hooks=ArenaHost)
def frees_while_leased(patch: pytest.MonkeyPatch) -> None:
    """The core takes a block for free, and hands it out again, while arrays reach it."""
    stand_before(patch, Leaseless)


@broken_core(f"{BY_TRIM}[small]", f"{BY_TRIM}[large]", f"{BY_TRIM}[tree]", f"{CLOSED}[array]", REACHED, FAILED, hooks=ArenaHost)
def leases_for_ever(patch: pytest.MonkeyPatch) -> None:
    """The core does not hear of the end of a lease."""
    for_ever = []

    def ticket_for_ever(post: Callable[[int], object], number: int) -> object:
        for_ever.append(ticket(post, number))
        return for_ever[-1]

    patch.setattr("xferlib.memory.device_pool.ticket", ticket_for_ever)


class FreesTwice(BrokenBackend):
    def free_device(self, block: Any) -> None:
        self.inner.free_device(block)
        self.inner.free_device(block)


@broken_core(
    f"{BY_TRIM}[small]",
    REACHED,
    WRITTEN,
    READ,
    f"{CLOSED}[array]",
    f"{CLOSED}[leaf]",
    f"{OUTLIVES}[open]",
    f"{OUTLIVES}[closed]",
    f"{IN_A_CYCLE}[{AFTER}-here]",
    FAILED,
    OF_OTHERS,
    hooks=ArenaHost,
)
def frees_twice(patch: pytest.MonkeyPatch) -> None:
    """The core frees each block twice."""
    stand_before(patch, FreesTwice)


class UnpinsTwice(BrokenBackend):
    def unpin(self, address: int) -> None:
        self.inner.unpin(address)
        with suppress(Exception):
            self.inner.unpin(address)

    def free_pinned(self, address: int) -> None:
        self.inner.free_pinned(address)
        with suppress(Exception):
            self.inner.free_pinned(address)


@broken_core(HOST_MEMORY, hooks=ArenaHost)
def unpins_twice(patch: pytest.MonkeyPatch) -> None:
    """The core gives host memory back twice, and does not mind the refusal."""
    stand_before(patch, UnpinsTwice)


class NeverUnpins(BrokenBackend):
    def unpin(self, address: int) -> None:
        pass


@broken_core(HOST_MEMORY, hooks=ArenaHost)
def never_unpins(patch: pytest.MonkeyPatch) -> None:
    """The core leaves memory of the caller's pinned."""
    stand_before(patch, NeverUnpins)


class MarksAsItCloses(BrokenBackend):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.pinned: dict[int, int] = {}

    def alloc_pinned(self, nbytes: int) -> int:
        address: int = self.inner.alloc_pinned(nbytes)
        self.pinned[address] = nbytes
        return address

    def free_pinned(self, address: int) -> None:
        del self.pinned[address]
        self.inner.free_pinned(address)

    def close(self) -> None:
        for address in self.pinned:
            ctypes.memset(address, 0xDD, MARK_NBYTES)
        self.inner.close()


@broken_core(HOST_MEMORY, hooks=ArenaHost)
def marks_as_it_closes(patch: pytest.MonkeyPatch) -> None:
    """Closing marks the beginning of pinned memory as gone, which arrays still hold."""
    stand_before(patch, MarksAsItCloses)


class FreesWhileOpen(BrokenBackend):
    closed = False

    def free_device(self, block: Any) -> None:
        if not self.closed:
            self.inner.free_device(block)

    def close(self) -> None:
        self.closed = True
        self.inner.close()


@broken_core(f"{CLOSED}[array]", f"{CLOSED}[leaf]", f"{OUTLIVES}[closed]", f"{OUTLIVES}[open]", hooks=ArenaHost)
def frees_nothing_once_closed(patch: pytest.MonkeyPatch) -> None:
    """The core leaves a block behind that an array held longer than the stager was open."""
    stand_before(patch, FreesWhileOpen)


class FreesUnderCopies(BrokenBackend):
    """Frees a block when nothing reaches its arrays, if it is being written. The core's own call, later, comes to nothing."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.early: dict[int, Any] = {}

    def as_array(self, block: Any, *what: Any, after: Event, lease: object) -> Any:
        array = self.inner.as_array(block, *what, after=after, lease=lease)
        weakref.finalize(array, self.free_if_written, block, after).atexit = False
        return array

    def free_if_written(self, block: Any, after: Event) -> None:
        # What failed is written no more.
        with suppress(*self.inner.failures):
            if not after.done() and not self.lost(block):
                self.early[id(block)] = block
                self.inner.free_device(block)

    def lost(self, block: Any) -> bool:
        return id(block) in self.early

    def free_device(self, block: Any) -> None:
        if not self.lost(block):
            self.inner.free_device(block)


@broken_core(WRITTEN, hooks=ArenaHost)
def frees_under_copies(patch: pytest.MonkeyPatch) -> None:
    """The core frees a block that no array reaches, while it is being copied into."""
    stand_before(patch, FreesUnderCopies)


class Unkept(BrokenBackend):
    def as_source(self, array: Any, stream: Any = None) -> Any:
        return self.inner.as_source(array, stream)._replace(keepalive=None)


@broken_core(READ, hooks=ArenaHost)
def frees_under_gets(patch: pytest.MonkeyPatch) -> None:
    """The core does not hold what it reads."""
    stand_before(patch, Unkept)


class FreesAllAtTheEnd(BrokenBackend):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.had: dict[int, Any] = {}

    def alloc_device(self, nbytes: int) -> Any:
        block = self.inner.alloc_device(nbytes)
        self.had[block.address] = block
        return block

    def free_device(self, block: Any) -> None:
        if self.had.pop(block.address, None) is not None:
            self.inner.free_device(block)

    def close(self) -> None:
        self.inner.close()
        for block in list(self.had.values()):
            self.free_device(block)


@broken_core(f"{OUTLIVES}[closed]", f"{CLOSED}[array]", "test_law10_arrays_outlive_the_stager", hooks=ArenaHost)
def frees_all_when_closed(patch: pytest.MonkeyPatch) -> None:
    """The core frees every block when its stager is closed, arrays or not."""
    stand_before(patch, FreesAllAtTheEnd)


@broken_backend(f"{BY_TRIM}[small]", f"{BY_TRIM}[large]", f"{CLOSED}[array]", hooks=ArenaHost)
class FreesNothing(BrokenBackend):
    """Takes blocks back and keeps them."""

    def free_device(self, block: Any) -> None:
        pass


class OwnsItsBlock:
    """Frees a block as it is finalized."""

    def __init__(self, free: Callable[[], None]) -> None:
        self.free = free

    def __del__(self) -> None:
        self.free()


broken_backend(f"{OTHERS_RUN}[trim]", f"{OTHERS_RUN}[unpin]", f"{OTHERS_RUN}[close]", hooks=ArenaHost)(KeepsTheInterpreter)


@broken_backend(f"{OUTLIVES}[closed]", OF_OTHERS, hooks=ArenaHost)
class FreesWithItsArrays(BrokenBackend):
    """Frees a block with the array that it made, and so in the middle of a cycle, while the core takes it for idle."""

    def as_array(self, block: Any, *what: Any, **rest: Any) -> Any:
        array = self.inner.as_array(block, *what, **rest)
        array.owner = OwnsItsBlock(lambda: self.inner.free_device(block))
        return array

    def free_device(self, block: Any) -> None:
        pass
