"""A save goes on beside the program: what it holds up and what it does not, in which order files come, what it takes."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream, open_stager

import xferlib
from tests.core.fakes import held, on_thread, until
from tests.files.saves import MIB, bits, held_files, held_writes, only, same, there
from xferlib import ledger
from xferlib.byte_reader import ByteReader
from xferlib.files import outcome, pace, writing
from xferlib.files.pace import READS_AHEAD
from xferlib.files.plan import MOST_ARRAYS, Layout, Plan
from xferlib.files.temporary import TemporaryFile
from xferlib.stager import Stager


def test_the_file_has_what_the_arrays_held_at_the_call(stager: Stager, tmp_path: Path) -> None:
    """And an array that is overwritten by a put is read first."""
    backend: Any = stager.backend
    old, new = bits((MIB,), np.dtype(np.uint8)), bits((MIB,), np.dtype(np.uint8))
    array = there(stager, old)
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager, memory=128 * 1024)
        overwriting = on_thread(lambda: stager.put(new, into=array).result())
        time.sleep(0.05)
        assert not overwriting.done()
        assert not save.done()
        gate.set()
    overwriting.result(20)
    same(np.load(save.result(20)), old)
    same(array, new)


def test_another_stagers_put_waits_as_well(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    old, new = bits((MIB,), np.dtype(np.uint8)), bits((MIB,), np.dtype(np.uint8))
    array = there(stager, old)
    with xferlib.stager("host") as other, held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager, memory=128 * 1024)
        overwriting = on_thread(lambda: other.put(new, into=array).result())
        time.sleep(0.05)
        assert not overwriting.done()
        gate.set()
        overwriting.result(20)
    same(np.load(save.result(20)), old)


def test_a_load_from_where_a_save_is_under_way_says_so(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "a.npy", tmp_path / "b.npy"
    (tmp_path / "link").symlink_to(tmp_path)
    with held_files(monkeypatch):
        save = xferlib.save(path, there(stager, np.arange(3)), stager)
        for name in (path, tmp_path / "link" / path.name):
            with pytest.raises(FileNotFoundError, match=r"a save to it is under way.*result\(\)"):
                xferlib.load(name, stager)
        with pytest.raises(FileNotFoundError, match="No such file"):
            xferlib.load(other, stager)
        save.cancel()
        # It will give its name to no file.
        with pytest.raises(FileNotFoundError, match="No such file"):
            xferlib.load(path, stager)
    xferlib.save(path, there(stager, np.arange(3)), stager).result(20)
    same(stager.get(xferlib.load(path, stager)).result(), np.arange(3))


@pytest.mark.parametrize("named", [True, False])
def test_it_waits_for_the_stream_that_fills_the_array(stager: Stager, tmp_path: Path, named: bool) -> None:
    gate, array = threading.Event(), np.zeros(1000, np.uint8)
    with closing(Stream()) as stream:
        stream.submit(gate.wait, 20)
        stream.submit(array.fill, 7)
        if named:
            save = xferlib.save(tmp_path / "a.npy", array, stager, stream=stream)
        else:
            with stream:
                save = xferlib.save(tmp_path / "a.npy", array, stager)
        with pytest.raises(TimeoutError):
            save.wait_read(0.1)
        gate.set()
        assert (np.load(save.result(20)) == 7).all()


def test_the_call_lays_nothing_out(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of arrays that takes a while. The threads do it."""
    gate, lay_out, makers = threading.Event(), Plan.laid_out, []

    def held_back(self: Plan) -> Layout:
        makers.append(threading.get_ident())
        gate.wait(20)
        return lay_out(self)

    monkeypatch.setattr(Plan, "laid_out", held_back)
    save = xferlib.save(tmp_path / "a.safetensors", {"w": there(stager, np.arange(3))}, stager)
    assert not save.done()
    gate.set()
    save.result(20)
    assert makers
    assert threading.get_ident() not in makers


