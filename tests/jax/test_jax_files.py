"""States of JAX to files and back: registered trees, its own dtypes, what is not computed yet, training that goes on."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import xferlib
from tests import children
from tests.core.fakes import on_thread, until
from tests.files.saves import held_writes
from xferlib.byte_reader import FOUND_AT_ONCE, Span
from xferlib.conformance.values import assert_same
from xferlib.pending import Reading
from xferlib.stager import Stager

jax = pytest.importorskip("jax")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    moments: Any
    step: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


def initial() -> State:
    keys = jax.random.split(jax.random.key(3), 3)
    params = {
        "dense": [jax.random.normal(keys[0], (70, 33)), jax.random.normal(keys[1], (33,))],
        "half": jax.random.normal(keys[2], (17, 5)).astype(jax.numpy.bfloat16),
    }
    return State(params, jax.tree.map(jax.numpy.zeros_like, params), jax.numpy.int32(0), "a run")


def trained(state: State) -> State:
    params = jax.tree.map(lambda value: value * jax.numpy.asarray(1.01, value.dtype) + value.mean(), state.params)
    return State(params, jax.tree.map(lambda value: value + 1, state.moments), state.step + 1, state.name)


train = jax.jit(trained)


def equal(got: State, want: State) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same(np.asarray(one), np.asarray(other))


def test_a_run_that_goes_on_from_a_file_ends_as_one_that_went_through(stager: Stager, tmp_path: Path) -> None:
    state, saves = initial(), []
    for step in range(6):
        state = train(state)
        # Not computed yet, perhaps; and the next step goes on meanwhile.
        saves.append(xferlib.save(tmp_path / f"step_{step}.safetensors", state, stager, keep=3))
    for save in saves:
        save.result(60)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step}.safetensors" for step in (3, 4, 5)]
    again = xferlib.load(tmp_path / "step_3.safetensors", stager, like=initial())
    assert int(again.step) == 4
    equal(train(train(again)), state)


def test_shapes_alone_say_what_to_load(stager: Stager, tmp_path: Path) -> None:
    state = train(initial())
    path = xferlib.save(tmp_path / "state.safetensors", state, stager).result(60)
    equal(xferlib.load(path, stager, like=jax.eval_shape(initial)), state)


def test_a_state_is_replaced_while_it_is_saved(stager: Stager, tmp_path: Path) -> None:
    """The loop drops what is being saved at once."""
    state = initial()
    want = []
    for step in range(10):
        state = train(state)
        save = xferlib.save(tmp_path / f"{step}.safetensors", state, stager, memory=64 << 10)
        want.append([np.asarray(leaf) for leaf in jax.tree.leaves(state)])
    save.result(60)
    for step in range(10):
        got = xferlib.load(tmp_path / f"{step}.safetensors", stager, like=jax.eval_shape(initial))
        for one, other in zip(jax.tree.leaves(got), want[step], strict=True):
            assert_same(np.asarray(one), other)


def test_what_fails_to_be_computed_fails_the_save(stager: Stager, tmp_path: Path) -> None:
    def broken(value: Any) -> Any:
        raise RuntimeError("no such value")

    shape = jax.ShapeDtypeStruct((100,), np.dtype(np.float32))
    try:
        value = jax.jit(lambda x: jax.pure_callback(broken, shape, x))(np.float32(1))
        save = xferlib.save(tmp_path / "a.npy", {"a": value}["a"], stager)
    except Exception:
        # Found at once, where nothing computes ahead.
        return
    with pytest.raises(xferlib.XferError):
        save.result(60)
    assert not list(tmp_path.iterdir())


def test_a_snapshot_may_be_donated_at_once(stager: Stager, tmp_path: Path) -> None:
    """Its memory is overwritten by the steps that follow, while the file is written."""
    want, state = [], initial()
    for _ in range(5):
        state = train(state)
        want.append([np.asarray(leaf) for leaf in jax.tree.leaves(state)])
    step = jax.jit(trained, donate_argnums=0)
    state, saves = initial(), []
    for number in range(5):
        # Not computed yet, perhaps.
        before, state = state, step(state)
        assert before.params["dense"][0].is_deleted()
        saves.append(xferlib.save(tmp_path / f"{number}.safetensors", state, stager, snapshot=True, memory=64 << 10))
        assert saves[-1].held_nbytes == 0
        saves[-1].wait_read(0)
    step(state)
    for number, save in enumerate(saves):
        got = xferlib.load(save.result(60), stager, like=jax.eval_shape(initial))
        for one, other in zip(jax.tree.leaves(got), want[number], strict=True):
            assert_same(np.asarray(one), other)


def copies_are_compiled() -> int:
    """Wait until what copies many arrays is compiled, and return for how many states."""
    from xferlib_jax import _copies

    for thread in threading.enumerate():
        if thread.name == _copies.THREAD:
            thread.join()
    return len([function for function in _copies._of_process.values() if function is not None])


def test_a_state_of_many_arrays_is_copied_by_one_call_once_that_is_compiled(stager: Stager, tmp_path: Path) -> None:
    def state(start: int) -> list[Any]:
        return [jax.device_put(np.full((3, number % 7), start + number, np.int32), jax.devices()[0]) for number in range(71)]

    def saved(arrays: list[Any]) -> None:
        save = xferlib.save(tmp_path / "a.safetensors", arrays, stager, snapshot=True)
        assert save.held_nbytes == 0
        want = [np.asarray(array) for array in arrays]
        for array in arrays:
            array.delete()
        got = xferlib.load(save.result(60), stager)
        assert all(np.array_equal(np.asarray(got[str(number)]), array) for number, array in enumerate(want))

    before = copies_are_compiled()
    saved(state(1))
    assert copies_are_compiled() == before + 1
    saved(state(2))

    def traced(other: Any) -> Any:
        saved(arrays)
        return other + 1

    # A traced function has concrete arrays, too.
    arrays = state(3)
    jax.jit(traced)(1)
    assert copies_are_compiled() == before + 1


@pytest.mark.parametrize("together", [4 << 20, 64, 0])
def test_copies_by_one_call_are_the_same_bits(stager: Stager, monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """Those of one dtype lie together, the larger ones by themselves; and all of them in memory of their own."""
    from xferlib_jax import _copies

    monkeypatch.setattr(_copies, "TOGETHER_NBYTES", together)
    monkeypatch.setattr(_copies, "_of_process", {})
    dtypes = [jax.numpy.dtype(name) for name in ("bool", "int8", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn")]
    shapes = [(), (0,), (3,), (2, 0), (5, 7), (3, 1), (1, 2, 3)]
    random = np.random.default_rng(0)
    wanted = []
    for number in range(5 * _copies.TOGETHER):
        shape, dtype = shapes[number % len(shapes)], dtypes[number % 5 - number % 2]
        raw = random.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
        wanted.append(raw.view(dtype).reshape(shape))
    arrays = [jax.device_put(array, jax.devices()[0]) for array in wanted]
    _copies._compile((jax.devices()[0], tuple([(array.shape, array.dtype) for array in arrays])))
    # Nothing else copies them.
    monkeypatch.setattr(jax, "device_put", None)
    with stager.reader(arrays, snapshot=True) as reader:
        for array in arrays:
            array.delete()
        for number, array in enumerate(wanted):
            got = reader.read([Span(number, 0, array.nbytes)], reader.empty(max(1, array.nbytes))).result()
            assert got.tobytes() == array.tobytes()


def test_wide_arrays_are_copied_by_one_call_where_the_callers_thread_alone_has_them(
    stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they come first, or behind one that lies by itself."""
    from xferlib_jax import _copies

    monkeypatch.setattr(_copies, "TOGETHER_NBYTES", 4096)
    monkeypatch.setattr(_copies, "_of_process", {})
    with jax.enable_x64(True):
        wanted = [np.full((3,), number + 0.1, np.float64) for number in range(70)]
        wanted += [np.arange(1000, dtype=np.float64), np.full((2, 2), 1 << 40, np.int64)]
        arrays = [jax.device_put(array, jax.devices()[0]) for array in wanted]
        key = jax.devices()[0], tuple([(array.shape, array.dtype) for array in arrays])
        on_thread(lambda: _copies._compile(key)).result(60)
        compiled = _copies._of_process[key]
        assert compiled is not None
        # The large one lies alone.
        assert sorted({number for number, _, _ in compiled.where}) == [0, 1, 2, 3]
        # Nothing else copies them.
        monkeypatch.setattr(jax, "device_put", None)
        with stager.reader(arrays, snapshot=True) as reader:
            for number, array in enumerate(wanted):
                got = reader.read([Span(number, 0, array.nbytes)], reader.empty(array.nbytes)).result()
                assert got.tobytes() == array.tobytes()


