"""Host backends, and cores, that move a byte wrongly, too early or to the wrong place: each law looks at the values, too."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from xferlib_host.conformance import TestHost as Host

from tests.mutants.laws.broken import BrokenBackend, broken_backend, broken_core
from xferlib.stager import Stager
from xferlib.staging.pageable import Staging

__all__: list[str] = []

SIDE_BY_SIDE = "test_law01_leaves_that_lie_side_by_side_arrive_whole"
STARTS_NOTHING = "test_law01_a_tree_with_a_leaf_that_is_refused_starts_nothing"
POISONS = "test_law12_a_failure_poisons_nothing_but_itself"
PUT_KEEPS = "test_law01_put_keeps_values_shape_and_dtype"
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
    """What a get is to write into pageable memory goes to a copy of it."""
    copy_out = Staging.copy_out

    def copy_out_elsewhere(staging: Staging, pageable: Any, *what: Any, **rest: Any) -> Any:
        return copy_out(staging, [(address, array.copy()) for address, array in pageable], *what, **rest)

    patch.setattr(Staging, "copy_out", copy_out_elsewhere)


@broken_core("test_law01_put_into_overwrites_the_array_of_the_caller", hooks=Host)
def overwrites_from_pinned_memory_only(patch: pytest.MonkeyPatch) -> None:
    """A put of pageable memory into an array of the caller's does nothing."""
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
