"""Models in several files: one dict comes out, only what is asked for is opened, and an index must fit its files."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import xferlib
from tests.core.fakes import succeeds
from xferlib.stager import Stager


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host", strict=True) as stager:
        yield stager


ARRAYS = {f"layers.{layer}.{part}": np.full((3, 5), 10 * layer + number) for layer in range(3) for number, part in enumerate("kq")}


def model(folder: Path, index: dict[str, str] | None = None) -> Path:
    """Write three files of two arrays each, and an index of them, or another index."""
    weights: dict[str, str] = {}
    for layer in range(3):
        file = f"model-{layer + 1}-of-3.safetensors"
        held = {name: array for name, array in ARRAYS.items() if name.startswith(f"layers.{layer}.")}
        safetensors.numpy.save_file(held, folder / file)
        weights |= dict.fromkeys(held, file)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 720}, "weight_map": weights if index is None else index}))
    return path


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def equal(found: Any, names: list[str] | None = None) -> None:
    assert list(found) == list(ARRAYS if names is None else names)
    for name, array in found.items():
        assert array.dtype == ARRAYS[name].dtype
        assert array.tobytes() == ARRAYS[name].tobytes()


def opened_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the names of files that are opened to be read."""
    names: list[str] = []
    real = open

    def noted(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike):
            names.append(Path(file).name)
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", noted)
    monkeypatch.setattr("io.open", noted)
    return names


def test_an_index_gives_all_arrays_of_its_files(stager: Stager, tmp_path: Path) -> None:
    equal(xferlib.load(model(tmp_path), stager))


def test_a_list_of_paths_and_a_pattern_give_what_the_index_does(stager: Stager, tmp_path: Path) -> None:
    model(tmp_path)
    equal(xferlib.load(files_of(tmp_path), stager))
    equal(xferlib.load((str(path) for path in files_of(tmp_path)), stager))
    equal(xferlib.load(str(tmp_path / "model-*.safetensors"), stager))
    equal(xferlib.load(tmp_path / "model-[1-3]-of-?.safetensors", stager))


def test_files_of_both_formats_go_together_in_the_order_of_the_list(stager: Stager, tmp_path: Path) -> None:
    model(tmp_path)
    np.savez(tmp_path / "more.npz", mask=np.arange(4))
    found = xferlib.load([tmp_path / "more.npz", files_of(tmp_path)[2]], stager)
    assert list(found) == ["mask", "layers.2.k", "layers.2.q"]
    assert found["mask"].tolist() == [0, 1, 2, 3]


