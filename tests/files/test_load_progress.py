"""Progress: what is told is true, it is told on the calling thread, and what it raises ends the load and leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.numpy

import xferlib
from tests.core.fakes import held, on_thread, until
from tests.core.points import interrupted_at, lost_copies
from xferlib.stager import Stager

WITHIN = tuple(f"files/{name}.py" for name in ("load", "ahead", "shards", "readers", "progress"))
COUNT, NBYTES = 6, 1 << 20
ARRAYS = {str(number): np.full(NBYTES, number, np.uint8) for number in range(COUNT)}


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host", strict=True, pinned_limit=16 << 20) as stager:
        yield stager
    calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # the host backend's own
    assert calls.pinned_allocations == calls.pinned_frees
    assert calls.device_allocations == calls.device_frees


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of six pieces."""
    monkeypatch.setattr("xferlib.files.load.PIECE_NBYTES", NBYTES)
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file(ARRAYS, path)
    return path


def test_each_piece_is_told_of_from_none_to_all(stager: Stager, path: Path) -> None:
    told: list[tuple[int, int]] = []
    threads: set[int] = set()

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.get_ident())

    xferlib.load(path, stager, progress=tell)
    assert told == [(number * NBYTES, COUNT * NBYTES) for number in range(COUNT + 1)]
    assert threads == {threading.get_ident()}
    told.clear()
    xferlib.load(path, stager, names=["2", "4"], progress=tell)
    assert told == [(number * NBYTES, 2 * NBYTES) for number in range(3)]
    told.clear()
    xferlib.load(path, stager, names=[], progress=tell)
    assert told == [(0, 0)]


