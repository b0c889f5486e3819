"""What is handed out and taken: Numba's own arrays with the stream they name, foreign ones, and those that lie in pieces."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import pytest
from xferlib_numba import conformance

from xferlib.conformance import cuda
from xferlib.conformance.values import LARGE, SMALL, assert_same, words
from xferlib.stager import Stager

LEGACY, PER_THREAD = 1, 2
MEBI = 1 << 20
Values: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Target: TypeAlias = Callable[[conformance.TestNumba, Stager, Values], Values]


@final
class Foreign:
    """An array of some other library's, over the memory of one of Numba's."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype
        self._interface = {**array.__cuda_array_interface__, "stream": None} | changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface


def named_by(array: Any) -> int | None:
    stream: int | None = array.__cuda_array_interface__["stream"]
    return stream


def test_arrays_are_those_of_numba(laws: conformance.TestNumba, stager: Stager) -> None:
    array = laws.put_values(stager, words(1))
    assert type(array) is type(conformance.bench().cuda.to_device(words(1)))


def test_an_array_names_the_default_stream_which_value_makes_wait(laws: conformance.TestNumba, stager: Stager) -> None:
    array = laws.put_values(stager, words(1))
    assert named_by(array) == LEGACY
    assert named_by(array[3:]) == LEGACY


def test_an_array_names_the_stream_that_was_named_for_it(laws: conformance.TestNumba, stager: Stager) -> None:
    first, second = (conformance.bench().cuda.stream() for _ in range(2))
    transfer = stager.put([words(1), words(2)], stream=first)
    arrays = transfer.value
    view = arrays[0][1:]
    assert [named_by(array) for array in (*arrays, view)] == [int(first.handle)] * 3
    transfer.stream_wait(second)
    assert [named_by(array) for array in (*arrays, view)] == [int(second.handle)] * 3
    transfer.stream_wait()
    assert named_by(view) == int(second.handle)


def test_an_array_names_no_stream_that_its_owner_may_destroy(laws: conformance.TestNumba, stager: Stager) -> None:
    stream = conformance.bench().non_blocking()
    for name in (stream, int(stream.handle)):
        assert named_by(stager.put(words(1), stream=name).value) == LEGACY


def pinned_of(laws: conformance.TestNumba, stager: Stager, values: Values) -> Values:
    return laws.pinned(stager, np.zeros_like(values))


def pageable_of(laws: conformance.TestNumba, stager: Stager, values: Values) -> Values:
    return np.zeros_like(values)


every_target = pytest.mark.parametrize("target", [pinned_of, pageable_of], ids=["pinned", "pageable"])
"""The engine makes the copies to pageable memory, and is told otherwise what they wait for."""


@every_target
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_get_waits_for_the_stream_to_which_an_array_is_bound(
    laws: conformance.TestNumba, stager: Stager, target: Target, size: int
) -> None:
    values = words(1, size)
    laws.warm(stager, values)
    idle = conformance.bench().non_blocking()
    first, second = target(laws, stager, values), target(laws, stager, values)
    with laws.held_array(stager.backend, values) as held:
        completes = laws.assert_returns(lambda: stager.get(held.array.bind(held.stream), out=first, stream=idle))
        laws.assert_completes(completes)
        waits = laws.assert_returns(lambda: stager.get(held.array.bind(held.stream), out=second))
        laws.assert_stays_undone(waits, held)
    assert_same(waits.result(), values)


@every_target
@pytest.mark.parametrize("part", [slice(None, None, 2), slice(1, None)], ids=["every_second", "but_the_first"])
def test_get_of_a_view_reads_after_its_producer(laws: conformance.TestNumba, stager: Stager, target: Target, part: slice) -> None:
    values = words(1, 3 * MEBI).reshape(-1, 64)
    laws.warm(stager, values)
    seen = np.ascontiguousarray(values[:, part])
    # Memory to gather it in is taken before anything is held.
    stager.get(laws.from_numpy(values)[:, part], out=target(laws, stager, seen)).synchronize()
    out = target(laws, stager, seen)
    with laws.held_array(stager.backend, values) as held:
        transfer = laws.assert_returns(lambda: stager.get(held.array[:, part], out=out, stream=held.stream))
        laws.assert_stays_undone(transfer, held)
    assert_same(transfer.result(), seen)


