"""What is saved is what was on the device: every byte, whole or not there, whatever goes wrong meanwhile."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from xferlib_host import Stream

import xferlib
from tests.children import fork, threads
from tests.core.fakes import held, on_thread, until
from tests.core.points import interrupted_at
from xferlib.byte_reader import ByteReader
from xferlib.files.temporary import SUFFIX, TemporaryFile
from xferlib.stager import Stager

MIB = 1 << 20
saving: Any = sys.modules["xferlib.files.save"]
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
    assert (8 + length) % 64 == 0
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
        (("x1.safetensors", "tree"), {"keep": True}, TypeError, "keep=True: expected a whole number"),
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
    # Nothing was put: there is nothing else in the pool. Requests below a MiB share segments of two.
    xferlib.save(tmp_path / "a.npy", bits((8 * MIB,), np.dtype(np.uint8)), stager, memory=MIB).result()
    assert stager._pool.nbytes == 2 * MIB


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
    for _ in range(6):
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


@contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let nothing be written before the gate is open."""
    gate, write = threading.Event(), TemporaryFile.write

    def hold(self: TemporaryFile, data: memoryview, offset: int) -> None:
        if offset:
            gate.wait(20)
        write(self, data, offset)

    monkeypatch.setattr(TemporaryFile, "write", hold)
    try:
        yield gate
    finally:
        gate.set()


def test_what_is_read_is_free_before_it_is_written(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = there(stager, np.zeros(1000, np.uint8))
    with held_writes(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        save.wait_read(5)
        on_thread(lambda: stager.put(np.ones(1000, np.uint8), into=array).result()).result(20)
        assert not save.done()
        gate.set()
    assert not np.load(save.result(20)).any()


def test_arrays_of_which_a_piece_is_left_are_not_read(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = there(stager, np.zeros(MIB, np.uint8))
    with held_writes(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager, memory=64 * 1024)
        with pytest.raises(TimeoutError):
            save.wait_read(0.2)
        gate.set()
        save.wait_read(20)
    save.result(20)


@pytest.mark.parametrize("named", [True, False])
def test_it_waits_for_the_stream_that_fills_the_array(stager: Stager, tmp_path: Path, named: bool) -> None:
    gate, array = threading.Event(), np.zeros(1000, np.uint8)
    with closing(Stream()) as stream:
        stream.submit(gate.wait, 20)
        stream.submit(array.fill, 7)
        if named:
            save = xferlib.save(tmp_path / "a.npy", array, stager, stream=stream)
        else:
            with stream:
                save = xferlib.save(tmp_path / "a.npy", array, stager)
        with pytest.raises(TimeoutError):
            save.wait_read(0.1)
        gate.set()
        assert (np.load(save.result(20)) == 7).all()


class Level(IntEnum):
    HIGH = 3


def test_a_number_of_a_class_of_its_own_is_refused(stager: Stager, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'level' is a Level"):
        xferlib.save(tmp_path / "a.safetensors", {"w": there(stager, np.zeros(3)), "level": Level.HIGH}, stager)


def test_it_takes_half_of_the_pool_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, write = threading.Barrier(2), TemporaryFile.write

    def together(self: TemporaryFile, data: memoryview, offset: int) -> None:
        if offset and not both.broken:
            # Until each thread has its memory, or there is no other.
            with suppress(threading.BrokenBarrierError):
                both.wait(2)
        write(self, data, offset)

    monkeypatch.setattr(TemporaryFile, "write", together)
    with xferlib.stager("host", pinned_limit=8 * MIB) as stager:
        # Nothing was put: there is nothing else in the pool.
        array = bits((20 * MIB,), np.dtype(np.uint8))
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager).result()), array)
        assert stager._pool.nbytes == 4 * MIB


def test_many_threads_take_no_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.files.save.usable_cores", lambda: 16)
    with xferlib.stager("host", pinned_limit=64 * MIB) as stager:
        array = bits((20 * MIB,), np.dtype(np.uint8))
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager, memory=4 * MIB).result()), array)
        assert stager._pool.nbytes <= 4 * MIB


