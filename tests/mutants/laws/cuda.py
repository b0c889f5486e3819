"""CUDA backends that break one promise each, by means that no framework has a part in, and the tests that must fail by it.

Some mistakes cannot be made on a host: memory that only pretends to be page-locked, one stream for both directions. All leave the
CUDA context in order, so that they can share a process. Beside them each framework has a file of what is done wrong with its own
means; that file is what is run.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar, final

import numpy as np

from tests.mutants.laws.broken import BrokenBackend, BrokenEvent, BrokenEvents, KeepsTheInterpreter, Mutant
from xferlib.conformance import StagerConformance
from xferlib.protocol import Event, Place, Stream

__all__ = ["LAW06", "LAW13", "Listing"]

LAW05_BEHIND_COPIES = "test_law05_starting_returns_while_copies_are_held"
LAW06 = "test_law06_a_transfer_completes_while_compute_is_held"
LAW06_OPPOSITE = "test_law06_a_transfer_completes_while_the_opposite_direction_is_held"
LAW13 = "test_law13_a_hundred_transfers_call_for_no_memory"
LAW14_OTHERS_RUN = "test_law14_other_threads_run_while_memory_is_released"

W = TypeVar("W", bound=Callable[..., Any])

WALLS: list[tuple[tuple[str, ...], Callable[[Any], Any]]] = []
"""What every listing begins with: the tests that must fail, and what breaks an honest backend."""


@final
class Listing:
    """The mutants of one framework, by the name of the class that is collected: the shared ones, and those that are added."""

    def __init__(self, prefix: str, hooks: type[StagerConformance]) -> None:
        self._prefix = prefix
        self._hooks = hooks
        self.mutants: dict[str, Mutant] = {}
        for tests, wall in WALLS:
            self.broken(*tests)(wall)

    def broken(self, *tests: str, hooks: type[StagerConformance] | None = None) -> Callable[[W], W]:
        """List a wall, or a function that breaks an honest backend, as the mutant by which these tests fail."""

        def listed(wall: W) -> W:
            assert wall.__doc__, "a mutant says what it does wrong"
            self.mutants[f"{self._prefix}_{wall.__name__}"] = Mutant(tests=tests, hooks=hooks or self._hooks, wall=wall)
            return wall

        return listed

    def broken_core(self, *tests: str) -> Callable[[W], W]:
        """List a function that breaks the core likewise."""

        def listed(patch: W) -> W:
            assert patch.__doc__, "a mutant says what it does wrong"
            self.mutants[f"{self._prefix}_{patch.__name__}"] = Mutant(tests=tests, hooks=self._hooks, patch=patch)
            return patch

        return listed


def broken_everywhere(*tests: str) -> Callable[[W], W]:
    """List a wall for every framework."""

    def listed(wall: W) -> W:
        WALLS.append((tests, wall))
        return wall

    return listed


broken_everywhere(*(f"{LAW14_OTHERS_RUN}[{way}]" for way in ("trim", "unpin", "close")))(KeepsTheInterpreter)


@broken_everywhere(
    "test_law01_put_keeps_values_shape_and_dtype[float64]", "test_law01_put_keeps_values_shape_and_dtype[complex128]"
)
class NarrowsDoubles(BrokenBackend):
    """Accepts double precision and makes it single."""

    def as_array(self, block: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], **rest: Any) -> Any:
        narrow = np.dtype({"d": "f", "D": "F"}.get(dtype.char, dtype))
        return self.inner.as_array(block, offset, shape, narrow, **rest)


@broken_everywhere("test_law02_a_pinned_source_is_free_once_done[small]", "test_law02_an_array_is_free_once_its_get_is_done[get]")
class CopiesTwice(BrokenBackend):
    """Makes each copy again before the next one of its direction, whatever the source holds by then."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.again: dict[str, tuple[int, ...]] = {}

    def copy_h2d(self, *what: int) -> None:
        self.copy("h2d", self.inner.copy_h2d, what)

    def copy_d2h(self, *what: int) -> None:
        self.copy("d2h", self.inner.copy_d2h, what)

    def copy(self, direction: str, start: Callable[..., None], what: tuple[int, ...]) -> None:
        if direction in self.again:
            start(*self.again[direction])
        self.again[direction] = what
        start(*what)


@broken_everywhere(
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[put]",
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[get]",
)
class IsAlwaysDone(BrokenEvents):
    """Says of every copy that it is done."""

    class event(BrokenEvent):  # noqa: N801  (it stands for an attribute)
        def done(self) -> bool:
            return True


@broken_everywhere(
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[put]",
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[get_out]",
)
class IsDoneOnlyWhenWaitedFor(BrokenEvents):
    """Says that a copy is done only after somebody has waited for it, as a poll does that takes every status for "not yet"."""

    class event(BrokenEvent):  # noqa: N801  (it stands for an attribute)
        waited = False

        def done(self) -> bool:
            return self.waited

        def synchronize(self) -> None:
            self.inner.synchronize()
            self.waited = True


@broken_everywhere(
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[put]", "test_law07_value_can_be_used_at_once"
)
class RecordsOnTheWrongStream(BrokenBackend):
    """Records the events of copies to the device on the stream of the other direction."""

    def record_h2d(self) -> Event:
        event: Event = self.inner.record_d2h()
        return event