def test_its_threads_start_one_by_one(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have the interpreter in between."""
    seen: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if thread.name == "xferlib-save":
            seen.append("start")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    monkeypatch.setattr("xferlib.files.writing.give_way", lambda: seen.append("give way"))
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    xferlib.save(tmp_path / "a.npy", array, stager, memory=MIB).result(20)
    assert len(seen) >= 4
    assert seen == ["start", "give way"] * (len(seen) // 2)


def test_it_returns_while_the_copies_are_held_and_waits_for_what_was_read(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        with pytest.raises(TimeoutError, match="have not been read"):
            save.wait_read(0.05)
        with pytest.raises(TimeoutError, match="has not ended"):
            save.result(0.01)
        assert "under way" in repr(save)
        assert not save.done()
        gate.set()
        save.wait_read(20)
        array[:] = 0
        save.result(20)
    assert "done" in repr(save)
    assert np.load(save.path).any()


@pytest.mark.parametrize("wait", ["result", "wait_read"])
def test_a_finalizer_does_not_wait_for_ever(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    """The collector may run it on the very thread that writes."""
    monkeypatch.setattr("xferlib.uninterrupted.FINALIZER_SECONDS", 0.05)
    backend: Any = stager.backend
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    told: list[str] = []

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            with suppress(TimeoutError):
                getattr(save, wait)(0.01)
            try:
                getattr(save, wait)()
            except xferlib.XferError as error:
                told.append(str(error))

    def collect() -> None:
        Garbage()
        gc.collect()

    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        on_thread(collect).result(20)
        gate.set()
        assert save.result(20).exists()
    assert "a finalizer that the garbage collector runs has waited long" in told[0]


def test_what_is_read_is_free_before_it_is_written(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = there(stager, np.zeros(1000, np.uint8))
    with held_writes(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        save.wait_read(5)
        on_thread(lambda: stager.put(np.ones(1000, np.uint8), into=array).result()).result(20)
        assert not save.done()
        gate.set()
    assert not np.load(save.result(20)).any()


def test_arrays_of_which_a_piece_is_left_are_not_read(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = there(stager, np.zeros(MIB, np.uint8))
    with held_writes(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager, memory=64 * 1024)
        with pytest.raises(TimeoutError):
            save.wait_read(0.2)
        gate.set()
        save.wait_read(20)
    save.result(20)


def test_what_was_read_is_held_by_nobody(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = there(stager, np.zeros(1000, np.uint8))
    with held_writes(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        save.wait_read(5)
        gone = weakref.ref(array)
        del array
        assert until(lambda: gone() is None)
        gate.set()
    save.result(20)


def test_a_thread_that_ends_reads_no_more(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one may have its number, and must be waited for and wait as others do."""
    backend: Any = stager.backend
    empty, asked = ByteReader.empty, []

    def scarce(self: ByteReader, nbytes: int, *, wait: bool = True) -> Any:
        asked.append(nbytes)
        if len(asked) > 1:
            raise xferlib.AllocationError("no more")
        return empty(self, nbytes, wait=wait)

    monkeypatch.setattr(ByteReader, "empty", scarce)
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager, memory=512 * 1024)
        (reading,) = stager._ledger.jobs.readings.values()
        assert until(lambda: len(asked) == 2 and len(reading.threads) == 1)
        gate.set()
    same(np.load(save.result(20)), array)


def test_a_snapshot_holds_up_nobody(stager: Stager, tmp_path: Path) -> None:
    """What is enqueued behind the call may overwrite the arrays, while nothing of them has crossed yet, and drop them."""
    backend: Any = stager.backend
    turned = bits((30, 40), np.dtype(np.float32)).T
    tree: dict[str, Any] = {"a": bits((MIB,), np.dtype(np.uint8)), "b": [turned, np.float64(3)], "step": 3}
    want = {"a": tree["a"].copy(), "b.0": turned.copy(), "b.1": np.array(3.0)}
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.safetensors", tree, stager, memory=128 * 1024, snapshot=True)
        save.wait_read(0)
        assert save.held_nbytes == 0
        assert not save.done()
        stager.put(np.zeros(MIB, np.uint8), into=tree["a"]).result(20)
        turned[:] = 0
        gone = weakref.ref(tree["a"])
        del tree
        gate.set()
    back = xferlib.load(save.result(20), stager)
    for name, array in want.items():
        same(back[name], array)
    assert until(lambda: gone() is None)


def test_a_snapshot_is_of_what_the_stream_has_enqueued_so_far(stager: Stager, tmp_path: Path) -> None:
    gate, array = threading.Event(), np.zeros(1000, np.uint8)
    with closing(Stream()) as stream:
        stream.submit(gate.wait, 20)
        stream.submit(array.fill, 7)
        save = xferlib.save(tmp_path / "a.npy", array, stager, stream=stream, snapshot=True)
        stream.submit(array.fill, 9)
        save.wait_read(0)
        gate.set()
        assert (np.load(save.result(20)) == 7).all()