def test_a_file_whose_name_is_a_pattern_is_that_file(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "run[1].npz"
    np.savez(path, a=np.arange(3))
    np.savez(tmp_path / "run1.npz", b=np.arange(3))
    assert list(xferlib.load(path, stager)) == ["a"]


def test_a_folder_whose_name_is_a_pattern_is_that_folder(stager: Stager, tmp_path: Path) -> None:
    folder = tmp_path / "lr=[1e-3]"
    folder.mkdir()
    array = stager.put(np.arange(3.0), borrow=True).value
    xferlib.save(folder / "a_1.npz", {"a": array}, stager).result(60)
    assert xferlib.load(folder / "a_*.npz", stager).keys() == {"a"}
    assert xferlib.load(tmp_path / "lr=*" / "a_*.npz", stager).keys() == {"a"}


def test_by_an_index_only_files_that_hold_what_is_asked_for_are_opened(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = model(tmp_path)
    files_of(tmp_path)[1].unlink()
    opened = opened_by(monkeypatch)
    equal(xferlib.load(index, stager, names=["layers.2.k", "layers.0.q"]), ["layers.2.k", "layers.0.q"])
    assert {name for name in opened if name.startswith("model-")} == {"model-1-of-3.safetensors", "model-3-of-3.safetensors"}
    like = {"layers": {"2": {"k": ARRAYS["layers.2.k"]}}}
    del opened[:]
    got: Any = xferlib.load(index, stager, like=like)
    assert got["layers"]["2"]["k"].tobytes() == ARRAYS["layers.2.k"].tobytes()
    assert {name for name in opened if name.startswith("model-")} == {"model-3-of-3.safetensors"}
    assert xferlib.load(index, stager, names=[]) == {}


def test_a_name_that_ends_in_a_dot_stands_for_all_below_it(stager: Stager, tmp_path: Path) -> None:
    index = model(tmp_path)
    for paths in (index, files_of(tmp_path)):
        equal(xferlib.load(paths, stager, names=["layers.1."]), ["layers.1.k", "layers.1.q"])
        found = xferlib.load(paths, stager, names=["layers.2.q", "layers.1.", "layers.2."])
        equal(found, ["layers.2.q", "layers.1.k", "layers.1.q", "layers.2.k"])
        with pytest.raises(ValueError, match=r"no array whose name begins with 'layers\.7\.'"):
            xferlib.load(paths, stager, names=["layers.7."])
        # A name that is begun but not ended is no subtree.
        with pytest.raises(ValueError, match=r"no array named 'layers'. Did you mean 'layers\.', which stands for all below it\?"):
            xferlib.load(paths, stager, names=["layers"])


def test_only_what_is_asked_for_is_put(stager: Stager, tmp_path: Path) -> None:
    index = model(tmp_path)
    xferlib.load(index, stager, names=["layers.1."])
    assert stager.stats().h2d_nbytes == 2 * 120


def test_a_tree_that_was_saved_in_several_files_comes_back_with_what_rode_along(stager: Stager, tmp_path: Path) -> None:
    state: dict[str, Any] = {"params": {"w": np.arange(6.0), "b": np.arange(3.0)}, "step": 3, "run": "first"}
    put = stager.put(state, borrow=True).value
    xferlib.save(tmp_path / "params.safetensors", {"params": put["params"]}, stager).result(60)
    xferlib.save(tmp_path / "rest.safetensors", {"step": 3, "run": "first", "more": put["params"]["b"]}, stager).result(60)
    got = xferlib.load(sorted(tmp_path.glob("*")), stager, like=state)
    assert (got["step"], got["run"]) == (3, "first")
    assert got["params"]["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_value_that_two_files_have_differently_is_refused(stager: Stager, tmp_path: Path) -> None:
    array = stager.put(np.arange(3.0), borrow=True).value
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, name, step in zip(paths, "ab", (3, 4), strict=True):
        xferlib.save(path, {name: array, "step": step, "run": "first", "loss": math.nan}, stager).result(60)
    assert xferlib.load(paths, stager, like={"a": array, "b": array, "run": "", "loss": 0.0})["run"] == "first"
    before = stager.stats().h2d_nbytes
    with pytest.raises(ValueError, match="'step' has one value in one file, and another in another"):
        xferlib.load(paths, stager, like={"a": array, "b": array, "step": 0})
    # Before anything is put.
    assert stager.stats().h2d_nbytes == before


def test_a_name_in_two_files_is_refused_with_both(stager: Stager, tmp_path: Path) -> None:
    model(tmp_path)
    paths = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"'layers\.0\..' is in '.*model-1-of-3.*' and in '.*model-1-of-3.*'"):
        xferlib.load([paths[0], paths[1], paths[0]], stager)
    assert stager.stats().h2d_nbytes == 0


def test_an_index_that_promises_what_its_file_lacks_is_refused_with_both(stager: Stager, tmp_path: Path) -> None:
    index = model(tmp_path, {"layers.0.q": "model-1-of-3.safetensors", "layers.0.v": "model-1-of-3.safetensors"})
    expected = r"index\.json' says that '.*model-1-of-3\.safetensors' has 'layers\.0\.v', and it has not"
    for names in (None, ["layers.0."]):
        with pytest.raises(ValueError, match=expected):
            xferlib.load(index, stager, names=names)
    assert list(xferlib.load(index, stager, names=["layers.0.q"])) == ["layers.0.q"]


def test_an_index_that_lacks_what_a_file_has_is_refused_unless_names_are_asked_for(stager: Stager, tmp_path: Path) -> None:
    index = model(tmp_path, {"layers.0.q": "model-1-of-3.safetensors"})
    with pytest.raises(ValueError, match=r"model-1-of-3.*' has 'layers\.0\.k', which '.*index\.json' does not name\. Say"):
        xferlib.load(index, stager)
    equal(xferlib.load(index, stager, names=["layers.0.q"]), ["layers.0.q"])


def test_an_index_that_has_an_array_in_another_file_is_refused(stager: Stager, tmp_path: Path) -> None:
    weights = {"layers.0.q": "model-1-of-3.safetensors", "layers.0.k": "model-2-of-3.safetensors"}
    expected = r"model-1-of-3\.safetensors' has 'layers\.0\.k', which '.*index\.json' says is in 'model-2-of-3"
    with pytest.raises(ValueError, match=expected):
        xferlib.load(model(tmp_path, weights), stager)
    with pytest.raises(ValueError, match=r"says that '.*model-2-of-3\.safetensors' has 'layers\.0\.k', and it has not"):
        xferlib.load(tmp_path / "model.safetensors.index.json", stager, names=["layers.0.k"])


def test_a_file_that_is_missing_is_named_with_what_it_should_have(stager: Stager, tmp_path: Path) -> None:
    index = model(tmp_path)
    files_of(tmp_path)[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.json' says that it has 'layers\.1\.k': '.*model-2-of-3\.safetensors'"):
        xferlib.load(index, stager)
    with pytest.raises(FileNotFoundError, match="model-2-of-3"):
        xferlib.load([tmp_path / "model-1-of-3.safetensors", tmp_path / "model-2-of-3.safetensors"], stager)
    with pytest.raises(FileNotFoundError, match=r"no file has a name of this pattern: '.*other-\*\.safetensors'"):
        xferlib.load(tmp_path / "other-*.safetensors", stager)
    assert stager.stats().h2d_nbytes == 0


@pytest.mark.parametrize("spare", [0, 1])
def test_more_files_than_a_process_may_have_open_are_called_no_damaged_ones(tmp_path: Path, spare: int) -> None:
    for number in range(40):
        safetensors.numpy.save_file({f"w{number}": np.zeros(3, np.float32)}, tmp_path / f"m-{number:02}.safetensors")
    said = succeeds(f"""
        import os, resource, xferlib
        with xferlib.stager("host") as stager:
            xferlib.load({str(tmp_path / "m-00.safetensors")!r}, stager)
            before = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (30 + {spare}, 30 + {spare}))
            try:
                xferlib.load({str(tmp_path / "m-*.safetensors")!r}, stager)
            except OSError as error:
                print(error)
            assert len(os.listdir("/proc/self/fd")) == before
    """)
    assert re.fullmatch(rf"\[Errno {errno.EMFILE}\] Too many open files: '{tmp_path}/m-\d\d\.safetensors'\n", said)


def test_links_out_of_the_folder_are_followed_as_in_caches_of_downloads(stager: Stager, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    index = model(blobs)
    for number, path in enumerate([*files_of(blobs), index]):
        blob = path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    equal(xferlib.load(snapshot / index.name, stager))


def test_a_folder_is_refused_with_what_to_pass(stager: Stager, tmp_path: Path) -> None:
    model(tmp_path)
    with pytest.raises(IsADirectoryError, match=r"Pass its index, such as '.*index\.json', or '.*\*\.safetensors'"):
        xferlib.load(tmp_path, stager)


def test_paths_that_make_no_sense_are_refused(stager: Stager, tmp_path: Path) -> None:
    index = model(tmp_path)
    np.save(tmp_path / "alone.npy", np.arange(3))
    given: Any
    for given, error, words in (
        ([], ValueError, "the list is empty"),
        ([3], TypeError, "3 among the paths: expected a path"),
        (3, TypeError, "3: expected a path, or several$"),
        (Future(), TypeError, r"expected a path, or several\. Pass the path that its result\(\) returns"),
        (b"a.npz", TypeError, "expected a path as text"),
        ([index], ValueError, "an index says itself which files there are"),
        ([tmp_path / "alone.npy"], ValueError, "its array has no name"),
        (tmp_path / "*.npy", ValueError, "its array has no name"),
        (tmp_path / "model*", ValueError, "an index says itself which files there are"),
    ):
        with pytest.raises(error, match=words):
            xferlib.load(given, stager)
