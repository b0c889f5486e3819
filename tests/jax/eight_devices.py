"""What holds of batches that eight devices share. Not collected by itself: `test_jax_sharded.py` starts a child for it."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import xferlib_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from xferlib_jax import _gather, _globals, _prefetch, _sharded, _spread, _stagers

import xferlib
from tests import children
from xferlib.stager import Stager, open_stagers

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
SPECS = [
    PartitionSpec(*axes)
    for axes in ((), ("a",), ("b",), (("a", "b"),), (("b", "a"),), (None, "b"), ("b", "a"), ("a", "b"), (None, ("a", "b")))
]


def over(*axes: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*axes))


def random(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    bits = np.random.default_rng(seed).integers(0, 200, shape, np.uint8)
    return (bits > 100) if dtype == np.bool_ else bits.astype(np.int32).astype(dtype)


def assert_is(array: Any, expected: Any, sharding: Any) -> None:
    assert array.shape == expected.shape
    assert array.dtype == expected.dtype
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    assert array.committed
    assert len(array.addressable_shards) == len(sharding.device_set)
    for shard in array.addressable_shards:
        assert shard.data.devices() == {shard.device}
        assert np.array_equal(np.asarray(shard.data), expected[shard.index])


@pytest.fixture
def stagers() -> Iterator[tuple[Stager, ...]]:
    opened = xferlib_jax.local_stagers()
    yield opened
    for stager in opened:
        stager.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail where a thread of a loop outlives its test, or a stager that a loop opened outlives the end of keeping them."""
    yield
    assert_nothing_is_held()
    xferlib_jax.close()
    assert not open_stagers()


def assert_nothing_is_held() -> None:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(("xferlib-prefetch", "xferlib-close")):
            thread.join(20)
            assert not thread.is_alive(), thread.name
    deadline = time.monotonic() + 20
    while _stagers._SHARED._rows:
        assert time.monotonic() < deadline, _stagers._SHARED._rows
        gc.collect()
        time.sleep(0.001)


def pulled(stagers: tuple[Stager, ...]) -> int:
    return sum(stager.stats().h2d_nbytes for stager in stagers)


def all_of(batches: Any, sharding: Any, depth: int = 2, **options: Any) -> list[Any]:
    with xferlib_jax.prefetch(batches, sharding, depth, **options) as loop:
        return list(loop)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_shard_is_right_and_crosses_the_bus_once(spec: Any, stagers: tuple[Stager, ...]) -> None:
    batches = [random((64, 32, 1024), seed=seed) for seed in range(3)]
    for array, batch in zip(all_of(batches, over(*spec), stagers=stagers), batches, strict=True):
        assert_is(array, batch, over(*spec))
    assert pulled(stagers) == 3 * batches[0].nbytes


def told_apart(shape: tuple[int, ...], sharding: Any) -> Any:
    """Return an array that is replicated over devices, and has the number of each on that."""
    copies = [jax.device_put(np.full(shape, device.id, np.float32), device) for device in sharding.device_set]
    return jax.make_array_from_single_device_arrays(shape, sharding, copies)


def test_a_stager_gets_the_copy_on_its_own_device_of_what_is_replicated(stagers: tuple[Stager, ...]) -> None:
    array = told_apart((33, 5), over())
    small = told_apart((), NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec()))
    for number, stager in enumerate(stagers):
        got = stager.get({"array": array, "small": small}).result()
        assert got["array"].shape == (33, 5)
        assert (got["array"] == number).all()
        assert got["small"] == number
    # As a step leaves it, computed or not.
    for _ in range(3):
        array = jax.jit(lambda x: x + 1, out_shardings=over())(array)
        assert (stagers[5].get(array).result() >= 1).all()
    assert stagers[0].get(array).result().shape == (33, 5)
    split = jax.device_put(np.zeros((8, 8), np.float32), over("a"))
    half = told_apart((3,), NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec()))
    assert stagers[3].get(half).result().tolist() == [3] * 3
    for stager, refused in ((stagers[0], split), (stagers[4], half)):
        with pytest.raises(ValueError, match="is spread over"):
            stager.get(refused)
    array.delete()
    with pytest.raises(ValueError, match="was deleted"):
        stagers[0].get(array)


@pytest.mark.parametrize("shards", [[], None], ids=["none", "refused"])
def test_what_is_replicated_may_be_deleted_by_another_thread_as_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, stagers: tuple[Stager, ...], shards: list[Any] | None
) -> None:
    """JAX says then that it has no shards, or refuses to say: no loop is to end by that, or to raise what no user would expect."""
    array = told_apart((3,), over())
    whole = type(array).addressable_shards

    def looked_at(self: Any) -> Any:
        if self is not array:
            return whole.fget(self)
        self.delete()
        return whole.fget(self) if shards is None else shards

    monkeypatch.setattr(type(array), "addressable_shards", property(looked_at))
    with pytest.raises(ValueError, match="was deleted"):
        stagers[3].get(array)


