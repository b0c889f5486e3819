"""Putting: content, arrays that exist already, streams, and what is not under way any more when a put fails."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xferlib_host

import xferlib
from tests.core.fakes import held, on_thread, tampered
from xferlib.errors import CapabilityError

DTYPES = ["?", "i1", "u2", "i8", "f2", "f4", "f8", "c8", "c16", "M8[ns]", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def h2d(stager: xferlib.Stager) -> Any:
    """Return the host backend's engine of this direction."""
    return stager.backend.h2d  # type: ignore[attr-defined]  # the host backend's


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 11)])
@pytest.mark.parametrize("pinned", [True, False])
def test_values_shape_and_dtype_arrive(stager: xferlib.Stager, dtype: Any, shape: tuple[int, ...], pinned: bool) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape).astype("i8").astype(dtype)
    source = stager.empty_pinned(shape, dtype) if pinned else np.empty(shape, dtype)
    source[...] = values
    device = stager.put(source).value
    assert (device.shape, device.dtype) == (values.shape, values.dtype)
    assert device.tobytes() == values.tobytes()


def test_leaves_do_not_overlap_and_large_ones_have_their_own_block(stager: xferlib.Stager) -> None:
    tree = [np.full(n, i, np.uint8) for i, n in enumerate([1, 0, 257, 70_000, 255, 65_535, 65_536, 0])]
    device = stager.put(tree).value
    assert all(np.array_equal(a, b) for a, b in zip(device, tree, strict=True))
    assert all(array.ctypes.data % 256 == 0 for array in device if array.size)
    before = stager.stats().device_nbytes
    del device[3]
    stager.trim()
    assert before - stager.stats().device_nbytes >= 70_000


def test_a_pinned_source_is_not_copied_by_the_cpu(stager: xferlib.Stager) -> None:
    source = stager.empty_pinned(10, np.int64)
    source[:] = 1
    with held(h2d(stager)):
        transfer = stager.put(source)
        source[:] = 2
        assert not transfer.done()
    assert transfer.value.tolist() == [2] * 10
    assert stager.stats().synchronous == 0


def test_a_put_into_an_array_overwrites_it(stager: xferlib.Stager) -> None:
    device = stager.put({"a": np.zeros(5), "b": [np.zeros(3)]}).value
    transfer = stager.put({"a": np.ones(5), "b": [np.full(3, 2.0)]}, into=device)
    assert transfer.result() is device
    assert device["a"].tolist() == [1] * 5
    assert device["b"][0].tolist() == [2] * 3


def test_a_put_into_an_array_waits_for_its_earlier_readers(stager: xferlib.Stager) -> None:
    with xferlib_host.Stream() as stream:
        device = stager.put(np.zeros(4), stream=stream).result()
        seen: list[float] = []
        with held(stream) as gate:
            stream.submit(lambda: seen.extend(device.tolist()))
            transfer = stager.put(np.ones(4), into=device, stream=stream)
            assert not transfer.done()
            gate.set()
        transfer.synchronize()
        stream.synchronize()
    stream.close()
    assert seen == [0] * 4
    assert device.tolist() == [1] * 4


@pytest.mark.parametrize("pinned_out", [True, False])
@pytest.mark.parametrize("pinned_source", [True, False])
@pytest.mark.parametrize("tree", [True, False])
def test_a_put_into_an_array_waits_for_a_get_that_still_reads_it(
    stager: xferlib.Stager, tree: bool, pinned_source: bool, pinned_out: bool
) -> None:
    """No stream of the user's knows of that get, so the core must."""
    source = stager.empty_pinned(1000, np.uint8) if pinned_source else np.empty(1000, np.uint8)
    source[:] = 2
    device = stager.put({"other": np.zeros(3), "it": np.full(1000, 1, np.uint8)}).result()["it"]
    out = stager.empty_pinned(1000, np.uint8) if pinned_out else np.empty(1000, np.uint8)
    with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
        back = stager.get(device, out=out)
        putting = stager.put([source], into=[device]) if tree else stager.put(source, into=device)
        # Of an engine that does not wait for the get, this would be the proof.
        with pytest.raises(TimeoutError):
            putting.result(0.05)
        gate.set()
    assert (back.result() == 1).all()
    putting.synchronize()
    assert (device == 2).all()