@pytest.mark.parametrize("started", [0, 1, 2])
def test_threads_that_the_system_has_not_are_done_without(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    start, left = threading.Thread.start, iter(range(started))

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "xferlib-save" and next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("xferlib.files.save.usable_cores", lambda: 4)
    save = xferlib.save(tmp_path / "a.npy", array, stager, memory=256 * 1024)
    if started:
        same(np.load(save.result(20)), array)
    else:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            save.result(20)
        only(tmp_path)
    at_rest(stager)


def test_a_finalizer_in_its_threads_is_refused_and_does_not_hang(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the collector runs there may put into what is being saved."""
    array = there(stager, np.zeros(MIB, np.uint8))
    told: list[str] = []

    def finalize() -> None:
        with pytest.raises(xferlib.XferError) as raised:
            stager.put(np.ones(MIB, np.uint8), into=array)
        told.append(str(raised.value))

    begin, pieces = TemporaryFile.__init__, saving._Plan.pieces

    def beginning(self: TemporaryFile, target: Path) -> None:
        finalize()
        begin(self, target)

    def cutting(self: Any, nbytes: int) -> Iterator[Any]:
        for piece in pieces(self, nbytes):
            finalize()
            yield piece

    monkeypatch.setattr(TemporaryFile, "__init__", beginning)
    monkeypatch.setattr(saving._Plan, "pieces", cutting)
    save = xferlib.save(tmp_path / "a.npy", array, stager, memory=512 * 1024)
    assert not np.load(save.result(20)).any()
    assert len(told) == 5
    assert all("finalizer" in words for words in told)


def test_others_stop_when_one_has_failed(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = there(stager, np.zeros(20 * MIB, np.uint8))
    write, failed, written = TemporaryFile.write, threading.Event(), []

    def failing(self: TemporaryFile, data: memoryview, offset: int) -> None:
        if offset > 1000 and not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "broken")
        if offset > 1000:
            time.sleep(0.01)
        written.append(offset)
        write(self, data, offset)

    monkeypatch.setattr(TemporaryFile, "write", failing)
    save = xferlib.save(tmp_path / "a.npy", array, stager, memory=128 * 1024)
    with pytest.raises(OSError, match="broken"):
        save.result(20)
    assert len(written) < 20


def test_a_failure_keeps_no_memory_and_its_traceback_does_not_grow(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    array = there(stager, np.zeros(MIB, np.uint8))
    stager.idle()
    before = stager._pool.usage().used
    monkeypatch.setattr(TemporaryFile, "write", broken)
    save = xferlib.save(tmp_path / "a.npy", array, stager)
    lengths = []
    for _ in range(3):
        with pytest.raises(OSError, match="broken") as raised:
            save.result(20)
        lengths.append(len(raised.traceback))
    assert len(set(lengths)) == 1
    del raised
    stager.idle()
    assert stager._pool.usage().used == before


def test_a_save_that_has_ended_keeps_none_before_it(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.zeros(10, np.uint8))
    first = xferlib.save(tmp_path / "s_1.npy", array, stager)
    second = xferlib.save(tmp_path / "s_2.npy", array, stager)
    second.result(20)
    gone = weakref.ref(first._work)
    del first
    assert until(lambda: gone() is None)


def test_an_archive_that_cannot_be_ended_is_not_there(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("zipfile.ZipFile._write_end_record", broken)
    save = xferlib.save(tmp_path / "a.npz", {"w": there(stager, np.zeros(10))}, stager)
    with pytest.raises(OSError, match="broken"):
        save.result(20)
    only(tmp_path)


def test_members_of_an_archive_may_be_of_any_size(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zipfile.ZIP64_LIMIT", 1000)
    array = bits((5000,), np.dtype(np.uint8))
    path = xferlib.save(tmp_path / "a.npz", {"w": there(stager, array)}, stager).result(20)
    monkeypatch.undo()
    with np.load(path) as found:
        same(found["w"], array)


def test_a_child_saves_into_the_series_that_its_parent_saves_to(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    array = there(stager, np.arange(1000))
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "s_1.npy", array, stager)
        child = fork()
        if child == 0:
            with xferlib.stager("host") as own:
                xferlib.save(tmp_path / "s_2.npy", np.arange(3), own).result(10)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.set()
    save.result(20)
    only(tmp_path, "s_1.npy", "s_2.npy")


def test_writes_that_come_short_go_on(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:999], offset))
    array = bits((100_000,), np.dtype(np.uint8))
    same(np.load(xferlib.save(tmp_path / "a.npy", there(stager, array), stager).result(20)), array)


def test_the_disk_has_the_bytes_before_the_file_has_its_name(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        folder = Path(f"/proc/self/fd/{descriptor}").resolve()
        synced.append((tmp_path / "a.npy").exists())
        assert folder == tmp_path if synced[-1] else folder.parent == tmp_path
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager).result(20)
    assert synced == [False, True]


def test_a_disk_with_just_enough_room_will_do(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(3)
    size = xferlib.save(tmp_path / "a.npy", there(stager, array), stager).result(20).stat().st_size

    class Small:
        f_bavail, f_frsize = size, 1

    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: Small)
    xferlib.save(tmp_path / "a.npy", there(stager, array), stager).result(20)


def test_no_descriptor_is_left_open(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.arange(3))
    xferlib.save(tmp_path / "a.npy", array, stager).result(20)
    before = len(os.listdir("/proc/self/fd"))
    for kind in ("npy", "npz", "safetensors"):
        xferlib.save(tmp_path / f"a.{kind}", {"w": array} if kind == "npz" else array, stager).result(20)
        with pytest.raises(FileNotFoundError):
            xferlib.save(tmp_path / "none" / "a.npy", array, stager).result(20)
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_names_than_a_header_has_room_for_are_refused(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.files.formats.LARGEST_HEADER", 200)
    with pytest.raises(ValueError, match="the names of 9 arrays take"):
        xferlib.save(tmp_path / "a.safetensors", [there(stager, np.arange(3))] * 9, stager)


def test_a_value_that_the_file_has_not_is_refused(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path, {"xferlib.values": json.dumps({"step": 3})})
    with pytest.raises(ValueError, match="no value named 'name'"):
        xferlib.load(path, stager, like={"w": np.zeros(3, np.float32), "step": 1, "name": "new"})


def test_what_is_like_nothing_is_refused(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.arange(3))
    alone = xferlib.save(tmp_path / "a.npy", array, stager).result(20)
    with pytest.raises(ValueError, match="like is a tree"):
        xferlib.load(alone, stager, like={"w": array})
    tree = xferlib.save(tmp_path / "a.safetensors", {"w": array}, stager).result(20)
    with pytest.raises(TypeError, match="'w' is a object"):
        xferlib.load(tree, stager, like={"w": object()})


def test_an_interrupt_at_any_point_of_the_call_leaves_nothing(stager: Stager, tmp_path: Path) -> None:
    """The file is whole or not there, and nothing is left of a save that did not begin."""
    array = there(stager, bits((200_000,), np.dtype(np.uint8)))
    path = tmp_path / "a.npy"

    def ended() -> bool:
        return not [thread for thread in threading.enumerate() if thread.name == "xferlib-save"]

    for point in itertools.count(1):
        if not interrupted_at(point, ("files/save.py", "byte_reader.py"), lambda: xferlib.save(path, array, stager)):
            break
        assert until(ended)
        gc.collect()
        stager.idle()
        stager._ledger.reap()
        assert not stager._ledger.jobs.readings
        if path.exists():
            same(np.load(path), array)
            path.unlink()
        only(tmp_path)
    assert until(ended)
    assert point > 20


def test_what_is_loaded_is_of_one_file_though_others_take_its_place(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    stop = threading.Event()

    def states() -> Iterator[Any]:
        for step in itertools.count():
            # With headers and sizes that differ.
            yield {"w": np.full(1000 + step % 7, step, np.int32), "step": step, "pad": "x" * (step % 300)}

    def save() -> None:
        with xferlib.stager("host") as own:
            for state in states():
                xferlib.save(path, own.put(state, borrow=True).result(), own).result()
                if stop.is_set():
                    return

    xferlib.save(path, there(stager, next(states())), stager).result()
    saving = on_thread(save)
    try:
        for _ in range(100):
            got = xferlib.load(path, stager)["w"]
            step = int(got[0])
            assert len(got) == 1000 + step % 7
            assert (got == step).all()
            with suppress(ValueError):
                like: Any = {"w": np.zeros(1000 + step % 7, np.int32), "step": 0, "pad": ""}
                back = xferlib.load(path, stager, like=like)
                assert (back["w"] == back["step"]).all()
    finally:
        stop.set()
        saving.result(20)


def test_keep_goes_by_the_order_of_the_calls(stager: Stager, tmp_path: Path) -> None:
    """The first is the last to be written."""
    large, small = there(stager, bits((2 * MIB,), np.dtype(np.uint8))), there(stager, np.zeros(3, np.uint8))
    saves = [xferlib.save(tmp_path / "s_1.npy", large, stager, memory=128 * 1024, rate_limit=8 * MIB, keep=2)]
    saves += [xferlib.save(tmp_path / f"s_{step}.npy", small, stager, keep=2) for step in (2, 3)]
    for save in saves:
        save.result(20)
    only(tmp_path, "s_2.npy", "s_3.npy")


def test_files_that_have_nothing_to_do_with_each_other_do_not_wait(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    with xferlib.stager("host") as other, held(backend.d2h) as gate:
        slow = xferlib.save(tmp_path / "step_1.npy", there(stager, np.zeros(10, np.uint8)), stager)
        xferlib.save(tmp_path / "best.npy", there(other, np.ones(10, np.uint8)), other).result(20)
        xferlib.save(tmp_path / "step_1.npz", {"a": there(other, np.ones(10, np.uint8))}, other).result(20)
        assert not slow.done()
        gate.set()
    slow.result(20)


def test_what_cannot_be_removed_is_said_and_the_file_is_there(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    (tmp_path / "s_1.npy").write_bytes(b"old")
    (tmp_path / "s_0.npy").mkdir()
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "s_1.npy":
            raise PermissionError("not yours")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(warnings, "warn", lambda words, *_: said.append(words))
    xferlib.save(tmp_path / "s_2.npy", there(stager, np.zeros(3)), stager, keep=1).result(20)
    monkeypatch.undo()
    assert "could not be removed: not yours" in said[0]
    assert len(said) == 1
    only(tmp_path, "s_0.npy", "s_1.npy", "s_2.npy")


def test_whoever_could_read_the_earlier_file_can_read_the_new_one(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    array = there(stager, np.arange(3))
    xferlib.save(path, array, stager).result(20)
    path.chmod(0o640)
    xferlib.save(path, array, stager).result(20)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("limit", [16 * 1024, 64 * 1024, 4 * MIB])
def test_it_does_with_what_the_pool_has(tmp_path: Path, limit: int) -> None:
    with xferlib.stager("host", pinned_limit=limit) as stager:
        array = there(stager, bits((3 * MIB,), np.dtype(np.uint8)))
        stager.trim()
        kept = stager.empty_pinned(limit // 2, np.uint8)
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager).result(20)), array)
        del kept


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "x" * 70_000], ids=["nul", "line", "long"])
def test_a_name_that_an_archive_would_not_give_back_is_refused(stager: Stager, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name for an array in an archive"):
        xferlib.save(tmp_path / "a.npz", {name: there(stager, np.zeros(3))}, stager)


class Moments(NamedTuple):
    mu: Any
    nu: Any


def test_parts_of_a_named_tuple_have_their_names(stager: Stager, tmp_path: Path) -> None:
    tree = {"opt": (Moments(there(stager, np.zeros(3)), there(stager, np.ones(3))), there(stager, np.zeros(1)))}
    path = xferlib.save(tmp_path / "a.safetensors", tree, stager).result(20)
    assert sorted(xferlib.load(path, stager)) == ["opt.0.mu", "opt.0.nu", "opt.1"]
    back = xferlib.load(path, stager, like=tree)
    assert isinstance(back["opt"][0], Moments)
    assert (back["opt"][0].nu == 1).all()


def test_what_was_read_is_held_by_nobody(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = there(stager, np.zeros(1000, np.uint8))
    with held_writes(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        save.wait_read(5)
        gone = weakref.ref(array)
        del array
        assert until(lambda: gone() is None)
        gate.set()
    save.result(20)


def test_an_interrupt_while_the_threads_start_leaves_the_save_going_on(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = there(stager, np.arange(1000))

    def interrupted(call: Any) -> None:
        call()
        raise KeyboardInterrupt

    def too_early(call: Any) -> None:
        raise KeyboardInterrupt

    for number, start in enumerate((interrupted, too_early)):
        monkeypatch.setattr("xferlib.files.save.uninterrupted", start)
        with pytest.raises(KeyboardInterrupt) as raised:
            xferlib.save(tmp_path / f"s_{number}.npy", array, stager)
        monkeypatch.undo()
        # What was raised leads to the save that was not started: it is in nobody's way.
        xferlib.save(tmp_path / "s_9.npy", array, stager).result(20)
        stager.put(np.arange(1000), into=array).result()
        assert (tmp_path / f"s_{number}.npy").exists() == (start is interrupted)
        del raised


def test_a_thread_that_ends_reads_no_more(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one may have its number, and must be waited for and wait as others do."""
    backend: Any = stager.backend
    empty, asked = ByteReader.empty, []

    def scarce(self: ByteReader, nbytes: int, *, wait: bool = True) -> Any:
        asked.append(nbytes)
        if len(asked) > 1:
            raise xferlib.AllocationError("no more")
        return empty(self, nbytes, wait=wait)

    monkeypatch.setattr(ByteReader, "empty", scarce)
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager, memory=512 * 1024)
        (reading,) = stager._ledger.jobs.readings.values()
        assert until(lambda: len(asked) == 2 and len(reading.threads) == 1)
        gate.set()
    same(np.load(save.result(20)), array)