@pytest.mark.parametrize("snapshot", [False, True])
def test_what_is_replicated_is_saved_from_the_stagers_device(stagers: tuple[Stager, ...], tmp_path: Path, snapshot: bool) -> None:
    state = {f"{number}": told_apart((number + 1, 7), over()) for number in range(3)}
    for number in (0, 6):
        path = xferlib.save(tmp_path / "state.safetensors", state, stagers[number], snapshot=snapshot).result(60)
        back = xferlib_jax.load(path, like=state)
        for name, array in state.items():
            assert_is(back[name], np.full(array.shape, number, np.float32), over())


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int8, np.uint16, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.complex64], ids=str
)
def test_every_dtype_comes_through_whole_or_in_parts(dtype: Any) -> None:
    batch = {"split": random((16, 3), dtype), "whole": random((1 << 10, 513), dtype)}
    (found,) = all_of([batch], {"split": over("a"), "whole": over()})
    assert_is(found["split"], batch["split"], over("a"))
    assert_is(found["whole"], batch["whole"], over())


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, ::2]], ids=["contiguous", "strided"])
def test_a_shard_that_its_devices_cannot_divide_by_rows_is_divided_by_items(view: Any, stagers: tuple[Stager, ...]) -> None:
    batch = view(random((1001, 614)))
    (found,) = all_of([batch], over(), stagers=stagers)
    assert_is(found, batch, over())
    assert batch.nbytes <= pulled(stagers) < batch.nbytes + 8 * batch.itemsize


def test_small_leaves_are_sent_to_each_device(stagers: tuple[Stager, ...]) -> None:
    batch = random((64, 16))
    (found,) = all_of([batch], over(), stagers=stagers)
    assert_is(found, batch, over())
    assert pulled(stagers) == 8 * batch.nbytes


def test_batches_that_differ_in_dtype_alone_are_planned_each(stagers: tuple[Stager, ...]) -> None:
    """The one is small, and sent to each device, the other is not."""
    small, large = random((64, 1024), np.int8), random((64, 1024), np.float32)
    for found, batch in zip(all_of([small, large, small], over(), stagers=stagers), [small, large, small], strict=True):
        assert_is(found, batch, over())
    assert pulled(stagers) == 2 * 8 * small.nbytes + large.nbytes


def test_batches_of_the_same_shape_are_planned_once_and_of_many_shapes_not_all_are_kept(
    stagers: tuple[Stager, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[int, ...]] = []

    def noted(sharding: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        planned.append(shape)
        return _spread.plan_leaf(sharding, shape, dtype)

    monkeypatch.setattr(_sharded, "plan_leaf", noted)
    shapes = [(8, columns) for columns in range(1, _sharded.KEPT_PLANS + 2)]
    batches = [random(shape) for shape in (*shapes, shapes[-1], shapes[1], shapes[0])]
    for found, batch in zip(all_of(batches, over("a"), stagers=stagers), batches, strict=True):
        assert_is(found, batch, over("a"))
    assert planned == [*shapes, shapes[0]]


@pytest.mark.parametrize("shape", [(4, 300, 700), (7, 101, 333), (65536,), (1, 99991)], ids=str)
@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec(None, "a")], ids=str)
def test_devices_that_gather_among_themselves_make_the_same_whole(shape: tuple[int, ...], spec: Any) -> None:
    """As GPUs do it. One at a time, since a CPU of few cores cannot run two collectives at once."""
    if len(shape) < len(spec) or (len(spec) and shape[1] % 2):
        spec = PartitionSpec()
    dtypes = [np.dtype(dtype) for dtype in (np.float32, np.int16, ml_dtypes.bfloat16)]
    plans = [_spread.plan_leaf(NamedSharding(MESH, spec), shape, dtype) for dtype in dtypes]
    assert all(plan.parts for plan in plans)
    for by_collective in (True, False):
        gather = _gather.Gather(plans, by_collective=by_collective)
        # From the second on by JAX's private constructor.
        for seed in range(3):
            batches = [random(shape, dtype, seed) for dtype in dtypes]
            found = [
                {device: jax.device_put(view, device) for device, view in plan.views(batch)}
                for plan, batch in zip(plans, batches, strict=True)
            ]
            for whole, plan, batch in zip(gather(found), plans, batches, strict=True):
                array = jax.make_array_from_single_device_arrays(batch.shape, plan.sharding, list(whole.values()))
                array.block_until_ready()
                assert_is(array, batch, plan.sharding)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_global_arrays_are_made_by_the_fast_constructor_and_by_the_public_call_alike(spec: Any, dtype: Any) -> None:
    batches = [random((16, 8), dtype, seed) for seed in range(3)]
    make, add = _globals.GlobalArrays((16, 8), over(*spec)), jax.jit(lambda array: array + array)
    for number, batch in enumerate(batches):
        places = over(*spec).addressable_devices_indices_map(batch.shape).items()
        # In the order of the numbers of devices, which is not that of every sharding.
        shards = {device: jax.device_put(batch[index], device) for device, index in sorted(places, key=lambda place: place[0].id)}
        assert make.by_private_call == (number > 0)
        array = make(shards)
        assert_is(array, batch, over(*spec))
        assert not array.weak_type
        assert_is(add(array), batch + batch, add(jax.device_put(batch, over(*spec))).sharding)


