"""Arrays that several stagers share: the file is that of the whole arrays, byte for byte, and whatever goes wrong is told.

The stagers are of the host's backend, and the arrays are NumPy's: what knows their shards is made for the test.
"""

from __future__ import annotations

import errno
import gc
import itertools
import math
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import always_raises, held, on_thread, until
from tests.core.points import interrupted_at
from tests.files.saves import DTYPES, MIB, at_rest, bits, held_writes, only
from xferlib.byte_reader import ByteReader
from xferlib.files import outcome, regions, sharded, writing
from xferlib.files.sharded import ShardedReader
from xferlib.files.temporary import BORDER, TemporaryFile
from xferlib.memory.arrays import address_of
from xferlib.pending import Reading
from xferlib.stager import Stager

Cuts = Mapping[int, tuple[tuple[int, ...], ...]]


class Cut:
    """What knows the shards of arrays: each is cut along its axes, and its boxes go to the stagers in turn.

    `cuts`: by the identity of an array, where its axes are cut; others are shards themselves.
    """

    def __init__(self, stagers: list[Stager], cuts: Cuts | None = None) -> None:
        self.stagers = stagers
        self.backend = stagers[0].backend
        self.cuts = cuts or {}
        self.released = 0
        self._turns = itertools.cycle(stagers)

    def shards(self, array: Any) -> list[tuple[Stager, Any, tuple[int, ...]]]:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"expected an array, got {array!r}")
        if id(array) not in self.cuts:
            return [(next(self._turns), array, (0,) * array.ndim)]
        cuts = self.cuts[id(array)]
        axes = [itertools.pairwise([0, *cut, length]) for cut, length in zip(cuts, array.shape, strict=True)]
        boxes = itertools.product(*axes)
        return [
            (next(self._turns), array[tuple(slice(*ends) for ends in box)].copy(), tuple(start for start, _ in box))
            for box in boxes
        ]

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def stagers() -> Iterator[list[Stager]]:
    opened = [xferlib.stager("host", pinned_limit=64 * MIB) for _ in range(3)]
    yield opened
    for stager in opened:
        stager.close()


def saved(path: Path, tree: Any, arrays: Cut, **options: Any) -> bytes:
    save = xferlib.save(path, tree, arrays, **options)
    found = save.result(60).read_bytes()
    assert save.written == save.nbytes
    assert arrays.released
    only(path.parent, path.name)
    for stager in arrays.stagers:
        at_rest(stager)
        assert not stager._ledger.jobs.readings
    return found


def whole(folder: Path, name: str, tree: Any, **options: Any) -> bytes:
    """Return what one stager saves of the same tree."""
    other = folder / "whole"
    other.mkdir(exist_ok=True)
    with xferlib.stager("host") as stager:
        found = xferlib.save(other / name, tree, stager, **options).result(60).read_bytes()
    (other / name).unlink()
    other.rmdir()
    return found


def cut_at_random(random: np.random.Generator, array: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(sorted(set(random.integers(1, length, random.integers(0, 3)).tolist()))) if length > 1 else ()
        for length in array.shape
    )


@pytest.mark.parametrize("memory", [256 * MIB, 100_000, 33_333, 8192])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_the_file_is_that_of_whole_arrays(tmp_path: Path, stagers: list[Stager], suffix: str, memory: int) -> None:
    random = np.random.default_rng(memory)
    shapes = [(), (0,), (1,), (7,), (3, 0, 2), (300, 70), (5, 600, 7), (2, 3, 4, 5), (1, 9000), (9000, 1), (17, 513)]
    dtypes = DTYPES if suffix == ".safetensors" else DTYPES[:8]
    arrays = [bits(shape, dtypes[number]) for shape in shapes for number in random.choice(len(dtypes), 2, replace=False)]
    cuts = {id(array): cut_at_random(random, array) for array in arrays}
    tree: dict[str, Any] = {"layers": arrays}
    if suffix == ".safetensors":
        tree |= {"step": 3, "note": "text"}
    want = whole(tmp_path, f"a{suffix}", tree, memory=memory)
    if suffix == ".npz":
        # The format has the time of day in it.
        saved(tmp_path / "a.npz", tree, Cut(stagers, cuts), memory=memory)
        with np.load(tmp_path / "a.npz") as archive:
            assert [archive[f"layers.{number}"].tobytes() for number in range(len(arrays))] == [one.tobytes() for one in arrays]
        return
    assert saved(tmp_path / f"a{suffix}", tree, Cut(stagers, cuts), memory=memory) == want