def test_a_get_into_pageable_memory_that_waits_holds_up_no_other_stager(laws: conformance.TestNumba, stager: Stager) -> None:
    values = words(1, LARGE)
    with laws.new_stager() as other:
        for each in (stager, other):
            laws.warm(each, values)
        array, out = laws.from_numpy(values), [np.zeros_like(values) for _ in range(2)]
        idle = conformance.bench().non_blocking()
        with laws.held_array(stager.backend, values) as held:
            waits = laws.assert_returns(lambda: stager.get(held.array.bind(held.stream), out=out[0]))
            laws.assert_completes(laws.assert_returns(lambda: stager.put(values, borrow=True)))
            laws.assert_completes(laws.assert_returns(lambda: other.get(array, out=out[1], stream=idle)))
            laws.assert_stays_undone(waits, held)
        assert_same(out[1], values)
        assert_same(waits.result(), values)


def test_get_waits_for_the_stream_that_a_foreign_array_names(laws: conformance.TestNumba, stager: Stager) -> None:
    values = words(1)
    laws.warm(stager, values)
    idle = conformance.bench().non_blocking()
    with laws.held_array(stager.backend, values) as held:
        named: Any = held.stream
        foreign = Foreign(held.array, stream=int(named.handle))
        completes = stager.get(foreign, stream=idle)
        laws.assert_completes(completes)
        waits = laws.assert_returns(lambda: stager.get(foreign))
        laws.assert_stays_undone(waits, held)
    assert_same(waits.result(), values)


@pytest.mark.parametrize("stream", [None, LEGACY, PER_THREAD])
def test_foreign_arrays_are_got_and_put_into(laws: conformance.TestNumba, stager: Stager, stream: int | None) -> None:
    array = laws.from_numpy(words(1))
    foreign = Foreign(array, stream=stream)
    assert_same(stager.get(foreign).result(), words(1))
    assert stager.put(words(2), into=foreign).result() is foreign
    assert_same(laws.to_numpy(array), words(2))


def test_an_object_without_the_stream_entry_is_an_array(laws: conformance.TestNumba, stager: Stager) -> None:
    foreign = Foreign(laws.from_numpy(words(1)), version=2)
    del foreign.__cuda_array_interface__["stream"]
    assert_same(stager.get(foreign).result(), words(1))


def test_what_cannot_be_taken_is_refused(laws: conformance.TestNumba, stager: Stager) -> None:
    array = laws.from_numpy(words(1))
    with pytest.raises(TypeError, match="__cuda_array_interface__"):
        stager.get(words(1))
    with pytest.raises(TypeError, match="masked"):
        stager.get(Foreign(array, mask=array))
    with pytest.raises(ValueError, match="stream 0"):
        stager.get(Foreign(array, stream=0))
    with pytest.raises(ValueError, match="read-only"):
        stager.put(words(1), into=Foreign(array, data=(array.gpu_data.device_pointer_value, True)))
    with pytest.raises(ValueError, match="not contiguous"):
        stager.put(words(1)[::2].copy(), into=array[::2])


