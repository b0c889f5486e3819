"""Host backends that wait where they must not, or do not where they must: laws 4, 5, 6 and 7."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from xferlib_host import Stream
from xferlib_host.conformance import Gate
from xferlib_host.conformance import TestHost as Host

from tests.mutants.laws.broken import BrokenBackend, BrokenEvent, BrokenEvents, broken_backend, broken_core
from xferlib import protocol
from xferlib.latch import is_copy_thread
from xferlib.protocol import DeviceRange, HostStager

__all__: list[str] = []

WHEN_RELEASED = "test_law04_a_transfer_is_done_when_its_copies_are_released_and_not_before"
DOES_NOT_BLOCK = "test_law04_done_does_not_block"
WHILE_COMPUTE = "test_law06_a_transfer_completes_while_compute_is_held"
WHILE_OPPOSITE = "test_law06_a_transfer_completes_while_the_opposite_direction_is_held"
WHILE_GET_WAITS = "test_law06_put_completes_while_a_get_waits_for_its_producer"
PUT_INTO_COMPLETES = "test_law06_put_into_completes_while_compute_is_held"
STARTS_UNDER_COMPUTE = "test_law05_starting_returns_while_compute_is_held"
STARTS_UNDER_COPIES = "test_law05_starting_returns_while_copies_are_held"
BORROWS_UNDER_COPIES = "test_law05_a_put_that_borrows_returns_while_copies_are_held"
AFTER_PRODUCER = "test_law07_get_reads_after_its_producer"
TREE_AFTER_PRODUCERS = "test_law07_get_of_a_tree_reads_after_the_producer_of_each_leaf"


class ComputeIsKnown(Host):
    """Honest hooks that let the backend know where compute is."""

    @contextmanager
    def hold_compute(self, stager: HostStager[Any]) -> Iterator[Gate]:
        computing: Any = getattr(stager, "computing", [])
        with super().hold_compute(stager) as gate:
            computing.append(gate.stream)
            try:
                yield gate
            finally:
                computing.pop()


class KnowsCompute(BrokenBackend):
    """Has the streams on which compute is under way."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.computing: list[Stream] = []


class AlwaysDone(BrokenEvent):
    def done(self) -> bool:
        return True


@broken_backend(
    f"{WHEN_RELEASED}[put]",
    f"{WHEN_RELEASED}[get]",
    f"{WHEN_RELEASED}[get_out]",
    f"{DOES_NOT_BLOCK}[put]",
    "test_law04_a_tree_is_done_when_its_last_leaf_is",
    f"{WHILE_OPPOSITE}[put]",
    *(f"{TREE_AFTER_PRODUCERS}[{place}]" for place in range(3)),
    "test_law11_streams_are_waited_for_or_refused",
    hooks=Host,
)
class SaysYesAtOnce(BrokenEvents):
    """`done()` says yes whenever it is asked."""

    event = AlwaysDone


class NeverDone(BrokenEvent):
    def done(self) -> bool:
        return False


@broken_backend("test_law10_close_waits_for_what_is_in_flight", "test_law10_close_after_an_interrupt_waits_as_ever", hooks=Host)
class NeverSaysYes(BrokenEvents):
    """`done()` says no for ever, though who waits comes back. To its callers: the core's thread would serve no other stager."""

    event = NeverDone

    def record_h2d(self) -> Any:
        return self.inner.record_h2d() if is_copy_thread() else super().record_h2d()

    def record_d2h(self) -> Any:
        return self.inner.record_d2h() if is_copy_thread() else super().record_d2h()


class DoneOnceWaitedFor(BrokenEvent):
    waited = False

    def done(self) -> bool:
        return self.waited and self.inner.done()

    def synchronize(self) -> None:
        self.inner.synchronize()
        self.waited = True


@broken_backend(f"{WHEN_RELEASED}[put]", f"{WHEN_RELEASED}[get]", hooks=Host)
class SaysYesOnlyIfWaitedFor(BrokenEvents):
    """`done()` does not get to yes without `synchronize`. To its callers: the core's thread never waits."""

    event = DoneOnceWaitedFor

    def record_h2d(self) -> Any:
        return self.inner.record_h2d() if is_copy_thread() else super().record_h2d()

    def record_d2h(self) -> Any:
        return self.inner.record_d2h() if is_copy_thread() else super().record_d2h()


class WaitsToSay(BrokenEvent):
    def done(self) -> bool:
        self.inner.synchronize()
        return True


@broken_backend(f"{DOES_NOT_BLOCK}[put]", f"{DOES_NOT_BLOCK}[put_pageable]", f"{DOES_NOT_BLOCK}[get]", hooks=Host)
class WaitsInDone(BrokenEvents):
    """`done()` waits until it can say yes."""

    event = WaitsToSay


