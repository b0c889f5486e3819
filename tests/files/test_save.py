"""What is saved is what was on the device: every byte, whole or not there, whatever goes wrong meanwhile."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import xferlib
from tests.children import fork, threads
from tests.core.fakes import held, on_thread, until
from xferlib.files.temporary import SUFFIX, TemporaryFile
from xferlib.stager import Stager

MIB = 1 << 20
RANDOM = np.random.default_rng(11)
DTYPES = [
    *(np.dtype(kind) for kind in ("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "complex64")),
    *(np.dtype(getattr(ml_dtypes, kind)) for kind in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")),
]


@pytest.fixture
def stager() -> Iterator[Stager]:
    before = threads()
    with xferlib.stager("host", pinned_limit=64 * MIB) as stager:
        yield stager
    assert threads() <= before


def there(stager: Stager, tree: Any) -> Any:
    return stager.put(tree, borrow=True).result()


def bits(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = RANDOM.integers(0, 2 if dtype.kind == "b" else 256, count, np.uint8)
    return raw.view(dtype).reshape(shape)


def same(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def at_rest(stager: Stager) -> None:
    stager.idle()
    assert not stager._ledger.busy


def only(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_a_tree_is_what_safetensors_reads(stager: Stager, tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "params": {"kernel": bits((300, 77), np.dtype("float32")), "bias": bits((3,), np.dtype("uint8"))},
        "none": np.zeros((0, 4), np.int16),
        "scalar": np.array(7, np.int64),
        "list": [bits((5,), dtype) for dtype in DTYPES],
    }
    path = tmp_path / "state.safetensors"
    save = xferlib.save(path, there(stager, tree), stager, metadata={"made by": "a test"})
    assert save.result() == path
    assert save.done()
    assert save.written == save.nbytes == sum(array.nbytes for array in [*tree["params"].values(), tree["scalar"], *tree["list"]])
    # The format's own reader knows some of the dtypes under names of its own alone: NumPy's are compared by it.
    with safetensors.safe_open(path, framework="numpy") as reader:
        assert set(reader.keys()) == {
            "params.kernel",
            "params.bias",
            "none",
            "scalar",
            *(f"list.{n}" for n in range(len(DTYPES))),
        }
        assert reader.metadata() == {"made by": "a test"}
        same(reader.get_tensor("params.kernel"), tree["params"]["kernel"])
        same(reader.get_tensor("none"), tree["none"])
    back = xferlib.load(path, stager)
    for name, array in {"params.bias": tree["params"]["bias"], "scalar": tree["scalar"]}.items():
        same(stager.get(back[name]).result(), array)
    for number, array in enumerate(tree["list"]):
        same(stager.get(back[f"list.{number}"]).result(), array)
    only(tmp_path, path.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_lie_as_their_dtypes_want(stager: Stager, tmp_path: Path, dtype: np.dtype[Any]) -> None:
    tree = {"a": bits((3,), np.dtype(np.uint8)), "b": bits((5,), dtype), "c": bits((1,), np.dtype(np.uint8))}
    path = xferlib.save(tmp_path / "odd.safetensors", there(stager, tree), stager).result()
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    for name, array in tree.items():
        start, end = entries[name]["data_offsets"]
        assert (8 + length + start) % dtype.itemsize == 0 or name != "b"
        assert raw[8 + length + start : 8 + length + end] == array.tobytes()
    assert len(raw) == 8 + length + sum(array.nbytes for array in tree.values())


@pytest.mark.parametrize("nbytes", [1, 64 * 1024 - 1, 64 * 1024, 64 * 1024 + 1, 3 * MIB + 5])
@pytest.mark.parametrize("memory", [1, 64 * 1024, 200_000, MIB])
def test_every_byte_of_every_piece(stager: Stager, tmp_path: Path, nbytes: int, memory: int) -> None:
    tree = [bits((nbytes,), np.dtype(np.uint8)), bits((max(1, nbytes // 3),), np.dtype(np.uint8)), bits((9,), np.dtype(np.uint8))]
    path = xferlib.save(tmp_path / "pieces.safetensors", there(stager, tree), stager, memory=memory).result()
    got = safetensors.numpy.load_file(path)
    for number, array in enumerate(tree):
        same(got[str(number)], array)


def test_an_array_alone(stager: Stager, tmp_path: Path) -> None:
    array = bits((40, 3), np.dtype("float64"))
    same(
        safetensors.numpy.load_file(xferlib.save(tmp_path / "a.safetensors", there(stager, array), stager).result())["array"], array
    )
    same(np.load(xferlib.save(tmp_path / "a.npy", there(stager, array), stager).result()), array)
    same(xferlib.load(tmp_path / "a.safetensors", stager, like=array), array)
    same(xferlib.load(tmp_path / "a.npy", stager, like=array), array)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "<U7"])
def test_npy_has_every_dtype_of_numpy_that_the_backend_has(stager: Stager, tmp_path: Path, dtype: str) -> None:
    array = np.zeros((3, 2), dtype)
    try:
        on_device = there(stager, array)
    except TypeError:
        # Text is nothing that is transferred.
        assert dtype == "<U7"
        return
    same(np.load(xferlib.save(tmp_path / "x.npy", on_device, stager).result()), array)


def test_an_archive_is_what_numpy_reads(stager: Stager, tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "a": {"b": bits((5 * MIB,), np.dtype(np.uint8))},
        "none": np.zeros((3, 0), np.float32),
        "c": np.array(2.5),
    }
    path = xferlib.save(tmp_path / "many.npz", there(stager, tree), stager, memory=MIB).result()
    with np.load(path) as found:
        assert sorted(found) == ["a.b", "c", "none"]
        same(found["a.b"], tree["a"]["b"])
        same(found["none"], tree["none"])
        same(found["c"], tree["c"])
    back = xferlib.load(path, stager, like=there(stager, tree))
    same(stager.get(back["a"]["b"]).result(), tree["a"]["b"])


@dataclass
class State:
    weights: Any
    step: int
    name: str


def test_a_state_comes_back_as_it_was_with_what_rode_along(stager: Stager, tmp_path: Path) -> None:
    state = State(there(stager, {"w": bits((100, 9), np.dtype("float32"))}), 17, "run é")
    path = xferlib.save(tmp_path / "state.safetensors", state, stager).result()
    blank = State(there(stager, {"w": np.zeros((100, 9), np.float32)}), 0, "")
    back = xferlib.load(path, stager, like=blank)
    assert (back.step, back.name) == (17, "run é")
    same(stager.get(back.weights["w"]).result(), stager.get(state.weights["w"]).result())
    # The file may have more than is asked for.
    part = xferlib.load(path, stager, like={"weights": blank.weights})
    same(stager.get(part["weights"]["w"]).result(), stager.get(state.weights["w"]).result())


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"w": np.zeros((9, 100), np.float32)}, "'w' is of shape"),
        ({"w": np.zeros((100, 9), np.float16)}, "'w' is of shape"),
        ({"v": np.zeros((100, 9), np.float32)}, "no array named 'v'"),
    ],
)
def test_a_file_that_is_not_like_it_is_refused(stager: Stager, tmp_path: Path, like: Any, words: str) -> None:
    path = xferlib.save(tmp_path / "w.safetensors", there(stager, {"w": np.ones((100, 9), np.float32)}), stager).result()
    with pytest.raises(ValueError, match=words):
        xferlib.load(path, stager, like=like)
    with pytest.raises(ValueError, match="Leave one of them out"):
        xferlib.load(path, stager, names=["w"], like=like)


def test_values_that_were_tampered_with_are_refused(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    for text in ("[1, 2]", "{", "nothing"):
        safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path, {"xferlib.values": text})
        with pytest.raises(ValueError, match="damaged"):
            xferlib.load(path, stager, like={"w": np.zeros(3, np.float32), "step": 1})


@pytest.mark.parametrize(
    ("arguments", "named", "error", "words"),
    [
        (("x.pt", "w"), {}, ValueError, "ends in"),
        (("x.npy", "tree"), {}, ValueError, "holds one array"),
        (("x.npz", "riding"), {}, ValueError, "no place for 'step'"),
        (("x.npz", "tree"), {"metadata": {"a": "b"}}, ValueError, "no place for metadata"),
        (("x.safetensors", "tree"), {"metadata": {"a": 1}}, TypeError, "metadata"),
        (("x.safetensors", "tree"), {"metadata": {"xferlib.values": "{}"}}, TypeError, "metadata"),
        (("x.safetensors", "tree"), {"memory": 0}, ValueError, "memory"),
        (("x.safetensors", "tree"), {"rate_limit": 0}, ValueError, "rate_limit"),
        (("x.safetensors", "tree"), {"rate_limit": float("nan")}, ValueError, "rate_limit"),
        (("x.safetensors", "tree"), {"keep": 3}, ValueError, "number"),
        (("x1.safetensors", "tree"), {"keep": 0}, ValueError, "keep"),
        (("x1.safetensors", "tree"), {"keep": True}, ValueError, "keep"),
        (("x.safetensors", "date"), {}, TypeError, "'when' is a date"),
        (("x.safetensors", "twice"), {}, ValueError, "both called 'a.b'"),
        (("x.safetensors", "hidden"), {}, ValueError, "cannot be called"),
        (("x.safetensors", "empty"), {}, ValueError, "no array"),
        (("x.safetensors", "complex"), {}, TypeError, "complex128"),
        (("x.npy", "bfloat16"), {}, TypeError, "bfloat16"),
        (("x.npz", "bfloat16s"), {}, TypeError, "bfloat16"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_the_call(
    stager: Stager, tmp_path: Path, arguments: tuple[str, str], named: dict[str, Any], error: type[Exception], words: str
) -> None:
    w = there(stager, np.zeros(4, np.float32))
    trees: dict[str, Any] = {
        "w": w,
        "tree": {"w": w},
        "riding": {"w": w, "step": 1},
        "date": {"w": w, "when": date(2026, 1, 1)},
        "twice": {"a.b": w, "a": {"b": w}},
        "hidden": {"__metadata__": w},
        "empty": {"a": []},
        "complex": {"w": there(stager, np.zeros(2, np.complex128))},
        "bfloat16": there(stager, np.zeros(2, ml_dtypes.bfloat16)),
        "bfloat16s": {"w": there(stager, np.zeros(2, ml_dtypes.bfloat16))},
    }
    name, tree = arguments
    with pytest.raises(error, match=words):
        xferlib.save(tmp_path / name, trees[tree], stager, **named)
    only(tmp_path)
    assert not stager._ledger.jobs.readings


def test_a_stager_comes_third(stager: Stager) -> None:
    with pytest.raises(TypeError, match="comes third"):
        xferlib.save(stager, np.zeros(3), "x.npy")  # type: ignore[arg-type]  # on purpose


def test_the_file_has_what_the_arrays_held_at_the_call(stager: Stager, tmp_path: Path) -> None:
    """And an array that is overwritten by a put is read first."""
    backend: Any = stager.backend
    old, new = bits((MIB,), np.dtype(np.uint8)), bits((MIB,), np.dtype(np.uint8))
    array = there(stager, old)
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager, memory=128 * 1024)
        overwriting = on_thread(lambda: stager.put(new, into=array).result())
        time.sleep(0.05)
        assert not overwriting.done()
        assert not save.done()
        gate.set()
    overwriting.result(20)
    same(np.load(save.result(20)), old)
    same(array, new)


def test_another_stagers_put_waits_as_well(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    old, new = bits((MIB,), np.dtype(np.uint8)), bits((MIB,), np.dtype(np.uint8))
    array = there(stager, old)
    with xferlib.stager("host") as other, held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager, memory=128 * 1024)
        overwriting = on_thread(lambda: other.put(new, into=array).result())
        time.sleep(0.05)
        assert not overwriting.done()
        gate.set()
        overwriting.result(20)
    same(np.load(save.result(20)), old)


def test_it_returns_while_the_copies_are_held_and_waits_for_what_was_read(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        with pytest.raises(TimeoutError, match="have not been read"):
            save.wait_read(0.05)
        with pytest.raises(TimeoutError, match="has not ended"):
            save.result(0.01)
        assert "under way" in repr(save)
        assert not save.done()
        gate.set()
        save.wait_read(20)
        array[:] = 0
        save.result(20)
    assert "done" in repr(save)
    assert np.load(save.path).any()


def test_closing_the_stager_waits_for_the_save(tmp_path: Path) -> None:
    array = bits((3 * MIB,), np.dtype(np.uint8))
    with xferlib.stager("host") as stager:
        save = xferlib.save(tmp_path / "a.npy", stager.put(array).value, stager, memory=256 * 1024)
    same(np.load(save.result(20)), array)


def test_a_stager_that_is_dropped_lets_it_end(tmp_path: Path) -> None:
    array = bits((3 * MIB,), np.dtype(np.uint8))
    stager = xferlib.stager("host")
    save = xferlib.save(tmp_path / "a.npy", stager.put(array).value, stager, memory=256 * 1024)
    with pytest.warns(ResourceWarning, match="never closed"):
        del stager
    same(np.load(save.result(20)), array)


def test_saves_to_one_path_come_there_in_order(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    path = tmp_path / "latest.npy"
    arrays = [there(stager, np.full(MIB // 8, number, np.uint8)) for number in range(6)]
    with held(backend.d2h) as gate:
        saves = [xferlib.save(path, array, stager) for array in arrays]
        gate.set()
    for save in saves:
        save.result(20)
    assert np.load(path)[0] == 5
    only(tmp_path, path.name)


@pytest.mark.parametrize("names", [("latest.npy", "latest.npy"), ("step_1.npy", "step_2.npy")])
def test_an_older_save_does_not_come_behind_a_newer_one(stager: Stager, tmp_path: Path, names: tuple[str, str]) -> None:
    """The older one's copies are held, the newer one's are not: it waits with its name."""
    backend: Any = stager.backend
    with xferlib.stager("host") as other, held(backend.d2h) as gate:
        first = xferlib.save(tmp_path / names[0], there(stager, np.zeros(10, np.uint8)), stager)
        second = xferlib.save(tmp_path / names[1], there(other, np.ones(10, np.uint8)), other)
        assert until(lambda: second.written == 10)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        gate.set()
        second.result(20)
        assert first.done()
    assert np.load(tmp_path / names[1])[0] == 1


def test_keep_leaves_the_newest(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.zeros(4, np.uint8))
    others = [tmp_path / name for name in ("step_x.npy", "step_7.npz", "best_7.npy", "step_7_old.npy")]
    for other in others:
        other.write_bytes(b"")
    for step in (900, 5, 30, 2000):
        xferlib.save(tmp_path / f"step_{step}.npy", array, stager, keep=2).result()
        # Times are told apart by the clock of the file system.
        time.sleep(0.02)
    only(tmp_path, "step_30.npy", "step_2000.npy", *(other.name for other in others))
    xferlib.save(tmp_path / "step_1.npy", array, stager, keep=1).result()
    only(tmp_path, "step_1.npy", *(other.name for other in others))


def test_what_a_link_leads_to_is_replaced(stager: Stager, tmp_path: Path) -> None:
    real = tmp_path / "there"
    real.mkdir()
    (real / "a.npy").write_bytes(b"old")
    link = tmp_path / "a.npy"
    link.symlink_to(real / "a.npy")
    xferlib.save(link, there(stager, np.arange(5)), stager).result()
    assert link.is_symlink()
    assert np.load(real / "a.npy").tolist() == [0, 1, 2, 3, 4]
    only(real, "a.npy")


def test_it_reads_no_faster_than_it_may(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, bits((2 * MIB,), np.dtype(np.uint8)))
    began = time.monotonic()
    path = xferlib.save(tmp_path / "slow.npy", array, stager, memory=256 * 1024, rate_limit=4 * MIB).result()
    # The last piece is read at once when those before it had their time.
    assert time.monotonic() - began >= (2 * MIB - 128 * 1024) / (4 * MIB)
    same(np.load(path), array)


def test_it_takes_no_more_memory_than_it_may(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, bits((8 * MIB,), np.dtype(np.uint8)))
    stager.trim()
    before = stager.stats().pinned_nbytes
    xferlib.save(tmp_path / "a.npy", array, stager, memory=MIB).result()
    # Requests below a MiB share segments of two.
    assert stager.stats().pinned_peak_nbytes - before <= 2 * MIB


def test_it_needs_little_of_a_pool_that_is_full(tmp_path: Path) -> None:
    with xferlib.stager("host", pinned_limit=4 * MIB) as stager:
        array = there(stager, bits((8 * MIB,), np.dtype(np.uint8)))
        kept = stager.empty_pinned(2 * MIB, np.uint8)
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager).result()), array)
        del kept


def test_a_pool_without_any_room_is_an_error_of_the_save(tmp_path: Path) -> None:
    with xferlib.stager("host", pinned_limit=4 * MIB) as stager:
        array = there(stager, bits((MIB,), np.dtype(np.uint8)))
        stager.trim()
        kept = stager.empty_pinned(4 * MIB, np.uint8)
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        with pytest.raises(xferlib.AllocationError):
            save.result(20)
        with pytest.raises(xferlib.AllocationError):
            save.done()
        del kept
        assert "failed" in repr(save)
    only(tmp_path)


@pytest.mark.parametrize("kind", ["safetensors", "npz", "npy"])
def test_a_full_disk_leaves_the_old_file(stager: Stager, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    tree = there(stager, np.zeros(MIB, np.uint8))
    save_tree = {"w": tree} if kind == "npz" else tree
    if kind == "npz":
        monkeypatch.setattr("zipfile._ZipWriteFile.write", full)
    else:
        monkeypatch.setattr(os, "pwrite", full)
    save = xferlib.save(path, save_tree, stager, memory=128 * 1024)
    with pytest.raises(OSError, match="No space left"):
        save.result(20)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    only(tmp_path, path.name)
    at_rest(stager)


def test_it_is_told_before_anything_is_written_where_the_disk_has_no_room(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: Small)
    with pytest.raises(OSError, match="bytes are to be written, and 4096 are free"):
        xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(MIB, np.uint8)), stager).result(20)
    only(tmp_path)


def test_a_folder_that_is_not_there_is_an_error_of_the_save(stager: Stager, tmp_path: Path) -> None:
    save = xferlib.save(tmp_path / "none" / "a.npy", there(stager, np.zeros(3)), stager)
    with pytest.raises(FileNotFoundError, match="none"):
        save.result(20)


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_read_only_is_an_error_of_the_save(stager: Stager, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(3)), stager)
    with pytest.raises(PermissionError):
        save.result(20)


def test_a_copy_that_fails_is_told_and_leaves_nothing(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = there(stager, np.zeros(MIB, np.uint8))
    calls = iter(range(100))
    copy = stager.backend.copy_d2h

    def failing(*arguments: int) -> None:
        if next(calls) == 3:
            raise stager.backend.failures[0]("the device is gone")
        copy(*arguments)

    monkeypatch.setattr(stager.backend, "copy_d2h", failing)
    save = xferlib.save(tmp_path / "a.npy", array, stager, memory=128 * 1024)
    with pytest.raises(xferlib.XferError, match="the device is gone"):
        save.result(20)
    save.wait_read(0)
    only(tmp_path)
    at_rest(stager)


def test_a_failure_that_nobody_asked_about_is_said_when_the_handle_goes(stager: Stager, tmp_path: Path) -> None:
    save = xferlib.save(tmp_path / "none" / "a.npy", there(stager, np.zeros(3)), stager)
    assert save._work.ended.wait(20)
    with pytest.warns(RuntimeWarning, match="nobody has asked"):
        del save


def test_a_failure_behind_a_handle_that_is_gone_is_said_as_well(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    backend: Any = stager.backend
    monkeypatch.setattr(warnings, "warn", lambda words, *_: said.append(words))
    array = there(stager, np.zeros(3))
    with held(backend.d2h) as gate:
        xferlib.save(tmp_path / "a.npy", array, stager)
        tmp_path.rename(tmp_path.with_name("moved"))
        gate.set()
    assert until(lambda: bool(said))
    assert "nobody has asked" in said[0]


def test_a_handle_is_neither_copied_nor_pickled(stager: Stager, tmp_path: Path) -> None:
    import copy

    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(3)), stager)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(save)
    save.result(20)


def test_a_forked_child_is_refused_and_the_parent_goes_on(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        child = fork()
        if child == 0:
            refused = 0
            for call in (save.done, save.result, save.wait_read):
                try:
                    call()
                except xferlib.BackendUnavailableError:
                    refused += 1
            os._exit(0 if refused == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.set()
    same(np.load(save.result(20)), array)


def test_what_a_killed_process_left_is_removed_by_the_next_save(stager: Stager, tmp_path: Path) -> None:
    left = tmp_path / f".a.npy.00ff{SUFFIX}"
    left.write_bytes(b"half")
    others = TemporaryFile(tmp_path / "b.npy")
    xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(3)), stager).result(20)
    assert not left.exists()
    # Somebody writes that one now.
    assert len(list(tmp_path.glob(f".*{SUFFIX}"))) == 1
    others.close()
    only(tmp_path, "a.npy")


PROGRAM = """
import sys
import numpy as np
import xferlib