@pytest.mark.parametrize("wrong", ["takes no such arguments", "makes something else"])
def test_a_constructor_of_another_jax_is_left_alone(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Array:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __getattr__(self, name: str) -> Any:
            return getattr(self.array, name)

    class Other(Array):
        def __init__(self, aval: Any, sharding: Any = None, arrays: Any = None, **options: Any) -> None:
            super().__init__(aval if sharding is None else public(aval.shape, sharding, arrays).astype(np.int32))

    kind, public = (Array if wrong == "takes no such arguments" else Other), jax.make_array_from_single_device_arrays
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda *arguments: kind(public(*arguments)))
    make = _globals.GlobalArrays((16, 4), over("a"))
    shards = {device: jax.device_put(random((8, 4)), device) for device in jax.devices()}
    for _ in range(2):
        assert make(shards).shape == (16, 4)
        assert not make.by_private_call


def test_gpus_would_gather_among_themselves() -> None:
    class Gpu:
        platform = "gpu"

    class Stop(Exception): ...

    plan = _spread.plan_leaf(over(), (1024, 1024), np.dtype(np.float32))
    (group,) = plan.groups
    seen = []

    class Asked:
        def __init__(self, leaves: Any, *, by_collective: bool) -> None:
            seen.append(by_collective)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gather, "Gather", Asked)
        for devices in ((Gpu(), Gpu()), group.devices):
            alike = dataclasses.replace(plan, groups=(_spread.Group(group.index, devices),))
            _gather.gathers([alike])
    assert seen == [True, False]


def test_a_tree_takes_a_prefix_of_shardings() -> None:
    batch = {
        "image": random((16, 8)),
        "more": (random((8, 4)), [np.float32(3), random((), np.int32), None]),
        "none": random((0, 5)),
    }
    shardings = {"image": over("a", "b"), "more": (over("b"), over()), "none": jax.sharding.SingleDeviceSharding(jax.devices()[3])}
    (found,) = all_of([batch], shardings)
    assert jax.tree.structure(found) == jax.tree.structure(batch)
    assert_is(found["image"], batch["image"], over("a", "b"))
    assert_is(found["more"][0], batch["more"][0], over("b"))
    assert_is(found["more"][1][0], np.asarray(batch["more"][1][0]), over())
    assert_is(found["none"], batch["none"], shardings["none"])


def test_nodes_that_jax_was_told_of_are_trees() -> None:
    @dataclasses.dataclass
    class Sample:
        image: Any
        label: Any

    jax.tree_util.register_dataclass(Sample, ["image", "label"], [])
    batch = Sample(random((8, 4)), random((8,), np.int32))
    (found,) = all_of([batch], Sample(over("a"), over("b")))
    assert isinstance(found, Sample)
    assert_is(found.image, batch.image, over("a"))
    assert_is(found.label, batch.label, over("b"))


def test_dataclasses_that_jax_was_not_told_of_are_trees_as_well() -> None:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        label: Any
        none: Any = None

    @dataclasses.dataclass
    class Sample:
        image: Any
        rest: Any

    batch = Sample(random((8, 4)), {"inner": [Inner(random((8,), np.int32))]})
    for shardings in (over("a"), Sample(over("a"), over("a")), Sample(over("a"), {"inner": [Inner(over("a"))]})):
        (found,) = all_of([batch], shardings)
        assert isinstance(found, Sample)
        assert_is(found.image, batch.image, over("a"))
        inner = found.rest["inner"][0]
        assert isinstance(inner, Inner)
        assert inner.none is None
        assert_is(inner.label, batch.rest["inner"][0].label, over("a"))
    with pytest.raises(TypeError, match=r"batch\.rest\['inner'\]\[0\]\.label is a builtins\.set"):
        all_of([Sample(random((8, 4)), {"inner": [Inner({1})]})], over("a"))


def test_what_is_inside_of_a_node_is_billed() -> None:
    @dataclasses.dataclass
    class Sample:
        image: Any

    with xferlib_jax.prefetch(iter([Sample(random((16, 4)))]), over("a")) as loop:
        # Over two of four groups: a half on each of eight devices.
        assert loop.bill.device_nbytes == 4 * 8 * 128


