"""Hooks that are wrong, on an honest host backend: the suite must find them out, and say which hook it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from xferlib_host.conformance import Gate
from xferlib_host.conformance import TestHost as Host

from tests.mutants.laws.broken import broken_hooks
from tests.mutants.laws.locking import LockingHost
from xferlib.conformance import Direction, Hold
from xferlib.protocol import HostStager

__all__: list[str] = []

COMPUTE = "test_hook_hold_compute_holds_what_is_behind_it"
LEFT = "test_hook_leaving_hold_compute_releases_it"
COPIES = "test_hook_hold_copies_holds_the_copies_that_start_inside"
HELD_ARRAY = "test_hook_held_array_gets_its_values_when_released"
READS_LATER = "test_hook_read_later_reads_when_it_is_released"
KEEPS = "test_hook_read_later_does_not_keep_the_array"
BREAKS = "test_hook_break_copies_lets_copies_fail"
COUNTS = "test_hook_memory_calls_counts_what_is_taken_and_given_back"
VALUES = "test_hook_values_come_back_from_the_device"
ALL_COPIES = tuple(f"{COPIES}[{direction}]" for direction in ("h2d", "d2h", "both"))


OPENS_AFTER_SECONDS = 0.05
"""Within the window in which a test looks whether what is held stays held."""


class Says:
    """A hold that says of itself what it is told to."""

    def __init__(self, inner: Any, held: bool) -> None:
        self.inner = inner
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@broken_hooks(COMPUTE, LEFT, *ALL_COPIES, HELD_ARRAY)
class AlwaysHeld(Host):
    """Every hold says that it is held, released or not."""

    @contextmanager
    def hold_compute(self, stager: HostStager[Any]) -> Iterator[Any]:
        with super().hold_compute(stager) as gate:
            yield Says(gate, True)

    @contextmanager
    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> Iterator[Any]:
        with super().hold_copies(stager, direction) as gate:
            yield Says(gate, True)


@broken_hooks(COMPUTE, *ALL_COPIES, HELD_ARRAY)
class NeverHeld(Host):
    """Every hold says that it is not held."""

    @contextmanager
    def hold_compute(self, stager: HostStager[Any]) -> Iterator[Any]:
        with super().hold_compute(stager) as gate:
            yield Says(gate, False)

    @contextmanager
    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> Iterator[Any]:
        with super().hold_copies(stager, direction) as gate:
            yield Says(gate, False)


@broken_hooks(COMPUTE, *ALL_COPIES, HELD_ARRAY)
class OpensByItself(Host):
    """Every hold opens after a moment, and says so if it is asked."""

    @contextmanager
    def hold_compute(self, stager: HostStager[Any]) -> Iterator[Any]:
        with super().hold_compute(stager) as gate:
            assert gate.stream is not None
            self.open_soon(gate)
            yield gate

    @contextmanager
    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> Iterator[Any]:
        with super().hold_copies(stager, direction) as gate:
            self.open_soon(gate)
            yield gate

    def open_soon(self, gate: Gate) -> None:
        def open_it() -> None:
            time.sleep(OPENS_AFTER_SECONDS)
            gate.release()

        self.calls.start(open_it)


class Nothing:
    """No hold at all."""

    stream: Any = None
    array: Any = None

    def __init__(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False


@broken_hooks(*ALL_COPIES)
class HoldsNoCopies(Host):
    """Says that copies are held, and does nothing about it."""

    @contextmanager
    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> Iterator[Any]:
        nothing = Nothing()
        yield nothing
        nothing.release()


@broken_hooks(f"{COPIES}[d2h]", f"{COPIES}[both]")
class HoldsOneDirection(Host):
    """Holds copies to the device, whatever it is asked for."""

    @contextmanager
    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> Iterator[Any]:
        with super().hold_copies(stager, "h2d") as gate:
            yield gate


@broken_hooks(COMPUTE, KEEPS)
class HoldsAnotherStream(Host):
    """Holds a stream, and reads on the calling thread."""

    def read_later(self, array: Any, hold: Hold) -> Callable[[], np.ndarray]:
        return lambda: np.array(array)


@broken_hooks(READS_LATER)
class ReadsAtOnce(Host):
    """Reads when it is called, and waits for the release."""

    def read_later(self, array: Any, hold: Hold) -> Callable[[], np.ndarray]:
        seen, read = array.copy(), super().read_later(array, hold)
        return lambda: (read(), seen)[1]


@broken_hooks(KEEPS)
class KeepsWhatItReads(Host):
    """Holds the array until it is read."""

    def read_later(self, array: Any, hold: Hold) -> Callable[[], np.ndarray]:
        read = super().read_later(array, hold)
        return lambda: (read(), array)[0]


@broken_hooks(COMPUTE, LEFT, KEEPS)
class ReadsSomethingElse(Host):
    """Reads zeros."""

    def read_later(self, array: Any, hold: Hold) -> Callable[[], np.ndarray]:
        read = super().read_later(array, hold)
        return lambda: read() * 0


@broken_hooks(HELD_ARRAY)
class HasItsValuesAlready(Host):
    """The array of `held_array` holds the values before they are produced."""

    @contextmanager
    def held_array(self, stager: HostStager[Any], values: np.ndarray) -> Iterator[Any]:
        with super().held_array(stager, values) as gate:
            gate.array[...] = values
            yield gate


@broken_hooks(HELD_ARRAY)
class NeverGetsItsValues(Host):
    """The array of `held_array` is never produced."""

    @contextmanager
    def held_array(self, stager: HostStager[Any], values: np.ndarray) -> Iterator[Any]:
        with super().held_array(stager, values) as gate:
            gate.array = gate.array.copy()
            yield gate


@broken_hooks(f"{BREAKS}[put]", f"{BREAKS}[get]")
class BreaksNothing(Host):
    """Copies go on as before."""

    @contextmanager
    def break_copies(self, stager: HostStager[Any]) -> Iterator[None]:
        yield


@broken_hooks(f"{BREAKS}[get]")
class BreaksOneDirection(Host):
    """Copies to the host go on as before."""

    @contextmanager
    def break_copies(self, stager: Any) -> Iterator[None]:
        stager.h2d.submit(lambda: 1 / 0)
        yield


@broken_hooks(COUNTS)
class CountsNothing(Host):
    """Always says 0."""

    def memory_calls(self, stager: HostStager[Any]) -> int:
        return 0


@broken_hooks(COUNTS)
class CountsItself(Host):
    """Says more each time that it is asked."""

    asked = 0

    def memory_calls(self, stager: HostStager[Any]) -> int:
        self.asked += 1
        return super().memory_calls(stager) + self.asked


class CountsSome(Host):
    """Sees calls of some kinds only."""

    unseen: tuple[str, ...]

    def memory_calls(self, stager: Any) -> int:
        calls: dict[str, int] = stager.memory.calls()._asdict()
        return sum(count for kind, count in calls.items() if kind not in self.unseen)


@broken_hooks(COUNTS)
class CountsNoFrees(CountsSome):
    """Does not see what is given back."""

    unseen = ("device_frees", "pinned_frees")


@broken_hooks(COUNTS)
class CountsNoDeviceMemory(CountsSome):
    """Does not see allocations on the device."""

    unseen = ("device_allocations",)


@broken_hooks(COUNTS)
class CountsNoPinnedMemory(CountsSome):
    """Does not see allocations of pinned memory."""

    unseen = ("pinned_allocations",)


@broken_hooks(COUNTS)
class CountsNoPins(CountsSome):
    """Does not see memory that is locked in place."""

    unseen = ("pins",)


@broken_hooks("test_hook_page_locked_tells_ordinary_memory_from_pinned")
class AllIsLocked(LockingHost):
    """Says of all memory that it is page-locked."""

    def page_locked(self, address: int) -> bool:
        return True


@broken_hooks("test_hook_write_writes")
class WritesNothing(Host):
    """Writes elsewhere."""

    def write(self, array: Any, values: np.ndarray) -> None:
        super().write(array.copy(), values)


@broken_hooks("test_hook_layouts_have_the_values")
class LaysOutZeros(Host):
    """Its arrays of other layouts have other values."""

    def layouts(self, values: np.ndarray) -> Iterable[tuple[str, Any]]:
        yield "Fortran order", np.zeros_like(values, order="F")


@broken_hooks("test_hook_current_makes_a_stream_the_current_one")
class MakesNothingCurrent(Host):
    """Enters no stream."""

    def current(self, stream: object) -> AbstractContextManager[object]:
        return nullcontext()


@broken_hooks("test_hook_aliases_share_the_memory_of_the_array")
class CallsACopyAnAlias(Host):
    """One of its aliases is none."""

    def aliases(self, array: Any) -> Iterable[tuple[str, Any]]:
        yield from super().aliases(array)
        yield "copy", array.copy()


@broken_hooks("test_hook_aliases_share_the_memory_of_the_array")
class KnowsNoAliases(Host):
    """Names none."""

    def aliases(self, array: Any) -> Iterable[tuple[str, Any]]:
        return ()


@broken_hooks(f"{VALUES}[int32]", f"{VALUES}[bool]")
class MakesNoCopy(Host):
    """The arrays that it makes are the caller's own memory."""

    def from_numpy(self, values: np.ndarray) -> Any:
        return values


@broken_hooks(f"{VALUES}[int32]", f"{VALUES}[float64]")
class GivesItsMemoryOut(Host):
    """The values that it returns are the device's own memory."""

    def to_numpy(self, array: Any) -> Any:
        return array


@broken_hooks(f"{VALUES}[int32]")
class ReadsZeros(Host):
    """Returns zeros for all values."""

    def to_numpy(self, array: Any) -> Any:
        return np.zeros_like(array)
