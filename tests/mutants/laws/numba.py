"""Numba backends that break one promise each, and the tests that must fail by it: what the suite is worth on a GPU.

Here stand the mistakes that are made with Numba's own means.
`pytest tests/mutants/laws/numba.py` shows how each fails.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from xferlib_numba.conformance import TestNumba as Numba
from xferlib_numba.conformance import bench

from tests.mutants.laws import maps
from tests.mutants.laws.broken import BrokenBackend, BrokenEvent, BrokenEvents
from tests.mutants.laws.cuda import LAW06, LAW13, Listing
from xferlib.conformance import Hold, cuda
from xferlib.in_flight import Entry, InFlight
from xferlib.protocol import DeviceRange, Stream

__all__ = ["MUTANTS"]

listing = Listing("TestNumba", Numba)
MUTANTS = listing.mutants
maps.add_to(listing)


class NumbaOnTheNullStream(Numba):
    """Compute runs where Numba has it unless told otherwise. Only puts can be tested so: a get waits for that stream by right."""

    @contextmanager
    def hold_compute(self, stager: Any) -> Iterator[Hold]:
        null = bench().cuda.legacy_default_stream()
        with cuda.hold_streams([int(null.handle)], stream=null) as hold:
            yield hold


@functools.cache
def streams_of_numba() -> tuple[Any, Any]:
    return bench().cuda.stream(), bench().cuda.stream()


@listing.broken(f"{LAW06}[small-put]", f"{LAW06}[large-put]", f"{LAW06}[small-get]", f"{LAW06}[large-get_out]")
def copies_on_the_compute_stream(honest: Any) -> Any:
    """Copies on the stream on which the user computes."""
    honest.h2d = honest.d2h = bench().streams[-1].handle
    return honest


@listing.broken(f"{LAW06}[small-put]", f"{LAW06}[large-get]", "test_law06_put_completes_while_a_get_waits_for_its_producer")
class WaitsForAllCompute(BrokenBackend):
    """Lets each copy wait for what any compute stream has enqueued, lest it come too early."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.wait_for_compute(self.inner.h2d)
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.wait_for_compute(self.inner.d2h)
        self.inner.copy_d2h(dst, src, nbytes)

    def wait_for_compute(self, copies: Any) -> None:
        for stream in bench().streams:
            self.inner._order(copies, stream.handle)


@listing.broken(f"{LAW06}[small-put]", f"{LAW06}[large-put]", hooks=NumbaOnTheNullStream)
def copies_on_streams_of_numba(honest: Any) -> Any:
    """Copies on streams as `cuda.stream()` makes them: they stop for whatever is on the NULL stream."""
    honest.h2d, honest.d2h = (stream.handle for stream in streams_of_numba())
    return honest


@listing.broken(f"{LAW06}[small-put]", f"{LAW06}[large-put]", hooks=NumbaOnTheNullStream)
def copies_on_the_null_stream(honest: Any) -> Any:
    """Copies where `copy_to_device` and `copy_to_host` do unless told otherwise."""
    honest.h2d = honest.d2h = bench().cuda.default_stream().handle
    return honest


@listing.broken(
    "test_law07_value_can_be_used_at_once",
    "test_law07_work_behind_stream_wait_sees_the_data",
    "test_law07_put_lets_its_stream_wait_for_the_copy",
)
class LetsNobodyWait(BrokenEvents):
    """Names the stream that is to wait, and tells it nothing."""

    class event(BrokenEvent):  # noqa: N801  (it stands for an attribute)
        def stream_wait(self, stream: object | None = None) -> Stream:
            named: Any = bench().cuda.default_stream() if stream is None else stream
            return Stream(int(named.handle), named)


@listing.broken(
    "test_law07_get_reads_after_its_producer[fresh]",
    "test_law07_get_reads_after_its_producer[pinned]",
    "test_law11_streams_are_waited_for_or_refused",
)
class ReadsBeforeTheProducer(BrokenBackend):
    """Starts a get without a look at what the stream has enqueued."""

    as_sources = None

    def as_source(self, array: Any, stream: object | None = None) -> DeviceRange:
        return DeviceRange(array.gpu_data.device_pointer_value, array.nbytes, array)


@listing.broken(*(f"test_law07_get_of_a_tree_reads_after_the_producer_of_each_leaf[{place}]" for place in range(3)))
class ReadsTogetherBeforeTheProducers(BrokenBackend):
    """Reads the leaves of a tree together, without a look at what the stream has enqueued."""

    def as_sources(self, arrays: list[Any], stream: object | None = None) -> list[DeviceRange]:
        return [DeviceRange(array.gpu_data.device_pointer_value, array.nbytes, array) for array in arrays]


@listing.broken("test_law07_put_into_waits_for_readers_that_were_enqueued")
class WritesUnderReaders(BrokenBackend):
    """Starts a put into an array without a look at what the stream has enqueued."""

    def as_target(self, array: Any, stream: object | None = None) -> DeviceRange:
        return DeviceRange(array.gpu_data.device_pointer_value, array.nbytes, array)


@listing.broken("test_law11_put_into_overwrites_in_place_or_is_refused", "test_law01_put_into_overwrites_the_array_of_the_caller")
class PutsIntoACopy(BrokenBackend):
    """Declares that arrays of the caller's may be overwritten, and overwrites a copy."""

    def as_target(self, array: Any, stream: object | None = None) -> DeviceRange:
        source: DeviceRange = self.inner.as_target(bench().empty(array.shape, array.dtype), stream)
        return source


@listing.broken(f"{LAW13}[small-put]", f"{LAW13}[large-put]", f"{LAW13}[small-get]", f"{LAW13}[large-get]")
class AllocatesForEachCopy(BrokenBackend):
    """Takes device memory for each copy, and gives it back."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        allocate_and_free()
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        allocate_and_free()
        self.inner.copy_d2h(dst, src, nbytes)


def allocate_and_free() -> None:
    with cuda.context(0):
        cuda.call("cuMemFree", cuda.call("cuMemAlloc", 256))


@listing.broken_core(
    "test_law03_put_survives_the_loss_of_its_source[small]",
    "test_law03_put_survives_the_loss_of_its_source[large]",
    "test_law03_get_survives_the_loss_of_its_array[small]",
    "test_law08_a_pinned_slot_is_not_handed_out_while_a_put_reads_it[large]",
)
def holds_nothing_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The core lets go of a copy's memory as soon as the copy is started."""
    add = InFlight.add

    def add_without(queue: InFlight, nbytes: int, *held: object, **more: object) -> Entry:
        return add(queue, nbytes, ())

    patch.setattr(InFlight, "add", add_without)


for _name, _mutant in MUTANTS.items():
    globals()[_name] = _mutant.make_tests(_name)
