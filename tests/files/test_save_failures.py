"""Whatever goes wrong, the file is the old one or the whole new one, nothing is left over, and somebody is told."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import held, until
from tests.files.saves import MIB, at_rest, bits, only, same, there
from xferlib.byte_reader import ByteReader
from xferlib.files import pace, writing
from xferlib.files.plan import Layout
from xferlib.files.temporary import SUFFIX, TemporaryFile
from xferlib.stager import Stager


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
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        save.result(20)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    only(tmp_path, path.name)
    at_rest(stager)


def test_it_is_told_before_anything_is_written_where_the_disk_has_no_room(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small:
        f_blocks, f_bavail, f_frsize = 9, 1, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: Small)
    with pytest.raises(OSError, match="bytes are to be written, and 4096 are free"):
        xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(MIB, np.uint8)), stager).result(20)
    only(tmp_path)


def test_a_disk_with_just_enough_room_will_do(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(3)
    size = xferlib.save(tmp_path / "a.npy", there(stager, array), stager).result(20).stat().st_size

    class Small:
        f_blocks, f_bavail, f_frsize = size, size, 1

    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: Small)
    xferlib.save(tmp_path / "a.npy", there(stager, array), stager).result(20)


def test_a_file_system_that_does_not_say_how_large_it_is_will_do(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        f_blocks, f_bavail, f_frsize = 0, 0, 512

    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: Silent)
    xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager).result(20)


def test_a_folder_that_is_not_there_is_refused_at_the_call(stager: Stager, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the file's folder is not there\. Make it first.*none'$"):
        xferlib.save(tmp_path / "none" / "a.npy", there(stager, np.zeros(3)), stager)


def test_a_folder_that_goes_meanwhile_is_an_error_of_the_save(stager: Stager, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    array = there(stager, np.zeros(3))
    with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # The host backend's.
        save = xferlib.save(tmp_path / "none" / "a.npy", array, stager)
        (tmp_path / "none").rename(tmp_path / "moved")
        gate.set()
    with pytest.raises(FileNotFoundError, match=r"none"):
        save.result(20)


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_read_only_is_an_error_of_the_save(stager: Stager, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(3)), stager)
    with pytest.raises(PermissionError):
        save.result(20)


def test_a_folder_of_the_files_name_is_an_error_of_the_save(stager: Stager, tmp_path: Path) -> None:
    (tmp_path / "a.npy").mkdir()
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager)
    with pytest.raises(IsADirectoryError):
        save.result(20)
    only(tmp_path, "a.npy")


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


class Frozen(Exception):
    """Of which no attribute can be set, as with frozen dataclasses; to compare two of them fails, as where they have arrays."""

    __hash__ = None  # type: ignore[assignment]  # As of what can be compared.

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} is frozen")

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")


def test_no_file_is_published_where_an_error_cannot_be_changed(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        try:
            raise Frozen("the first")
        except Frozen:
            raise Frozen("the second") from Frozen("another")

    array = there(stager, np.ones(MIB, np.uint8))
    path = tmp_path / "a.npy"
    path.write_bytes(b"old")
    monkeypatch.setattr(ByteReader, "read_row", failing)
    with pytest.raises(Frozen, match="the second"):
        xferlib.save(path, array, stager).result(20)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    only(tmp_path, "a.npy")
    at_rest(stager)


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


def test_copies_that_fail_leave_their_turns_to_threads_that_wait_for_one(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, take, taken = pace.READS_AHEAD + 2, writing.Writing._take_piece, []

    def noted(self: writing.Writing) -> Any:
        taken.append(take(self))
        return taken[-1]

    class Failing:
        def result(self) -> None:
            until(lambda: len(taken) == threads)
            raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(writing, "usable_cores", lambda: threads)
    monkeypatch.setattr(writing.Writing, "_take_piece", noted)
    monkeypatch.setattr(writing, "PIECE_NBYTES", 64 << 10)
    monkeypatch.setattr(ByteReader, "read_row", lambda *_: Failing())
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(2 * MIB, np.uint8)), stager, memory=MIB)
    with pytest.raises(OSError, match="broken"):
        save.result(20)
    only(tmp_path)


@pytest.mark.parametrize(("timeout", "error"), [("1", TypeError), (math.nan, ValueError)])
@pytest.mark.parametrize("wait", [xferlib.Save.result, xferlib.Save.wait_read])
def test_what_is_no_time_to_wait_for_is_refused(
    stager: Stager, tmp_path: Path, wait: Any, timeout: Any, error: type[Exception]
) -> None:
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(2)), stager)
    with pytest.raises(error, match=f"timeout={timeout!r}: expected seconds, or None"):
        wait(save, timeout)
    assert save.result(10**400) == tmp_path / "a.npy"


def test_an_archive_that_cannot_be_ended_is_not_there(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("zipfile.ZipFile._write_end_record", broken)
    save = xferlib.save(tmp_path / "a.npz", {"w": there(stager, np.zeros(10))}, stager)
    with pytest.raises(OSError, match="broken"):
        save.result(20)
    only(tmp_path)


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


def test_a_failure_that_nobody_asked_about_is_said_when_the_handle_goes(stager: Stager, tmp_path: Path) -> None:
    (tmp_path / "a.npy").mkdir()
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(3)), stager)
    assert save._outcome.ended.wait(20)
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


def test_a_failure_is_said_once_though_the_handle_goes_while_the_threads_end(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    failed, gate, close = threading.Event(), threading.Event(), TemporaryFile.close

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    def held_close(self: TemporaryFile) -> None:
        failed.set()
        gate.wait(20)
        close(self)

    monkeypatch.setattr(warnings, "warn", lambda words, *_: said.append(words))
    monkeypatch.setattr(TemporaryFile, "write", broken)
    monkeypatch.setattr(TemporaryFile, "close", held_close)
    before = threading.active_count()
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(3)), stager)
    assert failed.wait(20)
    ended = save._outcome.ended
    del save
    gate.set()
    assert ended.wait(20)
    assert until(lambda: threading.active_count() <= before)
    assert len(said) == 1


def test_a_failure_wakes_those_that_wait_for_their_rate(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their turn comes in an hour."""
    write = TemporaryFile.write

    def failing(self: TemporaryFile, data: memoryview, offset: int) -> None:
        if offset:
            raise OSError(errno.EIO, "broken")
        write(self, data, offset)

    monkeypatch.setattr(TemporaryFile, "write", failing)
    monkeypatch.setattr("xferlib.files.writing.usable_cores", lambda: 4)
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(MIB, np.uint8)), stager, memory=256 * 1024, rate_limit=10)
    try:
        with pytest.raises(OSError, match="broken"):
            save.result(20)
    finally:
        save.cancel()


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