def test_contiguous_shards_of_pinned_memory_are_read_where_they_are(stagers: tuple[Stager, ...]) -> None:
    batch = random((64, 1 << 14))
    pins = [stager.pin(batch) for stager in stagers]
    for spec in (("a",), (("a", "b"),), ()):
        (found,) = all_of([batch], over(*spec), stagers=stagers)
        assert_is(found, batch, over(*spec))
    assert [stager.stats().synchronous for stager in stagers] == [0] * 8
    all_of([batch], over(None, "a"), stagers=stagers)
    assert all(stager.stats().synchronous for stager in stagers)
    for pin in pins:
        pin.close()


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("spec", [(), ("b",)], ids=str)
def test_a_source_may_rewrite_its_memory(spec: tuple[str, ...], pinned: bool, stagers: tuple[Stager, ...]) -> None:
    """Copies are held until the source has been asked again, when all is staged, or has not been, where pinned memory is read."""
    shape, dtype = (1 << 12, 2560), np.dtype(np.float32)
    memory = stagers[0].empty_pinned(shape, dtype) if pinned else np.empty(shape, dtype)
    gate, asked = threading.Event(), threading.Event()
    for stager in stagers:
        stager.backend.h2d.submit(gate.wait)  # type: ignore[attr-defined]  # Of the backend on the CPU, for tests.

    def batches() -> Iterator[Any]:
        for number in range(3):
            memory[:] = number
            yield memory
            asked.set()

    with xferlib_jax.prefetch(batches(), over(*spec), stagers=stagers) as loop:
        was_asked = asked.wait(1 if pinned else 60)
        gate.set()
        assert was_asked == (not pinned), "the source was asked for more while its memory was being read, or was not asked"
        for number, found in enumerate(loop):
            assert (np.asarray(found) == number).all()


@pytest.mark.parametrize("how", ["says so", "keeps no batch"])
def test_a_source_that_rewrites_nothing_is_asked_while_its_batch_is_read(how: str, stagers: tuple[Stager, ...]) -> None:
    class Fresh:
        rewrites = how != "says so"

        def __init__(self) -> None:
            self.asked = threading.Event()
            self.kept: list[Any] = []

        def made(self, seed: int) -> Any:
            batch = random((1 << 12, 320), seed=seed)
            if how == "says so":
                self.kept.append(batch)
            return batch

        def __iter__(self) -> Iterator[Any]:
            yield self.made(0)
            self.asked.set()
            yield self.made(1)

    gate, source = threading.Event(), Fresh()
    for stager in stagers:
        stager.backend.h2d.submit(gate.wait)  # type: ignore[attr-defined]  # Of the backend on the CPU, for tests.
    with xferlib_jax.prefetch(source, over(), stagers=stagers) as loop:
        assert source.asked.wait(20), "the source was not asked while copies were held"
        gate.set()
        for seed, found in enumerate(loop):
            assert_is(found, random((1 << 12, 320), seed=seed), over())


@pytest.mark.parametrize("held", [0, 3, 7])
def test_a_batch_is_done_when_every_device_has_pulled_its_part(held: int, stagers: tuple[Stager, ...]) -> None:
    gate, others = threading.Event(), [stager for number, stager in enumerate(stagers) if number != held]
    with (
        xferlib.Ring(stagers[0], {"x": ((64, 1024), "float32")}, slots=1) as ring,
        xferlib_jax.prefetch([], over(("a", "b")), stagers=stagers) as loop,
    ):
        slot = ring.acquire()
        slot["x"][:] = random((64, 1024))
        stagers[held].backend.h2d.submit(gate.wait)  # type: ignore[attr-defined]  # Of the backend on the CPU, for tests.
        transfer = loop._puts.put(slot, unshared=False)
        passed = [threading.Event() for _ in others]
        for stager, event in zip(others, passed, strict=True):
            stager.backend.h2d.submit(event.set)  # type: ignore[attr-defined]  # As above. It comes behind the copy.
        try:
            assert all(event.wait(20) for event in passed)
            assert not transfer.done()
            # The device that is held reads it, so that it may not be its ring's.
            assert np.array_equal(slot["x"], random((64, 1024)))
        finally:
            gate.set()
        transfer.synchronize()
        assert transfer.done()
        with pytest.raises(RuntimeError, match="given back"):
            slot.tree  # noqa: B018  # Asking is enough.
        assert_is(transfer.value["x"], random((64, 1024)), over(("a", "b")))


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_slots_of_a_ring_come_back_when_every_device_has_read_them(slots: int, stagers: tuple[Stager, ...]) -> None:
    spec = {"x": ((64, 1024), "float32"), "y": ((64,), "int32")}
    with xferlib.Ring(stagers[0], spec, slots) as ring:

        def batches() -> Iterator[xferlib.Slot]:
            for number in range(8):
                slot = ring.acquire()
                slot["x"][:] = number
                slot["y"][:] = np.arange(64) * number
                if number == 7:
                    slot.rows = 16
                yield slot

        with xferlib_jax.prefetch(batches(), over("a"), stagers=stagers) as loop:
            assert loop.bill.pinned_nbytes == ring.bill.pinned_nbytes
            for number, found in enumerate(loop):
                rows = 16 if number == 7 else 64
                assert_is(found["x"], np.full((rows, 1024), number, np.float32), over("a"))
                assert_is(found["y"], (np.arange(64) * number)[:rows].astype(np.int32), over("a"))