def test_a_put_into_part_of_an_array_waits_for_a_get_of_the_whole(stager: xferlib.Stager) -> None:
    device = stager.put(np.full(1000, 1, np.uint8)).result()
    with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
        back = stager.get(device)
        apart = stager.put(np.full(10, 3, np.uint8), into=np.zeros(10, np.uint8))
        assert apart.result(10).tolist() == [3] * 10
        stager.put(np.full(10, 2, np.uint8), into=device[500:510])
        gate.set()
    assert (back.result() == 1).all()


def test_work_on_the_stream_that_was_named_waits_for_the_copy(stager: xferlib.Stager) -> None:
    stream = xferlib_host.Stream()
    source = stager.empty_pinned(4, np.int64)
    source[:] = 7
    seen: list[int] = []
    with held(h2d(stager)):
        device = stager.put(source, stream=stream)._value
        stream.submit(lambda: seen.extend(device.tolist()))
    stream.close()
    assert seen == [7] * 4


def reads_later(stream: xferlib_host.Stream, array: np.ndarray[Any, Any]) -> Callable[[], bytes]:
    """Enqueue a read of the array's memory that keeps nothing alive."""
    address, nbytes = array.ctypes.data, array.nbytes
    seen: list[bytes] = []
    stream.submit(lambda: seen.append(ctypes.string_at(address, nbytes)))

    def result() -> bytes:
        stream.synchronize()
        return seen[0]

    return result


@pytest.mark.parametrize("how", ["stream=", "stream_wait", "value", "into"])
def test_memory_is_not_written_again_while_a_named_stream_may_read_it(stager: xferlib.Stager, how: str) -> None:
    stream = xferlib_host.Stream()
    old, new = np.full(100, 1, np.uint8), np.full(100, 2, np.uint8)
    for _ in range(3):
        stager.put(new).synchronize()
    with held(stream) as gate:
        transfer = stager.put(old, stream=stream if how == "stream=" else None)
        if how == "into":
            transfer = stager.put(old, into=transfer.value)
        if how in ("stream_wait", "into"):
            transfer.stream_wait(stream)
        if how == "value":
            with stream:
                _ = transfer.value
        transfer.synchronize()
        later = reads_later(stream, transfer._value)
        del transfer
        kept = [stager.put(new).result() for _ in range(4)]
        assert not gate.is_set()
    assert later() == old.tobytes()
    stream.close()
    assert len(kept) == 4


@pytest.mark.parametrize("how", ["one", "tree", "packed", "part"])
def test_a_stream_named_for_a_put_into_an_array_protects_its_block(stager: xferlib.Stager, how: str) -> None:
    stream = xferlib_host.Stream()
    old, new = np.full(100, 1, np.uint8), np.full(100, 2, np.uint8)
    tree = stager.put([new, old] if how == "packed" else [old]).result()
    array = tree.pop()
    if how == "tree":
        stager.put([old], into=[array], stream=stream).synchronize()
    elif how == "part":
        stager.put(old[50:], into=array[50:], stream=stream).synchronize()
    else:
        stager.put(old, into=array, stream=stream).synchronize()
    with held(stream) as gate:
        later = reads_later(stream, array)
        del array, tree
        # Of the same size as the block, so that it would be taken.
        kept = [stager.put([new, new] if how == "packed" else new).result() for _ in range(4)]
        assert not gate.is_set()
    assert later() == old.tobytes()
    stream.close()
    assert len(kept) == 4


def test_everything_may_be_dropped_while_a_put_is_in_flight(stager: xferlib.Stager) -> None:
    device = stager.put(np.zeros(100, np.uint8)).result()
    with held(h2d(stager)):
        source = stager.empty_pinned(100, np.uint8)
        source[:] = 5
        stager.put(source, into=device)
        del source
        others = [stager.empty_pinned(100, np.uint8) for _ in range(50)]
        for other in others:
            other[:] = 9
        last = stager.put(np.zeros(1))
    last.synchronize()
    assert (device == 5).all()


