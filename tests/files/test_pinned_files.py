"""Files that are loaded again and again: the device reads them by itself, and nobody is given what a file held once."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import xferlib
from tests.children import fork
from tests.core.fakes import WATCHDOG, held, on_thread, tampered, until
from xferlib.engine.native import Figures, library
from xferlib.files import ahead as ahead_module
from xferlib.files import locked_pages, pinned_files
from xferlib.files.readers import opened
from xferlib.stager import Stager

COUNT = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(tmp_path / "weights.safetensors", 0)


def saved(path: Path, first: int) -> Path:
    """Write arrays, each of which is full of a number, from `first` on."""
    safetensors.numpy.save_file({str(number): np.full((300, 1000), first + number, np.float32) for number in range(COUNT)}, path)
    return path


def holds(found: dict[str, Any], first: int) -> bool:
    return len(found) == COUNT and all((array == first + int(name)).all() for name, array in found.items())


def copied_by_cpu() -> int:
    """Return how many bytes the CPU has copied so far, on the way to a device or back."""
    figures = Figures()
    library().xe_read_figures(figures)
    return int(figures.copied_nbytes)


def pages(files: xferlib.PinnedFiles) -> list[np.ndarray[Any, Any]]:
    return [pin.array for pin in files._pins.values()]


def are_pinned(stager: Stager, arrays: list[np.ndarray[Any, Any]]) -> list[bool]:
    return [stager.backend.is_pinned(array.ctypes.data, array.nbytes) for array in arrays]


def sharing(stager: Stager) -> Stager:
    """Open a stager whose driver tells of what another one has locked, as all stagers of one driver have it."""
    return xferlib.stager(tampered(is_pinned=stager.backend.is_pinned))


def test_each_load_is_copied_by_the_device_alone_until_the_files_are_unpinned(stager: Stager, path: Path) -> None:
    with xferlib.pin_files(path, stager) as files:
        assert files.nbytes == path.stat().st_size
        found = pages(files)
        assert are_pinned(stager, found) == [True]
        before = copied_by_cpu()
        for _ in range(2):
            assert holds(xferlib.load(path, stager), 0)
        assert holds(xferlib.load(path, stager, dtype="float16"), 0)
        with sharing(stager) as other:
            assert holds(xferlib.load(path, other), 0)
        assert copied_by_cpu() == before
    assert are_pinned(stager, found) == [False]
    assert holds(xferlib.load(path, stager), 0)
    assert copied_by_cpu() > before
    files.close()


def test_a_file_by_itself_and_numbers_in_place_of_arrays_come_from_it_too(stager: Stager, tmp_path: Path) -> None:
    alone, state = tmp_path / "alone.npy", tmp_path / "state.safetensors"
    np.save(alone, np.arange(1000.0))
    safetensors.numpy.save_file({"step": np.array(7), "weights": np.ones(1000)}, state)
    with xferlib.pin_files(alone, stager), xferlib.pin_files(state, stager):
        before = copied_by_cpu()
        assert np.array_equal(xferlib.load(alone, stager), np.arange(1000.0))
        back: dict[str, Any] = xferlib.load(state, stager, like={"step": 0, "weights": np.zeros(1000)})
        assert back["step"] == 7
        assert (back["weights"] == 1).all()
        assert copied_by_cpu() == before


def test_all_files_of_an_index_are_pinned(stager: Stager, tmp_path: Path) -> None:
    weights = {}
    for number in range(3):
        safetensors.numpy.save_file({f"{number}.kernel": np.full(5000, number)}, tmp_path / f"{number}.safetensors")
        weights[f"{number}.kernel"] = f"{number}.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    with xferlib.pin_files(index, stager) as files:
        assert files.nbytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
        before = copied_by_cpu()
        assert (xferlib.load(index, stager, names=["1."])["1.kernel"] == 1).all()
        assert len(xferlib.load(tmp_path / "*.safetensors", stager)) == 3
        assert copied_by_cpu() == before


def replaced(path: Path) -> None:
    saved(path.with_name("new.safetensors"), 10)
    path.with_name("new.safetensors").rename(path)


def rewritten(path: Path) -> None:
    """In place: the pages that were locked are the file's no more."""
    with path.open("r+b") as file:
        content = saved(path.with_name("new.safetensors"), 10).read_bytes()
        file.truncate(0)
        file.write(content)


