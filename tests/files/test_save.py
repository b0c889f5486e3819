"""What is saved is what was on the device, in files that others read, and comes back. What no file holds is refused at the call."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterator
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

import xferlib
from tests.files.saves import DTYPES, MIB, bits, only, same, there
from xferlib import latch
from xferlib.byte_reader import ByteReader
from xferlib.files import formats
from xferlib.files.plan import MOST_ARRAYS, Layout, Plan
from xferlib.files.temporary import BORDER, SUFFIX
from xferlib.stager import Stager


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


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@pytest.mark.parametrize(("saved", "like"), [(np.int32(17), 0), (np.float32(0.5), 1.0), (np.array(True), False)])
def test_a_number_that_became_an_array_comes_back_as_the_number_that_it_is_in_like(
    stager: Stager, tmp_path: Path, suffix: str, saved: Any, like: Any
) -> None:
    """As the step of a training state: a number when it is made, and an array from its first step on."""
    state = there(stager, {"w": np.ones(3, np.float32), "step": np.asarray(saved)})
    path = xferlib.save(tmp_path / f"state{suffix}", state, stager).result(20)
    back = xferlib.load(path, stager, like={"w": np.zeros(3, np.float32), "step": like})
    assert type(back["step"]) is type(like)
    assert back["step"] == saved
    same(stager.get(back["w"]).result(), np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("saved", "like"), [(np.float32(17), 0), (np.int32(17), 0.0), (np.int32(1), True), (np.arange(3), 0), (np.int32(1), "17")]
)
def test_an_array_that_is_no_number_as_in_like_is_refused(stager: Stager, tmp_path: Path, saved: Any, like: Any) -> None:
    state = there(stager, {"w": np.ones(3, np.float32), "step": np.asarray(saved)})
    path = xferlib.save(tmp_path / "state.safetensors", state, stager).result(20)
    with pytest.raises(ValueError, match=f"'step' is an array of shape .*, and a {type(like).__name__} in like"):
        xferlib.load(path, stager, like={"w": np.zeros(3, np.float32), "step": like})


def test_a_number_behind_the_end_of_a_file_that_was_cut_off_is_refused(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = there(stager, {"w": np.ones(3, np.float32), "step": np.array(3, np.int32)})
    path = xferlib.save(tmp_path / "state.safetensors", state, stager).result(20)

    unpatched = os.pread

    def read(descriptor: int, nbytes: int, start: int) -> bytes:
        os.truncate(path, start + 1)
        return unpatched(descriptor, nbytes, start)

    monkeypatch.setattr(os, "pread", read)
    with pytest.raises(ValueError, match="was cut off"):
        xferlib.load(path, stager, like={"w": np.zeros(3, np.float32), "step": 0})


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


@pytest.mark.parametrize(
    ("name", "dtype", "advice"),
    [
        ("x.safetensors", "complex128", r"Save it as \.npy"),
        ("x.safetensors", "float8_e3m4", "No other file here can"),
        ("x.npy", "bfloat16", r"Save it as \.safetensors"),
        ("x.npz", "float8_e3m4", "No other file here can"),
    ],
)
def test_what_is_said_of_a_dtype_can_be_done(stager: Stager, tmp_path: Path, name: str, dtype: str, advice: str) -> None:
    array = there(stager, np.zeros(2, getattr(ml_dtypes, dtype, dtype)))
    with pytest.raises(TypeError, match=advice):
        xferlib.save(tmp_path / name, {"w": array} if name != "x.npy" else array, stager)


def test_a_stager_comes_third(stager: Stager) -> None:
    with pytest.raises(TypeError, match="comes third"):
        xferlib.save(stager, np.zeros(3), "x.npy")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match="comes third"):
        xferlib.save(np.zeros(3), stager, "x.npy")  # type: ignore[arg-type]  # on purpose


def test_a_tree_before_its_path_is_told_the_order(stager: Stager) -> None:
    with pytest.raises(TypeError, match=r"path=\{'a': .*: expected a path\. The order is save\(path, tree, stager\)"):
        xferlib.save({"a": np.zeros(3)}, "x.npz", stager)  # type: ignore[arg-type]  # on purpose


def test_a_function_in_the_tree_is_told_that_it_is_no_array(stager: Stager, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"function len, which is neither .* leave it out of the tree") as caught:
        xferlib.save(tmp_path / "a.safetensors", {"w": there(stager, np.zeros(3, np.float32)), "f": len}, stager)
    assert caught.value.__notes__ == ["at tree.f"]


def test_a_host_tree_is_told_that_its_tree_is_saved(tmp_path: Path) -> None:
    with xferlib.stager("host") as host, xferlib.HostTree({"a": np.arange(3.0)}, host) as home:
        with pytest.raises(TypeError, match=r"save\(path, home\.tree, host\)"):
            xferlib.save(tmp_path / "a.npz", home, host)
        xferlib.save(tmp_path / "a.npz", home.tree, host).result(20)
    assert np.load(tmp_path / "a.npz")["a"].tolist() == [0, 1, 2]


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


def test_a_handle_is_neither_copied_nor_pickled(stager: Stager, tmp_path: Path) -> None:
    import copy

    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(3)), stager)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(save)
    save.result(20)


def test_a_name_may_be_as_long_as_a_name_can_be(stager: Stager, tmp_path: Path) -> None:
    name = "x" * 251 + ".npy"
    xferlib.save(tmp_path / name, there(stager, np.arange(3)), stager).result(20)
    only(tmp_path, name)


@pytest.mark.parametrize("value", ["17", 17.0, True, None, [17]])
def test_a_value_of_another_type_is_refused(stager: Stager, tmp_path: Path, value: Any) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path, {"xferlib.values": json.dumps({"step": value})})
    with pytest.raises(ValueError, match=r"'step' is of type .* there, and of type int in like"):
        xferlib.load(path, stager, like={"w": np.zeros(3, np.float32), "step": 1})


class Level(IntEnum):
    HIGH = 3


def test_a_number_of_a_class_of_its_own_is_refused(stager: Stager, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'level' is a Level"):
        xferlib.save(tmp_path / "a.safetensors", {"w": there(stager, np.zeros(3)), "level": Level.HIGH}, stager)


def test_members_of_an_archive_may_be_of_any_size(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zipfile.ZIP64_LIMIT", 1000)
    array = bits((5000,), np.dtype(np.uint8))
    path = xferlib.save(tmp_path / "a.npz", {"w": there(stager, array)}, stager).result(20)
    monkeypatch.undo()
    with np.load(path) as found:
        same(found["w"], array)


def test_more_names_than_a_header_has_room_for_are_refused(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.files.formats.LARGEST_HEADER", 200)
    with pytest.raises(ValueError, match="the names of 9 arrays take"):
        xferlib.save(tmp_path / "a.safetensors", [there(stager, np.arange(3))] * 9, stager)


def test_thousands_of_arrays_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile no other Python thread runs. Each array is in the header once, and in the pieces once."""
    count = 500
    names = [f"layers.{number}" for number in range(count)]
    described = [((3, number % 5), np.dtype(f"f{2 << number % 3}")) for number in range(count)]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in described]
    plan = Plan(".safetensors", names, described, {"a": "b"}, sizes, sum(sizes))
    ways: list[None] = []
    monkeypatch.setattr(latch, "give_way", lambda: ways.append(None))
    monkeypatch.setattr(latch, "TURN_SECONDS", 1e9)
    assert plan.laid_out().headers
    assert ways == []
    monkeypatch.setattr(latch, "TURN_SECONDS", 0)
    layout = plan.laid_out()
    assert len(ways) == 2 * count
    (header,) = layout.headers
    found = json.loads(header[8:])
    assert found.pop("__metadata__") == {"a": "b"}
    assert len(found) == count
    assert header[8:].decode().startswith('{"__metadata__":{"a":"b"},"layers.')
    pieces = list(layout.pieces(1 << 30))
    assert max(len(piece.arrays) for piece in pieces) == MOST_ARRAYS
    for piece in pieces:
        offset = piece.offset - len(header)
        for number in piece.arrays.tolist():
            assert found[names[number]]["data_offsets"] == [offset, offset + sizes[number]]
            offset += sizes[number]
        assert offset == piece.offset - len(header) + piece.nbytes
    assert sum(len(piece.arrays) for piece in pieces) == sum(1 for shape, _ in described if shape[1])