with xferlib.stager("host") as stager:
    for step in range(1, 1000):
        state = {"w": np.full(400_000, step, np.int32), "b": np.full(7, step, np.int32), "step": step}
        xferlib.save(sys.argv[1], stager.put(state, borrow=True).result(), stager, memory=1 << 18).result()
        print(step, flush=True)
"""


def test_a_killed_process_leaves_the_old_file_or_the_new_one(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    dice = np.random.default_rng(3)
    for _ in range(12):
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            seen = [int(child.stdout.readline()) for _ in range(int(dice.integers(1, 4)))]
            time.sleep(float(dice.random()) * 0.02)
            child.send_signal(signal.SIGKILL)
        like: Any = {"w": np.zeros(400_000, np.int32), "b": np.zeros(7, np.int32), "step": 0}
        back = xferlib.load(path, stager, like=like)
        step = back["step"]
        assert step >= seen[-1]
        assert (stager.get(back["w"]).result() == step).all()
        assert (stager.get(back["b"]).result() == step).all()
    xferlib.save(path, there(stager, {"w": np.zeros(3)}), stager).result()
    only(tmp_path, path.name)


def test_the_interpreter_waits_for_a_save_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    program = f"""
    import numpy as np, xferlib
    stager = xferlib.stager("host")
    array = stager.put(np.arange(3_000_000), borrow=True).result()
    xferlib.save({str(path)!r}, array, stager, memory=1 << 18)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=True, timeout=60)
    assert (np.load(path) == np.arange(3_000_000)).all()