def test_a_consumer_may_keep_its_batches() -> None:
    batches = [random((64, 4096), seed=seed) for seed in range(10)]
    kept = all_of(batches, over("a"))
    for array, batch in zip(kept, batches, strict=True):
        assert_is(array, batch, over("a"))


def test_memory_is_used_again_when_a_batch_was_dropped(stagers: tuple[Stager, ...]) -> None:
    batch = random((64, 1 << 14))
    asked: SimpleQueue[None] = SimpleQueue()

    def batches() -> Iterator[Any]:
        for _ in range(20):
            asked.get()
            yield batch

    with xferlib_jax.prefetch(batches(), over(("a", "b")), 4, stagers=stagers) as loop:
        for _ in range(20):
            # One at a time: each is dropped before the next is put.
            asked.put(None)
            next(loop).block_until_ready()
    assert max(stager.stats().device_peak_nbytes for stager in stagers) <= 2 * batch.nbytes // 8


def test_a_batch_that_cannot_be_divided_fails_in_its_place_before_anything_starts(stagers: tuple[Stager, ...]) -> None:
    batches = [{"x": random((16, 4)), "y": random((16,), np.int32)}, {"x": random((16, 4)), "y": random((10,), np.int32)}]
    loop = xferlib_jax.prefetch(batches, over(("a", "b")), stagers=stagers)
    assert_is(next(loop)["x"], batches[0]["x"], over(("a", "b")))
    with pytest.raises(ValueError, match=r"\(10,\) cannot be divided by .* over 8 devices. Pad the batch, drop it") as caught:
        next(loop)
    assert caught.value.__notes__ == ["at batch['y']", "in batch 1 of the source, counted from 0"]
    assert pulled(stagers) == 16 * 5 * 4
    with pytest.raises(StopIteration):
        next(loop)


@pytest.mark.parametrize(
    ("leaf", "kind", "message"),
    [
        (np.arange(8), TypeError, "narrow int64"),
        (np.array(["a"] * 8), TypeError, r"JAX has no arrays of dtype <U1. Text rides along in a list, array.tolist\(\)"),
        (np.zeros(8, ">f4"), TypeError, "JAX has no arrays of dtype >f4"),
        (np.ma.zeros(8), TypeError, "is a numpy.*MaskedArray: expected a plain NumPy array"),
        (np.zeros(8, ml_dtypes.int4), TypeError, "packs several items"),
        (np.float32(1), ValueError, r"has 0 axes, and .* names 1. Give a tree of shardings"),
        ({1}, TypeError, r"batch\['y'\] is a builtins.set: expected a plain.*xferlib.Host"),
    ],
    ids=str,
)
def test_what_cannot_be_a_batch_is_refused_before_anything_starts(
    leaf: Any, kind: type[Exception], message: str, stagers: tuple[Stager, ...]
) -> None:
    with pytest.raises(kind, match=message) as caught:
        all_of([{"x": random((16, 4)), "y": leaf}], over("a"), stagers=stagers)
    assert "batch['y']" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert pulled(stagers) == 0


def test_arrays_of_jax_and_traced_ones_are_refused() -> None:
    with pytest.raises(TypeError, match=r"batch\['x'\] is a jax.Array, which is on its devices already"):
        all_of([{"x": jax.numpy.ones(8)}], over("a"))

    def traced(array: Any) -> Any:
        return all_of([array], over("a"))[0]

    with pytest.raises(TypeError, match="stands for an array inside a function that JAX traces"):
        jax.jit(traced)(np.ones(8, np.float32))
    with pytest.raises(ValueError, match=r"there is no array in the batch.*Leave empty batches out"):
        all_of([{}], over("a"))
    with pytest.raises(ValueError, match="there is no array in the batch"):
        all_of([{"name": "x"}], over("a"))


def test_shardings_of_another_structure_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"sharding has another structure .*expected .*'x'.*, got .*'y'.*a tree with one for each"):
        all_of([{"x": random((16, 4))}], {"y": over("a")})