@pytest.mark.parametrize("into", [False, True])
def test_pinned_leaves_beside_small_pageable_ones_are_held_until_they_are_read(stager: xferlib.Stager, *, into: bool) -> None:
    targets = stager.put([np.zeros(100, np.uint8) for _ in range(3)]).result() if into else None
    before = stager.stats().h2d_nbytes
    with held(h2d(stager)):
        source = stager.empty_pinned(100, np.uint8)
        source[:] = 5
        transfer = stager.put([np.full(100, 3, np.uint8), source, np.full(100, 4, np.uint8)], into=targets)
        del source
        others = [stager.empty_pinned(100, np.uint8) for _ in range(50)]
        for other in others:
            other[:] = 9
    assert [bytes(leaf) for leaf in transfer.result()] == [bytes([value]) * 100 for value in (3, 5, 4)]
    assert stager.stats().h2d_nbytes - before == 300


def test_a_dropped_block_is_reused_behind_the_copy_into_it(stager: xferlib.Stager) -> None:
    with held(h2d(stager)):
        stager.put(np.full(100, 1, np.uint8))
        transfer = stager.put(np.full(100, 2, np.uint8))
    assert (transfer.result() == 2).all()
    assert stager.stats().device_nbytes == 256


def test_putting_starts_while_everything_is_held(stager: xferlib.Stager) -> None:
    source = stager.empty_pinned(100, np.uint8)
    with held(h2d(stager)), held(stager.backend.d2h):  # type: ignore[attr-defined]  # the host backend's
        transfers = on_thread(lambda: [stager.put(source) for _ in range(100)]).result(10)
        assert not any(transfer.done() for transfer in transfers)


def test_steady_state_makes_no_memory_call(stager: xferlib.Stager) -> None:
    source = stager.empty_pinned(100_000, np.uint8)

    def step() -> None:
        stager.get(stager.put(source).value).result()
        stager.put(np.zeros(500)).synchronize()

    for _ in range(40):
        step()
    before = stager.backend.memory.calls()  # type: ignore[attr-defined]  # the host backend's
    for _ in range(100):
        step()
    assert stager.backend.memory.calls() == before  # type: ignore[attr-defined]  # the host backend's


def test_one_slot_is_enough_for_a_loop_that_waits(stager: xferlib.Stager) -> None:
    for _ in range(5):
        slot = stager.empty_pinned(2 << 20, np.uint8)
        stager.put(slot).synchronize()
        del slot
    assert stager.stats().pool_misses == 1


def test_a_block_that_does_not_fit_the_limit_gives_the_others_of_its_put_back() -> None:
    with xferlib.stager("host", device_limit=1 << 20) as stager:
        for _ in range(3):
            with pytest.raises(xferlib.AllocationError, match="device memory is full"):
                stager.put([np.zeros(600_000, np.uint8), np.zeros(600_000, np.uint8)])
        assert stager.put(np.zeros(1 << 20, np.uint8)).result().shape == (1 << 20,)


def test_device_memory_in_reference_cycles_is_collected_before_failing() -> None:
    with xferlib.stager("host", device_limit=1 << 20) as stager:
        cycle: list[Any] = [stager.put(np.zeros(1 << 20, np.uint8)).result()]
        cycle.append(cycle)
        del cycle
        assert stager.put(np.ones(1 << 20, np.uint8)).result().all()


@pytest.mark.parametrize("nbytes", [256, 1 << 20])
def test_a_get_that_is_done_holds_no_device_memory(nbytes: int) -> None:
    with xferlib.stager("host", device_limit=nbytes) as stager:
        for step in range(3):
            device = stager.put(np.full(nbytes, step, np.uint8)).value
            back = stager.get(device).result()
            del device
            assert (back == step).all()


def test_a_put_at_the_device_limit_waits_for_a_get_in_flight() -> None:
    with xferlib.stager("host", device_limit=256) as stager:
        device = stager.put(np.full(256, 1, np.uint8)).value
        with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
            back = stager.get(device)
            del device
            putting = on_thread(lambda: stager.put(np.full(256, 2, np.uint8)).result())
            with pytest.raises(TimeoutError):
                putting.result(0.1)
            gate.set()
            assert (putting.result(10) == 2).all()
        assert (back.result() == 1).all()


class Broke(Exception):
    """What the backend raises."""


def fails(*args: object, **options: object) -> Any:
    raise Broke("no more")


