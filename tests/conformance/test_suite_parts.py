"""What the laws are written with: the assertions, the patterns, and the gates of the host's hooks, each shown to say no."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import xferlib_host.conformance
from xferlib_host import Stream
from xferlib_host.conformance import Gate
from xferlib_host.conformance import TestHost as Host

from tests.core.garbage import Garbage
from xferlib.conformance import cuda
from xferlib.conformance.base import REQUIRE, ThreadedCalls
from xferlib.conformance.moves import prepare
from xferlib.conformance.recording import RecordingBackend
from xferlib.conformance.values import DTYPES, LARGE, SHAPES, SIZES, assert_same, dtype_named, others, pattern, words
from xferlib.errors import BackendUnavailableError
from xferlib.registry import GROUP
from xferlib.stager import Stager


class Quick(Host):
    __test__: ClassVar[bool] = False
    deadline_seconds: ClassVar[float] = 0.05


class Held:
    """A hold that stays as it is told."""

    stream = None

    def __init__(self, held: bool = True) -> None:
        self.held = held

    def release(self) -> None: ...


class Transfer:
    """One that is done, or not, or has failed."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done


def laws() -> Any:
    made: Any = Quick()
    made.calls = ThreadedCalls()
    return made


@pytest.mark.parametrize(
    ("got", "want"),
    [
        pytest.param(np.zeros(4, np.int32), np.zeros(4, np.uint32), id="another dtype"),
        pytest.param(np.zeros(4, np.float32), np.zeros(4, np.int32), id="a dtype of the same size"),
        pytest.param(np.zeros((2, 2), np.int32), np.zeros(4, np.int32), id="another shape"),
        pytest.param(np.zeros((1,), np.int32), np.zeros((), np.int32), id="an axis more"),
        pytest.param(np.array([0, 1], np.uint8), np.array([0, 3], np.uint8), id="the last byte"),
        pytest.param(np.array([0.0]), np.array([-0.0]), id="equal numbers of other bits"),
    ],
)
def test_arrays_that_differ_are_not_the_same(got: Any, want: Any) -> None:
    with pytest.raises(AssertionError):
        assert_same(got, want)


def test_arrays_of_the_same_bits_are_the_same() -> None:
    assert_same(np.array([np.nan, 1.0]), np.array([np.nan, 1.0]))
    assert_same(np.zeros((3, 2), np.int8).T, np.zeros((2, 3), np.int8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if np.prod(shape) > 8])
def test_patterns_differ_from_seed_to_seed_and_from_nothing(dtype: str, shape: tuple[int, ...]) -> None:
    one, other = (pattern(shape, dtype_named(dtype), seed) for seed in (1, 2))
    assert one.shape == shape
    assert one.dtype == dtype_named(dtype)
    assert one.tobytes() != other.tobytes()
    assert any(one.tobytes())
    assert any(other.tobytes())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_others_differ_in_every_element_and_in_nothing_else(dtype: str, shape: tuple[int, ...]) -> None:
    values = pattern(shape, dtype_named(dtype), 1)
    found = others(values)
    assert (found.shape, found.dtype) == (values.shape, values.dtype)
    assert all(one.tobytes() != other.tobytes() for one, other in zip(values.reshape(-1), found.reshape(-1), strict=True))
    assert_same(others(found), values)
    assert_same(others(values.T), found.T.copy())


def test_calls_of_a_module_are_counted_by_name() -> None:
    module = SimpleNamespace(double=lambda number: 2 * number, fail=lambda: 1 / 0, other=lambda: None)
    calls = cuda.count_calls(module, ("double", "fail"))
    assert calls().total() == 0
    assert [module.double(3), module.double(4), module.other()] == [6, 8, None]
    with pytest.raises(ZeroDivisionError):
        module.fail()
    assert calls() == {"double": 2, "fail": 1}


def test_words_of_any_two_seeds_that_laws_use_differ_in_every_byte() -> None:
    seen = [np.frombuffer(words(seed).tobytes(), np.uint8) for seed in (*range(10), 50, 60, 90, 98, 99, 100, 101)]
    for index, one in enumerate(seen):
        assert not any((one == other).any() for other in seen[:index])