def test_without_room_for_a_snapshot_the_arrays_are_read(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = stager.backend

    def full(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(backend, "copied", full)
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager, snapshot=True)
        assert save.held_nbytes == save.nbytes == MIB
        with pytest.raises(TimeoutError, match="have not been read"):
            save.wait_read(0.05)
        gate.set()
    same(np.load(save.result(20)), array)


def test_a_backend_that_copies_no_arrays_makes_no_snapshot(tmp_path: Path) -> None:
    with xferlib.stager(WithoutCopies(open_stager())) as stager:
        with pytest.raises(xferlib.CapabilityError, match="copies no arrays on the device"):
            xferlib.save(tmp_path / "a.npy", np.zeros(3), stager, snapshot=True)
        assert not stager._ledger.jobs.readings
    only(tmp_path)


class WithoutCopies:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "copied":
            raise AttributeError(name)
        return getattr(self.inner, name)


def test_closing_the_stager_waits_for_the_save(tmp_path: Path) -> None:
    array = bits((3 * MIB,), np.dtype(np.uint8))
    with xferlib.stager("host") as stager:
        save = xferlib.save(tmp_path / "a.npy", stager.put(array).value, stager, memory=256 * 1024)
    same(np.load(save.result(20)), array)


def test_a_stager_that_is_dropped_lets_it_end(tmp_path: Path) -> None:
    array = bits((3 * MIB,), np.dtype(np.uint8))
    stager = xferlib.stager("host")
    save = xferlib.save(tmp_path / "a.npy", stager.put(array).value, stager, memory=256 * 1024)
    with pytest.warns(ResourceWarning, match="never closed"):
        del stager
    same(np.load(save.result(20)), array)


def test_saves_to_one_path_come_there_in_order(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    path = tmp_path / "latest.npy"
    arrays = [there(stager, np.full(MIB // 8, number, np.uint8)) for number in range(6)]
    with held(backend.d2h) as gate:
        saves = [xferlib.save(path, array, stager) for array in arrays]
        gate.set()
    for save in saves:
        save.result(20)
    assert np.load(path)[0] == 5
    only(tmp_path, path.name)


@pytest.mark.parametrize("names", [("latest.npy", "latest.npy"), ("step_1.npy", "step_2.npy")])
def test_an_older_save_does_not_come_behind_a_newer_one(stager: Stager, tmp_path: Path, names: tuple[str, str]) -> None:
    """The older one's copies are held, the newer one's are not: it waits with its name."""
    backend: Any = stager.backend
    with xferlib.stager("host") as other, held(backend.d2h) as gate:
        first = xferlib.save(tmp_path / names[0], there(stager, np.zeros(10, np.uint8)), stager)
        second = xferlib.save(tmp_path / names[1], there(other, np.ones(10, np.uint8)), other)
        assert until(lambda: second.written == 10)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        gate.set()
        second.result(20)
        assert first.done()
    assert np.load(tmp_path / names[1])[0] == 1


def test_files_that_have_nothing_to_do_with_each_other_do_not_wait(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    with xferlib.stager("host") as other, held(backend.d2h) as gate:
        slow = xferlib.save(tmp_path / "step_1.npy", there(stager, np.zeros(10, np.uint8)), stager)
        xferlib.save(tmp_path / "best.npy", there(other, np.ones(10, np.uint8)), other).result(20)
        xferlib.save(tmp_path / "step_1.npz", {"a": there(other, np.ones(10, np.uint8))}, other).result(20)
        assert not slow.done()
        gate.set()
    slow.result(20)


def test_a_save_that_has_ended_keeps_none_before_it(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.zeros(10, np.uint8))
    first = xferlib.save(tmp_path / "s_1.npy", array, stager)
    second = xferlib.save(tmp_path / "s_2.npy", array, stager)
    second.result(20)
    gone = weakref.ref(first._outcome)
    del first
    assert until(lambda: gone() is None)


def test_many_at_once_from_many_threads(stager: Stager, tmp_path: Path) -> None:
    arrays = [bits((300_000 + number,), np.dtype(np.uint8)) for number in range(12)]

    def save(number: int) -> Path:
        return xferlib.save(tmp_path / f"{number}.npy", there(stager, arrays[number]), stager, memory=128 * 1024).result(60)

    for number, future in enumerate([on_thread(lambda number=number: save(number)) for number in range(12)]):  # type: ignore[misc]
        same(np.load(future.result(60)), arrays[number])
    assert not [thread for thread in threading.enumerate() if thread.name == "xferlib-save"]
    only(tmp_path, *(f"{number}.npy" for number in range(12)))


def test_keep_leaves_the_newest(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.zeros(4, np.uint8))
    others = [tmp_path / name for name in ("step_x.npy", "step_7.npz", "best_7.npy", "step_7_old.npy")]
    for other in others:
        other.write_bytes(b"")
    for step in (900, 5, 30, 2000):
        xferlib.save(tmp_path / f"step_{step}.npy", array, stager, keep=2).result()
        # Times are told apart by the clock of the file system.
        time.sleep(0.02)
    only(tmp_path, "step_30.npy", "step_2000.npy", *(other.name for other in others))
    xferlib.save(tmp_path / "step_1.npy", array, stager, keep=1).result()
    only(tmp_path, "step_1.npy", *(other.name for other in others))


def test_keep_removes_none_where_there_are_fewer(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.zeros(4, np.uint8))
    for step in range(4):
        xferlib.save(tmp_path / f"step_{step}.npy", array, stager, keep=6).result(20)
    only(tmp_path, *(f"step_{step}.npy" for step in range(4)))


def test_keep_goes_by_the_order_of_the_calls(stager: Stager, tmp_path: Path) -> None:
    """The first is the last to be written."""
    large, small = there(stager, bits((2 * MIB,), np.dtype(np.uint8))), there(stager, np.zeros(3, np.uint8))
    saves = [xferlib.save(tmp_path / "s_1.npy", large, stager, memory=128 * 1024, rate_limit=8 * MIB, keep=2)]
    saves += [xferlib.save(tmp_path / f"s_{step}.npy", small, stager, keep=2) for step in (2, 3)]
    for save in saves:
        save.result(20)
    only(tmp_path, "s_2.npy", "s_3.npy")


def test_what_is_loaded_is_of_one_file_though_others_take_its_place(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    stop = threading.Event()

    def states() -> Iterator[Any]:
        for step in itertools.count():
            # With headers and sizes that differ.
            yield {"w": np.full(1000 + step % 7, step, np.int32), "step": step, "pad": "x" * (step % 300)}

    def save() -> None:
        with xferlib.stager("host") as own:
            for state in states():
                xferlib.save(path, own.put(state, borrow=True).result(), own).result()
                if stop.is_set():
                    return

    xferlib.save(path, there(stager, next(states())), stager).result()
    saving = on_thread(save)
    try:
        for _ in range(100):
            got = xferlib.load(path, stager)["w"]
            step = int(got[0])
            assert len(got) == 1000 + step % 7
            assert (got == step).all()
            with suppress(ValueError):
                like: Any = {"w": np.zeros(1000 + step % 7, np.int32), "step": 0, "pad": ""}
                back = xferlib.load(path, stager, like=like)
                assert (back["w"] == back["step"]).all()
    finally:
        stop.set()
        saving.result(20)


def test_a_working_directory_that_changes_meanwhile_changes_nothing(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = stager.backend
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with held(backend.d2h) as gate, held_files(monkeypatch) as files:
        save = xferlib.save("a.npy", there(stager, np.arange(3)), stager)
        monkeypatch.chdir(elsewhere)
        files.set()
        gate.set()
    save.result(20)
    only(tmp_path, "a.npy", "elsewhere")
    only(elsewhere)


def test_it_reads_no_faster_than_it_may(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, bits((2 * MIB,), np.dtype(np.uint8)))
    began = time.monotonic()
    path = xferlib.save(tmp_path / "slow.npy", array, stager, memory=256 * 1024, rate_limit=4 * MIB).result()
    # The last piece is read at once when those before it had their time.
    assert time.monotonic() - began >= (2 * MIB - 128 * 1024) / (4 * MIB)
    same(np.load(path), array)


def test_it_does_not_make_up_for_time_in_which_it_could_not_read(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = there(stager, bits((2 * MIB,), np.dtype(np.uint8)))
    with held_files(monkeypatch) as gate:
        save = xferlib.save(tmp_path / "slow.npy", array, stager, memory=256 * 1024, rate_limit=4 * MIB)
        time.sleep(0.4)
        began = time.monotonic()
        gate.set()
    save.result(20)
    assert time.monotonic() - began >= (2 * MIB - 128 * 1024) / (4 * MIB)


def test_it_takes_no_more_memory_than_it_may(stager: Stager, tmp_path: Path) -> None:
    # Nothing was put: there is nothing else in the pool. Requests below a MiB share segments of two.
    xferlib.save(tmp_path / "a.npy", bits((8 * MIB,), np.dtype(np.uint8)), stager, memory=MIB).result()
    assert stager._pool.nbytes == 2 * MIB


def test_it_takes_half_of_the_pool_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, write = threading.Barrier(2), TemporaryFile.write

    def together(self: TemporaryFile, data: memoryview, offset: int) -> None:
        if offset and not both.broken:
            # Until each thread has its memory, or there is no other.
            with suppress(threading.BrokenBarrierError):
                both.wait(2)
        write(self, data, offset)

    monkeypatch.setattr(TemporaryFile, "write", together)
    with xferlib.stager("host", pinned_limit=8 * MIB) as stager:
        # Nothing was put: there is nothing else in the pool.
        array = bits((20 * MIB,), np.dtype(np.uint8))
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager).result()), array)
        assert stager._pool.nbytes == 4 * MIB


def test_many_threads_take_no_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.files.writing.usable_cores", lambda: 16)
    with xferlib.stager("host", pinned_limit=64 * MIB) as stager:
        array = bits((20 * MIB,), np.dtype(np.uint8))
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager, memory=4 * MIB).result()), array)
        assert stager._pool.nbytes <= 4 * MIB


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (4, 4), (8, 8), (12, 8), (16, 10), (24, 15), (64, 16)])
def test_where_there_are_many_cores_the_threads_leave_some_to_others(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    started: list[None] = []
    start = writing.Writing._start_one

    def counted(self: writing.Writing) -> bool:
        started.append(None)
        return start(self)

    monkeypatch.setattr(writing, "usable_cores", lambda: cores)
    monkeypatch.setattr(writing, "PIECE_NBYTES", 64 << 10)
    monkeypatch.setattr(writing.Writing, "_start_one", counted)
    array = there(stager, bits((2 * MIB,), np.dtype(np.uint8)))
    same(np.load(xferlib.save(tmp_path / "a.npy", array, stager).result()), np.asarray(array))
    assert len(started) == threads


def test_it_needs_little_of_a_pool_that_is_full(tmp_path: Path) -> None:
    with xferlib.stager("host", pinned_limit=4 * MIB) as stager:
        array = there(stager, bits((8 * MIB,), np.dtype(np.uint8)))
        kept = stager.empty_pinned(2 * MIB, np.uint8)
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager).result()), array)
        del kept