def test_what_the_compiled_call_does_not_take_is_copied_one_by_one(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of the same shapes and dtypes may lie in another order."""
    from jax.experimental.layout import Format, Layout
    from xferlib_jax import _copies

    monkeypatch.setattr(_copies, "_of_process", {})
    wanted = [np.arange(12, dtype=np.float32).reshape(3, 4) + number for number in range(70)]
    arrays = [jax.device_put(array, jax.devices()[0]) for array in wanted]
    _copies._compile((jax.devices()[0], tuple([(array.shape, array.dtype) for array in arrays])))
    arrays[5] = jax.device_put(wanted[5], Format(Layout(major_to_minor=(1, 0)), arrays[5].sharding))
    with stager.reader(arrays, snapshot=True) as reader:
        for array in arrays:
            array.delete()
        for number, array in enumerate(wanted):
            got = reader.read([Span(number, 0, array.nbytes)], reader.empty(array.nbytes)).result()
            assert got.tobytes() == array.tobytes()


def test_numpys_arrays_are_refused_with_the_way_to_save_them(stager: Stager, tmp_path: Path) -> None:
    """A tree whose home is the host has such, and whoever saves it has a stager of the device at hand."""
    home = xferlib.HostTree({"a": {"w": np.ones(3, np.float32)}}, stager)
    with home, pytest.raises(TypeError, match=r"expected a jax\.Array") as caught:
        xferlib.save(tmp_path / "a.safetensors", home.tree, stager)
    assert any('xferlib.stager("host")' in note for note in caught.value.__notes__)
    with pytest.raises(TypeError) as caught:
        xferlib.save(tmp_path / "a.safetensors", {"a": jax.numpy.ones(3, "int4")}, stager)
    assert not any("NumPy" in note and "host" in note for note in caught.value.__notes__)


def test_a_wait_for_what_cannot_be_found_raises_our_error(finding: tuple[Stager, list[Callable[[Any], None]]]) -> None:
    """Whatever the framework raises."""
    stager, called = finding

    def fails(arrays: Any) -> None:
        raise jax.errors.JaxRuntimeError("no such value")

    with stager.reader([jax.numpy.ones(3), jax.numpy.ones(4)]) as reader:
        called.append(fails)
        with pytest.raises(xferlib.XferError, match="cannot be read: no such value"):
            reader.wait()


def test_a_reader_that_another_thread_closes_while_it_looks_says_so(finding: tuple[Stager, list[Callable[[Any], None]]]) -> None:
    stager, called = finding
    reader = stager.reader([jax.numpy.ones(3), jax.numpy.ones(4)])
    memory = reader.empty(28)
    # Closed once the read has looked whether it is.
    address = reader._address

    def late(out: Any, nbytes: int) -> int:
        reader.close()
        return address(out, nbytes)

    reader._address = late  # type: ignore[method-assign]
    with pytest.raises(xferlib.ClosedError, match="Make another one"):
        reader.read([Span(0, 0, 12), Span(1, 0, 16)], memory)
    assert not called


def test_a_put_waits_for_a_save_by_another_stager_that_has_not_found_its_arrays(
    finding: tuple[Stager, list[Callable[[Any], None]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has them any more: when they are read, there is room."""
    saver, called = finding
    gate, reached = threading.Event(), threading.Event()
    waiting: list[None] = []
    wait = Reading.wait

    def noted(self: Reading) -> None:
        waiting.append(None)
        wait(self)

    monkeypatch.setattr(Reading, "wait", noted)

    def stops(arrays: Any) -> None:
        reached.set()
        assert gate.wait(30)

    with xferlib.stager("jax", device_limit=1 << 20) as stager:
        array = stager.put(np.arange(200_000, dtype=np.float32)).result()
        called.append(stops)
        save = xferlib.save(tmp_path / "a.safetensors", [array, jax.numpy.ones(3)], saver)
        assert reached.wait(30)
        del array

        def put() -> Any:
            while True:
                try:
                    return stager.put(np.zeros(200_000, np.float32)).result()
                except xferlib.AllocationError:
                    # JAX may let go of memory on a thread of its own, a moment after the arrays were read.
                    if not gate.is_set():
                        raise

        putting = on_thread(put)
        until(lambda: bool(waiting) or putting.done(), 30)
        assert waiting
        gate.set()
        assert not np.asarray(putting.result(30)).any()
    got = xferlib.load(save.result(60), saver)
    assert_same(np.asarray(got["0"]), np.arange(200_000, dtype=np.float32))


def test_who_waits_for_a_reader_finds_room_as_soon_as_it_has_ended(
    finding: tuple[Stager, list[Callable[[Any], None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its thread goes no further then."""
    reading, _ = finding
    waiting = threading.Event()
    wait, end = Reading.wait, Reading.end

    def noted(self: Reading) -> None:
        waiting.set()
        wait(self)

    with xferlib.stager("jax", device_limit=1 << 20) as stager:
        reader = reading.reader([stager.put(np.arange(200_000, dtype=np.float32)).result(), jax.numpy.ones(3)])
        monkeypatch.setattr(Reading, "wait", noted)
        putting = on_thread(lambda: stager.put(np.zeros(200_000, np.float32)).result())
        assert waiting.wait(30)

        def stops(self: Reading) -> None:
            end(self)
            until(putting.done, 30)

        monkeypatch.setattr(Reading, "end", stops)
        reader.close()
        assert not np.asarray(putting.result(30)).any()


def test_what_cannot_be_saved_is_refused_by_the_call(stager: Stager, tmp_path: Path) -> None:
    """With the place in the tree, though arrays are found only later."""
    refused = {
        "random keys": jax.random.key(0),
        "JAX packs several items": jax.numpy.ones(3, "int4"),
        r"got jax\.ShapeDtypeStruct": jax.ShapeDtypeStruct((3,), "float32"),
        r"got numpy\.ndarray": np.ones(3, np.float32),
        "Pass its value": stager.put(np.ones(3, np.float32), borrow=True),
    }
    for words, leaf in refused.items():
        for snapshot in (False, True):
            with pytest.raises(TypeError, match=words) as caught:
                xferlib.save(tmp_path / "a.safetensors", {"a": jax.numpy.ones(3), "b": leaf}, stager, snapshot=snapshot)
            assert snapshot or caught.value.__notes__[0] == "at tree.b"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def finding(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stager, list[Callable[[Any], None]]]]:
    """A stager, and what is called with arrays that are about to be found together."""
    called: list[Callable[[Any], None]] = []
    backend: Any = type(stager.backend)
    places = backend.places

    def noted(self: Any, arrays: Any, stream: Any = None) -> Any:
        for call in called:
            call(arrays)
        return places(self, arrays, stream)

    monkeypatch.setattr(backend, "places", noted)
    with xferlib.stager("jax") as other:
        yield other, called


def test_the_call_of_a_save_finds_no_array(
    finding: tuple[Stager, list[Callable[[Any], None]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state has thousands, and they never change: threads of the save find them, piece by piece."""
    stager, called = finding
    found: list[tuple[int, int]] = []
    ways: list[int] = []
    monkeypatch.setattr("xferlib.latch.give_way", lambda: ways.append(threading.get_ident()))
    monkeypatch.setattr("xferlib.latch.TURN_SECONDS", 0)
    called.append(lambda arrays: found.append((threading.get_ident(), len(arrays))))
    state = {str(number): jax.numpy.full((9, 9), number, "float32") for number in range(20)}
    save = xferlib.save(tmp_path / "a.safetensors", state, stager)
    got = xferlib.load(save.result(60), stager)
    assert all((got[name] == value).all() for name, value in state.items())
    assert threading.get_ident() not in [thread for thread, _ in found]
    # Others have the interpreter in between. Whoever reads alone finds all at once.
    assert max(count for _, count in found) == FOUND_AT_ONCE < len(state)
    assert set(ways) >= {thread for thread, _ in found}
    assert len(ways) >= len(found)
    found.clear()
    ways.clear()
    with stager.reader(list(state.values())) as reader:
        reader.wait()
    assert [count for _, count in found] == [len(state)]
    assert ways == []


def test_arrays_are_let_go_of_one_by_one_as_they_are_read(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state's memory comes back meanwhile, and nobody lets go of thousands of arrays at once. The first is a piece by itself."""
    with held_writes(monkeypatch) as gate:
        # Of the large one a piece is left until something is written.
        state = {
            "0": jax.numpy.ones(1 << 13, "float32"),
            "1": jax.numpy.ones(1 << 16, "float32"),
            "2": jax.numpy.ones(9, "float32"),
        }
        gone = [weakref.ref(array) for array in state.values()]
        save = xferlib.save(tmp_path / "a.safetensors", state, stager, memory=64 << 10)
        del state

        def first_is_gone() -> bool:
            stager._ledger.reap()
            return gone[0]() is None

        assert until(first_is_gone)
        assert gone[1]() is not None
        assert gone[2]() is not None
        gate.set()
        assert xferlib.load(save.result(60), stager)["2"].tolist() == [1] * 9
    stager._ledger.reap()
    assert [one() for one in gone] == [None] * 3


def test_what_is_deleted_before_it_is_read_ends_the_save(
    finding: tuple[Stager, list[Callable[[Any], None]]], tmp_path: Path
) -> None:
    """As it is forbidden to, before `wait_read` has returned. The file that was there stays."""
    stager, called = finding
    path = tmp_path / "a.safetensors"
    state = {"a": jax.numpy.ones(1 << 16), "b": jax.numpy.zeros(1 << 16)}
    xferlib.save(path, state, stager).result(60)
    before = path.read_bytes()
    called.append(lambda arrays: state["b"].delete())
    with pytest.raises(xferlib.XferError, match=r"donated before they were read: the array was deleted.*wait_read\(\)"):
        xferlib.save(path, state, stager).result(60)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_reader_survives_that_another_thread_deletes_what_it_looks_for(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look whether arrays are deleted and all that follows: JAX's own answer would end the process."""
    backend: Any = stager.backend

    class Late:
        """Deletes arrays that were found to be whole."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, array: Any) -> Any:
            found = self.inner(array)
            array.delete()
            return found

        def accepts(self, arrays: Any) -> bool:
            found = self.inner.accepts(arrays)
            if found:
                arrays[0].delete()
            return bool(found)

    for count in (1, 3):
        arrays = [jax.numpy.full(1000, number, "float32").block_until_ready() for number in range(count)]
        with stager.reader(arrays) as reader:
            memory = reader.empty(4000 * count)
            with monkeypatch.context() as patch:
                patch.setattr(backend, "_check_array", Late(backend._check_array))
                with pytest.raises(xferlib.XferError, match="deleted"):
                    reader.read([Span(number, 0, 4000) for number in range(count)], memory)


def test_a_reader_holds_what_it_has_found_and_asks_again_for_what_it_has_not(stager: Stager) -> None:
    arrays = [jax.numpy.full(1000, number, "float32") for number in range(4)]
    with stager.reader(arrays) as reader:
        memory = reader.empty(8000)
        assert reader.read([Span(0, 0, 4000), Span(1, 0, 4000)], memory).result().view(np.float32)[999:1001].tolist() == [0, 1]
        for number in (0, 1, 3):
            arrays[number].delete()
        for _ in range(2):
            with pytest.raises(xferlib.XferError, match="were deleted or donated"):
                reader.read([Span(2, 0, 4000), Span(3, 0, 4000)], memory)
        with pytest.raises(xferlib.XferError, match="were deleted or donated"):
            reader.wait()
        # These are whole still.
        assert reader.read([Span(1, 0, 4000), Span(2, 0, 4000)], memory).result().view(np.float32)[999:1001].tolist() == [1, 2]


def test_a_snapshots_memory_is_free_when_its_file_is_there(stager: Stager, tmp_path: Path) -> None:
    """JAX keeps what was read until it is asked for something else, which may be never."""

    def used() -> int:
        figure = jax.devices()[0].memory_stats()["bytes_in_use"] if stager.on_gpu else psutil.Process().memory_info().rss
        return int(figure)

    nbytes = 64 << 20
    array = jax.device_put(np.ones(nbytes, np.uint8), jax.devices()[0]).block_until_ready()
    # The first time other memory is taken, which is kept.
    xferlib.save(tmp_path / "a.npy", array, stager, snapshot=True).result(60)
    gc.collect()
    gc.disable()
    try:
        before = used()
        xferlib.save(tmp_path / "a.npy", array, stager, snapshot=True).result(60)
        assert used() - before < nbytes // 2
    finally:
        gc.enable()


def test_a_state_of_many_arrays_may_be_donated_before_it_is_computed(stager: Stager, tmp_path: Path) -> None:
    def stepped(state: list[Any]) -> list[Any]:
        return [jax.numpy.sin(array * 1.5 + 1) @ array for array in state]

    def first() -> list[Any]:
        return [jax.numpy.full((50, 50), 0.001 * number, "float32") for number in range(70)]

    step, donating = jax.jit(stepped), jax.jit(stepped, donate_argnums=0)
    xferlib.save(tmp_path / "0.safetensors", step(first()), stager, snapshot=True).result(60)
    copies_are_compiled()
    want, state = [], first()
    for _ in range(4):
        state = step(state)
        want.append([np.asarray(array) for array in state])
    saves, state = [], first()
    for number in range(4):
        before, state = state, donating(state)
        assert before[0].is_deleted()
        saves.append(xferlib.save(tmp_path / f"{number}.safetensors", state, stager, snapshot=True))
        assert saves[-1].held_nbytes == 0
    donating(state)
    for save, arrays in zip(saves, want, strict=True):
        got = xferlib.load(save.result(60), stager)
        for number, array in enumerate(arrays):
            assert_same(np.asarray(got[str(number)]), array)


@pytest.mark.parametrize(("switch", "value"), [("jax_debug_nans", np.nan), ("jax_debug_infs", np.inf)])
def test_a_state_of_many_arrays_is_saved_whatever_it_holds(stager: Stager, tmp_path: Path, switch: str, value: float) -> None:
    state = [jax.device_put(np.full((3, number % 7), value, np.float32), jax.devices()[0]) for number in range(72)]
    # The one of its dtype is copied as it is, and JAX would look at it.
    state.append(jax.device_put(np.full(3, value, np.float16), jax.devices()[0]))
    xferlib.save(tmp_path / "a.safetensors", state, stager, snapshot=True).result(60)
    copies_are_compiled()
    jax.config.update(switch, True)
    try:
        save = xferlib.save(tmp_path / "a.safetensors", state, stager, snapshot=True)
    finally:
        jax.config.update(switch, False)
    got = xferlib.load(save.result(60), stager)
    for number, array in enumerate(state):
        assert_same(np.asarray(got[str(number)]), np.asarray(array))


def test_a_program_that_saves_a_snapshot_as_it_ends_comes_to_its_end(tmp_path: Path) -> None:
    """The thread that compiles for the next one is not cut off inside JAX."""
    program = f"""
import atexit
import jax
import numpy as np
import xferlib

stager = xferlib.stager("jax")
atexit.register(stager.close)

@atexit.register
def last():
    state = [jax.device_put(np.full((3, 1 + number), number, np.int32), jax.devices()[0]) for number in range(300)]
    xferlib.save({str(tmp_path / "a.safetensors")!r}, state, stager, snapshot=True).result(60)
"""
    done = children.run([sys.executable, "-c", program], seconds=100, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "a.safetensors").exists()


def test_a_snapshot_of_what_was_deleted_is_refused(stager: Stager, tmp_path: Path) -> None:
    value = jax.numpy.arange(5)
    value.delete()
    with pytest.raises(ValueError, match="was deleted"):
        xferlib.save(tmp_path / "a.npy", value, stager, snapshot=True)
    with pytest.raises(TypeError, match="inside a function that JAX traces"):
        jax.jit(lambda x: xferlib.save(tmp_path / "a.npy", x, stager, snapshot=True))(jax.numpy.arange(5))
    assert not list(tmp_path.iterdir())


def test_a_concrete_array_is_copied_where_a_function_is_traced(stager: Stager, tmp_path: Path) -> None:
    value = jax.numpy.arange(5)

    def traced(other: Any) -> Any:
        xferlib.save(tmp_path / "a.npy", value, stager, snapshot=True).result(60)
        return other + 1

    jax.jit(traced)(value)
    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2, 3, 4]


def test_all_that_holds_of_files_on_eight_devices(stager: Stager) -> None:
    here = Path(__file__).resolve().parent
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    files = [str(here / f"eight_devices_{name}.py") for name in ("load", "save")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    child = children.run(command, seconds=300, cwd=here.parents[1], env=os.environ | eight)
    assert child.returncode == 0, child.stdout + child.stderr


def test_arrays_are_converted_on_the_device(stager: Stager, tmp_path: Path) -> None:
    state = initial()
    path = xferlib.save(tmp_path / "state.safetensors", state, stager).result(60)
    got = xferlib.load(path, stager, dtype="bfloat16")
    names = {name for name in got if got[name].dtype == jax.numpy.bfloat16}
    assert names == {name for name in got if name != "step"}
    assert_same(np.asarray(got["params.dense.0"]), np.asarray(state.params["dense"][0].astype(jax.numpy.bfloat16)))
    like = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf.astype(jax.numpy.float16) if leaf.ndim else leaf, initial()))
    half = xferlib.load(path, stager, like=like, dtype=np.float16)
    assert_same(np.asarray(half.params["half"]), np.asarray(state.params["half"].astype(np.float16)))


def test_a_dtype_that_jax_would_narrow_is_refused_before_anything_is_put(stager: Stager, tmp_path: Path) -> None:
    if jax.config.jax_enable_x64:
        pytest.skip("JAX keeps arrays of 64 bits here")
    np.save(tmp_path / "a.npy", np.zeros(10, np.float32))
    before = stager.stats().h2d_nbytes
    with pytest.raises(TypeError, match="float64"):
        xferlib.load(tmp_path / "a.npy", stager, dtype="float64")
    assert stager.stats().h2d_nbytes == before


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_file_of_wide_arrays_says_that_dtype_comes_too_late(stager: Stager, tmp_path: Path, suffix: str) -> None:
    if jax.config.jax_enable_x64:
        pytest.skip("JAX keeps arrays of 64 bits here")
    np.save(tmp_path / "a.npy", np.zeros(10))
    np.savez(tmp_path / "a.npz", a=np.zeros(10))
    path = tmp_path / f"a.{suffix}"
    for dtype, notes in (("float32", 1), (None, 0)):
        with pytest.raises(TypeError, match="narrow float64") as caught:
            xferlib.load(path, stager, dtype=dtype)
        assert len([note for note in caught.value.__notes__ if "Convert the file instead" in note]) == notes


@pytest.mark.parametrize("snapshot", [False, True])
def test_wide_arrays_are_saved_where_wide_types_are_on_and_elsewhere_the_error_says_how(
    stager: Stager, tmp_path: Path, snapshot: bool
) -> None:
    file = tmp_path / "wide.npz"
    with jax.enable_x64(True):
        tree = {"a": jax.numpy.arange(1000, dtype=np.float64) * 1.1, "b": jax.numpy.arange(7, dtype=np.int64).reshape(7, 1).T}
    with jax.enable_x64(False):
        for call in (lambda: xferlib.save(file, tree, stager, snapshot=snapshot), lambda: stager.get(tree)):
            with pytest.raises(TypeError, match=r"around this call by `with jax\.enable_x64\(True\):`") as refused:
                call()
            assert refused.value.__notes__ == ["at tree.a"]
        assert not file.exists()
    with jax.enable_x64(True):
        saved, got = xferlib.save(file, tree, stager, snapshot=snapshot), stager.get(tree)
    with jax.enable_x64(False):
        saved.result(60)
        with np.load(file) as archive:
            found = dict(archive)
        for name, array in got.result().items():
            assert_same(found[name], np.asarray(tree[name]))
            assert_same(array, np.asarray(tree[name]))


def test_a_snapshot_that_does_not_fit_is_known_not_to(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX would ask for the memory for ten seconds. Where its memory grows, nobody can know."""
    from xferlib_jax import _copies, _fresh

    class Full:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_in_use": 81, "bytes_limit": 100}

    value = jax.numpy.arange(5, dtype="int32")
    monkeypatch.setattr(_fresh, "memory_grows", lambda: None)
    with pytest.raises(MemoryError, match="do not fit"):
        _copies.copies([value], Full())
    monkeypatch.setattr(_copies, "copies", lambda arrays, device, real=_copies.copies: real(arrays, Full()))
    for name in ("_cpu", "_cuda"):
        if (module := sys.modules.get(f"xferlib_jax.{name}")) is not None:
            monkeypatch.setattr(module, "copies", _copies.copies)
    save = xferlib.save(tmp_path / "a.npy", value, stager, snapshot=True)
    assert save.held_nbytes == value.nbytes
    assert np.load(save.result(60)).tolist() == [0, 1, 2, 3, 4]


def test_arrays_that_are_found_together_are_right_whatever_their_layout_and_held(stager: Stager, tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    plain = [jax.device_put(values + number, jax.devices()[0]) for number in range(3)]
    layout = pytest.importorskip("jax.experimental.layout")
    across = layout.Format(layout.Layout(major_to_minor=(1, 0)), plain[0].sharding)
    crossed = jax.jit(lambda array: array * 2, out_shardings=across)(plain[0])
    for name, tree in (("plain", plain), ("crossed", [*plain, crossed])):
        want = [np.asarray(array).copy() for array in tree]
        jax.block_until_ready(tree)
        with stager.reader(tree) as reader:
            reader.wait()
            # The memory is held, and not the array: this harms nobody.
            if name == "crossed":
                for array in tree:
                    array.delete()
            got = reader.read([Span(number, 0, array.nbytes) for number, array in enumerate(want)], reader.empty(1000)).result()
        assert got.tobytes() == b"".join(array.tobytes() for array in want)
    with pytest.raises(ValueError, match="was deleted") as caught:
        xferlib.save(tmp_path / "a.safetensors", {"a": jax.numpy.arange(3), "b": plain[0], "c": jax.numpy.arange(3)}, stager)
    assert caught.value.__notes__ == ["at tree.b"]
