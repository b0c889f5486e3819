"""No law, but tests of the hooks: if a hold opened by itself, or held nothing, a backend that breaks the laws could pass.

A failure here is a fault of the hook that it names, not of the backend: each hook is judged by another one, or by the bytes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from xferlib.conformance.base import Laws
from xferlib.conformance.hooks import Direction, Hold
from xferlib.conformance.values import DTYPES, LARGE, SHAPES, Array, assert_same, dtype_named, pattern, words
from xferlib.errors import CapabilityError, TransferError
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["HookChecks"]


class HookChecks(Laws):
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_hook_values_come_back_from_the_device(self, stager: Stager, dtype: str) -> None:
        with suppress(TypeError):
            stager.backend.check_dtype(dtype_named(dtype))
            for seed, shape in enumerate(SHAPES):
                values, given = (pattern(shape, dtype_named(dtype), seed) for _ in range(2))
                array = self.from_numpy(given)
                given.view(np.uint8 if shape else given.dtype)[...] = 0
                got = self.to_numpy(array)
                assert same(got, values), "the hook from_numpy or to_numpy: other values came back than went in"
                got[...] = np.zeros((), got.dtype)
                assert same(self.to_numpy(array), values), "the hook to_numpy gives out the device's own memory"

    def test_hook_hold_compute_holds_what_is_behind_it(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        array = self.from_numpy(values)
        with self.hold_compute(stager.backend) as hold:
            assert hold.held, "the hook hold_compute: `held` says no while nothing was released"
            seen = self.calls.start(self.read_later(array, hold))
            self.assert_holds(lambda: not seen.done(), hold, "hold_compute")
            hold.release()
            # Twice is fine.
            hold.release()
            got = seen.result(self.deadline_seconds)
        assert not hold.held, "the hook hold_compute: `held` says yes after the release"
        assert same(got, values), "the hook read_later read other values than the array has"

    def test_hook_leaving_hold_compute_releases_it(self, stager: Stager) -> None:
        self.warm(stager, words(1))
        array = self.from_numpy(words(1))
        with self.hold_compute(stager.backend) as hold:
            seen = self.calls.start(self.read_later(array, hold))
        assert not hold.held, "the hook hold_compute: leaving it released nothing"
        assert same(seen.result(self.deadline_seconds), words(1)), "the hook read_later read other values than the array has"

    @pytest.mark.parametrize("direction", ["h2d", "d2h", "both"])
    def test_hook_hold_copies_holds_the_copies_that_start_inside(self, stager: Stager, direction: Direction) -> None:
        values = words(1)
        self.warm(stager, values)
        source, array, out = self.pinned(stager, values), self.from_numpy(values), self.pinned(stager, words(2))
        with self.hold_copies(stager.backend, direction) as hold:
            assert hold.held, "the hook hold_copies: `held` says no while nothing was released"
            put, get = stager.put(source), stager.get(array, out=out)
            # Judged by the bytes: whether `done` is right is what other tests judge.
            seen = self.calls.start(lambda: self.to_numpy(put.value))
            self.assert_holds(
                lambda: (
                    (direction == "d2h" or not (seen.done() and same(seen.result(), values)))
                    and (direction == "h2d" or not same(out, values))
                ),
                hold,
                f"hold_copies({direction!r})",
            )
        assert not hold.held, "the hook hold_copies: `held` says yes after it was left"
        get.synchronize()
        assert_same(seen.result(self.deadline_seconds), values)
        assert_same(out, values)

    def test_hook_held_array_gets_its_values_when_released(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        with self.held_array(stager.backend, values) as held:
            assert held.held, "the hook held_array: `held` says no while nothing was released"
            array = held.array
            seen = self.calls.start(lambda: self.to_numpy(array))
            self.assert_holds(lambda: not (seen.done() and same(seen.result(), values)), held, "held_array")
            held.release()
        assert not held.held, "the hook held_array: `held` says yes after the release"
        assert same(self.to_numpy(array), values), "the hook held_array: released, the array has other values than were given"

    def test_hook_read_later_reads_when_it_is_released(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        with self.held_array(stager.backend, values) as held:
            read = self.read_later(held.array, held)
            held.release()
            got = read()
        assert same(got, values), "the hook read_later read what the array held before the release"

    def test_hook_read_later_does_not_keep_the_array(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        array = self.put_values(stager, values)
        with self.hold_compute(stager.backend) as hold:
            read = self.read_later(array, hold)
            gone = weakref.ref(array)
            del array
            gc.collect()
            kept = gone() is not None
            hold.release()
            got = read()
        assert not kept, "the hook read_later keeps the array alive: no test could drop it under its reader"
        assert same(got, values), "the hook read_later read other values than the array has"

    @pytest.mark.parametrize("way", ["put", "get"])
    def test_hook_break_copies_lets_copies_fail(self, stager: Stager, way: str) -> None:
        values = words(1)
        self.warm(stager, values)
        source, array, out = self.pinned(stager, values), self.from_numpy(values), self.pinned(stager, words(2))
        came: list[Array] = []
        with self.break_copies(stager.backend), suppress(TransferError):
            transfer: Transfer = stager.put(source) if way == "put" else stager.get(array, out=out)
            self.assert_completes(transfer)
            # Whether done or not, a copy that failed has left no values behind.
            came.append(self.to_numpy(transfer.value) if way == "put" else out)
        assert not any(same(got, values) for got in came), f"the hook break_copies: a {way} inside went well"

    def test_hook_memory_calls_counts_what_is_taken_and_given_back(self, stager: Stager) -> None:
        def counted(act: Callable[[], object]) -> int:
            before = self.memory_calls(stager.backend)
            kept.append(act())
            return self.memory_calls(stager.backend) - before

        self.let_go()
        kept: list[object] = []
        values = words(1, LARGE)
        source = self.pinned(stager, values)
        word = "the hook memory_calls does not count"
        assert counted(lambda: stager.empty_pinned(2 * LARGE, np.uint8)) > 0, f"{word} pinned memory that is taken"
        assert counted(lambda: stager.put(source).result()) > 0, f"{word} device memory that is taken"
        if stager.capabilities.register:
            assert counted(lambda: stager.pin(values).close()) >= 2, f"{word} page-locks, or unlocks"
        kept.clear()
        gc.collect()
        assert counted(stager.trim) >= 2, f"{word} memory that is given back"
        assert counted(lambda: None) == 0, "the hook memory_calls counts what nobody called"

    def test_hook_page_locked_tells_ordinary_memory_from_pinned(self, stager: Stager) -> None:
        if not stager.capabilities.pinned:
            assert stager.stats().pinned_nbytes == 0
            return
        ordinary = words(1, LARGE)
        start = ordinary.ctypes.data
        for address in (start, start + LARGE // 2, start + LARGE - 1):
            assert not self.page_locked(address), "the hook page_locked says yes of pageable memory"

    def test_hook_write_writes(self, stager: Stager) -> None:
        if not stager.capabilities.mapped:
            with pytest.raises(CapabilityError):
                stager.mapped(stager.empty_pinned(8, np.uint8))
            return
        array = self.from_numpy(words(1))
        self.write(array, words(2))
        assert same(self.to_numpy(array), words(2)), "the hook write left the array as it was"

    def test_hook_layouts_have_the_values(self, stager: Stager) -> None:
        values = pattern((12, 10), np.dtype(np.int32), 3)
        for name, array in self.layouts(values):
            assert same(self.to_numpy(array), values), f"the hook layouts: {name!r} has other values"
        assert stager.stats().h2d_nbytes == 0, "the hook layouts makes its arrays with the stager"

    def test_hook_current_makes_a_stream_the_current_one(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        if not stager.capabilities.streams:
            with pytest.raises(CapabilityError):
                stager.put(values, stream=object())
            return
        with self.held_array(stager.backend, values) as held:
            inside = self.current(held.stream)
            if inside is None:
                return
            with inside:
                # A get waits for the current stream.
                transfer = stager.get(held.array)
            self.assert_holds(lambda: not transfer.done(), held, "current")
        assert_same(transfer.result(), values)

    def test_hook_aliases_share_the_memory_of_the_array(self, stager: Stager) -> None:
        array = self.from_numpy(words(1))
        aliases = dict(self.aliases(array))
        assert aliases, "the hook aliases names none"
        before = {name: self.to_numpy(alias) for name, alias in aliases.items()}
        if not stager.capabilities.put_into:
            with pytest.raises(CapabilityError):
                stager.put(words(2), into=array)
            return
        stager.put(words(2), into=array).synchronize()
        for name, alias in aliases.items():
            assert not same(self.to_numpy(alias), before[name]), f"the hook aliases: {name!r} is a copy"

    def assert_holds(self, true: Callable[[], bool], hold: Hold, hook: str) -> None:
        """Assert that what a hold should prevent does not happen, and that the hold does not open by itself."""
        __tracebackhide__ = True

        def still() -> bool:
            assert hold.held, f"the hook {hook} opened by itself, or `held` changed its mind"
            assert true(), f"the hook {hook} does not hold what is behind it"
            return True

        self.assert_stays(still, hold)


def same(got: Array, want: Array) -> bool:
    """Tell what `assert_same` asserts."""
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()