@pytest.mark.parametrize(("nbytes", "border"), [(13, 1), (100, 1), (10_000, 4096), (9000, 4096), (1 << 30, 4096)])
def test_pieces_have_each_byte_once_and_end_at_borders(nbytes: int, border: int) -> None:
    sizes = [0, 7, 20_000, 4096, 0, 1, 5000, *[3] * 150, 8192, 0]
    order = list(reversed(range(len(sizes))))
    offset, read = 100, dict.fromkeys(order, 0)
    for piece in Layout([bytes(offset)], order, sizes, []).pieces(nbytes, border):
        assert (piece.offset, 0 < piece.nbytes <= nbytes) == (offset, True)
        left, skipped = piece.nbytes, piece.skipped
        for number in piece.arrays.tolist():
            assert read[number] == skipped
            read[number] = min(sizes[number], skipped + left)
            left, skipped = left - (read[number] - skipped), 0
        assert left == 0
        offset += piece.nbytes
        assert read[number] == sizes[number] or offset % border == 0
    assert [read[number] for number in range(len(sizes))] == sizes


def test_what_a_header_may_take_at_most_is_no_less_than_it_takes() -> None:
    """By that the call decides whether to look: control characters, the most dimensions, the largest offsets."""
    names = [chr(number) * 3 for number in range(1, 128)] + ["é€😀" * 5]
    described = [((1 << 60,) + (1,) * 63, np.dtype(ml_dtypes.float8_e4m3fnuz))] * len(names)
    header, _ = formats.safetensors_layout(names, described, {"\x01": "\x02" * 9})
    most = formats.ESCAPED * len("".join([*names, "\x01", "\x02" * 9]).encode()) + formats.ENTRY * (len(names) + 1)
    assert len(header) <= most