@broken_backend(f"{WHEN_RELEASED}[put]", f"{WHEN_RELEASED}[put_pageable]", f"{WHEN_RELEASED}[get]", hooks=Host)
class AsksTheOtherDirection(BrokenBackend):
    """Records its events in the stream of the other direction."""

    def record_h2d(self) -> Any:
        return self.inner.record_d2h()

    def record_d2h(self) -> Any:
        return self.inner.record_h2d()


@broken_backend(f"{WHEN_RELEASED}[put]", f"{WHEN_RELEASED}[get_out]", f"{WHEN_RELEASED}[get_pageable_out]", hooks=Host)
class IsOneBehind(BrokenBackend):
    """Returns the event before the one that it was asked for: it covers all copies but the last."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.before = {"h2d": inner.record_h2d(), "d2h": inner.record_d2h()}

    def record_h2d(self) -> Any:
        event, self.before["h2d"] = self.before["h2d"], self.inner.record_h2d()
        return event

    def record_d2h(self) -> Any:
        event, self.before["d2h"] = self.before["d2h"], self.inner.record_d2h()
        return event


@broken_backend(f"{WHEN_RELEASED}[get]", f"{WHEN_RELEASED}[get_out]", f"{WHEN_RELEASED}[get_pageable_out]", hooks=Host)
class TakesACopyForAnEarlierOne(BrokenBackend):
    """Returns, for a copy from an array that was copied before, the event of that copy."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.sources: list[Any] = []
        self.events: dict[int, Any] = {}

    def as_source(self, array: Any, stream: Any = None) -> Any:
        # Kept, so that no other array comes by its number.
        self.sources.append(array)
        return self.inner.as_source(array, stream)

    def record_d2h(self) -> Any:
        return self.events.setdefault(id(self.sources[-1]), self.inner.record_d2h()) if self.sources else self.inner.record_d2h()


@broken_backend(f"{STARTS_UNDER_COPIES}[small-put]", f"{STARTS_UNDER_COPIES}[large-get_out]", hooks=Host)
class CopiesAtOnce(BrokenBackend):
    """Returns from the start of a copy when it is done."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_h2d(dst, src, nbytes)
        self.inner.record_h2d().synchronize()

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_d2h(dst, src, nbytes)
        self.inner.record_d2h().synchronize()


@broken_core(f"{BORROWS_UNDER_COPIES}[True]", f"{BORROWS_UNDER_COPIES}[staged]", hooks=Host)
def borrows_nothing(patch: pytest.MonkeyPatch) -> None:
    """The core lets the caller wait until the CPU has copied a source that it may borrow."""
    patch.setattr("xferlib.h2d.BORROW_FROM_NBYTES", 1 << 60)


@broken_backend(
    f"{STARTS_UNDER_COMPUTE}[small-put]",
    f"{STARTS_UNDER_COMPUTE}[large-get]",
    "test_law05_put_into_returns_while_compute_and_copies_are_held",
    hooks=ComputeIsKnown,
)
class WaitsForTheDevice(KnowsCompute):
    """Waits until the whole device is idle before it starts a copy."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.wait_for_compute()
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.wait_for_compute()
        self.inner.copy_d2h(dst, src, nbytes)

    def wait_for_compute(self) -> None:
        for stream in tuple(self.computing):
            stream.record().synchronize()


@broken_backend(
    "test_law05_the_first_put_of_a_size_returns_while_compute_is_held[array]",
    "test_law05_the_first_put_of_a_size_returns_while_compute_is_held[tree]",
    hooks=ComputeIsKnown,
)
class AllocatesBehindCompute(KnowsCompute):
    """Waits until the whole device is idle before it takes memory."""

    def alloc_device(self, nbytes: int) -> Any:
        for stream in tuple(self.computing):
            stream.record().synchronize()
        return self.inner.alloc_device(nbytes)


@broken_backend("test_law05_get_returns_while_its_producer_is_held", hooks=Host)
class WaitsForTheProducer(BrokenBackend):
    """Lets the host wait for what produces an array."""

    def as_source(self, array: Any, stream: Any = None) -> Any:
        if stream is not None:
            stream.record().synchronize()
        return self.inner.as_source(array, stream)


class StopsTheHost(BrokenEvent):
    def stream_wait(self, stream: object | None = None) -> protocol.Stream | None:
        self.inner.synchronize()
        return self.inner.stream_wait(stream)


@broken_backend("test_law05_stream_wait_does_not_stop_the_host", hooks=Host)
class WaitsInStreamWait(BrokenEvents):
    """Makes the host wait where only a stream should."""

    event = StopsTheHost