@pytest.mark.parametrize("cuts", [((100, 250), ()), ((), (20, 21)), ((1, 299), (69,))], ids=str)
def test_each_byte_is_read_once_by_the_stager_that_has_it(tmp_path: Path, stagers: list[Stager], cuts: Any) -> None:
    array = bits((300, 70), np.dtype(np.float32))
    arrays = Cut(stagers, {id(array): cuts})
    assert saved(tmp_path / "a.npy", array, arrays, memory=20_000) == whole(tmp_path, "a.npy", array)
    shards = Cut(stagers, {id(array): cuts}).shards(array)
    for stager in stagers:
        assert stager.stats().d2h_nbytes == sum(shard.nbytes for owner, shard, _ in shards if owner is stager)


def test_what_lies_side_by_side_comes_to_its_place_without_the_cpu(
    tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it was laid out")

    monkeypatch.setattr(regions.Region, "lay", refuse)
    rows, one = bits((300, 70), np.dtype(np.float32)), bits((1, 5, 70), np.dtype(np.float32))
    cuts = {id(rows): ((100, 250), ()), id(one): ((), (2, 3), ())}
    for array in (rows, one):
        assert saved(tmp_path / "a.npy", array, Cut(stagers, cuts), memory=30_000) == whole(tmp_path, "a.npy", array)
    (tmp_path / "a.npy").unlink()
    # Of several arrays each device has several parts of a piece: large ones come to their places by a copy each.
    large = {str(number): bits((300, 700), np.dtype(np.float32)) for number in range(4)}
    cuts = {id(array): ((100, 250), ()) for array in large.values()}
    want = whole(tmp_path, "a.safetensors", large)
    assert saved(tmp_path / "a.safetensors", large, Cut(stagers, cuts)) == want
    small = {str(number): bits((300, 7), np.dtype(np.float32)) for number in range(4)}
    with pytest.raises(AssertionError, match="it was laid out"):
        saved(tmp_path / "b.safetensors", small, Cut(stagers, {id(array): ((100, 250), ()) for array in small.values()}))


@pytest.mark.parametrize("shift", [0, 256])
def test_what_is_laid_out_is_written_past_the_cache_too(
    tmp_path: Path, stagers: list[Stager], shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that lies at the borders of the file's blocks, as that which it was read to, wherever the pool's memory begins."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    (tmp_path / "probe").unlink()
    array = bits((2000, 301), np.dtype(np.uint16))
    want = whole(tmp_path, "a.npy", array)
    monkeypatch.setattr("xferlib.files.temporary._lies_in_memory", lambda descriptor: False)
    monkeypatch.setattr("xferlib.files.writing.DIRECT_FROM_NBYTES", 100_000)
    empty = ByteReader.empty
    monkeypatch.setattr(ByteReader, "empty", lambda self, size, *, wait=True: empty(self, size + shift, wait=wait)[shift:])
    written, write = list[int](), TemporaryFile._written_directly

    def noted(self: TemporaryFile, direct: Any, data: memoryview, offset: int) -> tuple[memoryview, int]:
        rest, end = write(self, direct, data, offset)
        written.append(end - offset)
        return rest, end

    monkeypatch.setattr(TemporaryFile, "_written_directly", noted)
    assert saved(tmp_path / "a.npy", array, Cut(stagers, {id(array): ((), (100, 200))}), memory=400_000) == want
    assert sum(written) > array.nbytes - 2 * BORDER


def test_memory_is_that_of_all_stagers_in_turn_or_of_one_that_has_room(tmp_path: Path, stagers: list[Stager]) -> None:
    arrays = [bits((100,), np.dtype(np.uint8)) for _ in stagers]
    reader = ShardedReader(Cut(stagers), arrays, snapshot=False)
    taken = [reader.empty(MIB) for _ in stagers]
    for stager in stagers:
        assert sum(stager._pool.contains(address_of(memory), memory.nbytes) for memory in taken) == 1
    del taken
    for stager in stagers:
        stager.trim()
    kept = [stager.empty_pinned(64 * MIB, np.uint8) for stager in stagers[:2]]
    some = [reader.empty(MIB, wait=False) for _ in stagers]
    assert all(stagers[2]._pool.contains(address_of(memory), memory.nbytes) for memory in some)
    with pytest.raises(xferlib.AllocationError):
        reader.empty(64 * MIB, wait=False)
    with pytest.raises(xferlib.AllocationError):
        reader.empty(64 * MIB)
    del kept, some
    # Where none has room, one waits for what will be free.
    backends: list[Any] = [stager.backend for stager in stagers]
    with ExitStack() as held_up:
        for stager, backend in zip(stagers, backends, strict=True):
            stager.trim()
            gate = held_up.enter_context(held(backend.d2h))
            stager.get(arrays[0], out=stager.empty_pinned(64 * MIB, np.uint8)[:100])
        emptying = on_thread(lambda: reader.empty(MIB))
        with pytest.raises(TimeoutError):
            emptying.result(0.05)
        gate.set()
        held_up.close()
        emptying.result(20)
    reader.close()
    # No more is taken than half of the smallest limit.
    with xferlib.stager("host", pinned_limit=2 * MIB) as small:
        array = bits((8 * MIB,), np.dtype(np.uint8))
        cut = Cut([*stagers, small], {id(array): ((MIB, 3 * MIB, 6 * MIB),)})
        before = [stager.stats().pinned_nbytes for stager in stagers]
        assert saved(tmp_path / "a.npy", array, cut) == whole(tmp_path, "a.npy", array)
        assert sum(stager.stats().pinned_nbytes for stager in stagers) - sum(before) <= MIB


@pytest.mark.parametrize("busy", range(3))
def test_memory_is_waited_for_where_something_in_flight_will_make_room(stagers: list[Stager], busy: int) -> None:
    array = bits((100,), np.dtype(np.uint8))
    reader = ShardedReader(Cut(stagers), [array] * 3, snapshot=False)
    backend: Any = stagers[busy].backend
    kept = [stager.empty_pinned(64 * MIB, np.uint8) for number, stager in enumerate(stagers) if number != busy]
    with held(backend.d2h) as gate:
        stagers[busy].get(array, out=stagers[busy].empty_pinned(64 * MIB, np.uint8)[:100])
        emptying = on_thread(lambda: reader.empty(MIB))
        with pytest.raises(TimeoutError):
            emptying.result(0.05)
        gate.set()
        memory = emptying.result(20)
    assert stagers[busy]._pool.contains(address_of(memory), memory.nbytes)
    reader.close()
    del kept


def breaks(stager: Stager, monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    """Have one of its copies fail to start."""
    calls, copy = itertools.count(), stager.backend.copy_d2h

    def failing(*arguments: int) -> None:
        if next(calls) == at:
            raise stager.backend.failures[0]("the device is gone")
        copy(*arguments)

    monkeypatch.setattr(stager.backend, "copy_d2h", failing)


@pytest.mark.parametrize("cuts", [((100_000, 200_000), ()), ((), (1, 2))], ids=["rows", "columns"])
@pytest.mark.parametrize("at", [0, 2])
def test_where_one_stager_fails_the_old_file_stays_and_nothing_is_under_way(
    tmp_path: Path, stagers: list[Stager], cuts: Any, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"old")
    array = bits((300_000, 3), np.dtype(np.uint8))
    breaks(stagers[1], monkeypatch, at=at)
    arrays = Cut(stagers, {id(array): cuts})
    save = xferlib.save(path, array, arrays, memory=200_000)
    with pytest.raises(xferlib.XferError, match="the device is gone"):
        save.result(60)
    save.wait_read(0)
    assert path.read_bytes() == b"old"
    only(tmp_path, "a.npy")
    assert arrays.released
    for stager in stagers:
        at_rest(stager)
        assert not stager._ledger.jobs.readings


def test_a_copy_that_fails_later_is_told_when_those_of_the_others_are_over(tmp_path: Path, stagers: list[Stager]) -> None:
    backends: list[Any] = [stager.backend for stager in stagers]
    array = bits((300, 3), np.dtype(np.uint8))
    reader = ShardedReader(Cut(stagers, {id(array): ((), (1, 2))}), array, snapshot=False)
    memory = reader.empty(array.nbytes)
    with held(backends[2].d2h) as gate:

        def broken() -> None:
            raise OSError("the device is gone")

        backends[0].d2h.submit(broken)
        read = reader.read_row(np.array([0]), 0, array.nbytes, memory)
        told: list[BaseException] = []

        def ask() -> None:
            try:
                read.result()
            except xferlib.TransferError as error:
                told.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(0.05)
        assert not told
        gate.set()
        asking.join(20)
    assert "the device is gone" in str(told[0])
    assert read.transfers[2].done()
    reader.close()


def test_where_one_cannot_be_started_those_before_it_are_over_before_it_is_said(
    tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = bits((300, 3), np.dtype(np.uint8))
    breaks(stagers[2], monkeypatch, at=0)
    reader = ShardedReader(Cut(stagers, {id(array): ((), (1, 2))}), array, snapshot=False)
    memory = reader.empty(array.nbytes)
    backend: Any = stagers[0].backend
    with held(backend.d2h) as gate:
        told: list[BaseException] = []

        def start() -> None:
            try:
                reader.read_row(np.array([0]), 0, array.nbytes, memory)
            except xferlib.XferError as error:
                told.append(error)

        starting = threading.Thread(target=start)
        starting.start()
        starting.join(0.05)
        assert not told
        gate.set()
        starting.join(20)
    assert len(told) == 1
    reader.close()


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"old")
    write = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset > 400_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    array = bits((1000, 1000), np.dtype(np.uint8))
    arrays = Cut(stagers, {id(array): ((), (300, 700))})
    with pytest.raises(OSError, match="No space left"):
        xferlib.save(path, array, arrays, memory=100_000).result(60)
    assert path.read_bytes() == b"old"
    only(tmp_path, "a.npy")
    assert arrays.released


def test_a_stager_that_is_closed_meanwhile_waits_for_the_save(
    tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = bits((MIB, 3), np.dtype(np.uint8))
    with held_writes(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, Cut(stagers, {id(array): ((), (1, 2))}), memory=20_000)
        closing = on_thread(stagers[1].close)
        with pytest.raises(TimeoutError):
            closing.result(0.05)
        gate.set()
        closing.result(20)
    assert np.load(save.result(60)).tobytes() == array.tobytes()


@pytest.mark.parametrize("number", [0, 2])
def test_what_is_refused_at_the_call_leaves_nothing(tmp_path: Path, stagers: list[Stager], number: int) -> None:
    array = bits((30, 3), np.dtype(np.uint8))
    arrays = Cut(stagers, {id(array): ((), (1, 2))})
    stagers[number].close()
    with pytest.raises(xferlib.ClosedError):
        xferlib.save(tmp_path / "a.npy", array, arrays)
    assert arrays.released == 1
    with pytest.raises(xferlib.ClosedError) as refused:
        xferlib.save(tmp_path / "a.npy", array, arrays)
    # Also as long as somebody has the error, and all that its frames hold.
    for stager in stagers:
        assert not stager._ledger.jobs.readings
    del refused
    # The first of them only `shards` knows, the second nobody takes for an array.
    for wrong, words in (
        (memoryview(b"a"), "expected an array, got <memory"),
        (NotImplemented, "NotImplementedType, which is neither"),
    ):
        with pytest.raises(TypeError, match=words) as caught:
            xferlib.save(tmp_path / "a.safetensors", {"a": array, "b": [wrong]}, Cut(stagers))
        assert caught.value.__notes__ == ["at tree.b[0]"]


class Whole:
    """An array of a library whose arrays have all that they have by themselves, and not by their class."""

    def __init__(self, array: Any) -> None:
        self.shape = array.shape
        self.dtype = array.dtype
        self.array = array


class CutWhole(Cut):
    def shards(self, array: Any) -> list[tuple[Stager, Any, tuple[int, ...]]]:
        return super().shards(array.array)


def test_an_array_is_one_whatever_its_class_has(tmp_path: Path, stagers: list[Stager]) -> None:
    array = np.arange(12.0)
    xferlib.save(tmp_path / "a.safetensors", {"a": Whole(array)}, CutWhole(stagers)).result(60)
    assert (xferlib.load(tmp_path / "a.safetensors", stagers[0])["a"] == array).all()


class Describing:
    """The host's backend, if it described its arrays."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    name = "describing"

    @staticmethod
    def describe(array: Any) -> Any:
        return None


def test_where_the_backend_describes_its_arrays_what_knows_the_shards_refuses_what_is_none(
    tmp_path: Path, stagers: list[Stager]
) -> None:
    cut = Cut(stagers)
    cut.backend = Describing(cut.backend)
    with pytest.raises(TypeError, match=r"^expected an array, got NotImplemented"):
        xferlib.save(tmp_path / "a.safetensors", {"a": np.zeros(3), "b": NotImplemented}, cut)


def test_a_piece_is_copied_by_those_that_have_a_part_of_it(stagers: list[Stager]) -> None:
    array = bits((30, 6), np.dtype(np.uint8))
    reader = ShardedReader(Cut(stagers, {id(array): ((10, 20), ())}), array, snapshot=False)
    memory = reader.empty(array.nbytes)
    for front, end, copies in ((0, 60, 1), (60, 120, 1), (59, 60, 1), (59, 61, 2), (30, 130, 3)):
        read = reader.read_row(np.array([0]), front, end - front, memory)
        assert len(read.transfers) == copies
        assert read.result().tobytes() == array.tobytes()[front:end]
    reader.close()


def test_a_put_into_what_is_read_waits_on_any_thread(
    tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the one that has called: others are to read."""
    arrays = [stager.put(np.zeros(MIB, np.uint8), borrow=True).result() for stager in stagers]
    with held_writes(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "a.safetensors", arrays, Cut(stagers), memory=50_000)
        asked = threading.Event()
        wait = Reading.wait

        def noted(self: Reading) -> None:
            asked.set()
            wait(self)

        def open_when_asked() -> None:
            asked.wait(20)
            gate.set()

        monkeypatch.setattr(Reading, "wait", noted)
        on_thread(open_when_asked)
        stagers[2].put(np.ones(MIB, np.uint8), into=arrays[2]).result()
        assert asked.is_set()
    assert not any(save.result(60).read_bytes()[-MIB:])
    assert arrays[2].all()


def test_threads_are_known_as_readers_of_all_stagers_while_they_read(stagers: list[Stager]) -> None:
    """A finalizer there is not to wait for them."""
    reader = ShardedReader(Cut(stagers), [bits((3,), np.dtype(np.uint8)) for _ in stagers], snapshot=False)
    reader.hand_over()
    reader.join()
    assert all(stager._ledger.jobs.reads_here for stager in stagers)
    reader.leave()
    assert not any(stager._ledger.jobs.reads_here for stager in stagers)
    reader.close()


def test_what_was_read_is_held_by_nobody(tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [stager.put(np.zeros(1000, np.uint8)).result() for stager in stagers]
    with held_writes(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "a.safetensors", arrays, Cut(stagers))
        save.wait_read(5)
        gone = [weakref.ref(array) for array in arrays]
        del arrays
        assert until(lambda: not any(array() is not None for array in gone))
        gate.set()
    save.result(20)


def test_a_release_that_fails_is_no_failure_of_the_save(
    tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Cut) -> None:
        raise xferlib.XferError("not all of the stager's memory could be given back")

    arrays = Cut(stagers)
    monkeypatch.setattr(Cut, "release", failing)
    assert np.load(xferlib.save(tmp_path / "a.npy", np.arange(3), arrays).result(60)).tolist() == [0, 1, 2]


def test_the_stagers_are_let_go_when_the_file_is_there_and_not_before_all_is_read(tmp_path: Path, stagers: list[Stager]) -> None:
    backend: Any = stagers[0].backend
    array = bits((30, 3), np.dtype(np.uint8))
    arrays = Cut(stagers, {id(array): ((), (1, 2))})
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, arrays)
        with pytest.raises(TimeoutError):
            save.wait_read(0.05)
        assert not arrays.released
        gate.set()
    save.result(60)
    assert arrays.released


def test_a_snapshot_is_one_of_all_shards(tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch) -> None:
    array = bits((30, 3), np.dtype(np.uint8))
    held_nbytes = [xferlib.save(tmp_path / "a.npy", array, Cut(stagers), snapshot=True).held_nbytes]
    full: Any = stagers[1].backend

    def refuse(*_: Any) -> None:
        raise MemoryError("there is no room")

    monkeypatch.setattr(full, "copied", refuse)
    save = xferlib.save(tmp_path / "a.npy", array, Cut(stagers, {id(array): ((10, 20), ())}), snapshot=True)
    assert [*held_nbytes, save.held_nbytes] == [0, array.nbytes]
    assert np.load(save.result(60)).tobytes() == array.tobytes()


@pytest.mark.parametrize("by_itself", [False, True], ids=["threads", "call"])
def test_an_interrupt_at_any_point_leaves_nothing(
    tmp_path: Path, stagers: list[Stager], by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the call, where threads write the file and where it writes by itself."""

    if by_itself:
        monkeypatch.setattr(writing, "start_new_thread", always_raises(RuntimeError, "can't start new thread"))
    array = bits((60, 30), np.dtype(np.uint16))
    path = tmp_path / "a.npy"
    within = ("files/save.py", "files/sharded.py", "files/regions.py", "files/writing.py")
    arrays: Any = None
    for point in itertools.count(1):
        path.write_bytes(b"old")
        arrays = Cut(stagers, {id(array): ((), (10, 20))})
        if not interrupted_at(point, within, partial(xferlib.save, path, array, arrays)):
            break
        assert until(lambda: not [save for save in outcome._under_way.values() if not save.is_dropped])
        gc.collect()
        for stager in stagers:
            stager.idle()
            stager._ledger.reap()
            assert not stager._ledger.jobs.readings
        only(tmp_path, "a.npy")
        if path.read_bytes() != b"old":
            assert np.load(path).tobytes() == array.tobytes()
    assert until(lambda: not outcome._under_way)
    assert point > (100 if by_itself else 30)


def test_an_interrupt_before_a_thread_begins_lets_the_stagers_go(
    tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "start_new_thread", too_early)
    arrays = Cut(stagers)
    with pytest.raises(KeyboardInterrupt):
        xferlib.save(tmp_path / "a.npy", np.arange(3), arrays)
    assert arrays.released == 1


def test_thousands_of_small_shards_are_worked_on_in_turns(
    tmp_path: Path, stagers: list[Stager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who launches work does not wait for the interpreter meanwhile."""
    turns: list[int] = []

    class Counted:
        def end_if_long(self) -> None:
            turns.append(1)

    monkeypatch.setattr(sharded, "Turn", Counted)
    tree = [bits((4, 3), np.dtype(np.uint8)) for _ in range(100)]
    cuts = {id(array): ((), (1, 2)) for array in tree}
    saved(tmp_path / "a.safetensors", tree, Cut(stagers, cuts))
    # One for each array as it is found, and one for each shard as it is laid.
    assert len(turns) == 100 + math.prod((100, 3))