def test_names_ride_along(stagers: tuple[Stager, ...]) -> None:
    ids = xferlib.Host(np.arange(16))
    batches = [{"name": [f"{number}", number], "x": random((16, 4)), "ids": ids} for number in range(3)]
    found = all_of(batches, over("a"), stagers=stagers)
    assert [batch["name"] for batch in found] == [["0", 0], ["1", 1], ["2", 2]]
    assert all(batch["ids"] is ids for batch in found)
    for batch, given in zip(found, batches, strict=True):
        assert_is(batch["x"], given["x"], over("a"))
    for shardings in ({"x": over("b"), "name": None}, {"x": over("b"), "name": over("a")}):
        (batch,) = all_of([{"x": random((16, 4)), "name": "one"}], shardings, stagers=stagers)
        assert_is(batch["x"], random((16, 4)), over("b"))
        assert batch["name"] == "one"


def test_what_is_no_sharding_of_this_process_is_refused() -> None:
    cpu = jax.devices()[0]

    class Foreign:
        platform = "cuda"

    abstract = MESH.abstract_mesh
    for sharding, kind, message in (
        (PartitionSpec("a"), TypeError, r"expected a sharding, got P.*NamedSharding\(mesh"),
        ("a", TypeError, "expected a sharding, got 'a'"),
        (cpu, TypeError, r"got CpuDevice.*make jax.sharding.SingleDeviceSharding\(device\)"),
        ({}, ValueError, "there is no sharding in {}"),
        (NamedSharding(abstract, PartitionSpec("a")), ValueError, "a mesh without devices"),
        (over("a").with_memory_kind("pinned_host"), ValueError, "memory of kind 'pinned_host'"),
    ):
        with pytest.raises(kind, match=message):
            xferlib_jax.prefetch([], sharding)
    with pytest.raises(ValueError, match=r"platform 'cuda', and JAX computes on 'cpu' here. .*JAX_PLATFORMS=cuda"):
        _prefetch.check_platform(Foreign(), [cpu])
    with pytest.raises(ValueError, match="depth=0: expected 1 or more"):
        xferlib_jax.prefetch([], over("a"), 0)
    with pytest.raises(TypeError, match="depth='2': expected a whole number"):
        xferlib_jax.prefetch([], over("a"), "2")  # type: ignore[call-overload]  # On purpose.
    with pytest.raises(TypeError, match="something to iterate"):
        xferlib_jax.prefetch(3, over("a"))  # type: ignore[call-overload]  # On purpose.
    with pytest.raises(TypeError, match="The sharding comes second"):
        xferlib_jax.prefetch(over("a"), [])
    with pytest.raises(TypeError, match="The sharding comes second"):
        xferlib_jax.prefetch(jax.local_devices()[0], [])
    with pytest.raises(TypeError, match=r"call xferlib_jax.prefetch\(batches, sharding\)"):
        xferlib_jax.ShardedPrefetch([], over("a"))
    with (
        xferlib.stager("jax") as stager,
        pytest.raises(TypeError, match=r"call xferlib.prefetch\(batches, stager\)"),
    ):
        xferlib_jax.prefetch([], stager)


def test_a_ring_of_few_slots_is_waited_for_only_as_far_as_the_loop_is_ahead() -> None:
    """`depth` is more than the source has batches for."""
    with xferlib.stager("host") as stager, xferlib.Ring(stager, {"x": ((16, 4), "float32")}, slots=2) as ring:
        slot = ring.acquire()
        slot["x"][:] = random((16, 4))
        with xferlib_jax.prefetch([slot], over("a"), depth=9) as loop:
            assert_is(next(loop)["x"], random((16, 4)), over("a"))
            assert not loop._puts.in_place(slot)


def test_stagers_that_do_not_fit_are_refused(stagers: tuple[Stager, ...]) -> None:
    with pytest.raises(ValueError, match=r"there is none on \[.*7.*\], over which"):
        xferlib_jax.prefetch([], over("a"), stagers=stagers[:7])
    with pytest.raises(ValueError, match="two of them are on"):
        xferlib_jax.prefetch([], over("a"), stagers=(*stagers, stagers[2]))
    with xferlib.stager("host") as host, pytest.raises(TypeError, match='expected stagers of backend "jax"'):
        xferlib_jax.prefetch([], over("a"), stagers=[host])
    one: Any = stagers[0]
    with pytest.raises(TypeError, match=r"^stagers=<Stager.*: expected several, .*Pass a list of them: stagers=\[stager\]$"):
        xferlib_jax.prefetch([], over("a"), stagers=one)


def test_stagers_may_be_in_whatever_a_loop_goes_over(stagers: tuple[Stager, ...]) -> None:
    class Old:
        """A sequence as there were before there were iterators."""

        def __getitem__(self, number: int) -> Stager:
            return stagers[number]

    old: Any = Old()
    with xferlib_jax.prefetch([random((8, 2))], over("a"), stagers=old) as batches:
        assert len(list(batches)) == 1