@pytest.mark.parametrize("name", ["first", "last"])
def test_hooks_are_those_of_the_backend_in_whose_package_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint(each, f"xferlib_{each}:open_stager", GROUP) for each in ("first", "last")]
    monkeypatch.setattr("xferlib.conformance.base.entry_points", lambda group: entries)

    def absent(hooks: object) -> None:
        raise BackendUnavailableError("no such device")

    hooks: Any = type("Hooks", (Quick,), {"__module__": f"xferlib_{name}.conformance", "open": absent})()
    monkeypatch.setenv(REQUIRE, "another")
    with pytest.raises(pytest.skip.Exception):
        hooks._open_or_skip()
    monkeypatch.setenv(REQUIRE, name)
    with pytest.raises(pytest.fail.Exception, match="forbids to skip this: no such device"):
        hooks._open_or_skip()


def test_a_call_that_never_returns_is_a_failure() -> None:
    blocked, made = threading.Event(), laws()
    with pytest.raises(AssertionError, match="has not returned after"):
        made.assert_returns(blocked.wait)
    with pytest.raises(AssertionError, match="1 calls are still blocked"):
        made.calls.join(0.01)
    blocked.set()
    made.calls.join(10)


def test_what_a_call_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        laws().assert_returns(lambda: 1 / 0)


def test_a_transfer_that_is_never_done_is_a_failure() -> None:
    with pytest.raises(AssertionError, match=r"is not done after 0\.05 s"):
        laws().assert_completes(Transfer(lambda: False))
    laws().assert_completes(Transfer(lambda: True))


def test_what_comes_to_pass_under_a_hold_is_a_failure() -> None:
    end = time.monotonic() + 0.02
    with pytest.raises(AssertionError, match="it came to pass while what it must wait for was held"):
        laws().assert_stays(lambda: time.monotonic() < end, Held())
    with pytest.raises(AssertionError):
        laws().assert_stays_undone(Transfer(lambda: True), Held())
    laws().assert_stays_undone(Transfer(lambda: False), Held())


def test_what_stays_while_nothing_is_held_proves_nothing() -> None:
    with pytest.raises(AssertionError):
        laws().assert_stays(lambda: True, Held(held=False))


def test_letting_go_leaves_nothing_with_the_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = []
    monkeypatch.setattr("xferlib.conformance.base.watch", lambda look: answers.append(look.settle()))
    laws().let_go()
    assert answers == [False]


def test_what_does_not_come_is_a_failure_in_its_own_words() -> None:
    with pytest.raises(AssertionError, match="as it was"):
        laws().assert_comes(lambda: False, lambda: "as it was")


def test_a_transfer_that_fails_has_not_arrived() -> None:
    backend: Any = Host().open()
    with Stager(backend) as stager:
        assert_same(laws().assert_arrives(lambda: stager.put(words(1))), words(1))
        backend.h2d.submit(lambda: 1 / 0)
        with pytest.raises(pytest.fail.Exception, match="TransferError: the copy"):
            laws().assert_arrives(lambda: stager.put(words(1)))


def test_other_puts_go_on_until_no_memory_of_that_size_is_free() -> None:
    with Stager(Host().open()) as stager:
        arrays = [stager.put(words(seed)).result() for seed in range(5)]
        taken = stager.stats().device_nbytes
        del arrays
        kept = laws().put_others(stager, words(1), at_least=2)
        assert len(kept) == 6
        assert stager.stats().device_nbytes > taken


@pytest.mark.parametrize("size", SIZES)
def test_what_is_warm_takes_no_memory_in_any_way(size: str) -> None:
    """Under a hold a call for memory may wait for what is held."""
    values = words(1, SIZES[size])
    backend = Host().open()
    with Stager(backend) as stager:
        array, pinned, pageable = laws().from_numpy(values), laws().pinned(stager, values), values.copy()
        laws().warm(stager, values)
        before = laws().memory_calls(backend)
        for source in (pinned, pageable):
            stager.put(source).result()
        stager.get(array).result()
        for out in (pinned, pageable):
            stager.get(array, out=out).result()
        assert laws().memory_calls(backend) == before


