"""CuPy backends that break one promise each, and the tests that must fail by it: what the suite is worth on a GPU.

Some mistakes cannot be made on a host: copies on the wrong kind of stream, memory that only pretends to be page-locked, pools that
know nothing of copies under way. All leave the CUDA context in order, so that they can share a process.
`pytest tests/cuda/mutants.py` shows how each fails.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import pytest
from xferlib_cupy.conformance import TestCupy as Cupy
from xferlib_cupy.conformance import bench

from tests.mutants.broken import BrokenBackend, BrokenEvent, BrokenEvents, Mutant
from xferlib.conformance import Hold, cuda
from xferlib.inflight import InFlight
from xferlib.protocol import Event, Source, Stream
from xferlib.stager import Stager

__all__ = ["CUDA_MUTANTS"]

CUDA_MUTANTS: dict[str, Mutant] = {}
"""By the name of the class that is collected."""

W = TypeVar("W", bound=Callable[..., Any])

LAW05_BEHIND_COPIES = "test_law05_starting_returns_while_copies_are_held"
LAW06 = "test_law06_a_transfer_completes_while_compute_is_held"
LAW06_OPPOSITE = "test_law06_a_transfer_completes_while_the_opposite_direction_is_held"
LAW13 = "test_law13_a_hundred_transfers_call_for_no_memory"


class CupyOnTheNullStream(Cupy):
    """Compute runs where CuPy has it unless told otherwise. Only puts can be tested so: a get waits for that stream by right."""

    @contextmanager
    def hold_compute(self, stager: Any) -> Iterator[Hold]:
        null = bench().cupy.cuda.Stream.null
        with cuda.hold_streams([null.ptr], stream=null) as hold:
            yield hold


def broken_cupy(*tests: str, hooks: type[Cupy] = Cupy) -> Callable[[W], W]:
    """List a wall, or a function that breaks an honest backend, as the mutant by which these tests fail."""

    def listed(wall: W) -> W:
        assert wall.__doc__, "a mutant says what it does wrong"
        CUDA_MUTANTS[f"TestCupy_{wall.__name__}"] = Mutant(tests=tests, hooks=hooks, wall=wall)
        return wall

    return listed


@functools.cache
def blocking_streams() -> tuple[Any, Any]:
    return bench().cupy.cuda.Stream(), bench().cupy.cuda.Stream()


@broken_cupy("test_law01_put_keeps_values_shape_and_dtype[float64]", "test_law01_put_keeps_values_shape_and_dtype[complex128]")
class NarrowsDoubles(BrokenBackend):
    """Accepts double precision and makes it single."""

    def as_array(self, block: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], **rest: Any) -> Any:
        narrow = np.dtype({"d": "f", "D": "F"}.get(dtype.char, dtype))
        return self.inner.as_array(block, offset, shape, narrow, **rest)


@broken_cupy("test_law02_a_pinned_source_is_free_once_done[small]", "test_law02_an_array_is_free_once_its_get_is_done[get]")
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


@broken_cupy(
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[put]",
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[get]",
)
class IsAlwaysDone(BrokenEvents):
    """Says of every copy that it is done."""

    class event(BrokenEvent):  # noqa: N801  (it stands for an attribute)
        def done(self) -> bool:
            return True


@broken_cupy(
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


@broken_cupy(
    "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before[put]", "test_law07_value_can_be_used_at_once"
)
class RecordsOnTheWrongStream(BrokenBackend):
    """Records the events of copies to the device on the stream of the other direction."""

    def record_h2d(self) -> Event:
        event: Event = self.inner.record_d2h()
        return event


@broken_cupy(
    "test_law09_pinned_arrays_are_page_locked_at_both_ends[4096]",
    "test_law09_results_of_get_are_page_locked",
    "test_law09_starting_does_not_wait_behind_held_copies[put]",
    "test_law09_starting_does_not_wait_behind_held_copies[get]",
    f"{LAW05_BEHIND_COPIES}[large-put]",
    f"{LAW05_BEHIND_COPIES}[large-get]",
)
class SellsPageableMemoryAsPinned(BrokenBackend):
    """Hands out ordinary memory and calls it page-locked."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.memory: dict[int, np.ndarray] = {}

    def alloc_pinned(self, nbytes: int) -> int:
        raw = np.zeros(nbytes + 4096, np.uint8)
        address = -(-raw.ctypes.data // 4096) * 4096
        self.memory[address] = raw
        return address

    def free_pinned(self, address: int) -> None:
        """Keep it: a copy that was to page-locked memory may still be on its way."""


@broken_cupy(
    "test_law09_memory_pinned_in_place_is_page_locked_meanwhile",
    "test_law11_register_page_locks_memory_of_the_caller_or_is_refused",
)
class RegistersNothing(BrokenBackend):
    """Declares that it page-locks memory of the caller's, and does not."""

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass


@broken_cupy(f"{LAW06}[small-put]", f"{LAW06}[large-put]", f"{LAW06}[small-get]", f"{LAW06}[large-get_out]")
def copies_on_the_compute_stream(honest: Any) -> Any:
    """Copies on the stream on which the user computes."""
    honest.h2d = honest.d2h = bench().streams[-1].ptr
    return honest


@broken_cupy(f"{LAW06_OPPOSITE}[put]", f"{LAW06_OPPOSITE}[get]", "test_law06_put_completes_while_a_get_waits_for_its_producer")
def copies_both_ways_on_one_stream(honest: Any) -> Any:
    """Has one stream for both directions."""
    honest.d2h = honest.h2d
    return honest


@broken_cupy(f"{LAW06}[small-put]", f"{LAW06}[large-get]", "test_law06_put_completes_while_a_get_waits_for_its_producer")
class WaitsForAllCompute(BrokenBackend):
    """Lets each copy wait for what any compute stream has enqueued, lest it come too early."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        wait_for_compute(self.inner.h2d)
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        wait_for_compute(self.inner.d2h)
        self.inner.copy_d2h(dst, src, nbytes)


def wait_for_compute(handle: int) -> None:
    for stream in bench().streams:
        event = stream.record()
        bench().cupy.cuda.runtime.streamWaitEvent(handle, event.ptr)


@broken_cupy(f"{LAW06}[small-put]", f"{LAW06}[large-put]", hooks=CupyOnTheNullStream)
def copies_on_blocking_streams(honest: Any) -> Any:
    """Copies on streams as CuPy makes them by default: they stop for whatever is on the NULL stream."""
    honest.h2d, honest.d2h = (stream.ptr for stream in blocking_streams())
    return honest


@broken_cupy(f"{LAW06}[small-put]", f"{LAW06}[large-put]", hooks=CupyOnTheNullStream)
def copies_on_the_null_stream(honest: Any) -> Any:
    """Copies where `ndarray.set` and `ndarray.get` do unless told otherwise."""
    honest.h2d = honest.d2h = 0
    return honest


@broken_cupy(
    "test_law07_value_can_be_used_at_once",
    "test_law07_work_behind_stream_wait_sees_the_data",
    "test_law07_put_lets_its_stream_wait_for_the_copy",
)
class LetsNobodyWait(BrokenEvents):
    """Names the stream that is to wait, and tells it nothing."""

    class event(BrokenEvent):  # noqa: N801  (it stands for an attribute)
        def stream_wait(self, stream: object | None = None) -> Stream:
            named: Any = bench().cupy.cuda.get_current_stream() if stream is None else stream
            return Stream(named.ptr, named)


@broken_cupy(
    "test_law07_get_reads_after_its_producer[fresh]",
    "test_law07_get_reads_after_its_producer[pinned]",
    "test_law11_streams_are_waited_for_or_refused",
)
class ReadsBeforeTheProducer(BrokenBackend):
    """Starts a get without a look at what the stream has enqueued."""

    def as_source(self, array: Any, stream: object | None = None) -> Source:
        return Source(array.data.ptr, array.nbytes, array)


@broken_cupy("test_law07_put_into_waits_for_readers_that_were_enqueued")
class WritesUnderReaders(BrokenBackend):
    """Starts a put into an array without a look at what the stream has enqueued."""

    def as_target(self, array: Any, stream: object | None = None) -> Source:
        return Source(array.data.ptr, array.nbytes, array)


@broken_cupy(
    "test_law08_memory_of_a_dropped_array_is_not_rewritten_under_a_reader[small]",
    "test_law08_memory_of_a_dropped_array_is_not_rewritten_under_a_reader[large]",
    "test_law08_every_reader_is_waited_for",
)
class RetiresWithoutAFence(BrokenBackend):
    """Takes memory for free as soon as its array is gone."""

    def retire(self, streams: Iterable[Stream]) -> None:
        return None


@broken_cupy("test_law08_every_reader_is_waited_for")
class RetiresBehindOneStream(BrokenBackend):
    """Waits for one of the streams that read the memory, whichever."""

    def retire(self, streams: Iterable[Stream]) -> Event | None:
        event: Event | None = self.inner.retire(list(streams)[:1])
        return event


@broken_cupy("test_law08_views_and_aliases_keep_the_memory", "test_law08_leaves_of_one_tree_keep_their_memory")
class LeasesToNobody(BrokenBackend):
    """Forgets the lease as soon as the array is made."""

    def as_array(self, *arguments: Any, lease: object, **rest: Any) -> Any:
        return self.inner.as_array(*arguments, lease=None, **rest)


@broken_cupy("test_law08_views_and_aliases_keep_the_memory")
class LeasesToTheFirstArray(BrokenBackend):
    """Ends the lease when the array that it made dies, whatever views of it live on."""

    def as_array(self, *arguments: Any, lease: object, **rest: Any) -> Any:
        array = self.inner.as_array(*arguments, lease=None, **rest)
        weakref.finalize(array, forget, lease).atexit = False
        return array


def forget(lease: object) -> None:
    """Hold the lease until called."""


@broken_cupy("test_law10_pinned_memory_stays_pinned_until_its_last_reference_goes")
class NeverUnpins(BrokenBackend):
    """Leaves pinned memory pinned."""

    def free_pinned(self, address: int) -> None:
        pass


@broken_cupy("test_law11_put_into_overwrites_in_place_or_is_refused", "test_law01_put_into_overwrites_the_array_of_the_caller")
class PutsIntoACopy(BrokenBackend):
    """Declares that arrays of the caller's may be overwritten, and overwrites a copy."""

    def as_target(self, array: Any, stream: object | None = None) -> Source:
        source: Source = self.inner.as_target(array.copy(), stream)
        return source


@broken_cupy(
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[put]",
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[put_pageable]",
    "test_law12_a_failed_transfer_raises_each_time_it_is_asked[get]",
    "test_law12_a_failed_put_into_raises_each_time_it_is_asked",
)
class SwallowsFailures(BrokenBackend):
    """Starts a copy, and is content if that fails."""

    def __setattr__(self, name: str, value: object) -> None:
        # The hook that breaks copies means the inside of the honest backend.
        if name == "_copy":
            setattr(self.inner, name, value)
        else:
            super().__setattr__(name, value)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        with suppress(*self.inner.failures):
            self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        with suppress(*self.inner.failures):
            self.inner.copy_d2h(dst, src, nbytes)


@broken_cupy(f"{LAW13}[small-put]", f"{LAW13}[large-put_pageable]", f"{LAW13}[small-get]", f"{LAW13}[large-get_out]")
class AllocatesForEachCopy(BrokenBackend):
    """Takes device memory for each copy, and gives it back."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        allocate_and_free()
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        allocate_and_free()
        self.inner.copy_d2h(dst, src, nbytes)


def allocate_and_free() -> None:
    runtime = bench().cupy.cuda.runtime
    runtime.free(runtime.malloc(256))


@broken_cupy(f"{LAW13}[small-put]", f"{LAW13}[small-get]")
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


def takes_pinned_memory_from_cupy(patch: pytest.MonkeyPatch) -> None:
    """The core leaves host memory to CuPy's pool, which hands it out again as soon as it is dropped, and holds nothing itself."""
    add = InFlight.add

    def add_without(queue: InFlight, nbytes: int, keepalive: object, sources: object = ()) -> Event:
        return add(queue, nbytes, None)

    def empty_pinned(stager: Stager, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        memory = bench().cupy.cuda.alloc_pinned_memory(math.prod(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, buffer=memory)

    patch.setattr(InFlight, "add", add_without)
    patch.setattr(Stager, "empty_pinned", empty_pinned)


CUDA_MUTANTS["TestCupy_takes_pinned_memory_from_cupy"] = Mutant(
    tests=(
        "test_law03_put_survives_the_loss_of_its_source[small]",
        "test_law03_put_survives_the_loss_of_its_source[large]",
        "test_law08_a_pinned_slot_is_not_handed_out_while_a_put_reads_it[large]",
    ),
    hooks=Cupy,
    patch=takes_pinned_memory_from_cupy,
)

for _name, _mutant in CUDA_MUTANTS.items():
    globals()[_name] = _mutant.make_tests(_name)
