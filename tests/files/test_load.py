"""Files to the device: what comes out is what was saved, whatever the format, and what is damaged is refused with its name."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from numpy.lib import format as npy
from xferlib_host import Stream

import xferlib
from tests.children import fork
from tests.core.fakes import WATCHDOG, held, on_thread
from xferlib.conformance.values import assert_same
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
    assert_same(got, np.asarray(array))
    assert got.flags.c_contiguous


def test_a_file_larger_than_the_pinned_limit_passes_through(tmp_path: Path) -> None:
    array = RANDOM.integers(0, 2**31, 3 << 20, np.int32)
    with xferlib.stager("host", pinned_limit=4 << 20) as stager:
        assert_same(xferlib.load(saved(tmp_path, array), stager), array)
        assert_same(xferlib.load(tensors(tmp_path, weights=array), stager)["weights"], array)
        assert stager.backend.memory.calls().pinned_allocations >= 1  # type: ignore[attr-defined]  # the host backend's own


def test_the_end_of_the_name_may_be_in_capitals(stager: Stager, tmp_path: Path) -> None:
    path = saved(tmp_path, np.arange(3))
    assert_same(xferlib.load(path.rename(tmp_path / "ARRAY.NPY"), stager), np.arange(3))


def save_npy(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.save(path, arrays["a"])


def save_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # NumPy's types take every keyword for its own


def save_tensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(arrays, path)


FORMATS: dict[str, Any] = {".npy": save_npy, ".npz": save_npz, ".safetensors": save_tensors}


@pytest.mark.parametrize("suffix", FORMATS)
def test_load_returns_when_the_arrays_are_there_whatever_stream_is_current(stager: Stager, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    FORMATS[suffix](path, {"a": np.arange(100)})

    def load() -> Any:
        with Stream():
            return xferlib.load(path, stager)

    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's own
        loading = on_thread(load)
        assert not wait([loading], 0.3).done
    got = loading.result(10)
    assert_same(got if suffix == ".npy" else got["a"], np.arange(100))


def test_no_more_than_two_large_members_are_in_memory(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many.npz"
    np.savez(path, **{str(index): np.full(10_000, index) for index in range(5)})  # type: ignore[arg-type]
    read: list[int] = []
    second = threading.Event()
    read_array = npy.read_array

    def counted(*args: Any, **kwargs: Any) -> Any:
        read.append(1)
        if len(read) == 2:
            second.set()
        return read_array(*args, **kwargs)

    monkeypatch.setattr(npy, "read_array", counted)
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's own
        loading = on_thread(lambda: xferlib.load(path, stager))
        assert second.wait(10)
        assert not wait([loading], 0.3).done
        assert len(read) == 2
    assert [int(array[0]) for array in loading.result(10).values()] == list(range(5))


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_are_only_read(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    FORMATS[suffix](path, {"a": np.arange(100)})
    modes: list[str] = []
    real = open

    def noted(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if str(file) == str(path):
            modes.append(mode)
        return real(file, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", noted)
    monkeypatch.setattr("io.open", noted)
    xferlib.load(path, stager)
    assert set(modes) == {"rb"}


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_npy_format_is_read(stager: Stager, tmp_path: Path, version: tuple[int, int]) -> None:
    array = RANDOM.random((20, 3))
    file = io.BytesIO()
    npy.write_array(file, array, version=version)
    path = tmp_path / "array.npy"
    path.write_bytes(file.getvalue())
    assert_same(xferlib.load(path, stager), array)
    with zipfile.ZipFile(tmp_path / "many.npz", "w") as archive:
        archive.writestr("a.npy", file.getvalue())
    assert_same(xferlib.load(tmp_path / "many.npz", stager)["a"], array)


def test_the_path_may_be_a_string(stager: Stager, tmp_path: Path) -> None:
    assert_same(xferlib.load(str(saved(tmp_path, np.arange(3))), stager), np.arange(3))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_gives_its_members_by_name(stager: Stager, tmp_path: Path, save: Any) -> None:
    path = tmp_path / "many.npz"
    arrays: dict[str, Any] = {"b": RANDOM.random((50, 60)), "a": np.arange(7), "none": np.zeros(0, np.int8)}
    save(path, **arrays)
    got = xferlib.load(path, stager)
    assert list(got) == ["b", "a", "none"]
    for name, array in arrays.items():
        assert_same(got[name], array)
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
        assert_same(got[name], array)


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
    assert_same(xferlib.load(path, stager, names=["values"])["values"], values)


def tensor_file(folder: Path, *tensors: tuple[str, str, list[int], bytes]) -> Path:
    """Write a safetensors file by hand: each tensor by its name, dtype, shape and bytes, in this order."""
    header: dict[str, Any] = {}
    data = b""
    for name, kind, shape, raw in tensors:
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    written = json.dumps(header).encode()
    path = folder / "weights.safetensors"
    path.write_bytes(len(written).to_bytes(8, "little") + written + data)
    return path


KINDS = {
    "BOOL": np.bool_,
    **{f"{letter}{bits}": f"{kind}{bits // 8}" for letter, kind in (("I", "i"), ("U", "u")) for bits in (8, 16, 32, 64)},
    **{"F16": np.float16, "F32": np.float32, "F64": np.float64, "C64": np.complex64, "BF16": ml_dtypes.bfloat16},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E8M0": ml_dtypes.float8_e8m0fnu},
    **{"F8_E5M2": ml_dtypes.float8_e5m2, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_of_safetensors_has_its_values(stager: Stager, tmp_path: Path, kind: str) -> None:
    dtype = np.dtype(KINDS[kind])
    values = np.array([1, 0, 1, 1], np.int8).astype(dtype)
    path = tensor_file(tmp_path, ("before", "U8", [16], bytes(16)), ("values", kind, [2, 2], values.tobytes()))
    assert_same(xferlib.load(path, stager)["values"], values.reshape(2, 2))


def test_tensors_around_one_whose_items_are_no_whole_bytes_are_found(stager: Stager, tmp_path: Path) -> None:
    values = np.arange(5, dtype=np.int32)
    before, after = (("before", "I32", [5], values.tobytes()), ("after", "I32", [5], values.tobytes()))
    path = tensor_file(tmp_path, before, ("four bits", "F4", [2, 8], bytes(range(8))), after)
    for name in ("before", "after"):
        assert_same(xferlib.load(path, stager, names=[name])[name], values)
    with pytest.raises(TypeError, match=r"'four bits' is of dtype F4, whose items are no whole bytes. Leave it out with names="):
        xferlib.load(path, stager)


def test_names_select_and_give_the_order(stager: Stager, tmp_path: Path) -> None:
    path = tensors(tmp_path, query=np.arange(3), key=np.arange(4), value=np.arange(5))
    assert list(xferlib.load(path, stager, names=["value", "query"])) == ["value", "query"]
    assert xferlib.load(path, stager, names=[]) == {}
    with pytest.raises(ValueError, match=r"no array named 'qery'. Did you mean 'query'"):
        xferlib.load(path, stager, names=["qery"])
    with pytest.raises(ValueError, match=r"no array named 3. It has '.*', '.*', '.*'"):
        xferlib.load(path, stager, names=["query", 3])  # type: ignore[list-item]  # on purpose
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


def test_nothing_is_executed_of_a_member_that_changes_behind_its_header(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Executed:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    def file(descr: str, shape: str, data: bytes) -> bytes:
        header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as made:
            made.writestr("a.npy", b"\x93NUMPY\x01\x00\x76\x00" + header.encode() + data.ljust(1 << 20, b"\0"))
        return archive.getvalue()

    def changed(stream: Any, total: int) -> Any:
        header = check(stream, total)
        checked.append(total)
        # The first time its size alone is asked.
        if len(checked) == 2:
            # Nothing of it is left in a buffer.
            stream.read()
            path.write_bytes(file("'|O'", "()", pickle.dumps(Executed())))
        return header

    path = tmp_path / "changes.npz"
    path.write_bytes(file("'|u1'", f"({1 << 20},)", b""))
    checked: list[int] = []
    module: Any = sys.modules["xferlib.files.readers"]
    check = module._header
    monkeypatch.setattr(module, "_header", changed)
    with pytest.raises(ValueError, match=r"changes\.npz' is damaged"):
        xferlib.load(path, stager)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("given", "advice"),
    [("host", "Open one with"), (None, "Open one with"), ("missing", "Open one with"), ("swapped", "comes second")],
)
def test_what_is_no_stager_is_refused(stager: Stager, tmp_path: Path, given: str | None, advice: str) -> None:
    path = saved(tmp_path, np.arange(3))
    orders: dict[str | None, Any] = {"swapped": (stager, path), "missing": (path,)}
    arguments = orders.get(given, (path, given))
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

        def metadata(self) -> None: ...

    path = tensors(tmp_path, a=np.arange(2))
    monkeypatch.setattr(safetensors, "safe_open", Reader)
    with pytest.raises(ValueError, match=r"weights\.safetensors' holds a dtype of unknown size, 'STRANGE'"):
        xferlib.load(path, stager)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_a_child_that_is_forked_in_the_middle_of_a_load_reads_the_file_by_itself_and_the_parent_goes_on(
    stager: Stager, tmp_path: Path, suffix: str
) -> None:
    """The child has the open files of the load, whose thread it has not: nobody there reads them, so no place in them moves."""
    path = tmp_path / f"a{suffix}"
    array = np.arange(100_000)
    match suffix:
        case ".npy":
            np.save(path, array)
        case ".npz":
            np.savez(path, x=array)
        case _:
            safetensors.numpy.save_file({"x": array}, path)
    begun, gate = threading.Event(), threading.Event()

    def tell(done: int, total: int) -> None:
        begun.set()
        assert gate.wait(WATCHDOG)

    loading = on_thread(lambda: xferlib.load(path, stager, progress=tell))
    assert begun.wait(WATCHDOG)
    child = fork()
    if child == 0:
        try:
            with xferlib.stager("host") as own:
                found = xferlib.load(path, own)
            os._exit(0 if np.array_equal(found if suffix == ".npy" else found["x"], array) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    found = loading.result(WATCHDOG)
    assert np.array_equal(found if suffix == ".npy" else found["x"], array)
