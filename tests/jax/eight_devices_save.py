"""What holds of saves of arrays that eight devices share. Not collected by itself: `test_jax_files.py` starts a child for it."""

# ruff: noqa: F811  # A fixture that is imported stands in the parameters of tests.

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import xferlib_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from xferlib_jax import _save, _stagers

import xferlib
from tests import children
from tests.core.fakes import until
from tests.core.points import interrupted_at
from tests.files.saves import at_rest, held_files, only
from tests.jax.eight_devices import MESH, SPECS, assert_is, assert_nothing_is_held, nothing_left, over, random, stagers  # noqa: F401
from xferlib.files import outcome
from xferlib.stager import Stager, open_stagers

DTYPES: list[Any] = [
    *(np.bool_, np.int8, np.uint16, np.int32, np.float16, np.float32, np.complex64),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
TREE = {
    "params": {"kernel": random((64, 320)), "bias": random((320,), ml_dtypes.bfloat16), "scale": random((), np.float32)},
    "moments": [random((64, 320), seed=1), random((320,), np.int32, seed=2)],
    "empty": random((0, 8)),
    "step": 17,
    "name": "text",
}
SHARDINGS = {
    "params": {"kernel": over("b", "a"), "bias": over(("a", "b")), "scale": over()},
    "moments": [over(None, "b"), over("a")],
    "empty": over(None, "a"),
    "step": None,
    "name": None,
}


def divided() -> Any:
    return jax.tree.map(
        lambda sharding, leaf: leaf if sharding is None else jax.device_put(leaf, sharding),
        SHARDINGS,
        TREE,
        is_leaf=lambda leaf: leaf is None,
    )


def on_the_host(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def gathered(folder: Path, tree: Any) -> bytes:
    """Return what a stager of the host saves of the gathered arrays."""
    other = folder / "gathered"
    other.mkdir(exist_ok=True)
    with xferlib.stager("host") as stager:
        path = xferlib.save(other / "a.safetensors", on_the_host(tree), stager).result(60)
    found = path.read_bytes()
    path.unlink()
    other.rmdir()
    return found


def saved(path: Path, tree: Any, **options: Any) -> Any:
    save = xferlib_jax.save(path, tree, **options)
    save.result(60)
    assert save.written == save.nbytes
    save.wait_read(0)
    only(path.parent, path.name)
    return path.read_bytes()


def pulled(stagers: tuple[Stager, ...]) -> list[int]:
    return [stager.stats().d2h_nbytes for stager in stagers]


@pytest.mark.parametrize("memory", [256 << 20, 20_000])
def test_the_file_is_that_of_the_gathered_tree(tmp_path: Path, memory: int) -> None:
    tree = divided()
    assert saved(tmp_path / "a.safetensors", tree, memory=memory) == gathered(tmp_path, tree)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_each_byte_is_read_once_and_all_devices_read_as_much(tmp_path: Path, stagers: tuple[Stager, ...], spec: Any) -> None:
    arrays = {str(number): random((64, 320), seed=number) for number in range(8)}
    tree = {name: jax.device_put(array, over(*spec)) for name, array in arrays.items()}
    found = saved(tmp_path / "a.safetensors", tree, stagers=stagers)
    assert found == gathered(tmp_path, tree)
    assert pulled(stagers) == [arrays["0"].nbytes] * 8
    for stager in stagers:
        at_rest(stager)
        assert not stager._ledger.jobs.readings


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_over_another_sharding(tmp_path: Path, dtype: Any) -> None:
    array = random((48, 40), dtype)
    path = tmp_path / "a.safetensors"
    saved(path, {"x": jax.device_put(array, over("b", "a"))}, memory=3000)
    for sharding in (over("b", "a"), over(None, ("a", "b")), over()):
        found = xferlib_jax.load(path, sharding)["x"]
        assert_is(found, array, sharding)
    with xferlib.stager("jax") as stager:
        assert np.asarray(xferlib.load(path, stager)["x"]).tobytes() == array.tobytes()


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    tree = divided()
    path = xferlib_jax.save(tmp_path / "step_1.safetensors", tree, metadata={"run": "a"}).result(60)

    def shaped(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return type(leaf)()

    back = xferlib_jax.load(path, like=jax.tree.map(shaped, tree))
    assert (back["step"], back["name"]) == (17, "text")
    for found, want in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        if isinstance(want, jax.Array):
            assert_is(found, np.asarray(want), want.sharding)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_numpy_reads_its_own_formats(tmp_path: Path, suffix: str) -> None:
    array = random((64, 320))
    for spec in SPECS:
        there = jax.device_put(array, over(*spec))
        path = xferlib_jax.save(tmp_path / f"a.{suffix}", there if suffix == "npy" else {"x": there}, memory=9001).result(60)
        found = np.load(path)
        assert (found if suffix == "npy" else found["x"]).tobytes() == array.tobytes()


def test_arrays_may_be_of_one_device_or_of_some_or_as_a_step_leaves_them(tmp_path: Path, stagers: tuple[Stager, ...]) -> None:
    some = Mesh(np.array(jax.devices()[2:5]), ("x",))
    step = jax.jit(
        lambda x, y: {"sum": x + 1, "product": x.T @ x, "number": y.sum()},
        out_shardings={"sum": over("b"), "product": over("b", "a"), "number": over()},
    )
    tree = {
        "one": jax.device_put(random((5, 7)), jax.devices()[6]),
        "uncommitted": jax.numpy.arange(5, dtype=np.int32),
        "some": jax.device_put(random((9, 2)), NamedSharding(some, PartitionSpec("x"))),
        "made": step(jax.device_put(random((16, 8)), over("a")), jax.device_put(random((8,)), over("b"))),
    }
    assert saved(tmp_path / "a.safetensors", tree) == gathered(tmp_path, tree)
    saved(tmp_path / "a.safetensors", {"one": tree["one"]}, stagers=[stagers[6]])
    assert pulled(stagers) == [0] * 6 + [tree["one"].nbytes, 0]


@dataclasses.dataclass
class State:
    """Which JAX does not take apart by itself."""

    weights: Any
    queue: Any
    step: int


def test_trees_are_those_of_other_saves(tmp_path: Path) -> None:
    state = State({"w": jax.device_put(random((8, 8)), over("a", "b"))}, deque([jax.device_put(random((3,)), jax.devices()[7])]), 3)
    saved(tmp_path / "a.safetensors", {"state": state})
    found = xferlib_jax.load(tmp_path / "a.safetensors", over())
    assert sorted(found) == ["state.queue.0", "state.weights.w"]
    assert np.array_equal(np.asarray(found["state.weights.w"]), random((8, 8)))
    assert np.array_equal(np.asarray(found["state.queue.0"]), random((3,)))


def test_layouts_of_other_orders_are_saved_in_c_order(tmp_path: Path) -> None:
    layout = pytest.importorskip("jax.experimental.layout")
    across = layout.Format(layout.Layout(major_to_minor=(1, 0)), over("b", "a"))
    array = jax.jit(lambda x: x * 2, out_shardings=across)(jax.device_put(random((64, 320)), over("a")))
    saved(tmp_path / "a.npy", array, memory=10_000)
    assert np.load(tmp_path / "a.npy").tobytes() == (random((64, 320)) * 2).tobytes()


@pytest.mark.parametrize("snapshot", [False, True])
def test_the_step_behind_it_may_donate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: bool) -> None:
    """At once with a snapshot, and without when the arrays have been read. Else the save fails, and says why."""
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    want = random((64, 320))
    for spec in SPECS:
        array = jax.jit(lambda x: x * 1, out_shardings=over(*spec))(want)
        with held_files(monkeypatch) as gate:
            save = xferlib_jax.save(tmp_path / "a.npy", array, snapshot=snapshot)
            assert save.held_nbytes == (0 if snapshot else want.nbytes)
            if not snapshot:
                gate.set()
            save.wait_read(20)
            donate(array)
            del array
        assert np.load(save.result(60)).tobytes() == want.tobytes()
    array = jax.device_put(want, over("b"))
    with held_files(monkeypatch):
        save = xferlib_jax.save(tmp_path / "a.npy", array)
        jax.block_until_ready(donate(array))
    with pytest.raises(xferlib.XferError, match="deleted or donated before they were read"):
        save.result(60)
    assert np.load(tmp_path / "a.npy").tobytes() == want.tobytes()
    only(tmp_path, "a.npy")


def test_a_training_loop_that_donates_its_state_saves_a_series(tmp_path: Path) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    arrays = {"w": random((64, 320)), "b": random((320,))}
    state = {"w": jax.device_put(arrays["w"], over("a", "b")), "b": jax.device_put(arrays["b"], over("b"))}
    for number in range(6):
        state = step(state)
        save = xferlib_jax.save(tmp_path / f"step_{number}.safetensors", state, snapshot=True, keep=2)
    save.result(60)
    only(tmp_path, "step_4.safetensors", "step_5.safetensors")
    found = xferlib_jax.load(tmp_path / "step_5.safetensors", over())
    for name, array in arrays.items():
        assert np.array_equal(np.asarray(found[name]), array + 6)


def test_the_shared_stagers_are_opened_once_and_kept_until_they_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = jax.device_put(random((8, 8)), over("a", "b"))
    xferlib_jax.save(tmp_path / "a.npy", array).result(60)
    assert not _stagers._SHARED._rows
    opened = open_stagers()
    assert len(opened) == 8
    xferlib_jax.save(tmp_path / "a.npy", array).result(60)
    assert open_stagers() == opened
    with held_files(monkeypatch) as gate:
        save = xferlib_jax.save(tmp_path / "a.npy", array)
        xferlib_jax.close()
        assert len(open_stagers()) == 8
        gate.set()
        save.result(60)
    assert not open_stagers()
    assert np.load(tmp_path / "a.npy").tobytes() == random((8, 8)).tobytes()


class Remote:
    """A sharding of which this process has only some devices."""

    is_fully_addressable = is_fully_replicated = False
    memory_kind = None

    def __init__(self, sharding: Any, local: int) -> None:
        self._sharding = sharding
        self.addressable_devices = set(jax.devices()[:local])

    def addressable_devices_indices_map(self, shape: Any) -> Any:
        places = self._sharding.addressable_devices_indices_map(shape)
        return {device: index for device, index in places.items() if device in self.addressable_devices}

    def shard_shape(self, shape: Any) -> Any:
        return self._sharding.shard_shape(shape)


def test_parts_that_other_processes_have_are_refused_unless_this_one_has_them_too(stagers: tuple[Stager, ...]) -> None:
    arrays = _save._Arrays(_stagers.given(stagers, jax.devices()))
    with pytest.raises(ValueError, match="process 0 cannot read them"):
        arrays._places(Remote(over("a"), 0), (0, 4))
    for local, spec, right in ((4, ("b",), True), (4, ("a",), False), (3, ("b",), False), (1, (), True), (0, (), False)):
        remote = Remote(over(*spec), local)
        if right:
            assert len(arrays._places(remote, (8, 4))) == (4 if spec else 1)
        else:
            with pytest.raises(ValueError, match=r"process 0 cannot read them\. Let all processes gather it, .*process_allgather"):
                arrays._places(remote, (8, 4))


def test_what_cannot_be_saved_is_refused_at_the_call_with_its_place(tmp_path: Path, stagers: tuple[Stager, ...]) -> None:
    path, array = tmp_path / "a.safetensors", jax.device_put(random((8, 8)), over("a"))
    gone = jax.device_put(random((8, 8)), over("a"))
    gone.delete()
    host = jax.device_put(random((8, 8)), over("a"))
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"a": array, "b": [gone]}, ValueError, "was deleted"),
        ({"a": array, "b": [random((3,))]}, TypeError, "expected a jax.Array, got numpy.ndarray"),
        ({"a": array, "b": [jax.random.key(0)]}, TypeError, "holds random keys"),
        ({"a": host, "b": [jax.numpy.zeros(3, jax.numpy.int4)]}, TypeError, "packs several items"),
        ({"a": host, "b": [object()]}, TypeError, "got builtins.object, which is neither"),
        ({"a": array, "b": [len]}, TypeError, "got the function len, which is neither an array nor something that rides along"),
    ]
    for tree, kind, words in cases:
        with pytest.raises(kind, match=words) as caught:
            xferlib_jax.save(path, tree, stagers=stagers)
        assert "at tree.b[0]" in caught.value.__notes__
    with pytest.raises(ValueError, match="there is no array"):
        xferlib_jax.save(path, {"a": 3})
    with pytest.raises(ValueError, match=r"expected a name that ends in \.safetensors"):
        xferlib_jax.save(tmp_path / "a.bin", array)
    with pytest.raises(ValueError, match=r"stagers: there is none on .*, over which"):
        xferlib_jax.save(path, array, stagers=stagers[:7])
    with pytest.raises(TypeError, match=r"expected a path\. The order is save\(path, tree\)$"):
        xferlib_jax.save({"a": array}, path)
    save: Any = xferlib_jax.save
    with pytest.raises(TypeError, match=r"takes no third argument, got <Stager.*leave this one out, or pass stagers=\[stager\]$"):
        save(path, array, stagers[0])
    with pytest.raises(TypeError, match=r"takes no third argument, got \{.*\}\. Pass what comes behind the tree by its name$"):
        save(path, array, {"step": "3"})
    with pytest.raises(TypeError, match=r"^stagers=<Stager.*: expected several, .*Pass a list of them: stagers=\[stager\]$"):
        save(path, array, stagers=stagers[0])
    with pytest.raises(TypeError, match="inside a function that JAX traces"):
        jax.jit(lambda x: xferlib_jax.save(path, x))(array)
    with jax.enable_x64(True):
        wide = jax.device_put(random((8, 8), np.float64), over("a"))
        assert saved(path, wide) == gathered(tmp_path, wide)
        path.unlink()
    with pytest.raises(TypeError, match="narrow float64"):
        xferlib_jax.save(path, wide)
    with pytest.raises(ValueError, match=r"is spread over 8 devices.*xferlib_jax\.save\(path, tree\)"):
        xferlib.save(path, array, stagers[0])
    with pytest.raises(ValueError, match=r"is spread over 8 devices.*xferlib_jax\.save\(path, tree\)"):
        stagers[0].get(array)
    only(tmp_path)
    assert pulled(stagers) == [0] * 8


