"""Reading ahead: what is not in the system's cache is asked for, in front of the copies, and nothing else is."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.numpy

import xferlib
from tests.core.fakes import on_thread, tampered, until
from xferlib.errors import TransferError
from xferlib.files.ahead import FileRange, Unmapping
from xferlib.memory.arrays import address_of
from xferlib.memory.foreign import file_of, mapped
from xferlib.stager import Stager

load_module: Any = sys.modules["xferlib.files.load"]
ahead_module: Any = sys.modules["xferlib.files.ahead"]
MIB = 1 << 20
SIZES = {"a": 5, "b": 3, "c": 3, "d": 9}


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host", strict=True) as stager:
        yield stager


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file({name: np.full(size * MIB, size, np.uint8) for name, size in SIZES.items()}, path)
    return path


class Advised:
    """What the system is asked to read of a file: where each range begins and ends."""

    def __init__(self, end: int) -> None:
        self.file_ranges: list[tuple[int, int]] = []
        self._end = end
        self._all = threading.Event()

    def __call__(self, descriptor: int, offset: int, nbytes: int) -> int:
        self.file_ranges.append((offset, offset + nbytes))
        if offset + nbytes >= self._end:
            self._all.set()
        return 0

    def wait(self, done: int, total: int) -> None:
        """Hold a load, as its progress, until the end of the file was asked for: it may be done before."""
        assert done < total or self._all.wait(20)


@pytest.fixture
def advised(path: Path, monkeypatch: pytest.MonkeyPatch) -> Advised:
    found = Advised(path.stat().st_size)
    monkeypatch.setattr(ahead_module, "_advise", found)
    return found


def is_cold(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def not_there(*_: Any) -> int:
        raise error

    monkeypatch.setattr(os, "preadv", not_there)


def places(path: Path) -> dict[str, tuple[int, int]]:
    """Where each array begins and ends: the writer has them by name, one behind the other."""
    ends = np.cumsum([path.stat().st_size - sum(SIZES.values()) * MIB, *(size * MIB for size in SIZES.values())])
    return {name: (int(start), int(end)) for name, start, end in zip(SIZES, ends[:-1], ends[1:], strict=True)}


def covered(advised: Advised, start: int, end: int) -> bool:
    for begin, finish in sorted(advised.file_ranges):
        if begin <= start:
            start = max(start, finish)
    return start >= end


@pytest.mark.parametrize("error", [BlockingIOError(), OSError(95, "not supported")], ids=["cold", "nobody knows"])
@pytest.mark.parametrize("names", [["a", "b", "c", "d"], ["d"]], ids=str)
def test_what_is_not_in_the_cache_is_asked_for_and_nothing_else(
    stager: Stager, path: Path, advised: Advised, monkeypatch: pytest.MonkeyPatch, error: OSError, names: list[str]
) -> None:
    is_cold(monkeypatch, error)
    got = xferlib.load(path, stager, names=names, progress=advised.wait)
    assert {name: int(array[-1]) for name, array in got.items()} == {name: SIZES[name] for name in names}
    start, end = places(path)[names[0]][0], path.stat().st_size
    assert covered(advised, start, end)
    assert all(start <= begin and until < end + (128 << 10) for begin, until in advised.file_ranges)


def test_what_is_in_the_cache_is_not_asked_for(stager: Stager, path: Path, advised: Advised) -> None:
    path.read_bytes()
    with path.open("rb") as stream:
        try:
            os.preadv(stream.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as error:
            pytest.skip(f"this file system does not tell what is in the cache: {error}")
    xferlib.load(path, stager)
    assert advised.file_ranges == []


def reads_ahead() -> bool:
    return any(thread.name == "xferlib-read-ahead" for thread in threading.enumerate())


def unmaps() -> bool:
    return any(thread.name == "xferlib-unmap" for thread in threading.enumerate())


def test_the_thread_is_gone_when_load_returns_or_raises(stager: Stager, path: Path) -> None:
    seen: list[bool] = []
    xferlib.load(path, stager, progress=lambda done, total: seen.append(reads_ahead()))
    assert seen == [False, True]
    assert not reads_ahead()

    def tell(done: int, total: int) -> None:
        if done:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        xferlib.load(path, stager, progress=tell)
    assert not reads_ahead()


def test_nothing_looks_at_a_file_that_is_closed(stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are done long before what is to be read ahead is asked for."""
    is_cold(monkeypatch, BlockingIOError())
    begun, goes_on, closed = threading.Event(), threading.Event(), []

    def slow(descriptor: int, *_: Any) -> int:
        begun.set()
        goes_on.wait(20)
        closed.append(not os.path.samefile(f"/proc/self/fd/{descriptor}", path))
        return 0

    monkeypatch.setattr(ahead_module, "_advise", slow)
    loading = on_thread(lambda: xferlib.load(path, stager))
    assert begun.wait(10)
    assert not wait([loading], 0.3).done
    goes_on.set()
    assert {name: int(array[0]) for name, array in loading.result(20).items()} == SIZES
    assert not any(closed)
    assert not reads_ahead()