def test_exceptions_of_the_source_come_out_in_their_place_with_their_traceback() -> None:
    def broken_source() -> Iterator[Any]:
        yield random((16, 4))
        raise ArithmeticError("on purpose")

    loop = xferlib_jax.prefetch(broken_source(), over("a"))
    assert_is(next(loop), random((16, 4)), over("a"))
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        next(loop)
    assert "broken_source" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert next(loop, None) is None
    assert _stagers._SHARED._rows == {}


class Stumbling(Iterator[Any]):
    """Batches, of which the third cannot be had, and the fifth not be divided."""

    asked = 0

    def __next__(self) -> Any:
        if self.asked == 6:
            raise StopIteration
        self.asked += 1
        if self.asked == 3:
            raise ArithmeticError("on purpose")
        return random((11 if self.asked == 5 else 16, 4), seed=self.asked)


def test_what_fails_for_a_batch_costs_that_batch_alone_and_a_second_pass_is_refused() -> None:
    loop = xferlib_jax.prefetch(Stumbling(), over("a"))
    for number in (1, 2):
        assert_is(next(loop), random((16, 4), seed=number), over("a"))
    with pytest.raises(ArithmeticError):
        next(loop)
    assert_is(next(loop), random((16, 4), seed=4), over("a"))
    with pytest.raises(ValueError, match="cannot be divided"):
        next(loop)
    assert _stagers._SHARED._rows != {}
    (last,) = loop
    assert_is(last, random((16, 4), seed=6), over("a"))
    assert _stagers._SHARED._rows == {}
    with pytest.raises(xferlib.ClosedError, match="spent"):
        list(loop)
    assert next(loop, None) is None


def test_an_interrupted_loop_is_closed_and_lets_its_stagers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = xferlib_jax.prefetch(Stumbling(), over("a"))
    next(loop)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop._loop, "_next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    assert _stagers._SHARED._rows == {}
    with pytest.raises(xferlib.ClosedError):
        iter(loop)


def test_a_copy_that_fails_on_one_device_fails_the_batch(stagers: tuple[Stager, ...]) -> None:
    def fail() -> None:
        raise ArithmeticError("on purpose")

    stagers[5].backend.h2d.submit(fail)  # type: ignore[attr-defined]  # Of the backend on the CPU, for tests.
    loop = xferlib_jax.prefetch([random((16, 4))], over("a"), stagers=stagers)
    with pytest.raises(xferlib.TransferError, match="on purpose"):
        next(loop)


def test_a_put_that_fails_on_one_device_leaves_nothing_in_flight(stagers: tuple[Stager, ...]) -> None:
    gate = threading.Event()
    for stager in stagers[:4]:
        stager.backend.h2d.submit(gate.wait)  # type: ignore[attr-defined]  # As above.
    stagers[4].close()
    batch = random((16, 1 << 15))
    pins = [stager.pin(batch) for stager in (*stagers[:4], *stagers[5:])]
    loop = xferlib_jax.prefetch([batch], over(("a", "b")), stagers=stagers)
    raised = []

    def take() -> None:
        try:
            next(loop)
        except xferlib.ClosedError as error:
            raised.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    taker.join(0.2)
    assert taker.is_alive(), "it was told while copies were held"
    gate.set()
    taker.join(20)
    assert len(raised) == 1
    for stager in stagers[:4]:
        # What is done may wait to be noticed, what is not done is not noticed.
        stager._ledger.reap()
        assert not stager._ledger.busy
    for pin in pins:
        pin.close()


def test_loops_share_stagers() -> None:
    # Many more than the second may have put before the first is closed: those behind them need its stagers then.
    batches = [random((16, 4), seed=seed) for seed in range(12)]
    first, second = xferlib_jax.prefetch(batches, over("a")), xferlib_jax.prefetch(batches, over("b"))
    assert [s.device for s in first.stagers] == [s.device for s in second.stagers]
    assert all(one is other for one, other in zip(first.stagers, second.stagers, strict=True))
    next(first)
    first.close()
    first.close()
    for batch in batches[:-1]:
        assert_is(next(second), batch, over("b"))
    second.close()
    with pytest.raises(xferlib.ClosedError):
        next(second)


def test_stagers_of_the_caller_stay_open(stagers: tuple[Stager, ...]) -> None:
    all_of([random((16, 4))], over("a"), stagers=stagers)
    assert stagers[0].put(random((4,))).result().shape == (4,)


def test_a_loop_says_which_stagers_it_uses_in_the_order_of_their_devices(stagers: tuple[Stager, ...]) -> None:
    with xferlib_jax.prefetch([random((16, 4))], over("a"), stagers=stagers) as loop:
        assert loop.stagers == stagers
        list(loop)
    assert loop.stagers == stagers


