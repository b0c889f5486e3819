"""What the laws are written with: a stager to test, calls that may block, and the three things to say about a transfer.

Nothing here decides by a clock: a deadline only turns what never comes into a failure, and a window only gives a wrong backend the
time to show that it is wrong. What belongs to one law alone stands with that law.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar, final

import pytest

from xferlib.conformance.hooks import Hold, Hooks
from xferlib.conformance.values import LARGE, Array, pattern, words
from xferlib.errors import BackendUnavailableError, CapabilityError, SynchronousTransferWarning, TransferError
from xferlib.protocol import HostStager
from xferlib.reaper import watch
from xferlib.registry import GROUP
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["POLL_SECONDS", "REQUIRE", "SCARCE", "WINDOW_SECONDS", "Laws", "ThreadedCalls"]

REQUIRE = "XFERLIB_REQUIRE"
"""Environment variable: names of backends, comma separated, that may not be skipped."""

POLL_SECONDS = 0.001
WINDOW_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""How long the reaper may take to give back what closed stagers left."""
MOST_PUTS = 100
"""More than the blocks of one size that any law leaves idle: a put that still finds one free gets the same memory every time."""
SCARCE = LARGE // 3
"""Bytes as a `pinned_limit`: room to stage a part of a large array. While copies are held, the rest cannot have been read."""

T = TypeVar("T")


@final
class ThreadedCalls:
    """Calls on threads of their own, so that a call that blocks is a failure and not a hang."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Call the function now, elsewhere. The call holds the function only until it has returned."""
        call: Future[T] = Future()
        thread = threading.Thread(target=_run, args=([function], call), daemon=True)
        self._threads.append(thread)
        thread.start()
        return call

    def join(self, seconds: float) -> None:
        """Wait until every call has returned."""
        for thread in self._threads:
            thread.join(seconds)
        blocked = sum(thread.is_alive() for thread in self._threads)
        assert blocked == 0, f"{blocked} calls are still blocked after all holds were released"


def _run(functions: list[Callable[[], T]], call: Future[T]) -> None:
    try:
        value = functions.pop()()
    except BaseException as error:  # Any error belongs to the thread that asks for the result.
        call.set_exception(error)
    else:
        call.set_result(value)


@final
class _Look:
    """The last thing that the reaper looks at. It looks in the order of asking, so everything before this one is then settled."""

    def __init__(self) -> None:
        self.taken = threading.Event()

    def settle(self) -> bool:
        self.taken.set()
        return False