@pytest.mark.parametrize(("most", "pieces"), [(2 * NBYTES - 1, 6), (2 * NBYTES, 3), (3 * NBYTES - 1, 3), (3 * NBYTES, 2)])
def test_a_piece_has_as_many_arrays_as_its_bytes_allow(
    stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch, most: int, pieces: int
) -> None:
    monkeypatch.setattr("xferlib.files.load.PIECE_NBYTES", most)
    told: list[int] = []
    xferlib.load(path, stager, progress=lambda done, total: told.append(done))
    assert told == [number * COUNT // pieces * NBYTES for number in range(pieces + 1)]


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_other_formats_tell_as_well(stager: Stager, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    np.save(path, np.zeros(30_000)) if suffix == ".npy" else np.savez(path, a=np.zeros(10_000), b=np.zeros(20_000))
    told: list[tuple[int, int]] = []
    xferlib.load(path, stager, progress=lambda done, total: told.append((done, total)))
    total = 240_000
    assert told == ([(0, total), (total, total)] if suffix == ".npy" else [(0, total), (80_000, total), (total, total)])


def test_what_is_told_as_done_is_done(stager: Stager, path: Path) -> None:
    told: list[int] = []
    began = threading.Event()

    def tell(done: int, total: int) -> None:
        told.append(done)
        began.set()

    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's own
        loading = on_thread(lambda: xferlib.load(path, stager, progress=tell))
        assert began.wait(10)
        # Two pieces are on their way, and neither can be done.
        assert not loading.done()
        assert told == [0]
    assert sorted(loading.result(10)) == sorted(ARRAYS)


@pytest.mark.parametrize("at", range(COUNT + 1))
@pytest.mark.parametrize("error", [RuntimeError("enough"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_it_raises_is_raised_and_nothing_reads_the_file_any_more(
    stager: Stager, path: Path, at: int, error: BaseException
) -> None:
    def tell(done: int, total: int) -> None:
        if done == at * NBYTES:
            raise error

    before = descriptors(path)
    with pytest.raises(type(error)) as caught:
        xferlib.load(path, stager, progress=tell)
    assert caught.value is error
    stager._ledger.wait_all()
    # The frames in its traceback hold arrays.
    error.__traceback__ = None
    del caught
    assert descriptors(path) == before
    stager.trim()
    assert stager.stats().device_nbytes == 0


class Noted:
    """Stands in a stager's place, and notes which puts were waited for."""

    whole = True
    patterns: ClassVar[dict[str, list[str]]] = {}

    def __init__(self, stager: Stager) -> None:
        self.backend = stager.backend
        self._stager = stager
        self.started: list[xferlib.Transfer[Any]] = []
        self.likes: list[dict[str, Any]] = []

    def put(self, arrays: dict[str, Any], like: dict[str, Any]) -> xferlib.Transfer[Any]:
        self.started.append(self._stager.put(arrays, borrow=True))
        self.likes.append(like)
        return self.started[-1]

    def idle(self) -> None:
        # As if another thread had closed the stager.
        raise xferlib.ClosedError

    def wait(self, arrays: list[Any]) -> None:
        raise AssertionError("nothing is converted")

    def trim(self) -> None:
        raise AssertionError("nothing is converted")


@pytest.mark.parametrize("at", range(1, COUNT))
def test_whatever_was_started_is_waited_for_before_the_error_is_raised(stager: Stager, path: Path, at: int) -> None:
    noted = Noted(stager)

    def tell(done: int, total: int) -> None:
        if done == at * NBYTES:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        xferlib.load(path, noted, progress=tell)
    assert len(noted.started) == min(at + 1, COUNT)
    assert all(transfer._finished for transfer in noted.started)


def test_a_load_that_fails_between_its_puts_does_not_wait_for_transfers_of_others(stager: Stager, path: Path) -> None:
    """They may wait for the caller."""

    def tell(done: int, total: int) -> None:
        if done:
            raise RuntimeError("enough")

    array = stager.put(np.ones(3), borrow=True).value
    with held(stager.backend.d2h):  # type: ignore[attr-defined]  # the host backend's own
        transfer = stager.get(array)
        with pytest.raises(RuntimeError, match="enough"):
            xferlib.load(path, stager, progress=tell)
        assert not transfer.done()


def test_nor_does_one_that_fails_while_a_put_waits_for_memory_of_those_before(stager: Stager, path: Path) -> None:
    class Full(Noted):
        def put(self, arrays: dict[str, Any], like: dict[str, Any]) -> xferlib.Transfer[Any]:
            if self.started:
                raise xferlib.AllocationError
            return super().put(arrays, like)

        def idle(self) -> None:
            raise AssertionError("it waits for all")

    def tell(done: int, total: int) -> None:
        if done:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        xferlib.load(path, Full(stager), progress=tell)


def test_a_put_whose_wait_was_interrupted_is_waited_for(stager: Stager, path: Path) -> None:
    waited: list[int] = []

    class Interrupted:
        def __init__(self, number: int) -> None:
            self._number = number

        @property
        def value(self) -> Any:
            raise AssertionError("it was not done")

        def synchronize(self) -> None:
            waited.append(self._number)
            if len(waited) == 1:
                raise KeyboardInterrupt

    class Interrupting(Noted):
        def put(self, arrays: dict[str, Any], like: dict[str, Any]) -> Any:
            super().put(arrays, like)
            return Interrupted(len(self.started))

    with pytest.raises(KeyboardInterrupt):
        xferlib.load(path, Interrupting(stager))
    assert waited == [1, 1, 2]


@pytest.mark.parametrize(("most", "expected"), [(NBYTES, 2), (NBYTES * 3 // 2 - 1, 2), (NBYTES * 3 // 2, 3), (2 * NBYTES - 1, 3)])
def test_two_pieces_are_on_their_way_or_more_that_together_are_as_large(
    stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch, most: int, expected: int
) -> None:
    monkeypatch.setattr("xferlib.files.load.PIECE_NBYTES", most)
    assert on_their_way(stager, path) == expected


def test_no_more_than_four_pieces_are_on_their_way(stager: Stager, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(7)]
    for number, path in enumerate(paths):
        safetensors.numpy.save_file({str(number): np.ones(8)}, path)
    assert on_their_way(stager, paths) == 4


def on_their_way(stager: Stager, paths: Any) -> int:
    """Return how many pieces were put before the first was waited for."""

    class Ending(Noted):
        def put(self, arrays: dict[str, Any], like: dict[str, Any]) -> Any:
            super().put(arrays, like)
            return SimpleNamespace(synchronize=end)

    def end() -> None:
        for transfer in noted.started:
            transfer.synchronize()
        raise RuntimeError("enough")

    noted = Ending(stager)
    with pytest.raises(RuntimeError, match="enough"):
        xferlib.load(paths, noted)
    count = len(noted.started)
    # It is in a cycle.
    noted.started.clear()
    return count


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_what_a_put_refuses_is_said_with_its_file(stager: Stager, path: Path, error: type[Exception]) -> None:
    class Refusing(Noted):
        def put(self, arrays: dict[str, Any], like: dict[str, Any]) -> Any:
            raise error("not this one")

    with pytest.raises(error, match="not this one") as caught:
        xferlib.load(path, Refusing(stager), dtype={"*": np.int16})
    where, *advice = caught.value.__notes__
    assert where == f"in {str(path)!r}"
    # As the file has it, the backend may lack it.
    assert [words.startswith("dtype= converts on the device") for words in advice] == [True] * (error is TypeError)


def test_members_of_an_archive_are_read_once(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays: dict[str, Any] = dict(ARRAYS)
    np.savez(tmp_path / "a.npz", **arrays)
    opened: list[str] = []
    open_member = zipfile.ZipFile.open

    def noted(archive: zipfile.ZipFile, name: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(name if isinstance(name, str) else name.filename)
        return open_member(archive, name, *arguments, **options)

    plain = Noted(stager)
    monkeypatch.setattr(zipfile.ZipFile, "open", noted)
    xferlib.load(tmp_path / "a.npz", plain)
    once = sorted(opened)
    opened.clear()
    xferlib.load(tmp_path / "a.npz", plain, like=arrays)
    assert sorted(opened) == once


def test_what_stands_in_a_stagers_place_is_given_what_the_tree_has_for_each_array(stager: Stager, path: Path) -> None:
    noted = Noted(stager)
    like = {"2": ARRAYS["2"], "5": ARRAYS["5"]}
    got = xferlib.load(path, noted, like=like)
    assert {name: array.tobytes() for name, array in got.items()} == {name: ARRAYS[name].tobytes() for name in like}
    assert [list(given) for given in noted.likes] == [["2"], ["5"]]
    assert all(given[name] is like[name] for given in noted.likes for name in given)


def test_what_is_not_alike_is_refused_before_anything_is_put(stager: Stager, path: Path) -> None:
    like = ARRAYS | {str(COUNT - 1): np.zeros(3, np.uint8)}
    with pytest.raises(ValueError, match=r"'5' is of shape \(1048576,\) and dtype uint8, and like has \(3,\) and uint8"):
        xferlib.load(path, stager, like=like)
    assert stager.stats().h2d_nbytes == 0


def descriptors(path: Path) -> int:
    """Return how often this process has the file open, or mapped."""
    opened = 0
    for name in os.listdir("/proc/self/fd"):
        # Other threads close theirs meanwhile.
        with suppress(FileNotFoundError):
            opened += os.path.samefile(f"/proc/self/fd/{name}", path)
    return opened + Path("/proc/self/maps").read_text().count(str(path))


def test_true_draws_a_bar_on_the_error_stream(stager: Stager, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    renamed = path.rename(path.with_name("[red]a.safetensors"))
    xferlib.load(renamed, stager, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "6.3/6.3 MB" in shown.err
    assert "[red]a.safetensors" in shown.err


@pytest.mark.parametrize("progress", [None, False])
def test_nothing_is_drawn_unless_asked_for(stager: Stager, path: Path, capsys: pytest.CaptureFixture[str], progress: Any) -> None:
    xferlib.load(path, stager, progress=progress)
    assert capsys.readouterr() == ("", "")


def test_what_cannot_be_called_is_refused(stager: Stager, path: Path) -> None:
    unfit: Any = 3
    with pytest.raises(TypeError, match="progress=3: expected True, or a function"):
        xferlib.load(path, stager, progress=unfit)


def test_an_interrupt_at_any_point_leaves_nothing_behind(stager: Stager, path: Path) -> None:
    """The largest part of the file is read ahead, so there is a thread as well."""
    large = {"a": np.full(5 * NBYTES, 1, np.uint8), "b": np.full(100, 2, np.uint8)}
    safetensors.numpy.save_file(large, path)
    before = descriptors(path)
    told: list[int] = []
    points = 0
    for point in itertools.count(1):
        if not interrupted_at(
            point, WITHIN, lambda: xferlib.load(path, stager, dtype={"b": np.int16}, progress=lambda done, total: told.append(done))
        ):
            break
        points = point
        # What was on its way when the interrupt came may still be, and its exception may be in a cycle.
        stager._ledger.wait_all()
        if descriptors(path) != before:
            gc.collect()
        # Who unmaps it behind the load has it for a moment.
        assert until(lambda: descriptors(path) == before), point
    assert points > 100
    assert told[-1] == 5 * NBYTES + 100
    deadline = time.monotonic() + 20
    while any(thread.name in ("xferlib-read-ahead", "xferlib-unmap") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    stager.trim()
    assert stager.stats().device_nbytes == 0


def test_an_interrupt_at_any_point_waits_for_a_copy_that_reads_the_file(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.safetensors"
    safetensors.numpy.save_file({"0": ARRAYS["0"]}, path)
    engine = stager.backend.h2d  # type: ignore[attr-defined]  # the host backend's own
    assert lost_copies(monkeypatch, "put", engine, ("files/load.py",), lambda: xferlib.load(path, stager)) > 10


@pytest.mark.parametrize("refusal", [xferlib.AllocationError, TypeError, ValueError])
def test_a_put_that_is_refused_does_not_wait_for_others(
    refusal: type[Exception], stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.safetensors"
    safetensors.numpy.save_file({"0": ARRAYS["0"]}, path)
    array = stager.put(np.ones(3), borrow=True).value

    def refuse(stager: Stager, tree: Any, **options: Any) -> Any:
        raise refusal("not this one")

    with held(stager.backend.d2h):  # type: ignore[attr-defined]  # the host backend's own
        transfer = stager.get(array)
        monkeypatch.setattr(Stager, "put", refuse)
        monkeypatch.setattr(Stager, "idle", lambda stager: pytest.fail("it waits for others"))
        with pytest.raises(refusal, match="not this one"):
            xferlib.load(path, stager)
        assert not transfer.done()
        monkeypatch.undo()


def test_an_interrupted_put_of_a_stager_that_was_closed_meanwhile_is_told_as_an_interrupt(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.safetensors"
    safetensors.numpy.save_file({"0": ARRAYS["0"]}, path)

    def cut_off(stager: Stager, tree: Any, **options: Any) -> Any:
        stager.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Stager, "put", cut_off)
    with pytest.raises(KeyboardInterrupt):
        xferlib.load(path, stager)


def test_small_members_of_an_archive_are_put_together(stager: Stager, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {f"small.{number}": np.full((3, number % 5), number, np.float32) for number in range(300)}
    arrays |= {f"large.{number}": np.full(70_000, number, np.int32) for number in range(2)}
    np.savez(tmp_path / "many.npz", **arrays)
    noted = Noted(stager)
    found = xferlib.load(tmp_path / "many.npz", noted, like=arrays)
    assert [len(like) for like in noted.likes] == [300, 1, 1]
    for name, array in arrays.items():
        np.testing.assert_array_equal(stager.get(found[name]).result(), array)
    # A damaged one is named all the same, and nothing is put.
    raw = bytearray((tmp_path / "many.npz").read_bytes())
    start = raw.index(np.full((3, 4), 299, np.float32).tobytes())
    raw[start] ^= 1
    (tmp_path / "damaged.npz").write_bytes(raw)
    again = Noted(stager)
    with pytest.raises(ValueError, match=r"damaged\.npz' is damaged.*'small\.299\.npy'"):
        xferlib.load(tmp_path / "damaged.npz", again)
    assert not again.started
