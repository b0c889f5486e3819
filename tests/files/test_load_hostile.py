"""Files that mean harm: each is refused by its name, with little memory and without waiting, and nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xferlib
from xferlib.stager import Stager

MOST = 24 << 20
"""Bytes that a refusal may take."""
DATA = np.arange(16, dtype=np.float32).tobytes()


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host", pinned_limit=16 << 20) as stager:
        yield stager
    calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # the host backend's own
    assert calls.pinned_allocations == calls.pinned_frees
    assert calls.device_allocations == calls.device_frees


def tensors(header: Any, data: bytes = DATA) -> bytes:
    """Return a safetensors file. `header`: what becomes JSON, or the bytes themselves."""
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + data


def tensor(shape: Any = (16,), offsets: Any = (0, 64), dtype: Any = "F32") -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def npy(descr: str = "'<f4'", shape: str = "(16,)", *, header: bytes | None = None, version: tuple[int, int] = (1, 0)) -> bytes:
    text = header if header is not None else f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    length = struct.pack("<H" if version[0] == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + DATA


def npz(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytearray:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return bytearray(file.getvalue())


def patched(content: bytearray, signature: bytes, offset: int, kind: str, value: int) -> bytearray:
    """Change a field behind every such signature."""
    at = content.find(signature)
    while at >= 0:
        struct.pack_into(kind, content, at + offset, value)
        at = content.find(signature, at + 4)
    return content


LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"


def lying_size() -> bytearray:
    """An archive whose member says that it unpacks to 1 GiB, and has a header that wants that."""
    content = npz(("a.npy", npy("'|u1'", f"({(1 << 30) - 128},)")), method=zipfile.ZIP_DEFLATED)
    return patched(patched(content, CENTRAL, 24, "<I", 1 << 30), LOCAL, 22, "<I", 1 << 30)


def twice_in_the_directory() -> bytearray:
    """Two entries for the same bytes."""
    content = npz(("a.npy", npy()), ("b.npy", npy()))
    first = struct.unpack_from("<I", content, content.find(CENTRAL) + 42)[0]
    struct.pack_into("<I", content, content.rfind(CENTRAL) + 42, first)
    return content


TENSORS: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\x08\0\0\0",
    "a length and no header": struct.pack("<Q", 16),
    "a header of no bytes": struct.pack("<Q", 0),
    "a length of all bits": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "a length with its sign": struct.pack("<Q", 1 << 63) + b"{}",
    "a length above the limit": struct.pack("<Q", 100_000_001) + b"{}" + bytes(64),
    "a length of one more than there is": tensors(b"{}", b"")[:-1],
    "no data": tensors({"a": tensor()}, b""),
    "a byte too few": tensors({"a": tensor()}, DATA[:-1]),
    "a byte too many": tensors({"a": tensor()}, DATA + b"\0"),
    "data before and behind": tensors({"a": tensor((8,), (16, 48))}),
    "overlapping": tensors({"a": tensor((12,), (0, 48)), "b": tensor((12,), (16, 64))}),
    "the same bytes twice": tensors({"a": tensor(), "b": tensor()}),
    "a gap": tensors({"a": tensor((4,), (0, 16)), "b": tensor((8,), (32, 64))}),
    "offsets backwards": tensors({"a": tensor((16,), (64, 0))}),
    "offsets below 0": tensors({"a": tensor((16,), (-64, 0))}),
    "offsets behind the end": tensors({"a": tensor((16,), (1 << 40, (1 << 40) + 64))}),
    "offsets that overflow": tensors({"a": tensor((16,), (0, (1 << 64) + 64))}),
    "offsets that are fractions": tensors({"a": tensor((16,), (0.0, 64.0))}),
    "one offset": tensors({"a": tensor((16,), (0,))}),
    "a shape of more than there is": tensors({"a": tensor((17,))}),
    "a shape that overflows": tensors({"a": tensor((1 << 32, 1 << 32))}),
    "a shape below 0": tensors({"a": tensor((-16,))}),
    "a shape of text": tensors({"a": tensor(("16",))}),
    "no shape": tensors({"a": {"dtype": "F32", "data_offsets": (0, 64)}}),
    "an unknown dtype": tensors({"a": tensor(dtype="F7")}),
    "a dtype of objects": tensors({"a": tensor(dtype="O")}),
    "a list": tensors([tensor()]),
    "text": tensors("a"),
    "not JSON": tensors(b"{'a': 1}"),
    "not UTF-8": tensors(b'{"\xff\xfe":' + json.dumps(tensor()).encode() + b"}"),
    "nested too deeply": tensors(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "metadata that is no text": tensors({"__metadata__": {"a": {"b": 1}}, "a": tensor()}),
}
ARRAYS: dict[str, bytes] = {
    "nothing": b"",
    "magic alone": npy()[:6],
    "a version nobody has": b"\x93NUMPY\x09\x09" + npy()[8:],
    "a header of 4 GiB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + npy()[10:],
    "a program": npy(header=b"__import__('os').mkdir('executed')\n"),
    "a shape that is a program": npy(shape="(__import__('os').mkdir('executed'),)"),
    "a key too many": npy(header=b"{'descr': '<f4', 'fortran_order': False, 'shape': (16,), 'more': 1}\n"),
    "not UTF-8": npy(header=b"{'descr': '<f4', '\xff\xfe': False, 'shape': (16,)}\n", version=(3, 0)),
    "a dtype of 8 EiB": npy(f"'|V{1 << 63}'"),
    "a dtype of arrays that overflows": npy(f"('<f4', ({1 << 31}, {1 << 31}))", "()"),
    "more axes than there may be": npy("'|u1'", "(" + "1," * 200 + ")"),
    "axes of no length beside endless ones": npy("'<f4'", f"(0, {1 << 62}, {1 << 62})"),
    "negative axes": npy("'<f4'", "(-2, -8)"),
    "fields nested too deeply": npy("[('a', " * 300 + "'<f4'" + ")]" * 300, "()"),
}
ARCHIVES: dict[str, bytes | bytearray] = {
    "nothing": b"",
    "two members of one name": npz(("a.npy", npy()), ("a", npy())),
    "a size that is a lie": lying_size(),
    "bytes in two entries": twice_in_the_directory(),
    "an archive in an archive": npz(("a.npy", bytes(npz(("a.npy", npy()))))),
    "a directory behind the end": patched(npz(("a.npy", npy())), END, 16, "<I", 1 << 30),
    "a directory of 4 GiB": patched(npz(("a.npy", npy())), END, 12, "<I", 0xFFFFFFF0),
    "a member behind the end": patched(npz(("a.npy", npy())), CENTRAL, 42, "<I", 1 << 30),
    "a wrong sum": patched(npz(("a.npy", npy())), CENTRAL, 16, "<I", 12345),
    "a header that wants 1 TiB": npz(("a.npy", npy("'|u1'", f"({1 << 40},)")), method=zipfile.ZIP_DEFLATED),
}
FILES = {
    f"{name}{suffix}": (suffix, content)
    for suffix, kinds in ((".safetensors", TENSORS), (".npy", ARRAYS), (".npz", ARCHIVES))
    for name, content in kinds.items()
}


def refused(stager: Stager, path: Path, shown: str | None = None, **options: Any) -> Exception:
    """Load what cannot be loaded, and return the error. `shown`: what it must name."""
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, TypeError, OSError)) as caught:
            xferlib.load(path, stager, **options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    error = caught.value
    assert type(error).__module__ == "builtins"
    assert shown or path.name in str(error)
    assert peak < MOST
    assert not (Path.cwd() / "executed").exists()
    assert stager.stats().h2d_nbytes == 0
    return error


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_by_its_name(stager: Stager, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suffix, content = FILES[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    refused(stager, path)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".npy", npy()), (".npz", bytes(npz(("a.npy", npy())))), (".safetensors", tensors({"a": tensor()}))],
    ids=[".npy", ".npz", ".safetensors"],
)
def test_a_file_that_ends_anywhere_too_early_is_refused(stager: Stager, tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"file{suffix}"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=rf"file{suffix}' is damaged, or no {suffix} file"):
            xferlib.load(path, stager)
    path.write_bytes(content)
    xferlib.load(path, stager)


def test_names_that_lead_out_of_an_archive_are_names_and_nothing_is_written(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    names = ["../../up", "/root", "C:\\there", "..\\up", "."]
    (folder / "a.npz").write_bytes(npz(*[(f"{name}.npy", npy()) for name in names]))
    assert list(xferlib.load("a.npz", stager)) == names
    assert list(tmp_path.rglob("*")) == [folder, folder / "a.npz"]


def test_what_unpacks_to_more_than_its_array_is_not_unpacked(stager: Stager, tmp_path: Path) -> None:
    """A member of 64 MiB of zeros behind an array of 64 bytes."""
    path = tmp_path / "a.npz"
    path.write_bytes(npz(("a.npy", npy() + bytes(64 << 20)), method=zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        found = xferlib.load(path, stager)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found["a"].tobytes() == DATA
    assert peak < MOST


def test_an_array_that_memory_has_no_room_for_is_not_unpacked(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive of a megabyte may be sound, and hold a gigabyte."""
    path = tmp_path / "a.npz"
    path.write_bytes(npz(("a.npy", npy("'|u1'", f"({65 << 20},)") + bytes(65 << 20)), method=zipfile.ZIP_DEFLATED))
    monkeypatch.setattr("xferlib.files.readers.available_memory", lambda: 1 << 20)
    with pytest.raises(xferlib.AllocationError, match=r"member 'a' is unpacked .* takes 65\.0 MiB, and 1\.0 MiB are free\. Unpack"):
        xferlib.load(path, stager)
    assert stager.stats().h2d_nbytes == 0