def test_a_file_system_that_takes_no_advice_is_read_all_the_same(
    stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cold(monkeypatch, BlockingIOError())
    asked: list[int] = []

    def refused(descriptor: int, start: int, nbytes: int) -> int:
        asked.append(start)
        return errno.EINVAL

    monkeypatch.setattr(ahead_module, "_advise", refused)

    def tell(done: int, total: int) -> None:
        assert done < total or until(lambda: bool(asked))

    assert {name: int(array[0]) for name, array in xferlib.load(path, stager, progress=tell).items()} == SIZES
    assert len(asked) == 1 < path.stat().st_size // ahead_module.LOOK_EVERY


def resident(mapping: mmap.mmap) -> int:
    """Count the pages that are in the system's cache."""
    found = (ctypes.c_ubyte * (len(mapping) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(address_of(np.frombuffer(mapping, np.uint8)))
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapping)), found) == 0
    return sum(page & 1 for page in found)


def test_advice_brings_every_page_of_a_range_into_the_cache(tmp_path: Path) -> None:
    pages, advised = 2048, range(512, 1536)
    with open(tmp_path / "cold", "w+b") as file:
        file.write(bytes(pages * mmap.PAGESIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapping = mmap.mmap(file.fileno(), 0)
        if resident(mapping):
            pytest.skip("this file system keeps all in memory")

        def all_came() -> bool:
            """Ask again: where the system is short of memory it leaves some out. Of what is not asked for, none ever comes."""
            assert ahead_module._advise(file.fileno(), advised.start * mmap.PAGESIZE, len(advised) * mmap.PAGESIZE) == 0
            return resident(mapping) >= len(advised)

        assert until(all_came)
    assert ahead_module._advise(-1, 0, 1) == errno.EBADF


def test_where_not_all_bytes_are_needed_nothing_is_asked_for(
    stager: Stager, path: Path, advised: Advised, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parts:
        """Stands in the stager's place, as if another process needed a part of each array."""

        whole = False
        patterns: ClassVar[dict[str, list[str]]] = {}
        backend = stager.backend

        def put(self, arrays: dict[str, Any], like: dict[str, Any]) -> xferlib.Transfer[Any]:
            return stager.put(arrays, borrow=True)

        def idle(self) -> None: ...

        def wait(self, arrays: list[Any]) -> None: ...

        def trim(self) -> None: ...

    is_cold(monkeypatch, BlockingIOError())
    got = xferlib.load(path, Parts())
    assert {name: int(array[0]) for name, array in got.items()} == SIZES
    assert advised.file_ranges == []


def mapped_nbytes(path: Path) -> int:
    """Return how many bytes of a file's mappings have pages."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_what_was_mapped_is_unmapped_behind(path: Path) -> None:
    data = path.read_bytes()
    with path.open("rb") as stream:
        raw = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    start, nbytes = 12_345, 9 * MIB
    file_range = FileRange(0, start, nbytes, raw.ctypes.data + start)
    assert raw[start : start + nbytes].tobytes() == data[start : start + nbytes]
    assert mapped_nbytes(path) >= nbytes
    with Unmapping() as behind:
        behind([file_range._replace(nbytes=10), file_range._replace(nbytes=0)], raw)
        assert not unmaps()
        behind([file_range], raw)
        # Its first and its last page may have bytes of others, and the system maps some around a fault.
        assert until(lambda: mapped_nbytes(path) <= 2 * MIB)
    assert raw[start : start + nbytes].tobytes() == data[start : start + nbytes]


def test_a_mapping_is_held_while_it_is_unmapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory that came there meanwhile would lose what is in it."""
    begun, goes_on = threading.Event(), threading.Event()

    def slow(address: int, nbytes: int, advice: int) -> None:
        begun.set()
        goes_on.wait(20)

    monkeypatch.setattr(ahead_module, "_madvise", slow)
    with path.open("rb") as stream:
        raw = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        file_range = FileRange(stream.fileno(), 0, raw.nbytes, raw.ctypes.data)
        held = weakref.ref(raw)
        with Unmapping() as behind:
            behind([file_range], raw)
        # Nobody waits for it.
        del raw
        assert begun.wait(20)
        assert held() is not None
        goes_on.set()
        assert until(lambda: held() is None)
        assert until(lambda: not unmaps())


def test_a_mapping_is_let_go_of_while_the_thread_waits_for_another(path: Path) -> None:
    with path.open("rb") as stream:
        raw = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    held = weakref.ref(raw)
    with Unmapping() as behind:
        behind([FileRange(0, 0, raw.nbytes, raw.ctypes.data)], raw)
        del raw
        assert until(lambda: held() is None)


def test_a_load_that_fails_waits_for_what_is_being_unmapped_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    # Behind loads that did not fail it goes on.
    assert until(lambda: not unmaps())
    begun, joined = threading.Event(), threading.Event()
    unmapped: list[tuple[int, int]] = []
    join = threading.Thread.join

    def slow(address: int, nbytes: int, advice: int) -> None:
        unmapped.append((address, nbytes))
        begun.set()
        joined.wait(20)

    def waited_for(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.set()
        join(thread, timeout)

    monkeypatch.setattr(ahead_module, "_madvise", slow)
    monkeypatch.setattr(threading.Thread, "join", waited_for)
    # Of two files, so they are not joined. Nothing is there: it would be unmapped by what stands in its place here.
    apart = [FileRange(file, 0, 4 * MIB, 64 * MIB * file + 100) for file in (1, 2)]
    try:
        with pytest.raises(RuntimeError, match="enough"), Unmapping() as behind:
            behind(apart, None)
            behind(apart, None)
            assert begun.wait(20)
            raise RuntimeError("enough")
        assert not unmaps()
    finally:
        joined.set()
    # Whole pages of its own.
    assert unmapped == [(64 * MIB + mmap.PAGESIZE, 4 * MIB - mmap.PAGESIZE)]


@pytest.mark.parametrize(
    ("starts", "joined"),
    [
        ([(1, 0), (1, 100)], [(1, 0, 200)]),
        ([(1, 0), (1, 100 + ahead_module.GAP)], [(1, 0, 200 + ahead_module.GAP)]),
        ([(1, 0), (1, 101 + ahead_module.GAP)], [(1, 0, 100), (1, 101 + ahead_module.GAP, 100)]),
        ([(1, 0), (1, 100), (1, 300)], [(1, 0, 400)]),
        # As in a file whose header names them in another order.
        ([(1, 100), (1, 0)], [(1, 100, 100), (1, 0, 100)]),
        ([(1, 0), (2, 100)], [(1, 0, 100), (2, 100, 100)]),
        ([], []),
    ],
)
def test_ranges_are_joined_where_they_follow_each_other(starts: list[tuple[int, int]], joined: list[tuple[int, int, int]]) -> None:
    file_ranges = [FileRange(file, start, 100, start) for file, start in starts]
    assert [one[:3] for one in ahead_module._joined(file_ranges)] == joined


def test_the_driver_is_not_asked_about_what_a_load_has_mapped_for_itself(path: Path) -> None:
    """A model has thousands of arrays, and each question takes microseconds."""
    backend = tampered()
    asked: list[int] = []

    def is_pinned(address: int, nbytes: int) -> bool:
        asked.append(nbytes)
        return bool(backend.inner.is_pinned(address, nbytes))

    backend.is_pinned = is_pinned
    with xferlib.stager(backend) as stager:
        asked.clear()
        assert {name: int(array[0]) for name, array in xferlib.load(path, stager).items()} == SIZES
        assert asked == []


def test_two_pieces_are_read_ahead_of_those_that_are_put(stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "PIECE_NBYTES", MIB)
    told: list[str] = []
    put = Stager.put

    def asked(_: object, file_ranges: Iterator[FileRange]) -> None:
        told.append(f"read {next(file_ranges).nbytes // MIB}")

    def noted(stager: Stager, arrays: dict[str, Any], **options: Any) -> Any:
        told.extend(f"put {array.nbytes // MIB}" for array in arrays.values())
        return put(stager, arrays, **options)

    monkeypatch.setattr(ahead_module.ReadAhead, "__call__", asked)
    monkeypatch.setattr(Stager, "put", noted)
    xferlib.load(path, stager)
    assert told == ["read 5", "read 3", "read 3", "put 5", "read 9", "put 3", "put 3", "put 9"]


def test_a_load_does_without_threads_of_its_own(stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_to_be_had(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_to_be_had)
    assert {name: int(array[0]) for name, array in xferlib.load(path, stager).items()} == SIZES


def test_arrays_are_read_from_the_file_and_no_page_is_mapped(stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "PIECE_NBYTES", 5 * MIB)
    # The first one to be asked holds up nothing that would unmap.
    monkeypatch.setattr(ahead_module, "_madvise", lambda *_: None)
    before, looks = open_files(), []

    def tell(done: int, total: int) -> None:
        looks.append(mapped_nbytes(path))

    got = xferlib.load(path, stager, progress=tell)
    assert {name: int(array[-1]) for name, array in got.items()} == SIZES
    assert len(looks) > 2
    assert looks == [0] * len(looks)
    # The engine closes its own a moment behind the end.
    assert until(lambda: open_files() == before)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_is_closed_is_read_through_its_mapping(stager: Stager, path: Path) -> None:
    with path.open("rb") as stream:
        raw = mapped(stream)
        array = raw[MIB : 3 * MIB]
        assert file_of(array) is file_of(raw) is not None
    assert file_of(array) is None
    assert file_of(np.zeros(8, np.uint8)) is None
    assert file_of(np.frombuffer(bytes(8), np.uint8)) is None
    got = stager.put(array, borrow=True).result()
    assert mapped_nbytes(path) >= array.nbytes
    assert got.tobytes() == path.read_bytes()[MIB : 3 * MIB]


def test_a_transfer_that_is_kept_keeps_no_file_mapped(stager: Stager, path: Path) -> None:
    with path.open("rb") as stream:
        raw = mapped(stream)
        found = file_of(raw)
        assert found is not None
        pages = weakref.ref(found)
        transfer = stager.put(raw[: 4 << 20], borrow=True)
        del raw, found
        transfer.synchronize()
        # The thread that calls the device lets go of the job a moment later.
        assert until(lambda: pages() is None)
    assert transfer.value.nbytes == 4 << 20


def test_a_file_that_loses_a_few_bytes_meanwhile_is_an_error(stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than a page has: a mapping would have zeros there."""
    monkeypatch.setattr(load_module, "PIECE_NBYTES", 5 * MIB)
    size = path.stat().st_size

    def cut(done: int, total: int) -> None:
        # When it is mapped. The last array is not asked for yet.
        if done:
            os.truncate(path, size - 10)

    with pytest.raises(TransferError, match="cut off"):
        xferlib.load(path, stager, progress=cut)
    with path.open("ab") as file:
        file.write(bytes([SIZES["d"]] * 10))
    assert {name: int(array[-1]) for name, array in xferlib.load(path, stager).items()} == SIZES


class Halves:
    """Stands in the stager's place, and puts every other item of each array: no run of bytes, so they are read from the mapping."""

    whole = True
    patterns: ClassVar[dict[str, list[str]]] = {}

    def __init__(self, stager: Stager) -> None:
        self.backend = stager.backend
        self._stager = stager

    def put(self, arrays: dict[str, Any], like: dict[str, Any]) -> xferlib.Transfer[Any]:
        return self._stager.put({name: array[::2] for name, array in arrays.items()}, borrow=True)

    def idle(self) -> None: ...

    def wait(self, arrays: list[Any]) -> None: ...

    def trim(self) -> None: ...


def test_pages_of_arrays_that_are_on_the_device_are_unmapped_while_others_are_put(
    stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all of it is left to the end, when nothing is copied any more."""
    monkeypatch.setattr(load_module, "PIECE_NBYTES", 5 * MIB)
    # At the end nothing is left but pages around the ends.
    looks: list[bool] = []

    def tell(done: int, total: int) -> None:
        looks.append(until(lambda: mapped_nbytes(path) <= total - done + MIB))

    got = xferlib.load(path, Halves(stager), progress=tell)
    assert {name: int(array[-1]) for name, array in got.items()} == SIZES
    assert len(looks) > 2
    assert all(looks)
    assert until(lambda: not unmaps())