def test_a_device_that_is_lost_meanwhile_leaves_the_old_file(
    tmp_path: Path, stagers: tuple[Stager, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = jax.device_put(random((64, 320)), over("b", "a"))
    path = tmp_path / "a.npy"
    path.write_bytes(b"old")
    backend: Any = stagers[5].backend
    calls, copy = itertools.count(), type(backend).copy_d2h

    def failing(self: Any, *arguments: int) -> None:
        if self is backend and next(calls) == 2:
            raise backend.failures[0]("the device is gone")
        copy(self, *arguments)

    monkeypatch.setattr(type(backend), "copy_d2h", failing)
    save = xferlib_jax.save(path, array, stagers=stagers, memory=10_000)
    with pytest.raises(xferlib.XferError, match="the device is gone"):
        save.result(60)
    assert path.read_bytes() == b"old"
    only(tmp_path, "a.npy")
    for stager in stagers:
        at_rest(stager)
        assert not stager._ledger.jobs.readings


def test_what_is_deleted_by_another_thread_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = jax.device_put(random((64, 320)), over("b"))
    with held_files(monkeypatch):
        save = xferlib_jax.save(tmp_path / "a.npy", array)
        deleting = threading.Thread(target=array.delete)
        deleting.start()
        deleting.join()
    with pytest.raises(xferlib.XferError, match="deleted or donated"):
        save.result(60)
    only(tmp_path)


def test_an_interrupt_at_any_point_of_the_call_leaves_nothing(tmp_path: Path, stagers: tuple[Stager, ...]) -> None:
    want = random((16, 24))
    array = jax.device_put(want, over("b", "a"))
    path = tmp_path / "a.npy"
    for given in (stagers, None):
        for point in itertools.count(1):
            within = ("xferlib_jax/_save.py", "files/save.py", "files/sharded.py", *(() if given else ("xferlib_jax/_stagers.py",)))
            if not interrupted_at(point, within, partial(xferlib_jax.save, path, array, stagers=given)):
                break
            assert until(lambda: not [save for save in outcome._under_way.values() if not save.is_dropped])
            assert_nothing_is_held()
            for stager in stagers:
                stager.idle()
                stager._ledger.reap()
                assert not stager._ledger.jobs.readings
            if path.exists():
                assert np.load(path).tobytes() == want.tobytes()
                path.unlink()
            only(tmp_path)
        assert until(lambda: not outcome._under_way)
        path.unlink()
        assert point > 40


def test_a_program_that_ends_has_its_file_and_says_nothing(tmp_path: Path) -> None:
    program = f"""
import jax, numpy as np, xferlib_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
array = jax.device_put(np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024), NamedSharding(mesh, PartitionSpec("a", "b")))
xferlib_jax.save({str(tmp_path / "a.npy")!r}, array, memory=100_000)
"""
    late = "import atexit\n@atexit.register\ndef last():\n" + "".join(f"    {line}\n" for line in program.splitlines() if line)
    # All of the package is there before the end, or only its front, which every call imports the rest for.
    for code in (program, "import xferlib_jax\nxferlib_jax.save\n" + late, "import xferlib_jax\n" + late):
        done = children.run([sys.executable, "-W", "always", "-c", code], seconds=100)
        assert (done.returncode, done.stderr) == (0, "")
        assert np.array_equal(np.load(tmp_path / "a.npy").ravel(), np.arange(1 << 20))
        (tmp_path / "a.npy").unlink()