@broken_everywhere(
    "test_law09_pinned_arrays_are_page_locked_at_both_ends[4096]",
    "test_law09_results_of_get_are_page_locked[1]",
    "test_law09_starting_does_not_wait_behind_held_copies[put]",
    "test_law09_starting_does_not_wait_behind_held_copies[get]",
    f"{LAW05_BEHIND_COPIES}[large-put]",
    f"{LAW05_BEHIND_COPIES}[large-get]",
)
class SellsPageableMemoryAsPinned(BrokenBackend):
    """Hands out pageable memory and calls it page-locked."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.capabilities = dataclasses.replace(inner.capabilities, register=False)
        self.memory: dict[int, np.ndarray] = {}

    def alloc_pinned(self, nbytes: int) -> int:
        raw = np.zeros(nbytes + 4096, np.uint8)
        address = -(-raw.ctypes.data // 4096) * 4096
        self.memory[address] = raw
        return address

    def free_pinned(self, address: int) -> None:
        """Keep it: a copy that was to page-locked memory may still be on its way."""


@broken_everywhere(
    "test_law09_memory_pinned_in_place_is_page_locked_meanwhile",
    "test_law11_register_page_locks_memory_of_the_caller_or_is_refused",
)
class RegistersNothing(BrokenBackend):
    """Declares that it page-locks memory of the caller's, and does not."""

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass


@broken_everywhere(
    f"{LAW06_OPPOSITE}[put]", f"{LAW06_OPPOSITE}[get]", "test_law06_put_completes_while_a_get_waits_for_its_producer"
)
def copies_both_ways_on_one_stream(honest: Any) -> Any:
    """Has one stream for both directions."""
    honest.d2h = honest.h2d
    return honest


@broken_everywhere(
    "test_law08_memory_of_a_dropped_array_is_not_rewritten_under_a_reader[small]",
    "test_law08_memory_of_a_dropped_array_is_not_rewritten_under_a_reader[large]",
    "test_law08_every_reader_is_waited_for",
)
class RetiresWithoutAFence(BrokenBackend):
    """Takes memory for free as soon as its array is gone."""

    def retire(self, streams: Iterable[Stream]) -> None:
        return None


@broken_everywhere("test_law08_every_reader_is_waited_for")
class RetiresBehindOneStream(BrokenBackend):
    """Waits for one of the streams that read the memory, whichever."""

    def retire(self, streams: Iterable[Stream]) -> Event | None:
        event: Event | None = self.inner.retire(list(streams)[:1])
        return event


@broken_everywhere(
    "test_law08_views_and_aliases_keep_the_memory",
    "test_law08_leaves_of_one_tree_keep_their_memory",
    "test_law14_nothing_is_released_that_an_array_or_an_alias_reaches",
)
class LeasesToNobody(BrokenBackend):
    """Forgets the lease as soon as the array is made."""

    def as_array(self, *arguments: Any, lease: object, **rest: Any) -> Any:
        return self.inner.as_array(*arguments, lease=None, **rest)

    def as_arrays(self, block: Any, places: Iterable[Place], **rest: Any) -> list[Any]:
        return [self.as_array(block, *place, **rest) for place in places]


@broken_everywhere(
    "test_law14_memory_that_nobody_holds_is_released_by_trim[small]",
    "test_law14_memory_that_nobody_holds_is_released_by_trim[large]",
)
class FreesNothing(BrokenBackend):
    """Takes blocks back and keeps them."""

    def free_device(self, block: Any) -> None:
        pass


@broken_everywhere("test_law08_views_and_aliases_keep_the_memory")
class LeasesToTheFirstArray(BrokenBackend):
    """Ends the lease when the array that it made dies, whatever views of it live on."""

    def as_array(self, *arguments: Any, lease: object, **rest: Any) -> Any:
        array = self.inner.as_array(*arguments, lease=None, **rest)
        weakref.finalize(array, forget, lease).atexit = False
        return array


def forget(lease: object) -> None:
    """Hold the lease until called."""


@broken_everywhere("test_law10_pinned_memory_stays_pinned_until_its_last_reference_goes")
class NeverUnpins(BrokenBackend):
    """Leaves pinned memory pinned."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        # Pages that are locked for good must not be unmapped, which the core would do.
        self.capabilities = dataclasses.replace(inner.capabilities, register=False)

    def free_pinned(self, address: int) -> None:
        pass


@broken_everywhere(
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[put]",
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[put_pageable]",
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[get]",
    "test_law12_a_failed_put_into_raises_each_time_it_is_asked",
)
class SwallowsFailures(BrokenBackend):
    """Starts a copy, and is content if that fails."""

    def __setattr__(self, name: str, value: object) -> None:
        # The hook that breaks copies means the inside of the honest backend.
        if name.startswith("_copy"):
            setattr(self.inner, name, value)
        else:
            super().__setattr__(name, value)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        with suppress(*self.inner.failures):
            self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        with suppress(*self.inner.failures):
            self.inner.copy_d2h(dst, src, nbytes)


@broken_everywhere(f"{LAW13}[small-put]", f"{LAW13}[small-get]")
class PinsForEachCopy(BrokenBackend):
    """Page-locks memory for each copy, and unlocks it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.memory = np.zeros(1 << 16, np.uint8)

    def record_h2d(self) -> Event:
        self.pin_and_unpin()
        event: Event = self.inner.record_h2d()
        return event

    def record_d2h(self) -> Event:
        self.pin_and_unpin()
        event: Event = self.inner.record_d2h()
        return event

    def pin_and_unpin(self) -> None:
        self.inner.pin(self.memory.ctypes.data, self.memory.nbytes)
        self.inner.unpin(self.memory.ctypes.data)