def test_a_value_that_the_file_has_not_is_refused(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path, {"xferlib.values": json.dumps({"step": 3})})
    with pytest.raises(ValueError, match="no value named 'name'"):
        xferlib.load(path, stager, like={"w": np.zeros(3, np.float32), "step": 1, "name": "new"})


def test_what_rode_along_and_is_wanted_as_an_array_is_named_as_that(stager: Stager, tmp_path: Path) -> None:
    array = np.zeros(3, np.float32)
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    xferlib.save(paths[0], {"w": there(stager, array), "step": 3}, stager).result(20)
    xferlib.save(paths[1], {"v": there(stager, array)}, stager).result(20)
    wrong: list[dict[str, Any]] = [{"names": ["step"]}, {"like": {"w": array, "step": np.zeros((), np.int32)}}]
    for path in (paths[0], paths):
        for wanted in wrong:
            with pytest.raises(ValueError, match=r"no array named 'step': 3 rode along .* like=, with a value of type int in its"):
                xferlib.load(path, stager, **wanted)
        with pytest.raises(ValueError, match=r"no array named 'stop'\. "):
            xferlib.load(path, stager, names=["stop"])
    # Alone, it is read without the arrays.
    assert xferlib.load(paths, stager, like={"step": 0}) == {"step": 3}


def test_what_is_like_nothing_is_refused(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.arange(3))
    alone = xferlib.save(tmp_path / "a.npy", array, stager).result(20)
    with pytest.raises(ValueError, match="like is a tree"):
        xferlib.load(alone, stager, like={"w": array})
    tree = xferlib.save(tmp_path / "a.safetensors", {"w": array}, stager).result(20)
    with pytest.raises(TypeError, match="'w' is a object"):
        xferlib.load(tree, stager, like={"w": object()})


def test_whoever_could_read_the_earlier_file_can_read_the_new_one(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    array = there(stager, np.arange(3))
    xferlib.save(path, array, stager).result(20)
    path.chmod(0o640)
    xferlib.save(path, array, stager).result(20)
    assert path.stat().st_mode & 0o777 == 0o640


def test_who_could_not_read_the_earlier_file_cannot_at_any_time(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.npy").write_bytes(b"")
    (tmp_path / "a.npy").chmod(0o600)
    modes: list[int] = []
    opened = os.open

    def note(path: Any, flags: int, mode: int = 0o777, **others: Any) -> int:
        descriptor = opened(path, flags, mode, **others)
        if flags & os.O_CREAT:
            modes.append(os.fstat(descriptor).st_mode & 0o777)
        return descriptor

    monkeypatch.setattr(os, "open", note)
    xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager).result(20)
    assert modes == [0o600]


def test_what_replaces_a_read_only_file_is_its_owners_until_it_has_the_name(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"")
    path.chmod(0o444)
    modes: list[int] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    xferlib.save(path, there(stager, np.arange(3)), stager).result(20)
    # If its process were killed now, whoever removes what is left could open it.
    assert modes[0] & 0o600 == 0o600
    assert path.stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "x" * 70_000], ids=["nul", "line", "long"])
