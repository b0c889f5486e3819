"""Consumer streams: whatever names a stream is waited for and waits, in every thread, and nothing else does.

JAX takes no part: it gives its users no streams.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from tests.frameworks.kits.cupy import CUPY
from tests.frameworks.kits.every import CUDA_KITS, given, pairs
from tests.frameworks.kits.kit import CudaKit, Named
from tests.frameworks.kits.numba import NUMBA
from xferlib.conformance import StagerConformance, cuda
from xferlib.conformance.values import LARGE, assert_same, words
from xferlib.pipeline.prefetch import prefetch
from xferlib.stager import Stager

THREADS = 8
ROUNDS = 30

every_name = pairs("named", {kit: kit.streams.values() for kit in CUDA_KITS})
every_cuda_kit = given(*CUDA_KITS)


@every_name
def test_work_on_the_stream_named_by_put_sees_the_data(
    kit: CudaKit, laws: StagerConformance, stager: Stager, named: Callable[[], Named]
) -> None:
    values = words(1)
    laws.warm(stager, values)
    source, (name, stream), idle = laws.pinned(stager, values), named(), kit.non_blocking()
    with laws.hold_copies(stager.backend, "h2d") as hold:
        transfer = stager.put(source, stream=name)
        with kit.current(idle):
            # On a stream that nothing runs on: naming the stream in `put` alone must do.
            array = transfer.value
        seen = laws.calls.start(kit.bench.read_on(stream, array))
        laws.assert_stays(lambda: not seen.done(), hold)
    assert_same(seen.result(laws.deadline_seconds), values)


@every_name
def test_work_on_the_stream_named_by_stream_wait_sees_the_data(
    kit: CudaKit, laws: StagerConformance, stager: Stager, named: Callable[[], Named]
) -> None:
    values = words(1)
    laws.warm(stager, values)
    source, (name, stream), idle = laws.pinned(stager, values), named(), kit.non_blocking()
    with laws.hold_copies(stager.backend, "h2d") as hold:
        transfer = stager.put(source)
        with kit.current(idle):
            array = transfer.value
        transfer.stream_wait(name)
        seen = laws.calls.start(kit.bench.read_on(stream, array))
        laws.assert_stays(lambda: not seen.done(), hold)
    assert_same(seen.result(laws.deadline_seconds), values)


@every_name
def test_work_on_the_stream_named_by_prefetch_sees_the_data_of_every_batch(
    kit: CudaKit, laws: StagerConformance, stager: Stager, named: Callable[[], Named]
) -> None:
    values = words(1, LARGE)
    laws.warm(stager, values)
    (name, stream), idle = named(), kit.non_blocking()
    # Lent, and so still being copied when they are handed out.
    with laws.hold_copies(stager.backend, "h2d") as hold, prefetch([values] * 2, stager, rewrites=False, stream=name) as batches:
        with kit.current(idle):
            array = next(batches)
        seen = laws.calls.start(kit.bench.read_on(stream, array))
        laws.assert_stays(lambda: not seen.done(), hold)
        hold.release()
        assert_same(seen.result(laws.deadline_seconds), values)
        with kit.current(idle):
            array = next(batches)
        assert_same(kit.bench.read_on(stream, array)(), values)


@every_name
def test_get_waits_for_the_stream_that_it_names(
    kit: CudaKit, laws: StagerConformance, stager: Stager, named: Callable[[], Named]
) -> None:
    values = words(1)
    laws.warm(stager, values)
    array, product, (name, stream) = laws.from_numpy(words(2)), laws.from_numpy(values), named()

    def produce() -> None:
        kit.bench.copy_bytes(array, product, stream)

    with cuda.hold_streams([kit.handle(stream)], stream=stream, enqueue=produce) as hold:
        transfer = stager.get(array, stream=name)
        laws.assert_stays_undone(transfer, hold)
    laws.assert_completes(transfer)
    assert_same(transfer.value, values)


@every_name
def test_put_into_waits_for_the_stream_that_it_names(
    kit: CudaKit, laws: StagerConformance, stager: Stager, named: Callable[[], Named]
) -> None:
    old, new = words(1), words(2)
    laws.warm(stager, old)
    source, array, (name, stream) = laws.pinned(stager, new), laws.from_numpy(old), named()
    with cuda.hold_streams([kit.handle(stream)], stream=stream) as hold:
        read = kit.bench.read_on(stream, array)
        transfer = stager.put(source, into=array, stream=name)
        laws.assert_stays_undone(transfer, hold)
    laws.assert_completes(transfer)
    assert_same(read(), old)
    assert_same(laws.to_numpy(array), new)


@every_name
def test_memory_is_not_rewritten_under_a_reader_on_a_named_stream(
    kit: CudaKit, laws: StagerConformance, stager: Stager, named: Callable[[], Named]
) -> None:
    values = words(1)
    laws.warm(stager, values)
    source, (name, stream), idle = laws.pinned(stager, values), named(), kit.non_blocking()
    transfer = stager.put(source, stream=name)
    with kit.current(idle):
        array = transfer.result()
    with cuda.hold_streams([kit.handle(stream)], stream=stream) as hold:
        read = kit.bench.read_on(stream, array)
        del transfer, array
        kept = laws.put_others(stager, values)
        assert hold.held
    assert_same(read(), values)
    del kept


@every_cuda_kit
@pytest.mark.parametrize("size", [4096, LARGE], ids=["small", "large"])
def test_transfers_complete_while_compute_on_the_null_stream_is_held(
    kit: CudaKit, laws: StagerConformance, stager: Stager, size: int
) -> None:
    values = words(1, size)
    laws.warm(stager, values)
    source, array, idle = laws.pinned(stager, values), laws.from_numpy(values), kit.non_blocking()
    with cuda.hold_streams([0]) as hold:
        put = laws.assert_returns(lambda: stager.put(source))
        get = laws.assert_returns(lambda: stager.get(array, stream=idle))
        laws.assert_completes(put)
        laws.assert_completes(get)
        assert hold.held
    assert_same(laws.to_numpy(put.value), values)
    assert_same(get.value, values)


@every_cuda_kit
def test_without_a_name_a_transfer_waits_for_the_default_stream(laws: StagerConformance, stager: Stager) -> None:
    values = words(1)
    laws.warm(stager, values)
    array = laws.from_numpy(values)
    with cuda.hold_streams([0]) as hold:
        transfer = laws.assert_returns(lambda: stager.get(array))
        laws.assert_stays_undone(transfer, hold)
    assert_same(transfer.result(), values)


@every_cuda_kit
def test_the_bare_number_0_is_refused_as_a_stream(laws: StagerConformance, stager: Stager) -> None:
    array = laws.from_numpy(words(1))
    transfer = stager.put(words(1))
    calls: list[Callable[[], object]] = [
        lambda: stager.put(words(1), stream=0),
        lambda: stager.put(words(1), into=array, stream=0),
        lambda: stager.get(array, stream=0),
        lambda: transfer.stream_wait(0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="stream=0 is ambiguous"):
            call()


@every_cuda_kit
@pytest.mark.parametrize("nonsense", [-1, 1.5, "0", True, object()], ids=["negative", "float", "string", "bool", "object"])
def test_what_is_no_stream_is_refused(laws: StagerConformance, stager: Stager, nonsense: object) -> None:
    array = laws.from_numpy(words(1))
    with pytest.raises((TypeError, ValueError), match="stream"):
        stager.get(array, stream=nonsense)
    with pytest.raises((TypeError, ValueError), match="stream"):
        stager.put(words(1), stream=nonsense)


@given(CUPY)
def test_each_thread_waits_for_its_own_current_stream(kit: CudaKit, laws: StagerConformance, stager: Stager) -> None:
    """Where the framework has a current stream."""
    values = words(1)
    laws.warm(stager, values)
    array, held, free = laws.from_numpy(values), kit.non_blocking(), kit.non_blocking()

    def get_on(stream: Any) -> Any:
        with kit.current(stream):
            return stager.get(array)

    with cuda.hold_streams([kit.handle(held)], stream=held) as hold:
        # The free one first: a direction is first in, first out.
        completes = laws.assert_returns(lambda: get_on(free))
        laws.assert_completes(completes)
        waits = laws.assert_returns(lambda: get_on(held))
        laws.assert_stays_undone(waits, hold)
    assert_same(waits.result(), values)


@pytest.mark.parametrize(
    ("kit", "current"), [(CUPY, True), (CUPY, False), (NUMBA, False)], ids=["cupy-current", "cupy-named", "numba-named"]
)
def test_threads_with_streams_of_their_own_do_not_mix_their_data(
    kit: CudaKit, laws: StagerConformance, stager: Stager, current: bool
) -> None:
    def work(thread: int) -> int:
        stream = kit.non_blocking()
        name = None if current else stream
        wrong = 0
        with kit.current(stream) if current else nullcontext():
            for turn in range(ROUNDS):
                values = words(thread * ROUNDS + turn, 40_000)
                array = stager.put(laws.pinned(stager, values), stream=name).value
                copy = kit.copy(array, stream)
                out = stager.get(copy, stream=name)
                del array, copy
                wrong += not np.array_equal(out.value, values)
        return wrong

    calls = [laws.calls.start(lambda thread=thread: work(thread)) for thread in range(THREADS)]  # type: ignore[misc]  # default
    assert [call.result(6 * laws.deadline_seconds) for call in calls] == [0] * THREADS
