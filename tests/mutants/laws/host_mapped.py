"""Host backends, and cores, that are wrong about views of host memory and about write-combined memory: laws 1, 3, 8, 10 and 11."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from xferlib_host.conformance import TestHost as Host

from tests.mutants.laws.broken import BrokenBackend, broken_backend, broken_core
from tests.mutants.laws.locking import LockingBackend, LockingHost
from xferlib.memory.mapped import Views
from xferlib.memory.pinned_pool import PinnedPool
from xferlib.protocol import Capabilities
from xferlib.stager import Stager

__all__: list[str] = []

READS_AND_WRITES = "test_law01_the_device_reads_and_writes_mapped_memory"
SHAPE_AND_DTYPE = "test_law01_views_keep_shape_and_dtype_and_begin_where_the_array_does"
UNDER_A_READER = "test_law08_mapped_memory_is_not_handed_out_under_a_reader"
WHAT_IT_SAYS = "test_law11_write_combined_memory_is_what_it_says_or_is_refused"
FOR_THOSE_WHO_ASK = "test_law11_write_combined_memory_is_for_those_who_ask_for_it"


class CombiningBackend(LockingBackend):
    """As if some of what it page-locks were write-combined. Keeps a table of that, as a driver would."""

    def __init__(self, inner: Any, locked: dict[int, int]) -> None:
        super().__init__(inner, locked)
        self.capabilities = dataclasses.replace(self.capabilities, write_combined=True)
        self.combined: dict[int, int] = {}

    def alloc_write_combined(self, nbytes: int) -> int:
        address = self.alloc_pinned(nbytes)
        self.combined[address] = address + nbytes
        return address

    def free_pinned(self, address: int) -> None:
        self.combined.pop(address, None)
        super().free_pinned(address)


class CombiningHost(LockingHost):
    """Honest hooks for it."""

    opened: CombiningBackend

    def open(self) -> Any:
        self.opened = CombiningBackend(Host.open(self), self.locked)
        return self.opened

    def write_combined(self, address: int) -> bool:
        return any(start <= address < end for start, end in self.opened.combined.items())


class UnmappedBackend(BrokenBackend):
    """Page-locks, and makes no views."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.capabilities = dataclasses.replace(inner.capabilities, mapped=False)


class UnmappedHost(Host):
    """Honest hooks for it."""

    def open(self) -> Any:
        return UnmappedBackend(super().open())


@broken_backend(f"{READS_AND_WRITES}[small]", f"{READS_AND_WRITES}[large]", hooks=Host)
class MapsACopy(BrokenBackend):
    """Gives an array of its own that held the same values once."""

    def as_mapped(self, *what: Any, **rest: Any) -> Any:
        view, stream = self.inner.as_mapped(*what, **rest)
        return view.copy(), stream