@broken_backend(
    *(f"{WHILE_COMPUTE}[{size}-{way}]" for size in ("small", "large") for way in ("put", "put_pageable", "get", "get_out")),
    f"{WHILE_COMPUTE}[small-get_pageable_out]",
    PUT_INTO_COMPLETES,
    hooks=ComputeIsKnown,
)
class CopiesOnTheComputeStream(KnowsCompute):
    """Has no streams of its own: copies stand in line behind compute."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.copy(self.inner.copy_h2d, dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.copy(self.inner.copy_d2h, dst, src, nbytes)

    def record_h2d(self) -> Any:
        return self.computing[-1].record() if self.computing else self.inner.record_h2d()

    def record_d2h(self) -> Any:
        return self.computing[-1].record() if self.computing else self.inner.record_d2h()

    def copy(self, start: Any, dst: int, src: int, nbytes: int) -> None:
        if self.computing:
            self.computing[-1].submit(ctypes.memmove, dst, src, nbytes)
        else:
            start(dst, src, nbytes)


@broken_backend(
    f"{WHILE_COMPUTE}[small-put]", f"{WHILE_COMPUTE}[large-get]", PUT_INTO_COMPLETES, WHILE_GET_WAITS, hooks=ComputeIsKnown
)
class CopiesAfterCompute(KnowsCompute):
    """Starts at once, on streams of its own, which wait for all compute that was enqueued before."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.wait_for_compute(self.inner.h2d)
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.wait_for_compute(self.inner.d2h)
        self.inner.copy_d2h(dst, src, nbytes)

    def wait_for_compute(self, engine: Any) -> None:
        for stream in tuple(self.computing):
            engine.wait(stream.record())


@broken_backend(f"{WHILE_OPPOSITE}[put]", f"{WHILE_OPPOSITE}[get]", WHILE_GET_WAITS, hooks=Host)
class HasOneEngine(BrokenBackend):
    """Makes the copies of both directions on one stream."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.spare, inner.d2h = inner.d2h, inner.h2d

    def close(self) -> None:
        self.spare.close()
        self.inner.close()


class Unordered(BrokenEvent):
    def stream_wait(self, stream: object | None = None) -> protocol.Stream | None:
        return protocol.Stream(stream.handle, stream) if isinstance(stream, Stream) else None


@broken_backend(
    "test_law07_value_can_be_used_at_once",
    "test_law07_work_behind_stream_wait_sees_the_data",
    "test_law07_put_lets_its_stream_wait_for_the_copy",
    hooks=Host,
)
class OrdersNothing(BrokenEvents):
    """Hands out arrays that nothing makes wait for their data."""

    event = Unordered


@broken_backend(
    *(f"{AFTER_PRODUCER}[{out}]" for out in ("fresh", "pinned", "pageable")),
    "test_law07_a_reader_reads_after_the_producer",
    "test_law11_streams_are_waited_for_or_refused",
    hooks=Host,
)
class DoesNotWaitForTheProducer(BrokenBackend):
    """Accepts the stream that produces an array and does not wait for it."""

    def as_source(self, array: Any, stream: object | None = None) -> DeviceRange:
        source: DeviceRange = self.inner.as_source(array)
        return source

    def mark(self, stream: object | None = None) -> None:
        return None


@broken_backend(*(f"{TREE_AFTER_PRODUCERS}[{place}]" for place in range(3)), hooks=Host)
class ReadsTogetherBeforeTheProducers(BrokenBackend):
    """Reads the leaves of a tree together, and does not wait for the stream that produces one of them."""

    def as_sources(self, arrays: list[Any], stream: object | None = None) -> list[DeviceRange]:
        return [self.inner.as_source(array) for array in arrays]


@broken_backend("test_law07_put_into_waits_for_readers_that_were_enqueued", hooks=Host)
class DoesNotWaitForReaders(BrokenBackend):
    """Accepts the stream that reads an array and overwrites it at once."""

    def as_target(self, array: Any, stream: object | None = None) -> DeviceRange:
        source: DeviceRange = self.inner.as_target(array)
        return source


@broken_backend("test_law07_a_copy_on_the_device_has_what_the_array_held", hooks=Host)
class CopiesBeforeTheProducer(BrokenBackend):
    """Copies arrays on the device at once, whatever is to produce them."""

    def copied(self, arrays: list[Any], stream: object | None = None) -> list[Any]:
        return [array.copy() for array in arrays]


@broken_backend("test_law07_a_copy_on_the_device_has_what_the_array_held", hooks=Host)
class GivesTheArraysForCopies(BrokenBackend):
    """Hands out the arrays themselves, which are overwritten."""

    def copied(self, arrays: list[Any], stream: object | None = None) -> list[Any]:
        return list(arrays)


@broken_backend("test_law07_a_copy_on_the_device_has_what_the_array_held", hooks=Host)
class WaitsForItsCopies(BrokenBackend):
    """Copies arrays on the device, and returns when that is done."""

    def copied(self, arrays: list[Any], stream: object | None = None) -> list[Any]:
        copies: list[Any] = self.inner.copied(arrays, stream)
        event = self.inner.mark(stream)
        if event is not None:
            event.synchronize()
        return copies