@pytest.mark.parametrize("limit", [16 * 1024, 64 * 1024, 4 * MIB])
def test_it_does_with_what_the_pool_has(tmp_path: Path, limit: int) -> None:
    with xferlib.stager("host", pinned_limit=limit) as stager:
        array = there(stager, bits((3 * MIB,), np.dtype(np.uint8)))
        stager.trim()
        kept = stager.empty_pinned(limit // 2, np.uint8)
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager).result(20)), array)
        del kept


def test_a_get_waits_behind_few_copies_of_a_save(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are held until every thread of the save is there: then the get's comes behind as many as may be started."""
    monkeypatch.setattr("xferlib.files.writing.usable_cores", lambda: 8)
    monkeypatch.setattr("xferlib.files.writing.PIECE_NBYTES", MIB // 8)
    backend: Any = stager.backend
    copies: list[int] = []
    copy, empty, had = backend.copy_d2h, ByteReader.empty, list[int]()

    def noted(dst: int, src: int, nbytes: int) -> None:
        copies.append(nbytes)
        copy(dst, src, nbytes)

    def counted(self: ByteReader, nbytes: int, *, wait: bool = True) -> Any:
        memory = empty(self, nbytes, wait=wait)
        had.append(nbytes)
        return memory

    monkeypatch.setattr(ByteReader, "empty", counted)
    array, loss = there(stager, bits((2 * MIB,), np.dtype(np.uint8))), there(stager, np.arange(3))
    with held(backend.d2h) as gate:
        # The reader takes it as it is then.
        monkeypatch.setattr(type(backend), "copy_d2h", lambda self, *arguments: noted(*arguments))
        save = xferlib.save(tmp_path / "a.npy", array, stager, memory=MIB)
        assert until(lambda: len(had) == 8 and len(copies) == READS_AHEAD)
        got = stager.get(loss)
        gate.set()
        assert got.result().tolist() == [0, 1, 2]
    same(np.load(save.result(20)), array)
    assert copies.index(loss.nbytes) == READS_AHEAD
    assert len(copies) == 1 + 2 * MIB // (128 * 1024)


@pytest.mark.parametrize("pinned", [True, False])
def test_puts_come_first(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """While the training's next batch is on its way, of whatever stager, a save starts no copy. Nor while the engine is at one."""
    monkeypatch.setattr("xferlib.files.pace.PUTS_SECONDS", 20)
    looked: list[bool] = []
    look = ledger.puts_under_way

    def looking() -> bool:
        looked.append(look())
        return looked[-1]

    monkeypatch.setattr(pace, "puts_under_way", looking)
    array = there(stager, np.arange(1000))
    with xferlib.stager("host") as other:
        backend: Any = other.backend
        with held(backend.h2d) as gate:
            batch = other.put(other.empty_pinned(10, np.uint8) if pinned else np.zeros(8 * MIB, np.uint8), borrow=not pinned)
            save = xferlib.save(tmp_path / "a.npy", array, stager)
            assert until(lambda: len(looked) > 3)
            with pytest.raises(TimeoutError):
                save.wait_read(0)
            gate.set()
        batch.synchronize()
    same(np.load(save.result(20)), array)
    assert all(looked[:3])
    assert not looked[-1]


def test_a_put_that_is_done_holds_up_no_save_though_nobody_has_let_go_of_it(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xferlib.files.pace.PUTS_SECONDS", 60)
    array = there(stager, np.arange(1000))
    with xferlib.stager("host") as other:
        backend: Any = other.backend
        batch, done = other.put(other.empty_pinned(10, np.uint8)), threading.Event()
        backend.h2d.submit(done.set)
        assert done.wait(10)
        assert other._ledger.h2d.busy
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager).result(20)), array)
        assert batch.done()


def test_a_save_comes_to_its_end_beside_puts_that_never_end(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.arange(1000))
    backend: Any = stager.backend
    with held(backend.h2d) as gate:
        batch = stager.put(stager.empty_pinned(10, np.uint8))
        same(np.load(xferlib.save(tmp_path / "a.npy", array, stager).result(20)), array)
        assert not batch.done()
        gate.set()


def test_a_save_that_waits_for_puts_is_cancelled(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.files.pace.PUTS_SECONDS", 20)
    array = there(stager, np.arange(1000))
    backend: Any = stager.backend
    with held(backend.h2d) as gate:
        stager.put(stager.empty_pinned(10, np.uint8))
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        assert save.cancel()
        with pytest.raises(xferlib.XferError, match="cancelled"):
            save.result(10)
        gate.set()
    only(tmp_path)


def test_small_members_of_an_archive_do_not_each_wait_for_puts(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside puts that never end, thousands of them would take minutes."""
    waits: list[None] = []

    def always() -> bool:
        waits.append(None)
        return True

    monkeypatch.setattr("xferlib.files.pace.PUTS_SECONDS", 0)
    monkeypatch.setattr(pace, "puts_under_way", always)
    arrays = {f"w{number}": np.full(3, number) for number in range(10 * MOST_ARRAYS)}
    path = xferlib.save(tmp_path / "a.npz", there(stager, arrays), stager).result(20)
    assert 10 <= len(waits) <= 20
    with np.load(path) as found:
        assert all((found[name] == array).all() for name, array in arrays.items())


def test_a_save_waits_first_for_the_one_directly_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each that ends would wake all that are behind it."""
    asked: list[int] = []
    outcomes = [outcome.Outcome(tmp_path / f"step_{number}.npy") for number in range(20)]
    elsewhere = outcome.Outcome(tmp_path / "other_3.npy")
    for one in [*outcomes, elsewhere]:
        one.enter()
    try:
        monkeypatch.setattr(outcome, "_goes_on", asked.append)
        outcomes[-2].wait_for_older()
    finally:
        for one in [*outcomes, elsewhere]:
            one.end()
    assert asked == [one._number for one in reversed(outcomes[:-2])]
