"""What holds of files that eight devices share. Not collected by itself: `test_jax_files.py` starts a child for it."""

# ruff: noqa: F811  # A fixture that is imported stands in the parameters of tests.

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import xferlib_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from xferlib_jax import _load, _sharded, _spread

import xferlib
from tests.jax.eight_devices import assert_is, nothing_left, stagers  # noqa: F401  # Fixtures.
from xferlib.files import load
from xferlib.latch import Latch
from xferlib.stager import Stager, open_stagers

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
RANDOM = np.random.default_rng(11)
SPECS = [PartitionSpec(*axes) for axes in ((), ("a",), (("a", "b"),), (None, "b"), ("b", "a"), (None, ("a", "b")))]
ARRAYS: dict[str, Any] = {
    "embed": RANDOM.random((64, 512)).astype(np.float32),
    "layers.0.kernel": RANDOM.random((512, 1024)).astype(ml_dtypes.bfloat16),
    "layers.1.kernel": RANDOM.random((512, 1024)).astype(ml_dtypes.bfloat16),
    "layers.0.bias": RANDOM.random(1024).astype(np.float32),
    "layers.1.bias": RANDOM.random(1024).astype(np.float32),
    "scale": np.float32(3).reshape(()),
}


def over(*axes: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*axes))


STEPS = ("xferlib-jax-open", "xferlib-jax-load", "xferlib-jax-close")
"""Names of threads that a load starts, in the order of its steps."""
RULES = {"*.kernel": over("a", "b"), "embed": over(("a", "b")), "*": over()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    # By hand: the format's own writer takes no bfloat16 of NumPy in every version.
    with xferlib.stager("host") as stager:
        xferlib.save(path, dict(stager.put(ARRAYS, borrow=True).value), stager).result(60)
    return path


def pulled(stagers: tuple[Stager, ...]) -> int:
    return sum(stager.stats().h2d_nbytes for stager in stagers)


def test_files_that_are_pinned_are_loaded_over_all_devices(path: Path, stagers: tuple[Stager, ...]) -> None:
    with xferlib.pin_files(path, stagers[0]) as files:
        assert files.nbytes == path.stat().st_size
        for _ in range(2):
            found = xferlib_jax.load(path, RULES, stagers=stagers)
            for name, array in ARRAYS.items():
                rule = next(rule for pattern, rule in RULES.items() if fnmatchcase(name, pattern))
                assert_is(found[name], array, rule)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_shard_is_right_and_crosses_the_bus_once(spec: Any, tmp_path: Path, stagers: tuple[Stager, ...]) -> None:
    array = RANDOM.random((512, 1024)).astype(np.float32)
    np.save(tmp_path / "a.npy", array)
    found = xferlib_jax.load(tmp_path / "a.npy", over(*spec), stagers=stagers)
    assert_is(found, array, over(*spec))
    assert pulled(stagers) == array.nbytes


def test_patterns_of_names_say_what_goes_where(path: Path) -> None:
    found = xferlib_jax.load(path, RULES)
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        kind = "*.kernel" if name.endswith("kernel") else name if name == "embed" else "*"
        assert_is(found[name], array, RULES[kind])


def test_one_stager_for_several_is_refused(path: Path, stagers: tuple[Stager, ...]) -> None:
    one: Any = stagers[0]
    with pytest.raises(TypeError, match=r"^stagers=<Stager.*Pass a list of them: stagers=\[stager\]$"):
        xferlib_jax.load(path, RULES, stagers=one)


def test_a_tree_of_shapes_says_what_goes_where(path: Path) -> None:
    def shaped(name: str, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(ARRAYS[name].shape, ARRAYS[name].dtype, sharding=sharding)

    like = {
        "layers": [
            {"kernel": shaped(f"layers.{n}.kernel", over("b", "a")), "bias": shaped(f"layers.{n}.bias", over("a"))} for n in (0, 1)
        ]
    }
    found: Any = xferlib_jax.load(path, like=like)
    for number in (0, 1):
        assert_is(found["layers"][number]["kernel"], ARRAYS[f"layers.{number}.kernel"], over("b", "a"))
        assert_is(found["layers"][number]["bias"], ARRAYS[f"layers.{number}.bias"], over("a"))
    # What is given as an argument counts before the tree.
    found = xferlib_jax.load(path, {"*.bias": over()}, like=like)
    assert_is(found["layers"][0]["bias"], ARRAYS["layers.0.bias"], over())
    assert_is(found["layers"][0]["kernel"], ARRAYS["layers.0.kernel"], over("b", "a"))
    # Arrays that are spread are shapes with shardings, too.
    again: Any = xferlib_jax.load(path, like=found)
    assert_is(again["layers"][1]["kernel"], ARRAYS["layers.1.kernel"], over("b", "a"))


def test_a_model_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    arrays = {name: ARRAYS[name] for name in ("embed", "layers.0.bias", "layers.1.bias")}
    weights = {}
    for number, (name, array) in enumerate(arrays.items()):
        weights[name] = f"model-{number}.safetensors"
        safetensors.numpy.save_file({name: array}, tmp_path / weights[name])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    found = xferlib_jax.load(index, over("a"), names=["layers.", "embed"])
    assert list(found) == ["layers.0.bias", "layers.1.bias", "embed"]
    for name, array in arrays.items():
        assert_is(found[name], array, over("a"))


def test_shards_are_converted_where_they_are(path: Path) -> None:
    found = xferlib_jax.load(path, RULES, dtype={"*.kernel": np.float32, "embed": jax.numpy.bfloat16})
    assert_is(found["layers.0.kernel"], ARRAYS["layers.0.kernel"].astype(np.float32), over("a", "b"))
    assert_is(found["embed"], ARRAYS["embed"].astype(ml_dtypes.bfloat16), over(("a", "b")))
    assert_is(found["layers.0.bias"], ARRAYS["layers.0.bias"], over())


def test_layers_that_are_alike_are_planned_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []

    def noted(sharding: Any, shape: Any, dtype: Any) -> Any:
        planned.append(shape)
        return _spread.plan_whole_leaf(sharding, shape, dtype)

    monkeypatch.setattr(_load, "plan_whole_leaf", noted)
    xferlib_jax.load(path, RULES)
    assert sorted(planned) == [(), (64, 512), (512, 1024), (1024,)]


def test_progress_counts_what_the_file_has(path: Path) -> None:
    told: list[tuple[int, int]] = []
    xferlib_jax.load(path, RULES, progress=lambda done, total: told.append((done, total)))
    total = sum(array.nbytes for array in ARRAYS.values())
    assert told[0] == (0, total)
    assert told[-1] == (total, total)


def test_what_fails_half_way_leaves_nothing(path: Path, stagers: tuple[Stager, ...]) -> None:
    def tell(done: int, total: int) -> None:
        if done:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        xferlib_jax.load(path, RULES, progress=tell, stagers=stagers)
    for stager in stagers:
        stager._ledger.wait_all()
        assert not stager._ledger.busy


def slow_puts(monkeypatch: pytest.MonkeyPatch, before: Callable[[Stager], object]) -> None:
    """Have each put of a load do something first, on the thread that it runs on."""
    put = Stager.put

    def told(stager: Stager, tree: Any, **options: Any) -> Any:
        assert options == {"borrow": True}
        before(stager)
        return put(stager, tree, **options)

    monkeypatch.setattr(Stager, "put", told)


def test_the_devices_are_put_to_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stager's first put takes memory of the driver's: none waits for another one's."""
    array = RANDOM.random((512, 1024)).astype(np.float32)
    np.save(tmp_path / "a.npy", array)
    together = threading.Barrier(len(jax.devices()))
    slow_puts(monkeypatch, lambda _: together.wait(20))
    assert_is(xferlib_jax.load(tmp_path / "a.npy", over(("a", "b"))), array, over(("a", "b")))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("xferlib-jax-load")]


def test_devices_that_take_no_memory_any_more_are_put_to_in_turn(
    path: Path, stagers: tuple[Stager, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then threads would only wait for each other."""
    monkeypatch.setattr(load, "PIECE_NBYTES", 1)
    threads: list[list[threading.Thread]] = []
    for _ in range(2):
        threads.append([])
        slow_puts(monkeypatch, lambda _: threads[-1].append(threading.current_thread()))
        found = xferlib_jax.load(path, over(("a", "b")), names=["embed", "layers.0.kernel", "layers.1.kernel"], stagers=stagers)
        monkeypatch.undo()
        monkeypatch.setattr(load, "PIECE_NBYTES", 1)
        assert_is(found.pop("embed"), ARRAYS["embed"], over(("a", "b")))
        del found
        for stager in stagers:
            stager.idle()
    new, used = threads
    assert len(new) == len(used) == 3 * len(stagers)
    # At once they are put to by threads that no interrupt comes to.
    assert threading.current_thread() not in new
    assert {*used} == {threading.current_thread()}


def test_devices_of_which_some_have_no_memory_yet_are_put_to_at_once(
    path: Path, stagers: tuple[Stager, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stagers[0].put(ARRAYS["embed"], borrow=True).synchronize()
    assert [stager.stats().device_nbytes > 0 for stager in stagers] == [True, *[False] * 7]
    threads: list[threading.Thread] = []
    slow_puts(monkeypatch, lambda _: threads.append(threading.current_thread()))
    xferlib_jax.load(path, over(("a", "b")), names=["embed"], stagers=stagers)
    assert len(threads) == len(stagers)
    assert threading.current_thread() not in threads


def test_the_threads_have_the_callers_64_bit_types(tmp_path: Path) -> None:
    array = RANDOM.random((512, 1024))
    np.save(tmp_path / "a.npy", array)
    with jax.enable_x64(True):
        assert_is(xferlib_jax.load(tmp_path / "a.npy", over("a")), array, over("a"))


def test_where_one_device_cannot_be_put_to_the_others_are_done_before_it_is_said(
    path: Path, stagers: tuple[Stager, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stager: Stager) -> None:
        if stager is stagers[3]:
            raise xferlib.AllocationError("no room on this one")

    slow_puts(monkeypatch, refuse)
    with pytest.raises(xferlib.AllocationError, match="no room on this one"):
        xferlib_jax.load(path, RULES, stagers=stagers)
    assert pulled(stagers) > 0
    assert not any(stager._ledger.h2d.busy for stager in stagers)


def test_an_interrupt_waits_for_puts_that_have_begun(
    path: Path, stagers: tuple[Stager, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, waits = threading.Event(), threading.Event()
    ended: list[Stager] = []
    ended_before: list[list[Stager]] = []
    idle = Stager.idle

    class Told:
        """What the interrupted thread waits for until the puts have ended."""

        def __init__(self) -> None:
            self._latch = Latch()
            self.open = self._latch.open

        def wait(self) -> None:
            waits.set()
            self._latch.wait()

    def hold_up(stager: Stager) -> None:
        if stager is stagers[5]:
            inside.set()
            assert waits.wait(20)
            ended.append(stager)

    def made_idle(stager: Stager) -> None:
        ended_before.append(ended.copy())
        waits.set()
        idle(stager)

    def handle(*_: Any) -> None:
        raise KeyboardInterrupt

    def interrupt() -> None:
        assert inside.wait(20)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]  # It runs.

    slow_puts(monkeypatch, hold_up)
    monkeypatch.setattr(_sharded, "Latch", Told)
    monkeypatch.setattr(Stager, "idle", made_idle)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            xferlib_jax.load(path, RULES, stagers=stagers)
        other.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended_before == [[stagers[5]]] * len(stagers)
    assert not any(stager._ledger.h2d.busy for stager in stagers)


def test_an_interrupt_behind_a_put_that_is_not_entered_yet_waits_for_it(
    path: Path, stagers: tuple[Stager, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # From now on they have memory, and are put to in turn.
    xferlib_jax.load(path, RULES, stagers=stagers)
    put, idle, copy_h2d = Stager.put, Stager.idle, stagers[5].backend.copy_h2d
    gate = threading.Event()
    lost: list[Any] = []

    def interrupted(stager: Stager, tree: Any, **options: Any) -> Any:
        transfer = put(stager, tree, **options)
        if stager is stagers[5]:
            lost.append(transfer)
            raise KeyboardInterrupt
        return transfer

    def copies_late(*arguments: Any) -> None:
        assert gate.wait(20)
        copy_h2d(*arguments)

    def lets_go(stager: Stager) -> None:
        if stager is stagers[0]:
            raise xferlib.ClosedError("another thread has closed it")
        if stager is stagers[5]:
            gate.set()
        idle(stager)

    monkeypatch.setattr(Stager, "put", interrupted)
    monkeypatch.setattr(Stager, "idle", lets_go)
    monkeypatch.setattr(stagers[5].backend, "copy_h2d", copies_late)
    try:
        with pytest.raises(KeyboardInterrupt):
            xferlib_jax.load(path, RULES, stagers=stagers)
        assert gate.is_set()
        assert lost[0].done()
    finally:
        gate.set()


def test_a_pattern_without_effect_is_refused_before_anything_is_put(path: Path, stagers: tuple[Stager, ...]) -> None:
    typo = {"*.kernal": over("a", "b"), "*": over()}
    with pytest.raises(ValueError, match=r"sharding: none of the arrays has a name like '\*\.kernal'") as caught:
        xferlib_jax.load(path, typo, stagers=stagers)
    # Layers are alike: one of them stands for all.
    assert "'layers.0.kernel'" in str(caught.value)
    assert "layers.1.kernel" not in str(caught.value)
    hidden = {"layers.*": over(), "*.kernel": over("a", "b"), "*": over()}
    with pytest.raises(ValueError, match=r"sharding: '\*\.kernel' comes behind 'layers\.\*'"):
        xferlib_jax.load(path, hidden, stagers=stagers)
    assert pulled(stagers) == 0
    # Of a whole model's patterns each need have an effect in the files, and not on what is chosen.
    found = xferlib_jax.load(path, RULES, names=["embed"], stagers=stagers)
    assert_is(found["embed"], ARRAYS["embed"], RULES["embed"])
    # What is left for the last one may be nothing.
    exact = {"embed": over(), "scale": over(), "layers.*": over(), "*": over("a")}
    assert_is(xferlib_jax.load(path, exact, names=["scale"])["scale"], ARRAYS["scale"], over())


def test_what_cannot_be_spread_is_refused_with_its_name(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no sharding for 'embed'\. Add a pattern"):
        xferlib_jax.load(path, {"*.kernel": over("a")}, names=["embed"])
    with pytest.raises(ValueError, match=r"has 1 axes, and .* names 2") as caught:
        xferlib_jax.load(path, {"scale": over(), "*": over(None, ("a", "b"))}, names=["layers.0.bias", "scale"])
    assert "at 'layers.0.bias'" in caught.value.__notes__
    with pytest.raises(ValueError, match="there is no sharding: give one"):
        xferlib_jax.load(path)
    with pytest.raises(TypeError, match="expected a sharding"):
        xferlib_jax.load(path, PartitionSpec("a"))
    np.save(tmp_path / "wide.npy", np.zeros(16))
    with pytest.raises(TypeError, match="float64"):
        xferlib_jax.load(tmp_path / "wide.npy", over("a"))
    with pytest.raises(FileNotFoundError):
        xferlib_jax.load(tmp_path / "none.npy", over("a"))


def test_where_the_system_has_no_thread_for_each_device_those_that_are_there_serve_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the end of the program, where no more are started: the stagers are opened, put to and closed all the same."""
    started: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(STEPS):
            # One of those that put is there, and none of the others.
            if thread.name != "xferlib-jax-load_0" or thread.name in started:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        found = xferlib_jax.load(path, RULES)
    assert started == ["xferlib-jax-load_0"]
    for name, array in ARRAYS.items():
        kind = "*.kernel" if name.endswith("kernel") else name if name == "embed" else "*"
        assert_is(found[name], array, RULES[kind])
    assert not open_stagers()