def test_a_loop_is_as_long_as_its_source_says(stagers: tuple[Stager, ...]) -> None:
    with xferlib_jax.prefetch([random((16, 4))] * 3, over("a"), stagers=stagers) as loop:
        assert len(loop) == len(list(loop)) == 3
    with xferlib_jax.prefetch(iter([random((16, 4))]), over("a"), stagers=stagers) as loop:
        with pytest.raises(TypeError, match="this loop has no length"):
            len(loop)
        assert loop
        assert len(list(loop)) == 1


def test_what_comes_behind_the_end_of_a_loop_starts_nothing(stagers: tuple[Stager, ...]) -> None:
    batch = random((16, 4))
    with xferlib_jax.prefetch([batch], over("a"), stagers=stagers) as loop:
        list(loop)
        puts = loop._puts
    before = pulled(stagers)
    # As the loop's thread does where it is late: the stagers are the caller's, and open.
    with pytest.raises(xferlib.ClosedError, match="this loop has ended"):
        puts.put(batch, unshared=False)
    assert pulled(stagers) == before


def test_one_that_is_left_early_ends() -> None:
    for array in xferlib_jax.prefetch((random((16, 4)) for _ in range(100)), over("a")):
        assert_is(array, random((16, 4)), over("a"))
        break
    # The fixture looks for what is left.


def test_one_that_is_dropped_unused_ends() -> None:
    loop = xferlib_jax.prefetch((random((16, 4)) for _ in range(100)), over("a"))
    del loop


def test_a_program_that_forgets_its_loop_ends_without_a_word() -> None:
    import sys

    program = (
        "import itertools, jax, numpy as np, xferlib_jax\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec\n"
        "mesh = Mesh(np.array(jax.devices()), ('x',))\n"
        "ones = (np.ones((8, 1000), 'f4') for _ in itertools.count())\n"
        "loop = xferlib_jax.prefetch(ones, NamedSharding(mesh, PartitionSpec('x')))\n"
        "next(loop)\n"
    )
    child = children.run([sys.executable, "-X", "dev", "-c", program], seconds=100)
    assert (child.returncode, child.stderr) == (0, "")


def test_without_the_private_import_arrays_are_moved_to_their_devices(stagers: tuple[Stager, ...]) -> None:
    for stager in stagers:
        stager.backend._imports._convert = None  # type: ignore[attr-defined]  # As where JAX has no such call.
    batch = {"x": random((16, 4)), "y": random((1024, 1024))}
    (found,) = all_of([batch], {"x": over("a"), "y": over()}, stagers=stagers)
    assert_is(found["x"], batch["x"], over("a"))
    assert_is(found["y"], batch["y"], over())


def test_the_bill_counts_what_every_device_holds_and_the_report_tells() -> None:
    batch = random((1024, 256))
    with xferlib_jax.prefetch([batch] * 6, over("a"), 3) as loop:
        assert loop.bill.device_nbytes == 5 * 4 * batch.nbytes
        assert loop.bill.pinned_nbytes == 0
        assert "batches over 8 devices" in str(loop.bill)
        assert len(list(loop)) == 6
        assert loop.report().batches == 6
    with xferlib_jax.prefetch([], over("a")) as loop:
        assert loop.bill.charges == ()


@pytest.mark.parametrize("count", [8, 3, 1])
def test_stacked_batches_go_over_the_devices_for_pmap(count: int) -> None:
    devices = jax.devices()[::-1][:count]
    batches = [{"x": random((count, 5, 4), seed=seed)} for seed in range(4)]
    double = jax.pmap(lambda batch: batch["x"] * 2, devices=devices)
    with xferlib_jax.prefetch_to_device(iter(batches), 2, devices) as loop:
        for found, batch in zip(loop, batches, strict=True):
            assert [shard.device for shard in sorted(found["x"].addressable_shards, key=lambda s: s.index[0].start or 0)] == devices
            assert np.array_equal(np.asarray(double(found)), 2 * batch["x"])


def test_stacked_batches_take_all_devices_unless_told() -> None:
    with xferlib_jax.prefetch_to_device([random((8, 2))]) as loop:
        assert len(next(loop).addressable_shards) == 8


def test_a_computation_over_the_mesh_sees_the_batch() -> None:
    add = jax.jit(lambda x, w: (x @ w).sum())
    batches = [(random((32, 256), seed=seed), random((256, 256), seed=9 - seed)) for seed in range(4)]
    for found, (x, w) in zip(all_of(batches, (over("a", "b"), over())), batches, strict=True):
        assert np.isclose(float(add(*found)), (x @ w).sum(), rtol=1e-5)