@broken_backend(f"{SHAPE_AND_DTYPE}[float32]", f"{SHAPE_AND_DTYPE}[bool]", hooks=Host)
class MapsFromTheStart(BrokenBackend):
    """Lets every view begin where the memory was page-locked."""

    def as_mapped(self, address: int, *what: Any, **rest: Any) -> Any:
        return self.inner.as_mapped(address // 4096 * 4096, *what, **rest)


@broken_backend(f"{SHAPE_AND_DTYPE}[float32]", f"{SHAPE_AND_DTYPE}[bool]", hooks=Host)
class MapsBytes(BrokenBackend):
    """Makes the view of another dtype."""

    def as_mapped(self, address: int, shape: Any, dtype: Any, **rest: Any) -> Any:
        return self.inner.as_mapped(address, (*shape[:-1], shape[-1] * dtype.itemsize), np.dtype(np.uint8), **rest)


@broken_backend("test_law03_a_view_and_its_aliases_keep_the_host_memory", hooks=Host)
class MapsForTheArrayAlone(BrokenBackend):
    """Lets the memory go with the array that it made, aliases or not."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.leases: dict[int, object] = {}

    def as_mapped(self, *what: Any, lease: object, **rest: Any) -> Any:
        view, stream = self.inner.as_mapped(*what, lease=None, **rest)
        self.leases[id(view)] = lease
        weakref.finalize(view, self.leases.pop, id(view))
        return view, stream


@broken_backend(
    f"{UNDER_A_READER}[small]",
    f"{UNDER_A_READER}[large]",
    "test_law08_a_pin_is_not_closed_under_a_reader_of_its_views[alive]",
    "test_law08_a_pin_is_not_closed_under_a_reader_of_its_views[dropped]",
    hooks=Host,
)
class ForgetsTheStreamOfAView(BrokenBackend):
    """Says of no view where the work on it goes."""

    def as_mapped(self, *what: Any, **rest: Any) -> Any:
        return self.inner.as_mapped(*what, **rest)[0], None


@broken_core("test_law08_mapped_memory_is_handed_out_again_when_it_is_free", hooks=Host)
def keeps_what_was_mapped(patch: pytest.MonkeyPatch) -> None:
    """The core never lets go of memory that a view was made of."""
    lease, for_ever = Views.lease, []

    def lease_for_ever(views: Views, memory: Any) -> Any:
        for_ever.append(memory)
        return lease(views, memory)

    patch.setattr(Views, "lease", lease_for_ever)


@broken_backend("test_law10_a_view_outlives_the_stager", hooks=LockingHost)
class MapsForNobody(BrokenBackend):
    """Lets no view keep the memory."""

    def as_mapped(self, *what: Any, lease: object, **rest: Any) -> Any:
        return self.inner.as_mapped(*what, lease=None, **rest)


@broken_core("test_law10_a_view_outlives_the_stager", hooks=LockingHost)
def unlocks_under_views(patch: pytest.MonkeyPatch) -> None:
    """Closing page-unlocks memory that views still reach."""
    close = PinnedPool.close

    def close_at_all_events(pool: PinnedPool) -> None:
        close(pool)
        for start in list(pool._segments._index[0]):
            pool._free(start)
        # Not once more when the views are gone.
        pool._free = lambda address: None

    patch.setattr(PinnedPool, "close", close_at_all_events)


@broken_core("test_law11_only_pinned_memory_is_mapped", hooks=Host)
def maps_anything(patch: pytest.MonkeyPatch) -> None:
    """The core asks nothing about the memory that it hands on."""
    patch.setattr(sys.modules[Stager.__module__], "mappable", lambda array, host: (array, array.ctypes.data))


@broken_core(f"{READS_AND_WRITES}[small]", "test_law11_only_pinned_memory_is_mapped", hooks=Host)
def maps_though_it_says_no(patch: pytest.MonkeyPatch) -> None:
    """The flag is off, and views are made all the same."""
    patch.setattr(Stager, "capabilities", property(lambda stager: Capabilities()))


@broken_core(
    "test_law08_a_pin_is_not_closed_under_a_reader_of_its_views[alive]",
    "test_law11_only_pinned_memory_is_mapped",
    hooks=UnmappedHost,
)
def hands_out_what_it_cannot_map(patch: pytest.MonkeyPatch) -> None:
    """The flag is off, and who asks for a view of what is page-locked gets the array."""
    patch.setattr(Stager, "mapped", lambda stager, array, **more: array)


@broken_core(WHAT_IT_SAYS, FOR_THOSE_WHO_ASK, hooks=Host)
def combines_in_words_only(patch: pytest.MonkeyPatch) -> None:
    """Write-combined memory is promised where there is none, and pageable memory given."""
    empty = Stager.empty_pinned
    patch.setattr(Stager, "empty_pinned", lambda stager, shape, dtype, *, write_combined=False: empty(stager, shape, dtype))


@broken_backend(WHAT_IT_SAYS, hooks=CombiningHost)
class ForgetsTheFlag(BrokenBackend):
    """Takes the wish for write-combined memory, and allocates as ever."""

    def alloc_write_combined(self, nbytes: int) -> int:
        address: int = self.inner.alloc_pinned(nbytes)
        return address


@broken_core(FOR_THOSE_WHO_ASK, hooks=CombiningHost)
def mixes_its_memory(patch: pytest.MonkeyPatch) -> None:
    """What comes back to the pool is handed out to anybody."""
    set_up = PinnedPool.__init__

    def set_up_mixed(pool: PinnedPool, **arguments: Any) -> None:
        set_up(pool, **arguments)
        pool._segments.large = pool._segments.write_combined

    patch.setattr(PinnedPool, "__init__", set_up_mixed)