def test_other_puts_into_memory_that_was_free_have_rewritten_it() -> None:
    with Stager(Host().open()) as stager:
        # Dropped at once: the next put takes its memory.
        stager.put(words(1)).synchronize()
        with Host().hold_copies(stager.backend, "h2d"), pytest.raises(AssertionError, match=r"is not done after 0\.05 s"):
            laws().put_others(stager, words(1))
        assert all(transfer.done() for transfer in laws().put_others(stager, words(1))[:-1])


def test_what_overwrites_free_pinned_memory_finds_what_was_let_go_of() -> None:
    values = words(1, LARGE)
    with Stager(Host().open()) as stager:
        memory = laws().pinned(stager, values)
        address = memory.ctypes.data
        del memory
        kept = laws().overwrite_free_pinned(stager, values)
        assert address in [memory.ctypes.data for memory, _ in kept]
        for memory, others in kept:
            assert_same(memory, others)
            assert memory.nbytes == values.nbytes
            assert not (memory == values).any()


@pytest.mark.parametrize(
    ("way", "source", "target"),
    [
        ("put", "pinned", None),
        ("put_pageable", "pageable", None),
        ("put_into", "pinned", "pageable"),
        ("get", "pageable", None),
        ("get_out", "pageable", "pinned"),
        ("get_pageable_out", "pageable", "pageable"),
    ],
)
def test_a_move_goes_the_way_that_it_is_named_after(
    way: str, source: str, target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays of the host backend's device, where the test makes them, are pageable memory."""
    seen: list[tuple[Any, Any]] = []
    put, get = Stager.put, Stager.get

    def seen_put(stager: Stager, tree: Any, *, into: Any = None, **options: Any) -> Any:
        seen.append((tree, into))
        return put(stager, tree, into=into, **options)

    def seen_get(stager: Stager, tree: Any, *, out: Any = None, **options: Any) -> Any:
        seen.append((tree, out))
        return get(stager, tree, out=out, **options)

    monkeypatch.setattr(Stager, "put", seen_put)
    monkeypatch.setattr(Stager, "get", seen_get)
    with Stager(Host().open()) as stager:

        def kind(array: Any) -> str | None:
            if array is None:
                return None
            return "pinned" if stager.backend.is_pinned(array.ctypes.data, array.nbytes) else "pageable"

        move = prepare(laws(), stager, way, words(1))
        assert move.direction == ("h2d" if way.startswith("put") else "d2h")
        seen.clear()
        transfer = move.start()
        ((given, into),) = seen
        assert (kind(given), kind(into)) == (source, target)
        transfer.synchronize()
        assert_same(move.read(transfer), words(1))
        if into is not None:
            assert_same(into, words(1))


def test_a_gate_that_was_given_up_holds_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xferlib_host.conformance, "WATCHDOG_SECONDS", 0.01)
    with Stream() as stream:
        gate = Gate([stream.submit], stream)
        stream.synchronize()
        assert not gate.held
        with pytest.raises(TimeoutError, match="something waited for what it held"):
            gate.finish()
        stream.close()


def test_a_record_names_what_is_left_and_what_was_given_back_twice() -> None:
    with Stager(RecordingBackend(Host().open())) as stager:
        memory: RecordingBackend = stager.backend  # type: ignore[assignment]  # A proxy has what is asked of it.
        first, second = memory.alloc_pinned(4096), memory.alloc_pinned(4096)
        memory.free_pinned(first)
        assert memory.left == {"pinned": 1}
        with pytest.raises(memory.failures):
            memory.free_pinned(first)
        memory.free_pinned(second)
        assert memory.left == {}
        assert len(memory.wrong) == 1
        assert "perhaps it was given back twice" in memory.wrong[0]


def test_a_record_is_read_while_finalizers_take_and_give_back() -> None:
    """On Python 3.11 the collector may run between any two objects that a list of pairs is made of."""
    memory = RecordingBackend(Host().open())
    for number in range(2000):
        memory._take("device", number, 1)
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(50)
        for number in range(2000, 2020):
            Garbage(lambda: memory._take("device", number, 1), [])  # noqa: B023  # Called in this turn, or in a later one: any will do.
            assert memory._block_at(number - 1) in (number - 1, None)
            assert memory._block_at(7) == 7
    finally:
        gc.set_threshold(*threshold)
        memory.close()
