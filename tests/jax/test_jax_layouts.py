"""Arrays that do not lie in C order in memory: what a get returns has the values in order, whoever laid them out otherwise."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from xferlib_jax import conformance

from xferlib.conformance.values import assert_same, pattern, words
from xferlib.stager import Stager

SHAPES = [(3, 4), (5, 1), (1, 5), (1, 1), (2, 3, 4), (4, 1, 3), (0, 3), (3, 0, 2), (7, 5, 3, 2)]


def reversed_format(axes: int) -> Any:
    """Return the format with the last axis first in memory."""
    from jax.experimental.layout import Format, Layout

    bench = conformance.bench()
    order = tuple(reversed(range(axes)))
    return Format(Layout(major_to_minor=order), bench.jax.sharding.SingleDeviceSharding(bench.device))


def by_device_put(values: np.ndarray) -> Any:
    return conformance.bench().jax.device_put(values, reversed_format(values.ndim))


def by_jit(values: np.ndarray) -> Any:
    jax = conformance.bench().jax
    return jax.jit(lambda x: x, out_shardings=reversed_format(values.ndim))(jax.device_put(values, conformance.bench().device))


def by_import(values: np.ndarray) -> Any:
    """Import memory in Fortran order, as JAX takes it without a copy."""
    room = np.zeros(values.nbytes + 256, np.uint8)
    turned = np.ndarray(values.shape[::-1], values.dtype, room.data, -room.ctypes.data % 64)
    turned[...] = values.T
    return conformance.bench().jax.dlpack.from_dlpack(turned.T)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [by_device_put, by_jit])
def test_an_array_of_another_layout_comes_in_order(
    stager: Stager, make: Callable[[np.ndarray], Any], shape: tuple[int, ...]
) -> None:
    values = pattern(shape, np.dtype(np.int32), 1)
    array = make(values)
    fresh = stager.get(array).result()
    array.block_until_ready()
    for back in (fresh, stager.get(array).result(), stager.get([array, array]).result()[1]):
        assert back.flags.c_contiguous
        assert_same(back, values)


@pytest.mark.parametrize("name", ["bool", "uint8", "float16", "complex64", "bfloat16", "float8_e4m3fn"])
def test_an_array_of_another_layout_comes_in_order_with_items_of_any_size(stager: Stager, name: str) -> None:
    values = pattern((6, 10, 4), np.dtype(getattr(ml_dtypes, name, name)), 1)
    array = by_jit(values)
    assert array.format.layout.major_to_minor == (2, 1, 0)
    assert_same(stager.get(array.block_until_ready()).result(), values)


def test_memory_that_was_imported_transposed_comes_in_order(stager: Stager) -> None:
    if stager.on_gpu:
        pytest.skip("NumPy's memory is imported where JAX computes on the CPU")
    values = pattern((6, 10), np.dtype(np.int32), 1)
    array = by_import(values)
    assert array.format.layout.major_to_minor == (1, 0)
    assert_same(stager.get(array).result(), values)


def test_an_array_of_another_layout_that_is_not_computed_yet_comes_in_order(stager: Stager) -> None:
    """Into pageable memory, which is filled in pieces: what lies at an offset is asked for, too."""
    bench = conformance.bench()
    jax = bench.jax
    values = words(1, 20 << 20).reshape(1024, -1)
    after = jax.lax.optimization_barrier
    turned = jax.jit(lambda x, token: after((x, token))[0], keep_unused=True, out_shardings=reversed_format(2))
    given = bench.array(values)
    turned(given, bench.token).block_until_ready()
    if stager.on_gpu:
        # What lays it out is compiled by the first get, and compiling waits for the device.
        stager.get(turned(given, bench.token)).result()
    with bench.hold() as hold:
        array = turned(given, hold.token)
        assert not array.is_ready()
        transfer, landing = stager.get(array), stager.get(array, out=np.empty_like(values))
        del array
        assert not transfer.done()
        assert hold.held
    assert_same(transfer.result(), values)
    assert_same(landing.result(), values)


def test_the_caller_of_a_get_does_not_lay_an_array_out(stager: Stager) -> None:
    """Nothing is copied before the engine gets there: while it is held, the memory can be deleted, and is kept all the same."""
    values = pattern((64, 65), np.dtype(np.int32), 1)
    array = by_jit(values).block_until_ready()
    stager.get(array).result()
    with conformance.bench().hold_copies(stager.backend, "d2h"):
        transfer = stager.get(array)
        array.delete()
        assert not transfer.done()
    assert_same(transfer.result(), values)


def test_the_shards_of_a_sharded_array_come_in_order(stager: Stager) -> None:
    bench = conformance.bench()
    values = pattern((8, 6), np.dtype(np.int32), 1)
    from jax.experimental.layout import Format, Layout

    turned = Format(Layout(major_to_minor=(1, 0)), bench.mesh)
    array = bench.jax.device_put(values, turned)
    (shard,) = array.addressable_shards
    assert_same(stager.get(shard.data).result(), values)


def test_scalars_empty_arrays_and_weak_types_come_back(stager: Stager) -> None:
    jnp = conformance.bench().jax.numpy
    weak = jnp.asarray(2.5) * 1
    assert weak.weak_type
    back = stager.get({"weak": weak, "scalar": jnp.int32(7), "empty": jnp.zeros((0, 3), jnp.float32)}).result()
    assert (back["weak"].shape, back["weak"].dtype, float(back["weak"])) == ((), np.float32, 2.5)
    assert (back["scalar"].shape, int(back["scalar"])) == ((), 7)
    assert (back["empty"].shape, back["empty"].dtype) == ((0, 3), np.float32)


def test_several_threads_get_arrays_of_another_layout(stager: Stager) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(20):
            values = pattern((17, 13), np.dtype(np.int32), 100 * seed + turn)
            if not np.array_equal(stager.get(by_jit(values)).result(), values):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (1, 1, 7), (3, 1, 1)])
def test_an_array_whose_layout_makes_no_difference_is_read_where_it_lies(stager: Stager, shape: tuple[int, ...]) -> None:
    backend: Any = stager.backend
    array = by_device_put(pattern(shape, np.dtype(np.int32), 1)).block_until_ready()
    assert backend.as_source(array).address == array.unsafe_buffer_pointer()


def test_what_the_copying_thread_has_laid_out_is_laid_out_once_and_kept_until_it_is_copied(stager: Stager) -> None:
    if stager.on_gpu:
        pytest.skip("JAX lays it out there")
    backend: Any = stager.backend
    values = pattern((300, 500), np.dtype(np.int32), 1)
    source = backend.as_source(by_jit(values).block_until_ready())
    promise, _ = backend._promises.find(source.address)
    address = promise.wait()
    others = [np.zeros_like(values) for _ in range(20)]
    assert promise.wait() == address
    seen: Any = (ctypes.c_uint8 * values.nbytes).from_address(address)
    assert_same(np.frombuffer(seen, values.dtype).reshape(values.shape), values)
    del others, source
