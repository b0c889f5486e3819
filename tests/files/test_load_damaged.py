"""Damaged files: whatever the damage, the file is named, nothing large is allocated and nothing is left behind."""

from __future__ import annotations

import errno
import io
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.lib import format as npy

import xferlib
from xferlib.stager import Stager

FILES = 300
"""Of each format."""


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host", pinned_limit=16 << 20) as stager:
        yield stager
    calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # the host backend's own
    assert calls.pinned_allocations == calls.pinned_frees
    assert calls.device_allocations == calls.device_frees


def array_file(descr: str, shape: str, nbytes: int = 64) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(nbytes)


def archive(members: Mapping[str, bytes | bytearray]) -> bytearray:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return bytearray(file.getvalue())


def refused(stager: Stager, path: Path, content: bytes | bytearray, words: str = "") -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path.name}' is damaged, or no {path.suffix} file: .*{words}"):
        xferlib.load(path, stager)


HEADERS = {
    "more than an int": ("'<f4'", f"({10**30},)"),
    "more than memory": ("'<f4'", f"({1 << 62},)"),
    "product of 0": ("'<f4'", f"({1 << 32}, {1 << 32})"),
    "more than the file": ("'<f4'", "(17,)"),
    "negative": ("'<f4'", "(-4,)"),
    "all negative": ("'<f4'", "(-4, -4)"),
    "text": ("'<f4'", "('a',)"),
    "float": ("'<f4'", "(2.0,)"),
    "descr": ("'f4,,'", "(2,)"),
    "no descr": ("5", "(2,)"),
    "null byte": ("\0", "(2,)"),
    "open text": ("'<f4", "(2,)"),
    "parentheses": ("(" * 3000, "(2,)"),
    "too deep": ("-" * 9000 + "1", "(2,)"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_makes_no_sense_is_damage(stager: Stager, tmp_path: Path, name: str) -> None:
    content = array_file(*HEADERS[name])
    refused(stager, tmp_path / "array.npy", content)
    refused(stager, tmp_path / "many.npz", archive({"array.npy": content}))


def test_a_header_that_is_nested_too_deeply_is_called_so(stager: Stager, tmp_path: Path) -> None:
    content = array_file(*HEADERS["too deep"])
    refused(stager, tmp_path / "array.npy", content, "nested too deeply")
    refused(stager, tmp_path / "many.npz", archive({"array.npy": content}), "nested too deeply")


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_shape_of_one_item_more_than_there_is_promises_too_much(stager: Stager, tmp_path: Path, suffix: str) -> None:
    content: bytes | bytearray = array_file("'<f4'", "(17,)")
    if suffix == ".npz":
        content = archive({"array.npy": content})
    refused(stager, tmp_path / f"array{suffix}", content, "promises 68 bytes, .*and there are 64")


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_shape_that_promises_too_much_takes_no_memory(stager: Stager, tmp_path: Path, suffix: str) -> None:
    content: bytes | bytearray = array_file("'|u1'", f"({1 << 33},)")
    if suffix == ".npz":
        content = archive({"array.npy": content})
    tracemalloc.start()
    try:
        refused(stager, tmp_path / f"array{suffix}", content, f"promises {1 << 33} bytes.*and there are 64")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def everywhere(content: bytearray, offsets: tuple[int, int], mask: int, value: int) -> bytearray:
    """Change a field of two bytes in the local headers and in the directory of an archive."""
    for signature, offset in zip((b"PK\x03\x04", b"PK\x01\x02"), offsets, strict=True):
        at = content.find(signature) + offset
        (old,) = struct.unpack_from("<H", content, at)
        struct.pack_into("<H", content, at, old & mask | value)
    return content


def test_an_archive_that_cannot_be_unpacked_is_damage(stager: Stager, tmp_path: Path) -> None:
    plain = archive({"array.npy": array_file("'<f4'", "(16,)")})
    path = tmp_path / "many.npz"
    refused(stager, path, everywhere(plain.copy(), (8, 10), 0, 97), "not supported")
    refused(stager, path, everywhere(plain.copy(), (8, 10), 0, zipfile.ZIP_BZIP2), "Invalid data stream")
    refused(stager, path, everywhere(plain.copy(), (8, 10), 0, zipfile.ZIP_LZMA))
    refused(stager, path, everywhere(plain.copy(), (8, 10), 0, zipfile.ZIP_DEFLATED))
    refused(stager, path, everywhere(plain.copy(), (6, 8), 0xFFFF, 1), "encrypted")
    # Where the archive says that its directory ends: with more in it than before it, the archive begins before the file.
    elsewhere = plain.copy()
    struct.pack_into("<I", elsewhere, len(elsewhere) - 6, 1 << 20)
    refused(stager, path, elsewhere)


def test_a_member_that_is_no_array_is_refused_and_may_be_left_out(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "many.npz"
    path.write_bytes(archive({"array.npy": array_file("'<f4'", "(16,)"), "readme.txt": b"hello", "none": b""}))
    for name in ("readme.txt", "none"):
        with pytest.raises(ValueError, match=rf"many.npz': its member '{name}' is damaged, or no array. Leave it out with names="):
            xferlib.load(path, stager, names=["array", name])
    assert xferlib.load(path, stager, names=["array"])["array"].shape == (16,)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_what_cannot_be_opened_is_no_damage(stager: Stager, tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(IsADirectoryError):
        xferlib.load(tmp_path / f"folder{suffix}", stager)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "the disk"), MemoryError("none left")])
def test_what_cannot_be_read_is_no_damage(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = tmp_path / "many.npz"
    np.savez(path, a=np.arange(3))

    def fails(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(npy, "read_array", fails)
    with pytest.raises(type(error)) as caught:
        xferlib.load(path, stager)
    assert caught.value is error


def written(folder: Path, kind: str) -> Path:
    arrays: dict[str, Any] = {"a": np.arange(20.0), "b": np.ones((3, 4), np.float32), "c": np.arange(7, dtype=np.uint8)}
    match kind:
        case "npy":
            path = folder / "array.npy"
            np.save(path, arrays["a"])
        case "stored":
            path = folder / "stored.npz"
            np.savez(path, **arrays)
        case "deflated":
            path = folder / "deflated.npz"
            np.savez_compressed(path, **arrays)
        case _:
            path = folder / "weights.safetensors"
            safetensors.numpy.save_file(arrays, path)
    return path


def error_of(path: Path, stager: Stager) -> Exception | None:
    try:
        xferlib.load(path, stager)
    except Exception as error:
        # Without its traceback, whose frames hold arrays.
        return error.with_traceback(None)
    return None


@pytest.mark.parametrize("kind", ["npy", "stored", "deflated", "safetensors"])
def test_random_damage_is_refused_by_the_files_name_or_does_not_show(stager: Stager, tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    whole = path.read_bytes()
    chance = random.Random(f"damage of {kind}")
    loaded = 0
    for _ in range(FILES):
        content = bytearray(whole)
        # Half of it where the headers are.
        reach = chance.choice((len(content), 128))
        for _ in range(chance.choice((1, 1, 2, 5))):
            content[chance.randrange(reach)] = chance.randrange(256)
        path.write_bytes(content)
        error = error_of(path, stager)
        loaded += error is None
        if isinstance(error, TypeError):
            # What is left of the dtype is one that NumPy has and the backend has not.
            assert "dtype" in str(error)
            assert any(path.name in words for words in (str(error), *getattr(error, "__notes__", ())))
        elif error is not None:
            assert type(error) is ValueError
            assert path.name in str(error)
        del error
        stager._ledger.wait_all()
        stager.trim()
        assert not stager._ledger.busy
        assert stager.stats().device_nbytes == 0
        assert stager._pool.usage().used == 0
    assert 0 < loaded < FILES