def test_many_at_once_from_many_threads(stager: Stager, tmp_path: Path) -> None:
    arrays = [bits((300_000 + number,), np.dtype(np.uint8)) for number in range(12)]

    def save(number: int) -> Path:
        return xferlib.save(tmp_path / f"{number}.npy", there(stager, arrays[number]), stager, memory=128 * 1024).result(60)

    for number, future in enumerate([on_thread(lambda number=number: save(number)) for number in range(12)]):  # type: ignore[misc]
        same(np.load(future.result(60)), arrays[number])
    assert not [thread for thread in threading.enumerate() if thread.name == "xferlib-save"]
    only(tmp_path, *(f"{number}.npy" for number in range(12)))


def test_a_working_directory_that_changes_meanwhile_changes_nothing(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = stager.backend
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with held(backend.d2h) as gate, held_files(monkeypatch) as files:
        save = xferlib.save("a.npy", there(stager, np.arange(3)), stager)
        monkeypatch.chdir(elsewhere)
        files.set()
        gate.set()
    save.result(20)
    only(tmp_path, "a.npy", "elsewhere")
    only(elsewhere)


@contextmanager
def held_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no file be begun before the gate is open."""
    gate, begin = threading.Event(), TemporaryFile.__init__

    def hold(self: TemporaryFile, target: Path) -> None:
        gate.wait(20)
        begin(self, target)

    monkeypatch.setattr(TemporaryFile, "__init__", hold)
    try:
        yield gate
    finally:
        gate.set()


def test_a_name_may_be_as_long_as_a_name_can_be(stager: Stager, tmp_path: Path) -> None:
    name = "x" * 251 + ".npy"
    xferlib.save(tmp_path / name, there(stager, np.arange(3)), stager).result(20)
    only(tmp_path, name)


def test_a_file_system_without_locks_will_do(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager).result(20)
    only(tmp_path, "a.npy")


def test_a_file_that_another_process_takes_for_left_is_begun_anew(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    lock, times = fcntl.flock, iter(range(100))

    def taken(descriptor: int, how: int) -> None:
        number = next(times)
        if number == 0:
            raise BlockingIOError
        if number == 1:
            # Removed a moment before it is locked.
            (left,) = [path for path in tmp_path.glob(f".*{SUFFIX}") if path.stat().st_ino == os.fstat(descriptor).st_ino]
            left.unlink()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", taken)
    xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager).result(20)
    assert next(times) >= 3
    xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager).result(20)
    only(tmp_path, "a.npy")


@pytest.mark.parametrize("value", ["17", 17.0, True, None, [17]])
def test_a_value_of_another_type_is_refused(stager: Stager, tmp_path: Path, value: Any) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path, {"xferlib.values": json.dumps({"step": value})})
    with pytest.raises(ValueError, match="'step' is a"):
        xferlib.load(path, stager, like={"w": np.zeros(3, np.float32), "step": 1})


def test_a_folder_of_the_files_name_is_an_error_of_the_save(stager: Stager, tmp_path: Path) -> None:
    (tmp_path / "a.npy").mkdir()
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager)
    with pytest.raises(IsADirectoryError):
        save.result(20)
    only(tmp_path, "a.npy")
