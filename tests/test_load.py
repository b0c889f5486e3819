"""Files to the device: what comes out is what was saved, whatever the format, and what is damaged is refused with its name."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import xferlib
from xferlib.stager import Stager

RANDOM = np.random.default_rng(7)


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host", strict=True) as stager:
        yield stager


def saved(folder: Path, array: Any) -> Path:
    path = folder / "array.npy"
    np.save(path, array)
    return path


def tensors(folder: Path, **arrays: np.ndarray) -> Path:
    path = folder / "weights.safetensors"
    safetensors.numpy.save_file(arrays, path)
    return path


def same(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        RANDOM.integers(0, 255, (300, 7, 5), np.uint8),
        np.asfortranarray(RANDOM.random((40, 30, 3))),
        np.asfortranarray(RANDOM.random((40, 30)))[:, :1],
        np.float32(2.5),
        np.zeros((0, 3), np.int16),
        np.arange(10, dtype=np.complex64)[::2],
        np.array([True, False]),
    ],
    ids=["plain", "fortran", "column", "0-d", "empty", "strided", "bool"],
)
def test_an_npy_file_comes_out_as_it_went_in(stager: Stager, tmp_path: Path, array: Any) -> None:
    got = xferlib.load(saved(tmp_path, array), stager)
    same(got, np.asarray(array))
    assert got.flags.c_contiguous


def test_a_file_larger_than_the_pinned_limit_passes_through(tmp_path: Path) -> None:
    array = RANDOM.integers(0, 2**31, 3 << 20, np.int32)
    with xferlib.stager("host", pinned_limit=4 << 20) as stager:
        same(xferlib.load(saved(tmp_path, array), stager), array)
        same(xferlib.load(tensors(tmp_path, weights=array), stager)["weights"], array)
        assert stager.backend.memory.calls().pinned_allocations >= 1  # type: ignore[attr-defined]  # the host backend's own


def test_the_path_may_be_a_string(stager: Stager, tmp_path: Path) -> None:
    same(xferlib.load(str(saved(tmp_path, np.arange(3))), stager), np.arange(3))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_gives_its_members_by_name(stager: Stager, tmp_path: Path, save: Any) -> None:
    path = tmp_path / "many.npz"
    arrays = {"b": RANDOM.random((50, 60)), "a": np.arange(7), "none": np.zeros(0, np.int8)}
    save(path, **arrays)
    got = xferlib.load(path, stager)
    assert list(got) == ["b", "a", "none"]
    for name, array in arrays.items():
        same(got[name], array)
    assert list(xferlib.load(path, stager, names=["a", "b"])) == ["a", "b"]


def test_safetensors_come_out_as_they_went_in(stager: Stager, tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "odd": np.arange(3, dtype=np.uint8),
        "layer.0.weight": RANDOM.random((31, 17)).astype(np.float32),
        "half": RANDOM.random(9).astype(np.float16),
        "wide": np.arange(-4, 4, dtype=np.int64).reshape(2, 4),
        "scalar": np.full((), 0.1),
        "mask": np.array([True, False, True]),
        "empty": np.zeros((0, 4), np.int32),
    }
    got = xferlib.load(tensors(tmp_path, **arrays), stager)
    assert set(got) == set(arrays)
    for name, array in arrays.items():
        same(got[name], array)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("BF16", ml_dtypes.bfloat16), ("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2)]
)
def test_safetensors_may_be_of_dtypes_that_numpy_lacks(stager: Stager, tmp_path: Path, kind: str, dtype: Any) -> None:
    values = np.arange(1, 7).astype(dtype).reshape(2, 3)
    raw = values.view(f"u{values.itemsize}")
    path = tensors(tmp_path, **{"first": np.arange(5, dtype=np.uint8), "values": raw})
    plain = path.read_bytes()
    written = {1: b'"U8","shape":[2,3]', 2: b'"U16","shape":[2,3]'}[values.itemsize]
    named = f'"{kind}","shape":[2,3]'.encode()
    header = plain[8 : 8 + int.from_bytes(plain[:8], "little")]
    data = plain[8 + len(header) :]
    assert written in header
    header = header.replace(written, named)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    same(xferlib.load(path, stager, names=["values"])["values"], values)


def test_names_select_and_give_the_order(stager: Stager, tmp_path: Path) -> None:
    path = tensors(tmp_path, query=np.arange(3), key=np.arange(4), value=np.arange(5))
    assert list(xferlib.load(path, stager, names=["value", "query"])) == ["value", "query"]
    assert xferlib.load(path, stager, names=[]) == {}
    with pytest.raises(ValueError, match=r"no array named 'qery'. Did you mean 'query'"):
        xferlib.load(path, stager, names=["qery"])
    with pytest.raises(TypeError, match="one string"):
        xferlib.load(path, stager, names="query")
    with pytest.raises(ValueError, match="without a name"):
        xferlib.load(saved(tmp_path, np.arange(3)), stager, names=["query"])


def test_a_truncated_file_is_refused(stager: Stager, tmp_path: Path) -> None:
    many = tmp_path / "many.npz"
    np.savez(many, a=np.arange(1000))
    for path in (saved(tmp_path, np.arange(1000)), tensors(tmp_path, a=np.arange(1000)), many):
        whole = path.read_bytes()
        for length in (len(whole) - 8, 40, 3, 0):
            path.write_bytes(whole[:length])
            with pytest.raises(ValueError, match=f"{path.name}' is damaged, or no {path.suffix} file"):
                xferlib.load(path, stager)


def test_a_file_of_another_format_is_refused(stager: Stager, tmp_path: Path) -> None:
    np.savez(tmp_path / "archive.npz", a=np.arange(3))
    contents = {"text": b"this is no array, but it is long enough for a header", "zip": (tmp_path / "archive.npz").read_bytes()}
    contents["npy"] = saved(tmp_path, np.arange(9)).read_bytes()
    for kind, suffix in (("text", ".npy"), ("zip", ".npy"), ("text", ".npz"), ("npy", ".npz"), ("text", ".safetensors")):
        path = tmp_path / f"wrong{suffix}"
        path.write_bytes(contents[kind])
        with pytest.raises(ValueError, match=f"wrong{suffix}' is damaged, or no {suffix} file"):
            xferlib.load(path, stager)
    with pytest.raises(ValueError, match=r"expected a name that ends in .npy, .npz or .safetensors"):
        xferlib.load(tmp_path / "archive.pt", stager)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_a_missing_file_is_missing(stager: Stager, tmp_path: Path, suffix: str) -> None:
    with pytest.raises(FileNotFoundError):
        xferlib.load(tmp_path / f"none{suffix}", stager)


def test_a_pickle_is_no_array_and_nobody_is_told_to_trust_it(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "pickle.npy"
    path.write_bytes(pickle.dumps(list(range(100))))
    with pytest.raises(ValueError, match=r"pickle\.npy' is damaged, or no \.npy file") as caught:
        xferlib.load(path, stager)
    assert "allow_pickle" not in str(caught.value)


def test_objects_are_not_loaded(stager: Stager, tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    np.savez(tmp_path / "objects.npz", a=np.array([{}], object))
    for name in ("objects.npy", "objects.npz"):
        with pytest.raises(TypeError, match=rf"{name}.* holds Python objects .*cannot be transferred") as caught:
            xferlib.load(tmp_path / name, stager)
        assert "pickle" not in str(caught.value)
        assert ("'a'" in str(caught.value) and "names=" in str(caught.value)) is (name == "objects.npz")


@pytest.mark.parametrize(("given", "advice"), [("host", "Open one with"), (None, "Open one with"), ("swapped", "comes second")])
def test_what_is_no_stager_is_refused(stager: Stager, tmp_path: Path, given: str | None, advice: str) -> None:
    path = saved(tmp_path, np.arange(3))
    arguments: Any = (stager, path) if given == "swapped" else (path, given)
    with pytest.raises(TypeError, match=f"expected a stager. .*{advice}"):
        xferlib.load(*arguments)


def test_a_dtype_that_cannot_be_put_is_refused_with_its_place(stager: Stager, tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        xferlib.load(saved(tmp_path, np.arange(3, dtype=">i4")), stager)
    assert any("array.npy" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("missing", ["safetensors", "ml_dtypes"])
def test_a_missing_package_is_named_with_what_to_type(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    path = tensors(tmp_path, a=np.arange(4, dtype=np.uint16).reshape(2, 2))
    path.write_bytes(path.read_bytes().replace(b'"dtype":"U16","shape":[2,2]', b'"dtype":"BF16","shape":[2,2]'))
    header = int.from_bytes(path.read_bytes()[:8], "little")
    path.write_bytes((header + 1).to_bytes(8, "little") + path.read_bytes()[8:])
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"safetensors>=.*\" \"ml-dtypes>=.*\"") as caught:
        xferlib.load(path, stager)
    assert caught.value.name == missing


def test_a_dtype_whose_size_nobody_knows_is_refused(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        def get_dtype(self) -> str:
            return "STRANGE"

        def get_shape(self) -> list[int]:
            return [2]

    class Reader:
        """A newer reader, which lets files pass that are in nobody's words yet."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> Reader:
            return self

        def __exit__(self, *_: object) -> None: ...

        def offset_keys(self) -> list[str]:
            return ["a"]

        def get_slice(self, name: str) -> Tensor:
            return Tensor()

    path = tensors(tmp_path, a=np.arange(2))
    monkeypatch.setattr(safetensors, "safe_open", Reader)
    with pytest.raises(ValueError, match=r"weights\.safetensors' holds a dtype of unknown size, 'STRANGE'"):
        xferlib.load(path, stager)
