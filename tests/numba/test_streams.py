"""Consumer streams: whatever names a stream is waited for and waits, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
import pytest
from xferlib_numba import conformance

from xferlib.conformance import cuda
from xferlib.conformance.values import LARGE, assert_same, words
from xferlib.stager import Stager

THREADS = 8
ROUNDS = 30


class Named(NamedTuple):
    name: Any
    """What is passed as `stream=`."""
    stream: Any
    """Numba's object for the same stream, to launch work on."""


@final
class Foreign:
    """A stream of some other library's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self._stream.handle)


def non_blocking() -> Any:
    return conformance.bench().non_blocking()


def external_stream() -> Named:
    stream = non_blocking()
    return Named(stream, stream)


def stream_of_numba() -> Named:
    stream = conformance.bench().cuda.stream()
    return Named(stream, stream)


def handle() -> Named:
    stream = non_blocking()
    return Named(int(stream.handle), stream)


def foreign_object() -> Named:
    stream = non_blocking()
    return Named(Foreign(stream), stream)


def default_stream() -> Named:
    module = conformance.bench().cuda
    return Named(module.default_stream(), module.legacy_default_stream())


def legacy_default_stream() -> Named:
    stream = conformance.bench().cuda.legacy_default_stream()
    return Named(stream, stream)


def per_thread_default_stream() -> Named:
    stream = conformance.bench().cuda.per_thread_default_stream()
    return Named(stream, stream)


NAMES = (
    external_stream,
    stream_of_numba,
    handle,
    foreign_object,
    default_stream,
    legacy_default_stream,
    per_thread_default_stream,
)
every_name = pytest.mark.parametrize("named", NAMES, ids=lambda named: named.__name__)


@every_name
def test_work_on_the_stream_named_by_put_sees_the_data(
    laws: conformance.TestNumba, stager: Stager, named: Callable[[], Named]
) -> None:
    values = words(1)
    laws.warm(stager, values)
    source, (name, stream) = laws.pinned(stager, values), named()
    with laws.hold_copies(stager.backend, "h2d") as hold:
        array = stager.put(source, stream=name).value
        seen = laws.calls.start(conformance.bench().read_on(stream, array))
        laws.assert_stays(lambda: not seen.done(), hold)
    assert_same(seen.result(laws.deadline_seconds), values)


@every_name
def test_work_on_the_stream_named_by_stream_wait_sees_the_data(
    laws: conformance.TestNumba, stager: Stager, named: Callable[[], Named]
) -> None:
    values = words(1)
    laws.warm(stager, values)
    source, (name, stream) = laws.pinned(stager, values), named()
    with laws.hold_copies(stager.backend, "h2d") as hold:
        transfer = stager.put(source)
        transfer.stream_wait(name)
        seen = laws.calls.start(conformance.bench().read_on(stream, transfer.value))
        laws.assert_stays(lambda: not seen.done(), hold)
    assert_same(seen.result(laws.deadline_seconds), values)


@every_name
def test_get_waits_for_the_stream_that_it_names(laws: conformance.TestNumba, stager: Stager, named: Callable[[], Named]) -> None:
    values = words(1)
    laws.warm(stager, values)
    array, product, (name, stream) = laws.from_numpy(words(2)), laws.from_numpy(values), named()

    def produce() -> None:
        conformance.bench().copy_bytes(array, product, stream)

    with cuda.hold_streams([int(stream.handle)], stream=stream, enqueue=produce) as hold:
        transfer = stager.get(array, stream=name)
        laws.assert_stays_undone(transfer, hold)
    laws.assert_completes(transfer)
    assert_same(transfer.value, values)


@every_name
def test_put_into_waits_for_the_stream_that_it_names(
    laws: conformance.TestNumba, stager: Stager, named: Callable[[], Named]
) -> None:
    old, new = words(1), words(2)
    laws.warm(stager, old)
    source, array, (name, stream) = laws.pinned(stager, new), laws.from_numpy(old), named()
    with cuda.hold_streams([int(stream.handle)], stream=stream) as hold:
        read = conformance.bench().read_on(stream, array)
        transfer = stager.put(source, into=array, stream=name)
        laws.assert_stays_undone(transfer, hold)
    laws.assert_completes(transfer)
    assert_same(read(), old)
    assert_same(laws.to_numpy(array), new)


@every_name
def test_memory_is_not_rewritten_under_a_reader_on_a_named_stream(
    laws: conformance.TestNumba, stager: Stager, named: Callable[[], Named]
) -> None:
    values = words(1)
    laws.warm(stager, values)
    source, (name, stream) = laws.pinned(stager, values), named()
    transfer = stager.put(source, stream=name)
    array = transfer.result()
    with cuda.hold_streams([int(stream.handle)], stream=stream) as hold:
        read = conformance.bench().read_on(stream, array)
        del transfer, array
        kept = laws.put_others(stager, values)
        assert hold.held
    assert_same(read(), values)
    del kept


@pytest.mark.parametrize("size", [4096, LARGE], ids=["small", "large"])
def test_transfers_complete_while_compute_on_the_null_stream_is_held(
    laws: conformance.TestNumba, stager: Stager, size: int
) -> None:
    values = words(1, size)
    laws.warm(stager, values)
    source, array, idle = laws.pinned(stager, values), laws.from_numpy(values), non_blocking()
    with cuda.hold_streams([0]) as hold:
        put = laws.assert_returns(lambda: stager.put(source))
        get = laws.assert_returns(lambda: stager.get(array, stream=idle))
        laws.assert_completes(put)
        laws.assert_completes(get)
        assert hold.held
    assert_same(laws.to_numpy(put.value), values)
    assert_same(get.value, values)


def test_without_a_name_a_transfer_waits_for_the_default_stream(laws: conformance.TestNumba, stager: Stager) -> None:
    values = words(1)
    laws.warm(stager, values)
    array = laws.from_numpy(values)
    with cuda.hold_streams([0]) as hold:
        transfer = laws.assert_returns(lambda: stager.get(array))
        laws.assert_stays_undone(transfer, hold)
    assert_same(transfer.result(), values)


@pytest.mark.parametrize("nonsense", [-1, 1.5, "0", True, object()], ids=["negative", "float", "string", "bool", "object"])
def test_what_is_no_stream_is_refused(laws: conformance.TestNumba, stager: Stager, nonsense: object) -> None:
    array = laws.from_numpy(words(1))
    with pytest.raises((TypeError, ValueError), match="stream"):
        stager.get(array, stream=nonsense)
    with pytest.raises((TypeError, ValueError), match="stream"):
        stager.put(words(1), stream=nonsense)


@pytest.mark.parametrize("by_handle", [True, False], ids=["by_handle", "by_external_stream"])
def test_a_borrowed_stream_may_be_destroyed_when_the_arrays_are_gone(
    laws: conformance.TestNumba, stager: Stager, by_handle: bool
) -> None:
    values = words(1)
    laws.warm(stager, values)
    source, stream = laws.pinned(stager, values), non_blocking()
    transfer = stager.put(source, stream=int(stream.handle) if by_handle else stream)
    transfer.synchronize()
    del transfer
    with cuda.context(0):
        cuda.call("cuStreamDestroy", stream.handle)
    kept = laws.put_others(stager, values)
    assert_same(laws.to_numpy(stager.put(source).value), values)
    del kept


def test_threads_with_streams_of_their_own_do_not_mix_their_data(laws: conformance.TestNumba, stager: Stager) -> None:
    bench = conformance.bench()

    def work(thread: int) -> int:
        stream = non_blocking()
        wrong = 0
        for turn in range(ROUNDS):
            values = words(thread * ROUNDS + turn, 40_000)
            array = stager.put(laws.pinned(stager, values), stream=stream).value
            copy = bench.empty(array.shape, array.dtype)
            bench.copy_bytes(copy, array, stream)
            out = stager.get(copy, stream=stream)
            del array, copy
            wrong += not np.array_equal(out.value, values)
        return wrong

    calls = [laws.calls.start(lambda thread=thread: work(thread)) for thread in range(THREADS)]  # type: ignore[misc]  # default
    assert [call.result(6 * laws.deadline_seconds) for call in calls] == [0] * THREADS