def linked_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def linked_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def linked_to_a_folder(path: Path) -> None:
    path.symlink_to(".")


def linked_to_no_end(path: Path) -> None:
    path.symlink_to("/dev/zero")


def linked_to_memory(path: Path) -> None:
    path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".index.json"])
@pytest.mark.parametrize(
    "make", [linked_to_itself, linked_to_nothing, linked_to_a_folder, linked_to_no_end, linked_to_memory, os.mkfifo]
)
def test_what_is_no_file_is_refused_without_waiting(
    stager: Stager, tmp_path: Path, suffix: str, make: Callable[[Path], None]
) -> None:
    path = tmp_path / f"a{suffix}"
    make(path)
    refused(stager, path)


GOOD = "model.safetensors"
INDEXES: dict[str, bytes] = {
    "nothing": b"",
    "not JSON": b"weights",
    "a list": b"[]",
    "text": b'"weight_map"',
    "no map": b"{}",
    "a map that is a list": b'{"weight_map": ["a"]}',
    "a file that is a number": b'{"weight_map": {"a": 1}}',
    "a file that is a map": b'{"weight_map": {"a": {"b": "model.safetensors"}}}',
    "no JSON of UTF-8": b'{"weight_map": {"\xff\xfe": "model.safetensors"}}',
    "a name twice": b'{"weight_map": {"a": "model.safetensors", "a": "other.safetensors"}}',
    "a map twice": b'{"weight_map": {"a": "model.safetensors"}, "weight_map": {}}',
    "nested too deeply": b'{"weight_map": ' + b"[" * 200_000,
    "a number too long to be read": b'{"weight_map": {"a": "model.safetensors"}, "n": ' + b"9" * 100_000 + b"}",
    "numbers that are none": b'{"weight_map": NaN}',
    "more bytes than an index has": b" " * ((32 << 20) + 1),
    "a name that the file lacks": b'{"weight_map": {"b": "model.safetensors"}}',
}
OUTSIDE = {
    "up": "../model.safetensors",
    "up from below": "below/../../model.safetensors",
    "from the root": "/etc/model.safetensors",
    "from the root twice": "//etc/model.safetensors",
    "home": "~/../../model.safetensors",
    "nowhere": "",
    "here": ".",
    "up alone": "..",
    "with a null": "model.safetensors\0",
    "no text": "\ud800.safetensors",
    "itself": "model.safetensors.index.json",
    "a pickle": "pytorch_model.bin",
    "an array without a name": "model.npy",
    "a folder": "folder.safetensors",
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_hostile_index_is_refused_by_its_name(stager: Stager, tmp_path: Path, name: str) -> None:
    (tmp_path / GOOD).write_bytes(tensors({"a": tensor()}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(INDEXES[name])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"index\.json'"):
            xferlib.load(index, stager)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST
    assert stager.stats().h2d_nbytes == 0


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_leads_to_nothing_but_files_beside_it(stager: Stager, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "below").mkdir()
    (folder / "folder.safetensors").mkdir()
    # What it means is there, and sound.
    for place in (tmp_path, folder):
        (place / GOOD).write_bytes(tensors({"a": tensor()}))
    np.save(folder / "model.npy", np.arange(3))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": OUTSIDE[name]}}))
    for options in ({}, {"names": ["a"]}, {"like": {"a": np.zeros(16, np.float32)}}):
        error = refused(stager, index, shown=name, **options)
        assert "folder.safetensors" in str(error) if name == "a folder" else isinstance(error, ValueError)


def test_an_index_of_very_many_names_takes_no_longer_than_they_do(stager: Stager, tmp_path: Path) -> None:
    """A hundred thousand names in a thousand files that are not there: the first that is missed ends it."""
    weights = {f"layers.{number}": f"model-{number % 1000}.safetensors" for number in range(100_000)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(FileNotFoundError, match=r"says that it has 'layers\.0'"):
        xferlib.load(index, stager)


@pytest.mark.parametrize("values", ["[", "[]", "3", '"text"', "[" * 100_000, '{"step": "text"}', "{}", '{"step": 1e999}'])
def test_what_rode_along_may_be_anything_and_is_refused(stager: Stager, tmp_path: Path, values: str) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(tensors({"__metadata__": {"xferlib.values": values}, "a": tensor()}))
    like = {"a": np.zeros(16, np.float32), "step": 3}
    with pytest.raises(ValueError, match=r"state\.safetensors'"):
        xferlib.load(path, stager, like=like)