class Laws(Hooks):
    """The ground of every group of laws. Tests call `assert_...` and the hooks, and nothing of a backend's own."""

    deadline_seconds: ClassVar[float] = 5.0
    """The longest time that something which must happen may take, on the slowest machine. Shorter than a hold's watchdog."""

    calls: ThreadedCalls

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _spare_the_collector(cls) -> Iterator[None]:
        """Hide earlier objects from the garbage collector: the laws call it often, and it would go through all of them."""
        frozen = gc.get_freeze_count()
        gc.collect()
        gc.freeze()
        yield
        # A suite that has hidden its own does not want them back.
        if not frozen:
            gc.unfreeze()

    @pytest.fixture
    def stager(self) -> Iterator[Stager]:
        self.calls = ThreadedCalls()
        stager = self.new_stager()
        yield stager
        self.calls.join(self.deadline_seconds)
        stager.close()

    @pytest.fixture(autouse=True)
    def _put_pageable_memory_on_purpose(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SynchronousTransferWarning)
            yield

    @pytest.fixture(autouse=True)
    def _expect_known_failure(self, request: pytest.FixtureRequest) -> None:
        node: pytest.Function = request.node
        for name in (node.name, node.originalname):
            if name in self.known_failures:
                node.add_marker(pytest.mark.xfail(strict=True, reason=self.known_failures[name]))

    def new_stager(self, *, staging: str | None = None, pinned_limit: int | None = None) -> Stager:
        """Open the backend and wrap it, or skip: here and nowhere else. The rest: as the arguments of these names."""
        return Stager(self._open_or_skip(), staging=staging, pinned_limit=pinned_limit)

    def assert_returns(self, function: Callable[[], T]) -> T:
        """Assert that the call returns while nothing is released, and return its result."""
        __tracebackhide__ = True
        call = self.calls.start(function)
        wait([call], self.deadline_seconds)
        assert call.done(), f"the call has not returned after {self.deadline_seconds} s: it waits for what is held"
        return call.result()

    def assert_arrives(self, start: Callable[[], Transfer]) -> Any:
        """Assert that a transfer can be started, does not fail, and is done at some point; return its arrays."""
        __tracebackhide__ = True
        try:
            return start().result(self.deadline_seconds)
        except (TransferError, TimeoutError) as error:
            pytest.fail(f"{type(error).__name__}: {error}")

    def assert_completes(self, transfer: Transfer) -> None:
        """Assert that the transfer becomes done by itself, while it is only asked and nobody synchronizes."""
        __tracebackhide__ = True
        self.assert_comes(transfer.done, lambda: f"{transfer!r} is not done after {self.deadline_seconds} s")

    def assert_stays_undone(self, transfer: Transfer, hold: Hold) -> None:
        """Assert that the transfer is not done as long as the hold holds it."""
        __tracebackhide__ = True
        self.assert_stays(lambda: not transfer.done(), hold)

    def assert_stays(self, true: Callable[[], bool], hold: Hold) -> None:
        """Assert that something stays as it is while held.

        A right backend passes at any moment; the window gives a wrong one the time to fail.
        """
        __tracebackhide__ = True
        end = time.monotonic() + WINDOW_SECONDS
        while time.monotonic() < end:
            assert true(), "it came to pass while what it must wait for was held"
            time.sleep(POLL_SECONDS)
        assert hold.held

    def assert_comes(self, true: Callable[[], bool], otherwise: Callable[[], str]) -> None:
        """Assert that something becomes true by itself; `otherwise` says what was found instead."""
        __tracebackhide__ = True
        deadline = time.monotonic() + self.deadline_seconds
        while not true():
            assert time.monotonic() < deadline, otherwise()
            time.sleep(POLL_SECONDS)

    def put_into_is_refused(self, stager: Stager) -> bool:
        """Return False where `put_into` is on. Where it is off, assert the refusal: there is nothing else to test."""
        if stager.capabilities.put_into:
            return False
        with pytest.raises(CapabilityError):
            stager.put(words(1), into=self.from_numpy(words(2)))
        return True

    def pinned(self, stager: Stager, values: Array) -> Array:
        """Return a copy of the values in memory from `empty_pinned`."""
        copy = stager.empty_pinned(values.shape, values.dtype)
        copy[...] = values
        return copy

    def put_values(self, stager: Stager, values: Array) -> Any:
        """Return a device array with these values in memory of the stager's, finished."""
        return stager.put(self.pinned(stager, values)).result()

    def read_on(self, stager: Stager, transfer: Transfer, hold: Hold) -> Callable[[], Array]:
        """Enqueue a reader of what was put, on the hold's stream. The transfer is told of that stream."""
        array = transfer.value
        if stager.capabilities.streams:
            transfer.stream_wait(hold.stream)
        return self.read_later(array, hold)

    def put_others(self, stager: Stager, values: Array, *, at_least: int = 1) -> list[Transfer]:
        """Put other values of the same size until no device memory of that size is free, and keep all of it.

        So memory that was wrongly taken for free is now rewritten. A put into new memory may have to wait for held work.
        """
        taken = stager.stats().device_nbytes
        kept: list[Transfer] = []
        while len(kept) < at_least or stager.stats().device_nbytes == taken:
            assert len(kept) < MOST_PUTS, f"{MOST_PUTS} arrays that are all kept share memory that was free after the first"
            others = pattern(values.shape, values.dtype, 100 + len(kept))
            kept.append(stager.put(self.pinned(stager, others)))
            if stager.stats().device_nbytes == taken:
                self.assert_completes(kept[-1])
        return kept

    def warm(self, stager: Stager, values: Array) -> None:
        """Run once what will run under a hold: memory for several transfers of this size each way, readers, first launches.

        It leaves other bytes than the values in that memory.
        """
        self.let_go()
        others = pattern(values.shape, values.dtype, 99)
        arrays = [self.put_values(stager, others) for _ in range(8)]
        results = [stager.get(array).result() for array in arrays]
        stager.put(others.copy()).result()
        stager.get(arrays[0], out=results[0].copy()).result()
        with self.hold_compute(stager.backend) as hold:
            read = self.read_later(arrays[0], hold)
            hold.release()
            read()
        with self.held_array(stager.backend, values) as held:
            held.release()
        del arrays, results, read, held, hold
        gc.collect()

    def warm_staging(self, scarce: Stager) -> None:
        """Stage a large array once by a stager with little pinned memory, less than `warm` would ask for."""
        self.warm(scarce, words(99))
        scarce.put(words(99, LARGE), borrow=True).synchronize()
        gc.collect()

    def let_go(self) -> None:
        """Let what earlier tests left behind be given back now, including what their exceptions hold.

        If it came later, it would wait for held work under a hold, or be counted elsewhere.
        """
        gc.collect()
        look = _Look()
        watch(look)
        look.taken.wait(LOOK_SECONDS)

    def _open_or_skip(self) -> HostStager[Any]:
        try:
            return self.open()
        except BackendUnavailableError as error:
            required = {name.strip() for name in os.environ.get(REQUIRE, "").split(",")} - {""}
            name = self._backend_name()
            # If the name is unknown, nobody can say that it is not required.
            if required and (name is None or name in required):
                pytest.fail(f"{REQUIRE}={os.environ[REQUIRE]} forbids to skip this: {error}")
            pytest.skip(str(error))

    def _backend_name(self) -> str | None:
        """Return the name under which the package of the hooks is installed as a backend, or None."""
        modules = {cls.__module__ for cls in type(self).__mro__}
        for entry in entry_points(group=GROUP):
            if any(module == entry.module or module.startswith(f"{entry.module}.") for module in modules):
                return entry.name
        return None
