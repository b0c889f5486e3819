"""Law 14. Memory that the library took is released once, when nobody holds it any more; memory of others is never written.

Python finalizes all objects that become unreachable together, in any order, and a finalizer of the user's among them may still read
an array, put another one, or bring the array back. Memory that was released or handed out too early then shows up by its bytes.
Memory that was released twice, or never, shows up at the border between core and backend, where every such call is recorded.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest

from xferlib.conformance.base import POLL_SECONDS, WINDOW_SECONDS, Laws
from xferlib.conformance.recording import RecordingBackend
from xferlib.conformance.values import LARGE, SMALL, Array, assert_same, words
from xferlib.errors import CapabilityError, TransferError
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["OwnershipLaws"]


class RecordedStager(NamedTuple):
    """A stager, and the record of what its core takes and gives back."""

    stager: Stager
    memory: RecordingBackend


class Finalizer:
    """An object of the user's that does something when it is finalized, and notes what that raised."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act: Callable[[], None] | None = act
        self.cell: object = None
        self.errors: list[BaseException] = []

    def __del__(self) -> None:
        act, self.act = self.act, None
        try:
            if act is not None:
                act()
        except BaseException as error:
            self.errors.append(error)


class OwnershipLaws(Laws):
    @pytest.fixture
    def recorded(self, stager: Stager) -> Iterator[RecordedStager]:
        """A second stager, whose calls are recorded. After each test everything has been given back, once."""
        self.let_go()
        memory = RecordingBackend(self._open_or_skip())
        recorded = RecordedStager(Stager(memory), memory)
        yield recorded
        self.calls.join(self.deadline_seconds)
        recorded.stager.close()

    @pytest.mark.parametrize("where", ["here", "elsewhere"])
    @pytest.mark.parametrize("order", ["before the array", "after the array"])
    def test_law14_an_array_that_dies_in_a_cycle_is_whole_for_its_finalizers(
        self, recorded: RecordedStager, order: str, where: str
    ) -> None:
        values = words(1)
        self.warm(recorded.stager, values)
        seen: list[Array] = []
        saved: list[Any] = []
        kept: list[Any] = []

        def act(cell: list[Any]) -> None:
            # If the block was taken for free, it is given to these.
            kept.extend(self.put_in_a_finalizer(recorded.stager, values, cell[0]))
            seen.append(self.to_numpy(cell[0]))
            saved.append(cell[0])

        with collector_off():
            errors = self.make_cycle(recorded.stager, values, act, order)
            self.calls.start(gc.collect).result() if where == "elsewhere" else gc.collect()
        assert errors == []
        assert_same(seen[0], values)
        kept += self.put_others(recorded.stager, values)
        assert_same(self.to_numpy(saved[0]), values)
        saved.clear()
        kept.clear()
        gc.collect()
        self.assert_all_given_back(recorded)

    @pytest.mark.parametrize("state", ["open", "closed"])
    def test_law14_an_array_outlives_the_stager_that_it_dies_with(self, stager: Stager, state: str) -> None:
        values = words(1)
        self.warm(stager, values)
        memory = RecordingBackend(self._open_or_skip())
        saved: list[Any] = []
        with collector_off(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            dying = Stager(memory)
            errors = self.make_cycle(dying, values, lambda cell: saved.append(cell[0]), "after the array", dying)
            if state == "closed":
                dying.close()
            del dying
            gc.collect()
            # A stager that was open is closed by a thread of its own.
            self.assert_comes(lambda: memory.closed, lambda: "a stager that died in a cycle was not closed")
            others = [self.from_numpy(words(seed)) for seed in range(60, 64)]
            kept = self.put_others(stager, values)
            assert errors == []
            assert_same(self.to_numpy(saved[0]), values)
            assert len(memory.blocks) >= 1
            saved.clear()
            self.assert_comes(lambda: not memory.left, lambda: f"still had by a stager that is gone: {memory.left}")
        assert memory.wrong == []
        for seed, other in enumerate(others, 60):
            assert_same(self.to_numpy(other), words(seed))
        del kept

    @pytest.mark.parametrize("way", ["trim", "unpin", "close"])
    def test_law14_other_threads_run_while_memory_is_released(self, stager: Stager, recorded: RecordedStager, way: str) -> None:
        """To release memory may take as long as what runs on the device, and so may a put that is started meanwhile, where the
        driver lets one call wait for another. The interpreter is free all that time."""
        releasing, memory = recorded
        values = words(1, LARGE)
        self.warm(stager, values)
        self.warm(releasing, values)
        source = self.pinned(stager, values)
        release = releasing.close if way == "close" else releasing.trim
        if way == "unpin" and memory.capabilities.register:
            release = releasing.pin(values).close
        begun, turn = [], threading.Event()

        def tell() -> None:
            begun.append(time.monotonic())
            turn.set()

        def open_gate() -> tuple[float, Future[Array]]:
            turn.wait()
            putting = self.calls.start(lambda: self.to_numpy(stager.put(source).result()))
            # Until it waits, or has finished.
            for _ in range(round(WINDOW_SECONDS / POLL_SECONDS)):
                time.sleep(POLL_SECONDS)
            late = time.monotonic() - begun[0]
            hold.release()
            return late, putting

        interval = sys.getswitchinterval()
        with self.hold_compute(memory.inner) as hold:
            opening = self.calls.start(open_gate)
            memory.before_release = tell
            # A thread that releases memory, or puts, runs until it waits or gives up the interpreter, before any other runs.
            sys.setswitchinterval(10 * self.deadline_seconds)
            try:
                release()
            finally:
                sys.setswitchinterval(interval)
                memory.before_release = bool
                assert begun, "nothing was released"
            late, putting = opening.result(self.deadline_seconds)
            assert late < self.deadline_seconds, f"no other thread ran for {late:.1f} s while memory was released"
            assert_same(putting.result(self.deadline_seconds), values)

    @pytest.mark.parametrize("what", ["small", "large", "tree"])
    def test_law14_memory_that_nobody_holds_is_released_by_trim(self, recorded: RecordedStager, what: str) -> None:
        stager, memory = recorded
        tree = {"small": words(1), "large": words(1, LARGE), "tree": [words(1, SMALL), words(2, LARGE), words(3, 64)]}[what]
        arrays = stager.put(tree).result()
        # From here on no host memory is idle.
        stager.trim()
        del arrays
        gc.collect()
        had, calls = len(memory.blocks), self.memory_calls(memory.inner)
        assert had >= 1
        stager.trim()
        assert memory.blocks == set()
        assert stager.stats().device_nbytes == 0
        assert self.memory_calls(memory.inner) >= calls + had, "the driver saw fewer frees than the backend was asked for"
        calls = self.memory_calls(memory.inner)
        stager.trim()
        assert self.memory_calls(memory.inner) == calls
        self.assert_all_given_back(recorded)

    def test_law14_nothing_is_released_that_an_array_or_an_alias_reaches(self, recorded: RecordedStager) -> None:
        stager, memory = recorded
        names = [name for name, _ in self.aliases(self.put_values(stager, words(1)))]
        for name in names:
            array = self.put_values(stager, words(1))
            (alias,) = [alias for known, alias in self.aliases(array) if known == name]
            block = memory.block_of(array)
            stager.trim()
            assert block in memory.blocks
            assert_same(self.to_numpy(array), words(1))
            want = self.to_numpy(alias)
            del array
            gc.collect()
            stager.trim()
            # Memory that was freed last is handed out first.
            others = [self.from_numpy(words(seed)) for seed in range(60, 64)]
            assert_same(self.to_numpy(alias), want)
            del alias, others
            gc.collect()
            self.assert_comes(lambda: self.is_trimmed(recorded), lambda: f"kept by nothing, after {name!r} was dropped")  # noqa: B023
        self.assert_all_given_back(recorded)

    def test_law14_nothing_is_released_that_a_put_writes(self, recorded: RecordedStager) -> None:
        stager, memory = recorded
        source = self.pinned(stager, words(1))
        stager.put(source).synchronize()
        gc.collect()
        with self.hold_copies(memory.inner, "h2d") as hold:
            stager.put(source)
            gc.collect()
            block = memory.written
            assert block is not None, "the put writes memory that was given back"
            trimming = self.calls.start(stager.trim)
            self.assert_stays(lambda: block in memory.blocks, hold)
        trimming.result(self.deadline_seconds)
        stager.put(source).synchronize()
        del source
        gc.collect()
        self.assert_all_given_back(recorded)

    def test_law14_nothing_is_released_that_a_get_reads(self, recorded: RecordedStager) -> None:
        stager, memory = recorded
        values = words(1)
        array, out = self.put_values(stager, values), self.pinned(stager, words(2))
        stager.get(array, out=out).synchronize()
        out[...] = words(2)
        block = memory.block_of(array)
        with self.hold_copies(memory.inner, "d2h") as hold:
            stager.get(array, out=out)
            del array
            gc.collect()
            trimming = self.calls.start(stager.trim)
            self.assert_stays(lambda: block in memory.blocks, hold)
        trimming.result(self.deadline_seconds)
        # A direction is first in, first out.
        stager.get(self.from_numpy(values)).synchronize()
        assert_same(out, values)
        del out
        gc.collect()
        self.assert_all_given_back(recorded)

    @pytest.mark.parametrize("what", ["array", "leaf"])
    def test_law14_a_closed_stager_releases_what_its_last_array_leaves(self, recorded: RecordedStager, what: str) -> None:
        stager, memory = recorded
        values = words(1)
        arrays = stager.put(values if what == "array" else [words(2), values]).result()
        held = arrays if what == "array" else arrays[1]
        del arrays
        gc.collect()
        stager.close()
        had = len(memory.blocks)
        # The leaves of a tree may be copies of what is in the block.
        assert had == 1 or what == "leaf"
        calls = self.memory_calls(memory.inner)
        assert_same(self.to_numpy(held), values)
        del held
        gc.collect()
        # Nobody calls the stager any more.
        self.assert_comes(lambda: not memory.left, lambda: f"still had: {memory.left}")
        self.assert_comes(lambda: self.memory_calls(memory.inner) >= calls + had, lambda: "the driver saw no free")
        assert memory.wrong == []

    def test_law14_memory_of_a_failed_transfer_is_released(self, recorded: RecordedStager) -> None:
        self.fail_all(recorded)
        gc.collect()
        self.assert_all_given_back(recorded)

    def test_law14_host_memory_is_given_back_once(self, recorded: RecordedStager) -> None:
        stager, memory = recorded
        array = self.pinned(stager, words(1))
        got = stager.get(self.put_values(stager, words(2))).result()
        own = [words(3, LARGE), words(4, LARGE)]
        # Left to `close`.
        pins: list[object] = []
        if stager.capabilities.register:
            with stager.pin(own[0]):
                stager.put(own[0]).synchronize()
            pins.append(stager.pin(own[1]))
            assert memory.left["pin"] >= 1
        else:
            with pytest.raises(CapabilityError):
                stager.pin(own[1])
        cell: list[Any] = [array[1:], got]
        cell.append(cell)
        del array, got
        stager.close()
        assert_same(cell[0], words(1)[1:])
        assert_same(cell[1], words(2))
        assert memory.left != {}
        del cell
        gc.collect()
        self.assert_all_given_back(recorded)

    def test_law14_memory_of_others_is_never_written(self, stager: Stager, recorded: RecordedStager) -> None:
        sizes = (SMALL, 64, LARGE)
        others: list[tuple[Any, Array]] = []
        for seed, trims in enumerate((False, True), 60):
            self.drop_in_a_cycle(recorded.stager, sizes)
            if trims:
                recorded.stager.trim()
            # Made right after ours were dropped or freed, so that the framework may place them where ours lay.
            for nbytes in sorted(recorded.memory.sizes):
                for turn in range(3):
                    values = words(seed + 10 * turn, nbytes)
                    others.append((self.from_numpy(values), values))
            for user in (recorded.stager, stager):
                self.move_about(user, sizes, others[-1])
        for other, values in others:
            assert_same(self.to_numpy(other), values)
        self.assert_all_given_back(recorded)
        for other, values in others:
            assert_same(self.to_numpy(other), values)

    def fail_all(self, recorded: RecordedStager) -> None:
        """Make a put, a put of a tree and a get fail, each in its own way."""
        stager, memory = recorded
        source, array = self.pinned(stager, words(1)), self.put_values(stager, words(1))
        starts: tuple[Callable[[], Transfer], ...] = (
            lambda: stager.put(source),
            lambda: stager.put([source, words(2)]),
            lambda: stager.get(array),
        )
        with self.break_copies(memory.inner):
            for start in starts:
                with suppress(TransferError):
                    start().synchronize()

    def make_cycle(
        self, stager: Stager, values: Array, act: Callable[[list[Any]], None], order: str, *more: object
    ) -> list[BaseException]:
        """Put the values and leave the array, its transfer and a finalizer to each other; return what the finalizer will raise.

        The collector finalizes in the order in which objects were made.
        """
        cell: list[Any] = []
        if order == "before the array":
            finalizer = Finalizer(lambda: act(cell))
            transfer = stager.put(self.pinned(stager, values))
        else:
            transfer = stager.put(self.pinned(stager, values))
            finalizer = Finalizer(lambda: act(cell))
        finalizer.cell = cell
        cell += [transfer.result(), transfer, finalizer, *more]
        return finalizer.errors

    def put_in_a_finalizer(self, stager: Stager, values: Array, array: Any) -> list[Any]:
        """Put other values, or check that a transfer in a finalizer is refused."""
        if stager.capabilities.finalizers:
            return self.put_others(stager, values)
        with pytest.raises(CapabilityError):
            stager.put(values)
        with pytest.raises(CapabilityError):
            stager.get(array)
        return []

    def drop_in_a_cycle(self, stager: Stager, sizes: tuple[int, ...]) -> None:
        with collector_off():
            for size in sizes:
                transfer = stager.put(words(7, size))
                cell: list[Any] = [transfer.result(), transfer]
                cell.append(cell)
            del cell, transfer
            gc.collect()

    def move_about(self, stager: Stager, sizes: tuple[int, ...], other: tuple[Any, Array]) -> None:
        """Put, get and overwrite, trim in between, and see that the bytes are right."""
        for size in sizes:
            values = words(5, size)
            array = self.put_values(stager, values)
            assert_same(stager.get(array).result(), values)
            if stager.capabilities.put_into:
                stager.put(words(6, size), into=array).synchronize()
                assert_same(self.to_numpy(array), words(6, size))
            else:
                with pytest.raises(CapabilityError):
                    stager.put(other[1], into=other[0])
            kept = self.put_others(stager, values)
            stager.trim()
            del kept, array

    def is_trimmed(self, recorded: RecordedStager) -> bool:
        """Trim, and tell whether no device memory is left. A framework may take some time to let go of what its work has used."""
        recorded.stager.trim()
        return not recorded.memory.blocks

    def assert_all_given_back(self, recorded: RecordedStager) -> None:
        """Close, and assert that all memory is given back, each once. The caller holds none of it any more."""
        recorded.stager.close()
        # What failed refers to itself: its traceback leads to the frames in which it was raised.
        gc.collect()
        self.assert_comes(lambda: not recorded.memory.left, lambda: f"still had after close: {recorded.memory.left}")
        assert recorded.memory.wrong == []


@contextmanager
def collector_off() -> Iterator[None]:
    """Let the collector run only where it is called explicitly."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