PIECES: dict[str, Callable[[Any], Any]] = {
    "every_second": lambda array: array[:, :, ::2],
    "columns": lambda array: array[:, 1:3, :],
    "one_column": lambda array: array[:, 2, 3],
    "rows_and_columns": lambda array: array[::2, 1::2, 3:5],
    "last_axes": lambda array: array[1:, :, 2:],
}


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float64, np.complex128])
def test_views_that_lie_in_pieces_are_got(laws: conformance.TestNumba, stager: Stager, piece: str, dtype: npt.DTypeLike) -> None:
    values = np.arange(5 * 4 * 7).astype(dtype).reshape(5, 4, 7)
    got = stager.get(PIECES[piece](laws.from_numpy(values))).result()
    assert_same(got, np.ascontiguousarray(PIECES[piece](values)))


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda array: array.transpose(2, 0, 1),
    "reversed": lambda array: array[::-1, :, ::-1],
    "broadcast": lambda array: np.broadcast_to(array, (3, *array.shape)),
    "reversed_transposed": lambda array: array.T[::-2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_foreign_views_of_any_strides_are_got(laws: conformance.TestNumba, stager: Stager, view: str) -> None:
    values = np.arange(5 * 4 * 7, dtype=np.float32).reshape(5, 4, 7)
    wanted, array = VIEWS[view](values), laws.from_numpy(values)
    offset = wanted.__array_interface__["data"][0] - values.__array_interface__["data"][0]
    foreign = Foreign(array, shape=wanted.shape, strides=wanted.strides, data=(array.gpu_data.device_pointer_value + offset, False))
    foreign.shape = wanted.shape
    assert_same(stager.get(foreign).result(), np.ascontiguousarray(wanted))


def test_a_view_that_would_take_too_many_copies_is_refused(laws: conformance.TestNumba, stager: Stager) -> None:
    array = laws.from_numpy(np.zeros(MEBI, np.uint8))
    backwards = Foreign(array, strides=(-1,), data=(array.gpu_data.device_pointer_value + MEBI - 1, False))
    with pytest.raises(ValueError, match="a kernel of your own"):
        stager.get(backwards)


def test_gathered_memory_is_used_again_and_its_data_stays_apart(laws: conformance.TestNumba, stager: Stager) -> None:
    values = [words(seed).reshape(32, 32) for seed in range(20)]
    arrays = [laws.from_numpy(value) for value in values]
    transfers = [stager.get(array[:, ::2]) for array in arrays]
    for transfer, value in zip(transfers, values, strict=True):
        assert_same(transfer.result(), np.ascontiguousarray(value[:, ::2]))


@pytest.mark.alone
def test_memory_of_gathered_arrays_is_freed_with_the_stager(laws: conformance.TestNumba, stager: Stager) -> None:
    values = words(1, 64 * MEBI).reshape(-1, 2)
    array = laws.from_numpy(values)
    with laws.new_stager() as own:
        before = cuda.device_free_nbytes()
        got = own.get(array[:, :1]).result()
        assert before - cuda.device_free_nbytes() >= 32 * MEBI
    assert_same(got, np.ascontiguousarray(values[:, :1]))
    assert before - cuda.device_free_nbytes() < 32 * MEBI


def test_nothing_enters_the_queues_of_numba(laws: conformance.TestNumba, stager: Stager) -> None:
    context = conformance.bench().cuda.current_context()
    queues = context.deallocations, context.memory_manager.deallocations
    before = [len(queue) for queue in queues]
    with laws.new_stager() as own:
        for turn in range(20):
            array = own.put(laws.pinned(own, words(turn, 1000 * turn + 4)), stream=conformance.bench().streams[0]).result()
            own.get(array[1:]).result()
    del array
    gc.collect()
    assert [len(queue) for queue in queues] == before


def test_the_context_of_a_thread_is_left_as_found(laws: conformance.TestNumba, stager: Stager) -> None:
    def use() -> list[int]:
        found = [int(cuda.call("cuCtxGetCurrent"))]
        transfer = stager.put([words(1), np.zeros((0, 3))])
        transfer.done()
        transfer.synchronize()
        array, empty = transfer.value
        stager.get([array, empty]).result()
        stager.put(words(2), into=array).result()
        stager.empty_pinned(3 * MEBI, np.uint8)
        with stager.pin(words(3)):
            pass
        with laws.new_stager() as own:
            own.put(words(4)).result()
        return [*found, int(cuda.call("cuCtxGetCurrent"))]

    assert laws.calls.start(use).result(laws.deadline_seconds) == [0, 0]
    here = int(cuda.call("cuCtxGetCurrent"))
    use()
    assert int(cuda.call("cuCtxGetCurrent")) == here