def test_what_a_failed_copy_was_raised_from_keeps_no_memory(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = stager.backend

    def broken(*_: object) -> None:
        raise backend.failures[0]("broken")

    array = there(stager, np.zeros(MIB, np.uint8))
    stager.idle()
    before = stager._pool.usage().used
    monkeypatch.setattr(backend, "copy_d2h", broken)
    save = xferlib.save(tmp_path / "a.npy", array, stager)
    assert save._outcome.ended.wait(20)
    assert until(lambda: stager._pool.usage().used == before)
    with pytest.raises(xferlib.XferError, match="broken"):
        save.result(20)


def test_no_descriptor_is_left_open(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.arange(3))
    xferlib.save(tmp_path / "a.npy", array, stager).result(20)
    before = len(os.listdir("/proc/self/fd"))
    for kind in ("npy", "npz", "safetensors"):
        xferlib.save(tmp_path / f"a.{kind}", {"w": array} if kind == "npz" else array, stager).result(20)
        with pytest.raises(FileNotFoundError):
            xferlib.save(tmp_path / "none" / "a.npy", array, stager).result(20)
        # What it removes of others is open for a moment, too.
        (tmp_path / f".{kind}{SUFFIX}").write_bytes(b"half")
    xferlib.save(tmp_path / "a.npy", array, stager).result(20)
    assert len(os.listdir("/proc/self/fd")) == before


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


def test_what_is_said_of_older_files_is_no_failure_where_warnings_are_errors(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"s_{number}.npy").write_bytes(b"old")
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "s_0.npy":
            raise PermissionError("not yours")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    save = xferlib.save(tmp_path / "s_3.npy", there(stager, np.zeros(3)), stager, keep=1)
    with pytest.raises(RuntimeWarning, match="could not be removed: not yours"):
        save.result(20)
    with pytest.raises(RuntimeWarning, match="could not be removed: not yours"):
        save.done()
    # The file is there, and so nothing can be cancelled any more. The others are removed all the same.
    assert not save.cancel()
    assert "done" in repr(save)
    monkeypatch.undo()
    only(tmp_path, "s_0.npy", "s_3.npy")
    same(np.load(tmp_path / "s_3.npy"), np.zeros(3))


def test_an_older_file_that_another_process_has_removed_is_no_matter(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone when its time is asked."""
    (tmp_path / "s_0.npy").write_bytes(b"old")
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([folder / "s_0.npy", folder / "s_1.npy"]))
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    xferlib.save(tmp_path / "s_2.npy", there(stager, np.zeros(3)), stager, keep=1).result(20)
    monkeypatch.undo()
    only(tmp_path, "s_2.npy")


def test_a_folder_that_cannot_be_listed_is_said_and_the_file_is_there(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def refuse(path: Path) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(warnings, "warn", lambda words, *_: said.append(words))
    assert xferlib.save(tmp_path / "s_2.npy", there(stager, np.zeros(3)), stager, keep=1).result(20).exists()
    assert "could not be looked for, and stay: not yours" in said[0]


def test_a_folder_where_one_may_write_and_not_look_will_do(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = os.listdir

    def refuse(path: Any) -> list[str]:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(os, "listdir", refuse)
    array = bits((1000,), np.dtype(np.uint8))
    same(np.load(xferlib.save(tmp_path / "a.npy", there(stager, array), stager).result(20)), array)


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

    begin, pieces = TemporaryFile.__init__, Layout.pieces

    def beginning(self: TemporaryFile, target: Path, **options: bool) -> None:
        finalize()
        begin(self, target, **options)

    def cutting(self: Any, *sizes: int) -> Iterator[Any]:
        for piece in pieces(self, *sizes):
            finalize()
            yield piece

    monkeypatch.setattr(TemporaryFile, "__init__", beginning)
    monkeypatch.setattr(Layout, "pieces", cutting)
    save = xferlib.save(tmp_path / "a.npy", array, stager, memory=512 * 1024)
    assert not np.load(save.result(20)).any()
    assert len(told) == 5
    assert all("finalizer" in words for words in told)


def test_a_name_that_cannot_be_had_is_told(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TemporaryFile) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(TemporaryFile, "publish", broken)
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager)
    with pytest.raises(OSError, match="broken"):
        save.result(20)
    assert not save.cancel()
    only(tmp_path)


def test_a_rate_holds_up_nobody_who_has_read(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread waits for its turn, which comes in an hour. The other one goes on with what it has read."""
    monkeypatch.setattr("xferlib.files.writing.usable_cores", lambda: 2)
    gate, write, waiting = threading.Event(), TemporaryFile.write, []

    def hold(self: TemporaryFile, data: memoryview, offset: int) -> None:
        if offset:
            gate.wait(20)
        write(self, data, offset)

    seconds_until = pace.Pace.seconds_until

    def note(self: pace.Pace, nbytes: int) -> float:
        waiting.append(seconds_until(self, nbytes))
        return waiting[-1]

    monkeypatch.setattr(TemporaryFile, "write", hold)
    monkeypatch.setattr(pace.Pace, "seconds_until", note)
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(MIB, np.uint8)), stager, memory=128 * 1024, rate_limit=10)
    try:
        # The second one sleeps, or is about to.
        assert until(lambda: len(waiting) == 2)
        gate.set()
        assert until(lambda: save.written == 64 * 1024)
    finally:
        save.cancel()
    with pytest.raises(xferlib.XferError, match="was cancelled"):
        save.result(20)
