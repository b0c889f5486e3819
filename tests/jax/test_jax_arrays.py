"""What JAX arrays that were put are good for, and which arrays get refuses."""

from __future__ import annotations

import gc
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("jax")

from xferlib_jax import conformance
from xferlib_jax._cpu import CpuStager
from xferlib_jax._cuda import CudaStager
from xferlib_jax._imports import Imports

from xferlib.conformance.values import assert_same, pattern, words
from xferlib.errors import AllocationError, CapabilityError, TransferError
from xferlib.pipeline.prefetch import prefetch
from xferlib.pipeline.ring import Ring
from xferlib.stager import Stager

WHOLE_BYTES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64"),
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
WIDE = ["int64", "uint64", "float64", "complex128"]
SUB_BYTE = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]


def dtype_named(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def jax_of(stager: Stager) -> Any:
    """Return the framework, which the stager has imported by now."""
    return conformance.bench().jax


@pytest.mark.parametrize("name", WHOLE_BYTES)
def test_every_dtype_of_whole_bytes_goes_and_comes_back(stager: Stager, name: str) -> None:
    for seed, shape in enumerate([(), (0,), (7,), (3, 5), (2, 1, 3, 1, 2, 1, 2, 1, 2)]):
        values = pattern(shape, dtype_named(name), seed)
        array = stager.put(values).result()
        assert isinstance(array, jax_of(stager).Array)
        assert_same(conformance.bench().values(array), values)
        assert_same(stager.get(array).result(), values)


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_dtype_is_kept_where_it_is_on_and_refused_where_it_is_off(stager: Stager, name: str) -> None:
    values = pattern((5,), dtype_named(name), 1)
    with jax_of(stager).enable_x64(False), pytest.raises(TypeError, match=f"would narrow {name}.*jax_enable_x64"):
        stager.put(values)
    with jax_of(stager).enable_x64(True):
        array = stager.put(values).result()
        assert_same(stager.get(array).result(), values)
    with jax_of(stager).enable_x64(False), pytest.raises(TypeError, match="would narrow"):
        stager.put(values)
    lent = pattern((1 << 18,), dtype_named(name), 1)
    with jax_of(stager).enable_x64(False), pytest.raises(TypeError, match="would narrow"):
        # Before anything starts, also where the arrays are made later.
        stager.put(lent, borrow=True)
    with jax_of(stager).enable_x64(False), pytest.raises(TypeError, match="would narrow"):
        stager.put([lent] * 20)
    with jax_of(stager).enable_x64(True):
        assert_same(stager.get(stager.put([lent] * 20, borrow=True).result()[19]).result(), lent)


@pytest.mark.parametrize("name", WIDE)
def test_a_ring_of_a_dtype_that_would_be_narrowed_is_refused_as_a_put_is(stager: Stager, name: str) -> None:
    dtype = dtype_named(name)
    with jax_of(stager).enable_x64(False):
        with pytest.raises(TypeError) as of_put:
            stager.put({"x": np.zeros(1, np.int8), "y": np.zeros(1, dtype)})
        with pytest.raises(TypeError) as of_ring:
            Ring(stager, {"x": ((4,), np.int8), "y": ((4,), dtype)})
    assert str(of_ring.value) == str(of_put.value)
    assert of_ring.value.__notes__ == of_put.value.__notes__ == ["at tree.y"]
    with jax_of(stager).enable_x64(True), Ring(stager, ((4,), dtype)) as ring:
        assert ring.acquire().put().result().dtype == dtype


@pytest.mark.parametrize("name", SUB_BYTE)
def test_a_dtype_of_less_than_a_byte_is_refused_with_advice(stager: Stager, name: str) -> None:
    jnp = jax_of(stager).numpy
    with pytest.raises(TypeError, match=rf"several items of {name} into a byte.*jax.numpy.{name}"):
        stager.put(np.zeros(4, dtype_named(name)))
    with pytest.raises(TypeError, match="several items"):
        stager.get(jnp.zeros(4, dtype_named(name)))


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_a_put_never_shares_the_callers_memory(stager: Stager, memory: str) -> None:
    values = words(1, 1 << 16)
    # Aligned as JAX on the CPU likes it, so that it could take it over.
    source = stager.empty_pinned(values.shape, values.dtype) if memory == "pinned" else _aligned(values)
    source[...] = values
    array = stager.put(source).result()
    source[...] = 0
    assert_same(conformance.bench().values(array), values)


def _aligned(values: np.ndarray) -> np.ndarray:
    room = np.zeros(values.nbytes + 4096, np.uint8)
    first = -room.ctypes.data % 4096
    return room[first : first + values.nbytes].view(values.dtype)


def test_an_array_works_in_transformations(stager: Stager) -> None:
    jax = jax_of(stager)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = stager.put(values).value

    def total(x: Any) -> Any:
        return (x * x).sum()

    assert float(jax.jit(total)(array)) == float((values * values).sum())
    assert_same(np.asarray(jax.grad(total)(array)), 2 * values)
    assert_same(np.asarray(jax.vmap(total)(array)), (values * values).sum(axis=1))
    mesh = jax.sharding.Mesh(np.array([array.device]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    doubled = jax.shard_map(lambda x: x + x, mesh=mesh, in_specs=spec, out_specs=spec)(array)
    assert_same(np.asarray(doubled), 2 * values)
    assert array.committed


def test_an_array_can_be_donated_and_its_memory_comes_back(stager: Stager) -> None:
    jax = jax_of(stager)
    add = jax.jit(lambda x: x + np.int32(1), donate_argnums=0)
    values = words(1)
    # The first takes a spare one along, where the framework may still be using what it gave.
    stager.put(values).synchronize()
    taken = stager.stats().device_nbytes
    for _ in range(20):
        result = add(stager.put(values).value)
        assert_same(conformance.bench().values(result), values + np.int32(1))
        del result
        gc.collect()
    # Not of all twenty. JAX lets go of what it was given on a thread of its own, perhaps a little later.
    assert stager.stats().device_nbytes <= 4 * max(taken, values.nbytes)


def test_an_array_works_on_any_thread(stager: Stager) -> None:
    values = words(1)
    transfer = stager.put(values)
    seen: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: seen.append(conformance.bench().values(transfer.value + 0)))
    thread.start()
    thread.join()
    assert_same(seen[0], values)


def test_a_put_inside_a_function_that_is_traced_is_a_constant_of_it(stager: Stager) -> None:
    values = words(1)
    traced = jax_of(stager).jit(lambda x: x + stager.put(values).value)
    assert_same(np.asarray(traced(np.int32(1))), values + np.int32(1))
    assert_same(np.asarray(traced(np.int32(2))), values + np.int32(2))


def test_a_get_inside_a_function_that_is_traced_is_refused(stager: Stager) -> None:
    jax = jax_of(stager)
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(TypeError, match=r"has no memory\. Call get outside of jit"):
            transform(lambda x: stager.get(x))(np.ones(3, np.float32) if transform is jax.vmap else np.float32(1))


def test_deleted_and_donated_arrays_are_refused(stager: Stager) -> None:
    deleted, donated = (conformance.bench().array(words(1)) for _ in range(2))
    deleted.delete()
    jax_of(stager).jit(lambda x: x + 1, donate_argnums=0)(donated)
    for array in (deleted, donated):
        with pytest.raises(ValueError, match="the array was deleted"):
            stager.get(array)


def test_keys_and_foreign_arrays_are_refused(stager: Stager) -> None:
    with pytest.raises(TypeError, match=r"PRNGKeyArray.*key_data"):
        stager.get(jax_of(stager).random.key(0))
    # JAX has no arrays of some of these dtypes either, but to convert one would be no help.
    wide, of_bytes = np.zeros(1), np.zeros(1, "S3")
    for on_host in (words(1), 1.5, np.float32(1), wide, of_bytes):
        for tree in (on_host, [on_host, words(1)]):
            with pytest.raises(TypeError, match=r"^expected a jax.Array, got .*\. It is on the host already") as caught:
                stager.get(tree)
            assert caught.value.__suppress_context__ or caught.value.__context__ is None
    with pytest.raises(TypeError, match=r"^expected a jax.Array, got .*\. It is on the host already.*\nat tree.x$"):
        stager.get({"x": wide}, out={"x": np.zeros(3, np.uint8)})
    with pytest.raises(TypeError, match=r"expected a device array, got builtins\.object, which is neither"):
        stager.get({"x": object()})


def test_what_was_found_of_one_array_is_not_believed_of_another(stager: Stager) -> None:
    """Its class and its sharding are asked once, all else each time."""
    from xferlib_jax._arrays import ArrayCheck

    jax, device = jax_of(stager), conformance.bench().device
    check = ArrayCheck(device)
    good = jax.device_put(words(1), device)
    for _ in range(2):
        check(good)
        with pytest.raises(TypeError, match="random keys"):
            check(jax.random.key(1))
        with pytest.raises(TypeError, match="that JAX traces"):
            jax.jit(check)(good)
        with pytest.raises(TypeError, match=r"expected a jax.Array, got numpy"):
            check(words(1))
        deleted = jax.device_put(words(1), device)
        check(deleted)
        deleted.delete()
        with pytest.raises(ValueError, match="was deleted"):
            check(deleted)
    (kind,) = {good.sharding.memory_kind}
    elsewhere, refusing = ArrayCheck("another device"), ArrayCheck(device, (kind,))
    for _ in range(2):
        with pytest.raises(ValueError, match="this stager on another device"):
            elsewhere(good)
        with pytest.raises(ValueError, match=rf"in host memory \({kind}\) already"):
            refusing(good)


def test_of_shardings_that_were_seen_not_many_are_kept(stager: Stager) -> None:
    from xferlib_jax._arrays import MOST_SHARDINGS, ArrayCheck

    jax, device = jax_of(stager), conformance.bench().device
    check = ArrayCheck(device)
    for _ in range(2 * MOST_SHARDINGS + 1):
        array = jax.device_put(words(1), device)
        for _ in range(2):
            check(array)
        assert len(check._shardings) <= MOST_SHARDINGS


@pytest.mark.parametrize("name", [*WHOLE_BYTES, "int4", "uint4"])
def test_an_array_has_as_many_bytes_as_jax_says(stager: Stager, name: str) -> None:
    from xferlib_jax._arrays import nbytes_of

    for shape in [(), (0,), (7,), (3, 5)]:
        array = jax_of(stager).numpy.zeros(shape, dtype_named(name))
        assert nbytes_of(array) == array.nbytes


def test_streams_and_targets_are_refused(stager: Stager) -> None:
    array = conformance.bench().array(words(1))
    for call in (
        lambda: stager.put(words(1), into=array),
        lambda: stager.get(array, stream=object()),
        lambda: stager.put(words(1)).stream_wait(7),
        lambda: stager.backend.check_stream(7),
        lambda: stager.backend.as_target(array),
    ):
        with pytest.raises(CapabilityError):
            call()


def test_the_source_of_a_get_may_be_deleted_and_is_not_given_away(stager: Stager) -> None:
    jax = jax_of(stager)
    donate = jax.jit(lambda x: x + np.int32(1), donate_argnums=0)
    values = words(1)
    donate(conformance.bench().array(values))
    deleted, donated = (conformance.bench().array(values) for _ in range(2))
    with conformance.bench().hold_copies(stager.backend, "d2h"):
        transfers = [stager.get(array) for array in (deleted, donated)]
        deleted.delete()
        if stager.on_gpu:
            with pytest.raises(ValueError, match="external reference"):
                donate(donated)
        else:
            # Into other memory.
            assert_same(conformance.bench().values(donate(donated)), values + np.int32(1))
    for transfer in transfers:
        assert_same(transfer.result(), values)


def test_on_the_cpu_the_get_of_a_source_that_is_donated_before_it_is_computed_fails(stager: Stager) -> None:
    if stager.on_gpu:
        pytest.skip("JAX computes elsewhere here")
    bench = conformance.bench()
    values = words(1)
    donate = bench.donated
    donate(bench.read(bench.array(values), bench.token)).block_until_ready()
    stager.get(bench.array(values)).result()
    with bench.hold() as hold:
        array = bench.read(bench.array(values), hold.token)
        transfer = stager.get(array)
        donate(array)
    with pytest.raises(TransferError, match="could not be computed"):
        transfer.result()
    assert_same(stager.get(bench.array(values)).result(), values)


def test_deleting_every_live_array_harms_no_stager(stager: Stager) -> None:
    jax = jax_of(stager)
    values = words(1)
    kept = stager.put(values).result()
    mine = {id(array) for array in jax.live_arrays()}
    del kept
    bench = conformance.bench()
    spared = {id(array) for array in (bench.token, getattr(bench, "_store", None))}
    for array in jax.live_arrays():
        if id(array) in mine - spared:
            array.delete()
    for seed in range(2, 6):
        array = stager.put(words(seed)).result()
        assert_same(conformance.bench().values(array), words(seed))


def test_the_limit_of_device_memory_counts_what_arrays_hold(laws: conformance.TestJax, stager: Stager) -> None:
    with Stager(laws.open(), device_limit=1 << 20) as small:
        kept = [small.put(words(1, 1 << 19)).result() for _ in range(1)]
        with pytest.raises(AllocationError, match="device memory is full"):
            kept += [small.put(words(1, 1 << 19)).result() for _ in range(2)]
        del kept
        gc.collect()
        assert_same(conformance.bench().values(small.put(words(2, 1 << 19)).result()), words(2, 1 << 19))


@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_put_of_pinned_memory_makes_its_arrays_when_they_are_asked_for(stager: Stager, count: int) -> None:
    """To make them takes as long as all else that a put does: the caller first launches what runs beside the copy."""
    live_arrays = jax_of(stager).live_arrays
    tree = {str(number): stager.empty_pinned((3000,), np.uint8) for number in range(count)}
    values = {name: pattern((3000,), np.dtype(np.uint8), number) for number, name in enumerate(tree)}
    for name, source in tree.items():
        source[:] = values[name]
    stager.put(tree).result()
    gc.collect()
    before = len(live_arrays())
    transfer = stager.put(tree)
    transfer.synchronize()
    assert "uint8" not in repr(transfer)
    assert len(live_arrays()) == before
    arrays = transfer.value
    assert len(live_arrays()) >= before + count
    assert transfer.value is arrays
    for name, array in arrays.items():
        assert_same(conformance.bench().values(array), values[name])


@pytest.mark.parametrize("count", [1, 3])
def test_a_wide_array_is_made_where_it_is_put(stager: Stager, count: int) -> None:
    """Whoever asks for it may have 64-bit types off by then."""
    with jax_of(stager).enable_x64(True):
        sources = [stager.empty_pinned((300,), np.float64) for _ in range(count)]
        for number, source in enumerate(sources):
            source[:] = number + 0.1
        alone, together = stager.put(sources[0]), stager.put(sources)
    arrays = [alone.value, *together.value]
    assert [array.dtype for array in arrays] == [np.float64] * (1 + count)
    with jax_of(stager).enable_x64(True):
        for values, source in zip(stager.get(arrays).result(), [sources[0], *sources], strict=True):
            assert_same(values, source)


@pytest.mark.parametrize("slots", [False, True])
def test_a_prefetch_makes_arrays_of_pinned_memory_on_its_own_thread(
    stager: Stager, monkeypatch: pytest.MonkeyPatch, slots: bool
) -> None:
    made: list[threading.Thread] = []
    adopt = Imports.adopt

    def noting(imports: Imports, *arguments: Any, **options: Any) -> Any:
        made.append(threading.current_thread())
        return adopt(imports, *arguments, **options)

    monkeypatch.setattr(Imports, "adopt", noting)
    with Ring(stager, ((300,), np.float32), slots=2) as ring:
        source = ring.acquire if slots else lambda: stager.empty_pinned((300,), np.float32)
        batches = list(prefetch((source() for _ in range(3)), stager))
    assert len(made) == len(batches) == 3
    assert threading.current_thread() not in made


def test_a_prefetch_waits_for_no_lent_batch_to_make_its_arrays(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be made when their copies are started, for which whoever takes them waits."""
    made: list[threading.Thread] = []
    adopt = Imports.adopt

    def noting(imports: Imports, *arguments: Any, **options: Any) -> Any:
        made.append(threading.current_thread())
        return adopt(imports, *arguments, **options)

    monkeypatch.setattr(Imports, "adopt", noting)
    for _ in prefetch([np.zeros(1 << 20, np.uint8) for _ in range(3)], stager):
        pass
    assert made == [threading.current_thread()] * 3


def test_what_a_prefetch_could_not_make_ahead_is_made_when_it_is_asked_for(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    me = threading.current_thread()
    adopt = Imports.adopt
    refused: list[None] = []

    def refusing(imports: Imports, *arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is me:
            return adopt(imports, *arguments, **options)
        refused.append(None)
        raise jax_of(stager).errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(Imports, "adopt", refusing)
    sources = [stager.empty_pinned((300,), np.float32) for _ in range(3)]
    for number, source in enumerate(sources):
        source[:] = number
    for array, source in zip(prefetch(sources, stager), sources, strict=True):
        assert_same(conformance.bench().values(array), source)
    assert len(refused) == 3


@pytest.mark.parametrize("count", [1, 3])
def test_all_who_ask_at_once_get_the_same_arrays(stager: Stager, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    transfer = stager.put([stager.empty_pinned((300,), np.float32) for _ in range(count)])
    adopt, adopt_all = Imports.adopt, Imports.adopt_all
    others: list[Any] = []

    def meanwhile() -> None:
        if threading.current_thread() is threading.main_thread():
            asks = threading.Thread(target=lambda: others.append(transfer.value))
            asks.start()
            asks.join()

    def one(imports: Imports, *arguments: Any, **options: Any) -> Any:
        meanwhile()
        return adopt(imports, *arguments, **options)

    def several(imports: Imports, *arguments: Any, **options: Any) -> Any:
        meanwhile()
        return adopt_all(imports, *arguments, **options)

    monkeypatch.setattr(Imports, "adopt", one)
    monkeypatch.setattr(Imports, "adopt_all", several)
    arrays = transfer.value
    assert others[0] is arrays
    assert transfer.value is arrays


def test_what_was_put_is_made_after_its_stager_was_closed(stager: Stager) -> None:
    source = stager.empty_pinned((3000,), np.int32)
    source[:] = pattern((3000,), np.dtype(np.int32), 1)
    expected = source.copy()
    transfer = stager.put(source)
    del source
    stager.close()
    assert_same(conformance.bench().values(transfer.value), expected)


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("borrow", [False, True])
def test_no_array_is_made_over_memory_that_somebody_has_deleted(
    stager: Stager, monkeypatch: pytest.MonkeyPatch, count: int, borrow: bool
) -> None:
    """Whoever deletes every array of JAX deletes our memory, too. An array that is there already is deleted with it."""
    nbytes = 1 << 20
    sources = [np.ones(nbytes, np.uint8) if borrow else stager.empty_pinned((nbytes,), np.uint8) for _ in range(count)]
    transfer = stager.put(sources if count > 1 else sources[0], borrow=borrow)
    for kind in (CpuStager, CudaStager):
        monkeypatch.setattr(kind, "lost", lambda backend, block: True)
    with pytest.raises(TransferError, match="memory of what was put is gone"):
        _ = transfer.value