def rewritten_in_secret(path: Path) -> None:
    """With the time of the last change that it had before, as copying programs do."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    rewritten(path)
    os.utime(path, ns=times)


def written_over(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(saved(path.with_name("new.safetensors"), 10).read_bytes())


@pytest.mark.parametrize("change", [replaced, rewritten, rewritten_in_secret, written_over])
@pytest.mark.parametrize("wait", [0.0, 0.03])
def test_who_loads_a_file_that_was_changed_is_given_what_it_holds_now(
    stager: Stager, path: Path, change: Callable[[Path], None], wait: float
) -> None:
    with xferlib.pin_files(path, stager):
        assert holds(xferlib.load(path, stager), 0)
        time.sleep(wait)  # the clock of the file system may stand still meanwhile, or not
        change(path)
        assert holds(xferlib.load(path, stager), 10)
        before = copied_by_cpu()
        with xferlib.pin_files(path, stager):
            assert holds(xferlib.load(path, stager), 10)
        assert copied_by_cpu() == before
    assert holds(xferlib.load(path, stager), 10)


def test_a_file_that_was_changed_a_moment_ago_is_pinned_when_the_next_change_would_show(
    stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    # What a program says of the time of the last change does not count.
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**15))
    changed = path.stat().st_ctime_ns / locked_pages.SECOND
    now = [changed]
    monkeypatch.setattr(locked_pages, "time", SimpleNamespace(time=lambda: now[0], sleep=slept.append))
    xferlib.pin_files(path, stager).close()
    assert 0.9 * locked_pages.TICK_SECONDS < sum(slept) <= locked_pages.TICK_SECONDS
    for later in (locked_pages.TICK_SECONDS + 0.01, -3600.0):
        slept.clear()
        now[0] = changed + later
        xferlib.pin_files(path, stager).close()
        assert slept == []


def test_where_changes_are_noted_by_whole_seconds_it_waits_for_the_next_but_one(
    stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    told = SimpleNamespace(st_dev=1, st_ino=2, st_size=path.stat().st_size, st_mtime_ns=1, st_ctime_ns=1000 * 10**9)
    monkeypatch.setattr(locked_pages, "os", SimpleNamespace(fstat=lambda descriptor: told))
    monkeypatch.setattr(locked_pages, "time", SimpleNamespace(time=lambda: 1000.5, sleep=slept.append))
    xferlib.pin_files(path, stager).close()
    assert slept == [1.5]


@pytest.mark.parametrize("limit", [1 << 20, 6 << 20])
def test_files_that_have_no_room_are_refused_and_none_stays_locked(tmp_path: Path, limit: int) -> None:
    """The first of two has room under the larger limit."""
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for path in paths:
        safetensors.numpy.save_file({path.stem: np.ones(1 << 22, np.uint8)}, path)
    with xferlib.stager("host", strict=True, pinned_limit=limit) as stager:
        with pytest.raises(xferlib.AllocationError, match="Raise pinned_limit") as caught:
            xferlib.pin_files(paths, stager)
        assert caught.value.__notes__ == [f"pinning {str(paths[limit >> 22])!r}"]
        calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # the host backend's own
        assert calls.pins == calls.unpins == limit >> 22
        assert len(xferlib.load(paths, stager)) == 2


def test_members_of_an_archive_are_refused_and_nothing_stays_locked(stager: Stager, path: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive.npz"
    np.savez(archive, other=np.ones(3))
    with pytest.raises(ValueError, match=r"archive.npz' cannot be pinned.*Save it as \.safetensors"):
        xferlib.pin_files([path, archive], stager)
    calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # the host backend's own
    assert calls.pins == calls.unpins == 1
    before = copied_by_cpu()
    assert holds(xferlib.load(path, stager), 0)
    assert copied_by_cpu() > before


def test_a_file_that_is_pinned_already_is_refused_and_stays_pinned(stager: Stager, path: Path) -> None:
    with xferlib.pin_files(path, stager):
        with pytest.raises(ValueError, match="pinned already") as caught:
            xferlib.pin_files(path, stager)
        assert str(path) in str(caught.value)
        with xferlib.stager("host") as other, pytest.raises(ValueError, match="pinned already"):
            xferlib.pin_files(path, other)
        before = copied_by_cpu()
        assert holds(xferlib.load(path, stager), 0)
        assert copied_by_cpu() == before


def test_what_cannot_be_loaded_or_locked_is_not_pinned(stager: Stager, path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        xferlib.pin_files(tmp_path / "none.safetensors", stager)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        xferlib.pin_files(path, stager)
    with pytest.raises(TypeError, match="expected a stager"):
        xferlib.pin_files(stager, path)  # type: ignore[arg-type]
    backend = tampered()
    backend.capabilities = dataclasses.replace(stager.backend.capabilities, register=False)
    saved(path, 0)
    with (
        xferlib.stager(backend) as other,
        pytest.raises(xferlib.CapabilityError, match=r"cannot page-lock files\. Leave pin_files out"),
    ):
        xferlib.pin_files(path, other)


@pytest.mark.parametrize("at", [0, 1])
def test_what_an_interrupt_leaves_is_unlocked(
    stager: Stager, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    paths = [path, tmp_path / "other.safetensors"]
    safetensors.numpy.save_file({"other": np.ones(3)}, paths[1])
    pin = Stager.pin
    calls: list[None] = []

    def interrupted(stager: Stager, array: Any) -> Any:
        calls.append(None)
        if len(calls) > at:
            raise KeyboardInterrupt
        return pin(stager, array)

    monkeypatch.setattr(Stager, "pin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        xferlib.pin_files(paths, stager)
    monkeypatch.undo()
    counted = stager.backend.memory.calls()  # type: ignore[attr-defined]  # the host backend's own
    assert counted.pins == counted.unpins == at
    before = copied_by_cpu()
    assert holds(xferlib.load(path, stager), 0)
    assert copied_by_cpu() > before


def test_who_drops_them_is_warned_and_loads_go_on(stager: Stager, path: Path) -> None:
    kept = [xferlib.pin_files(path, stager)]
    with pytest.warns(ResourceWarning, match="never closed"):
        kept.clear()
    for _ in range(2):
        assert holds(xferlib.load(path, stager), 0)
    stager.trim()
    replaced(path)
    with xferlib.pin_files(path, stager):
        assert holds(xferlib.load(path, stager), 10)
        assert len(locked_pages._pages) == 1
    assert len(locked_pages._pages) == 0


def test_a_file_is_unlocked_with_its_stager(path: Path) -> None:
    with xferlib.stager("host", strict=True) as stager:
        files = xferlib.pin_files(path, stager)
        found = pages(files)
    assert are_pinned(stager, found) == [False]
    with xferlib.stager("host", strict=True) as other:
        assert holds(xferlib.load(path, other), 0)
        # They are no locked pages any more, so they are read ahead.
        with opened(path) as reader:
            assert not reader.pinned
        with xferlib.pin_files(path, other), opened(path) as reader:
            files.close()
            assert reader.pinned
    assert len(locked_pages._pages) == 0


def test_a_file_without_arrays_may_be_there_twice(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    safetensors.numpy.save_file({}, path)
    with xferlib.pin_files([path, path], stager) as files:
        assert files.nbytes == path.stat().st_size
        assert xferlib.load([path, path], stager) == {}


def test_of_two_threads_that_pin_a_file_at_once_one_is_refused(stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = Stager.pin
    first: list[xferlib.PinnedFiles] = []

    def pinned_twice(stager: Stager, array: Any) -> Any:
        monkeypatch.undo()
        first.append(xferlib.pin_files(path, stager))
        return pin(stager, array)

    monkeypatch.setattr(Stager, "pin", pinned_twice)
    with pytest.raises(ValueError, match="pinned already, by another thread"):
        xferlib.pin_files(path, stager)
    calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # the host backend's own
    assert (calls.pins, calls.unpins) == (2, 1)
    before = copied_by_cpu()
    assert holds(xferlib.load(path, stager), 0)
    assert copied_by_cpu() == before
    first[0].close()


def test_the_pages_stay_locked_until_a_load_by_another_stager_has_read_them(stager: Stager, path: Path) -> None:
    with sharing(stager) as other:
        files = xferlib.pin_files(path, stager)
        found = pages(files)
        with held(other.backend.h2d):  # type: ignore[attr-defined]  # the host backend's own
            loading = on_thread(lambda: xferlib.load(path, other))
            assert until(lambda: other._ledger.h2d.busy)
            closing = on_thread(files.close)
            closing_began = until(lambda: not locked_pages._pages)
            assert closing_began
            assert not loading.done()
            assert are_pinned(stager, found) == [True]
            assert not closing.done()
        assert holds(loading.result(WATCHDOG), 0)
        closing.result(WATCHDOG)
    assert are_pinned(stager, found) == [False]


def test_nothing_is_read_ahead_or_unmapped_of_pages_that_are_locked(
    stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(ahead_module.ReadAhead, "__call__", lambda _, ranges: told.append(len(list(ranges))))
    monkeypatch.setattr(ahead_module.Unmapping, "__call__", lambda _, ranges, mapping: told.append(len(list(ranges))))
    with xferlib.pin_files(path, stager):
        xferlib.load(path, stager)
    assert told == [0, 0]
    xferlib.load(path, stager)
    assert told == [0, 0, COUNT, COUNT]


def test_a_file_that_is_not_in_memory_is_read_ahead_of_the_lock(
    stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    pin = Stager.pin

    def pinning(stager: Stager, array: Any) -> Any:
        asked.append((-1, 0))
        return pin(stager, array)

    class Library:
        def xe_read_ahead(self, descriptor: int, start: int, nbytes: int) -> int:
            asked.append((start, nbytes))
            return 0

    monkeypatch.setattr(Stager, "pin", pinning)
    monkeypatch.setattr(pinned_files, "library", Library)
    xferlib.pin_files(path, stager).close()
    assert asked == [(0, path.stat().st_size), (-1, 0)]


def test_in_a_forked_child_nothing_is_pinned(stager: Stager, path: Path) -> None:
    with xferlib.pin_files(path, stager):
        child = fork()
        if child == 0:
            # No pin of the parent's is closed here.
            os._exit(len(locked_pages._pages))
        assert os.waitpid(child, 0)[1] == 0
        before = copied_by_cpu()
        assert holds(xferlib.load(path, stager), 0)
        assert copied_by_cpu() == before


def test_nothing_holds_the_pages_of_files_that_are_unpinned(stager: Stager, path: Path) -> None:
    files = xferlib.pin_files(path, stager)
    loaded = xferlib.load(path, stager)
    there = [weakref.ref(array) for array in pages(files)]
    files.close()
    del files
    gc.collect()
    assert [reference() for reference in there] == [None]
    assert holds(loaded, 0)