@pytest.mark.parametrize("call", ["record_h2d", "as_array"])
def test_a_put_that_fails_after_its_start_raises_when_nothing_is_under_way(call: str) -> None:
    backend = tampered(failures=(Broke,))
    works = getattr(backend.inner, call)
    calls = [works]
    setattr(backend, call, lambda *args, **options: (calls.pop() if calls else works)(*args, **options))
    with xferlib.stager(backend) as stager:
        source = stager.empty_pinned(100, np.uint8)
        stager.put(source).synchronize()
        with held(backend.inner.h2d) as gate:
            calls.append(fails)
            at_rest: list[bool] = []

            def start() -> None:
                try:
                    stager.put(source)
                finally:
                    at_rest.append(gate.is_set())

            failing = on_thread(start)
            with pytest.raises((TimeoutError, xferlib.TransferError)):
                failing.result(0.2)
            gate.set()
            with pytest.raises(xferlib.TransferError, match="no more"):
                failing.result(10)
        assert at_rest == [True]


@pytest.mark.parametrize("stream", ["no stream", "closed"])
def test_a_stream_that_is_refused_starts_nothing(stream: str) -> None:
    closed = xferlib_host.Stream()
    closed.close()
    bad = closed if stream == "closed" else object()
    backend = tampered()
    started: list[str] = []
    for name in ("copy_h2d", "copy_d2h", "alloc_device", "alloc_pinned"):
        setattr(backend, name, lambda *args, name=name: started.append(name))
    with xferlib.stager(backend) as stager:
        x, large = np.ones(100), np.ones(1 << 18)
        moves: list[Callable[[], object]] = [
            lambda: stager.put(x, stream=bad),
            lambda: stager.put([x, x], stream=bad),
            lambda: stager.put([x, large], stream=bad),
            lambda: stager.put(large, borrow=True, stream=bad),
            lambda: stager.put(x, into=np.zeros(100), stream=bad),
            lambda: stager.put([x], into=[np.zeros(100)], stream=bad),
            lambda: stager.get(x, stream=bad),
            lambda: stager.get([x], out=[np.zeros(100)], stream=bad),
        ]
        for move in moves:
            with pytest.raises((TypeError, xferlib.ClosedError), match=r"xferlib_host\.Stream"):
                move()
        assert started == []
        assert not stager._ledger.busy
        assert stager.stats().device_nbytes == 0


def test_an_allocation_error_stays_one_where_the_framework_raises_memory_errors() -> None:
    with (
        xferlib.stager(tampered(failures=(MemoryError,)), device_limit=1 << 20, pinned_limit=1 << 20) as stager,
        pytest.raises(xferlib.AllocationError, match="device_limit"),
    ):
        stager.put(np.zeros(2 << 20, np.uint8))


def test_several_threads_may_use_one_stager(stager: xferlib.Stager) -> None:
    start = threading.Barrier(6)

    def work(seed: int) -> bool:
        random = np.random.default_rng(seed)
        start.wait(10)
        right = True
        for _ in range(30):
            values = random.integers(0, 255, int(random.integers(1, 200_000)), np.uint8)
            device = stager.put({"x": values, "y": [values[:7]]}).value
            back = stager.get(device).result(timeout=20)
            right &= np.array_equal(back["x"], values) and np.array_equal(back["y"][0], values[:7])
        return right

    futures = [on_thread(lambda seed=seed: work(seed)) for seed in range(6)]  # type: ignore[misc]  # a default binds the seed
    assert all(future.result(30) for future in futures)
    assert stager.stats().synchronous == 6 * 30 * 2


def test_value_on_makes_the_stream_wait_and_nobody_else(stager: xferlib.Stager) -> None:
    values = np.arange(1, 100)
    with closing(xferlib_host.Stream()) as stream:
        seen = np.zeros_like(values)
        with held(h2d(stager)):
            array = stager.put(values).value_on(stream)
            stream.submit(np.copyto, seen, array)
            assert not stream.record().done()
            assert not seen.any()
        stream.synchronize()
        assert seen.tolist() == values.tolist()


def test_value_on_is_for_puts(stager: xferlib.Stager) -> None:
    with closing(xferlib_host.Stream()) as stream, pytest.raises(CapabilityError, match="read by the host"):
        stager.get(np.ones(4)).value_on(stream)
    with pytest.raises(ValueError, match="stream=0 is ambiguous"):
        stager.put(np.ones(4)).value_on(0)