def test_a_name_that_an_archive_would_not_give_back_is_refused(stager: Stager, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name for an array in an archive"):
        xferlib.save(tmp_path / "a.npz", {name: there(stager, np.zeros(3))}, stager)


def test_other_files_give_it_back(stager: Stager, tmp_path: Path) -> None:
    path = xferlib.save(tmp_path / "a.safetensors", {"a\nb": there(stager, np.zeros(3))}, stager).result(20)
    assert list(xferlib.load(path, stager)) == ["a\nb"]


class Moments(NamedTuple):
    mu: Any
    nu: Any


def test_parts_of_a_named_tuple_have_their_names(stager: Stager, tmp_path: Path) -> None:
    tree = {"opt": (Moments(there(stager, np.zeros(3)), there(stager, np.ones(3))), there(stager, np.zeros(1)))}
    path = xferlib.save(tmp_path / "a.safetensors", tree, stager).result(20)
    assert sorted(xferlib.load(path, stager)) == ["opt.0.mu", "opt.0.nu", "opt.1"]
    back = xferlib.load(path, stager, like=tree)
    assert isinstance(back["opt"][0], Moments)
    # Among nodes of other kinds the way is the same.
    mixed = {"a": [{"b": tree["opt"]}, ()], "c.d": None, "e": State(tree, 3, "x"), "f": there(stager, np.zeros(1))}
    names = ["a.0.b.0.mu", "a.0.b.0.nu", "a.0.b.1", "e.weights.opt.0.mu", "e.weights.opt.0.nu", "e.weights.opt.1", "f"]
    path = xferlib.save(tmp_path / "b.safetensors", mixed, stager).result(20)
    assert sorted(xferlib.load(path, stager)) == names
    assert (back["opt"][0].nu == 1).all()


def test_its_path_is_right_where_the_program_has_gone_elsewhere(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    save = xferlib.save("a.npy", there(stager, np.arange(3)), stager)
    monkeypatch.chdir("elsewhere")
    assert np.load(save.result(20)).tolist() == [0, 1, 2]
    assert save.path == tmp_path / "a.npy"


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files lie in memory, and are mapped however few threads write."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no file system in memory")
    monkeypatch.setattr("xferlib.files.writing.THREADS_TO_MAP", 1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_a_file_in_memory_is_written_through_a_mapping(
    stager: Stager, in_memory: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("it is written by calls")

    monkeypatch.setattr(os, "pwrite", refuse)
    # Pieces that begin and end within pages.
    array = bits((300_001,), np.dtype(np.uint8))
    tree = there(stager, array if suffix == ".npy" else {"a": array, "empty": np.zeros((0, 3)), "b": np.arange(7)})
    path = xferlib.save(in_memory / f"a{suffix}", tree, stager, memory=50_000).result(20)
    monkeypatch.undo()
    got = xferlib.load(path, stager)
    same(stager.get(got if suffix == ".npy" else got["a"]).result(), array)
    only(in_memory, path.name)
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if SUFFIX in line]


def test_a_file_in_memory_for_which_there_is_no_room_is_an_error_and_no_end_of_the_process(
    stager: Stager, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, times = os.posix_fallocate, iter(range(100))

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if next(times) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken(descriptor, offset, nbytes)

    (in_memory / "a.npy").write_bytes(b"old")
    monkeypatch.setattr(os, "posix_fallocate", full)
    save = xferlib.save(in_memory / "a.npy", there(stager, np.zeros(1 << 20, np.uint8)), stager, memory=100_000)
    with pytest.raises(OSError, match="No space left"):
        save.result(20)
    monkeypatch.undo()
    only(in_memory, "a.npy")
    assert (in_memory / "a.npy").read_bytes() == b"old"


def test_a_file_on_a_disk_is_written_by_calls(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.files.writing.THREADS_TO_MAP", 1)
    monkeypatch.setattr("xferlib.files.temporary._lies_in_memory", lambda descriptor: False)
    write, calls = os.pwrite, list[int]()

    def counted(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.arange(1000)), stager)
    assert np.array_equal(np.load(save.result(20)), np.arange(1000))
    assert calls == [0, 128]


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[tuple[bool, int, int]]]]:
    """A folder where files are written directly, and what is written: whether directly, where, and how much."""
    probe = tmp_path / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    probe.unlink()
    write, seen = os.pwrite, list[tuple[bool, int, int]]()

    def noted(descriptor: int, data: memoryview, offset: int) -> int:
        seen.append((bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT), offset, data.nbytes))
        return write(descriptor, data, offset)

    monkeypatch.setattr("xferlib.files.temporary._lies_in_memory", lambda descriptor: False)
    monkeypatch.setattr("xferlib.files.writing.DIRECT_FROM_NBYTES", 100_000)
    monkeypatch.setattr(os, "pwrite", noted)
    yield tmp_path, seen
    assert not [link for link in map(os.readlink, descriptors()) if SUFFIX in link]


def descriptors() -> list[str]:
    return [path for path in (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")) if os.path.islink(path)]


@pytest.mark.parametrize("shift", [0, 256])
@pytest.mark.parametrize("nbytes", [300_001, 2 * MIB, 2 * MIB + 4096 - 128])
def test_a_large_file_on_a_disk_is_written_past_the_cache(
    stager: Stager,
    on_disk: tuple[Path, list[tuple[bool, int, int]]],
    nbytes: int,
    shift: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole blocks, of which each is written once, wherever the pool's memory begins. What is left over at both ends goes by the
    cache."""
    folder, seen = on_disk
    empty = ByteReader.empty
    monkeypatch.setattr(ByteReader, "empty", lambda self, size, *, wait=True: empty(self, size + shift, wait=wait)[shift:])
    array = bits((nbytes,), np.dtype(np.uint8))
    path = xferlib.save(folder / "a.npy", there(stager, array), stager, memory=400_000).result(20)
    same(np.load(path), array)
    direct = [(offset, size) for is_direct, offset, size in seen if is_direct]
    assert sum(size for _, size in direct) == (128 + nbytes) // BORDER * BORDER - BORDER
    assert all(offset % BORDER == size % BORDER == 0 for offset, size in direct)
    assert sum(size for *_, size in seen) == 128 + nbytes
    only(folder, "a.npy")


def test_a_tree_of_small_arrays_is_written_past_the_cache_as_far_as_it_can_be(
    stager: Stager, on_disk: tuple[Path, list[tuple[bool, int, int]]]
) -> None:
    folder, seen = on_disk
    state = {f"w{number}": bits((number * 37 % 9000,), np.dtype(np.uint8)) for number in range(300)}
    path = xferlib.save(folder / "a.safetensors", there(stager, state), stager, memory=400_000).result(20)
    found = safetensors.numpy.load_file(path)
    assert all(found[name].tobytes() == value.tobytes() for name, value in state.items())
    assert any(is_direct for is_direct, *_ in seen)


def test_a_large_file_is_written_with_less_memory_than_two_blocks_need(
    stager: Stager, on_disk: tuple[Path, list[tuple[bool, int, int]]]
) -> None:
    folder, _ = on_disk
    array = bits((300_001,), np.dtype(np.uint8))
    same(np.load(xferlib.save(folder / "a.npy", there(stager, array), stager, memory=2 * BORDER).result(20)), array)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
def test_memory_or_files_that_are_not_for_direct_writes_go_by_the_cache(
    stager: Stager, on_disk: tuple[Path, list[tuple[bool, int, int]]], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = on_disk
    write, refused = os.pwrite, list[int]()

    def refusing(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(code, os.strerror(code))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    array = bits((MIB,), np.dtype(np.uint8))
    same(np.load(xferlib.save(folder / "a.npy", there(stager, array), stager, memory=200_000).result(20)), array)
    assert 1 <= len(refused) <= 2


def test_a_full_disk_is_an_error_of_direct_writes_as_well(
    stager: Stager, on_disk: tuple[Path, list[tuple[bool, int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = on_disk
    write = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset > 400_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    (folder / "a.npy").write_bytes(b"old")
    monkeypatch.setattr(os, "pwrite", full)
    save = xferlib.save(folder / "a.npy", there(stager, bits((MIB,), np.dtype(np.uint8))), stager, memory=200_000)
    with pytest.raises(OSError, match="No space left"):
        save.result(20)
    only(folder, "a.npy")
    assert (folder / "a.npy").read_bytes() == b"old"
