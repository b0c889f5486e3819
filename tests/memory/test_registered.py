"""Pinning memory of the caller's, in place."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import held, on_thread, tampered, until
from xferlib.latch import note_copy_thread
from xferlib.ledger import wait_for_others
from xferlib.memory import proc_maps, registered


def pinned(stager: xferlib.Stager, array: np.ndarray[Any, Any]) -> bool:
    return stager.backend.is_pinned(array.ctypes.data, array.nbytes)


def test_memory_is_pinned_inside_and_not_outside(stager: xferlib.Stager) -> None:
    array = np.arange(1000.0)
    with stager.pin(array) as same:
        assert same is array
        assert pinned(stager, array)
        assert np.array_equal(stager.put(array).value, array)
        assert stager.stats().synchronous == 0
    assert not pinned(stager, array)


@pytest.mark.parametrize("part", [np.s_[:], np.s_[5:], np.s_[:5], np.s_[3:7]])
def test_pinning_twice_is_refused(stager: xferlib.Stager, part: slice) -> None:
    array = np.arange(10.0)
    with stager.pin(array), pytest.raises(ValueError, match="pinned already"):
        stager.pin(array[part])
    with stager.pin(array[part]):
        assert pinned(stager, array[part])


def test_memory_of_the_pool_is_pinned_already(stager: xferlib.Stager) -> None:
    with pytest.raises((ValueError, xferlib.AllocationError), match="pinned already"):
        stager.pin(stager.empty_pinned(10, np.float64))


def test_neighbours_may_be_pinned_each(stager: xferlib.Stager) -> None:
    array = np.arange(10.0)
    with stager.pin(array[:5]), stager.pin(array[5:]):
        assert pinned(stager, array)


def test_memory_with_a_hole_between_two_pins_is_staged() -> None:
    """A copy engine, or a kernel, that came to the hole would fail, and with it all that the process has on the device."""
    backend = tampered()

    def by_its_ends(address: int, nbytes: int) -> bool:
        """Tell what drivers tell."""
        return bool(backend.inner.is_pinned(address, 1) and backend.inner.is_pinned(address + nbytes - 1, 1))

    backend.is_pinned = by_its_ends
    array, out = np.arange(3000.0), np.zeros(3000)
    with xferlib.stager(backend) as stager, ExitStack() as pins:
        for part in (array[:1000], array[2000:], out[:1000], out[2000:]):
            pins.enter_context(stager.pin(part))
        assert pinned(stager, array)
        device = stager.put(array).result()
        assert stager.stats().synchronous == 1
        assert np.array_equal(stager.get(device, out=out).result(), array)
        assert stager.stats().synchronous == 2
        with pytest.raises(ValueError, match="not in pinned memory"):
            stager.mapped(array)
        assert np.array_equal(stager.put(array[2100:2900]).value, array[2100:2900])
        assert stager.stats().synchronous == 2


def test_every_part_of_memory_with_pins_is_known_for_what_it_is(stager: xferlib.Stager) -> None:
    array = np.arange(12.0)
    pins = {places: stager.pin(array[slice(*places)]) for places in ((7, 10), (2, 4), (4, 5))}
    while pins:
        for first, end in combinations(range(13), 2):
            part = array[first:end]
            met = [(start, stop) for start, stop in pins if first < stop and start < end]
            split = any(not start <= first < end <= stop for start, stop in met)
            assert stager._pins.splits(part.ctypes.data, part.nbytes) is split
            if met:
                with pytest.raises(ValueError, match="pinned already"):
                    stager.pin(part)
            else:
                stager.pin(part).close()
        pins.popitem()[1].close()


@pytest.mark.parametrize(
    ("array", "error", "words"),
    [
        (np.empty(0), ValueError, "empty array has no memory"),
        (np.arange(10)[::2], ValueError, "not contiguous"),
        ([1, 2], TypeError, "numpy.asarray"),
        (np.ma.masked_array([1]), TypeError, "mask"),
    ],
)
def test_what_is_not_one_range_of_memory_is_refused(stager: xferlib.Stager, array: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        stager.pin(array)


def test_fortran_order_is_one_range_too(stager: xferlib.Stager) -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    with stager.pin(array):
        assert pinned(stager, array)


def test_a_backend_that_cannot_says_what_to_use() -> None:
    with (
        xferlib.stager(tampered(capabilities=xferlib.Capabilities())) as stager,
        pytest.raises(xferlib.CapabilityError, match=r"cannot page-lock memory of yours. Use stager\.empty_pinned"),
    ):
        stager.pin(np.zeros(3))


def test_a_driver_s_refusal_is_an_allocation_error_and_may_be_tried_again() -> None:
    backend = tampered(failures=(OSError,))

    def refuse(address: int, nbytes: int) -> None:
        raise OSError("error 712")

    backend.pin = refuse
    with xferlib.stager(backend) as stager:
        array = np.zeros(3)
        with pytest.raises(xferlib.AllocationError, match="24 bytes could not be page-locked: error 712") as caught:
            stager.pin(array)
        assert isinstance(caught.value.__cause__, OSError)
        backend.pin = backend.inner.pin
        with stager.pin(array):
            assert pinned(stager, array)


def test_closing_a_pin_waits_for_what_is_in_flight(stager: xferlib.Stager) -> None:
    array = np.full(1000, 3.0)
    pin = stager.pin(array)
    with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
        transfer = stager.put(array)
        closing = on_thread(pin.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        assert pinned(stager, array)
        gate.set()
        closing.result(10)
    assert not pinned(stager, array)
    assert transfer.done()
    pin.close()


def test_closing_the_stager_unpins_and_the_pin_may_be_closed_later(stager: xferlib.Stager) -> None:
    array = np.zeros(10)
    pin = stager.pin(array)
    stager.close()
    assert not pinned(stager, array)
    pin.close()


def test_a_pin_that_is_dropped_says_so(stager: xferlib.Stager) -> None:
    array = np.zeros(10)
    line = sys._getframe().f_lineno + 1
    pin = stager.pin(array)
    with pytest.warns(ResourceWarning, match="pin of 80 bytes was never closed") as told:
        del pin
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]
    stager.trim()
    assert not pinned(stager, array)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_pin_is_unpinned_where_warnings_are_errors(stager: xferlib.Stager) -> None:
    array = np.zeros(10)
    pin = stager.pin(array)
    del pin
    gc.collect()
    stager.trim()
    assert not pinned(stager, array)


def test_one_pin_that_cannot_be_undone_does_not_keep_the_stager_open() -> None:
    backend = tampered(failures=(OSError,))
    closed: list[bool] = []

    def close() -> None:
        closed.append(True)
        backend.inner.close()

    def refuse(address: int) -> None:
        raise OSError("error 713")

    backend.close = close
    stager = xferlib.stager(backend)
    array, other = np.zeros(3), np.zeros(4)
    pins = stager.pin(array), stager.pin(other)
    broken = array.ctypes.data
    backend.unpin = lambda address: refuse(address) if address == broken else backend.inner.unpin(address)
    with pytest.raises(xferlib.XferError, match="713"):
        stager.close()
    stager.close()
    assert closed == [True]
    assert not pinned(stager, other)
    for pin in pins:
        pin.close()


@contextmanager
def shared_memory(tmp_path: Path) -> Iterator[np.ndarray[Any, Any]]:
    memory = SharedMemory(create=True, size=NBYTES)
    try:
        memory.unlink()
        assert memory.buf is not None
        yield np.frombuffer(memory.buf, np.uint8)[:NBYTES]
    finally:
        gc.collect()


@contextmanager
def memfd(tmp_path: Path) -> Iterator[np.ndarray[Any, Any]]:
    file = os.memfd_create("batch")
    os.ftruncate(file, NBYTES)
    yield np.frombuffer(mmap.mmap(file, NBYTES, mmap.MAP_SHARED), np.uint8)
    os.close(file)


@contextmanager
def private_file(tmp_path: Path) -> Iterator[np.ndarray[Any, Any]]:
    yield np.memmap(file_of(tmp_path), np.uint8, "c")


@contextmanager
def read_only_file(tmp_path: Path) -> Iterator[np.ndarray[Any, Any]]:
    yield np.memmap(file_of(tmp_path), np.uint8, "r")


@contextmanager
def read_only(tmp_path: Path) -> Iterator[np.ndarray[Any, Any]]:
    yield np.frombuffer(bytes(NBYTES), np.uint8)


@contextmanager
def private_pages(tmp_path: Path) -> Iterator[np.ndarray[Any, Any]]:
    yield np.frombuffer(mmap.mmap(-1, NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def file_of(tmp_path: Path) -> Path:
    path = tmp_path / "values.bin"
    path.write_bytes(bytes(NBYTES))
    return path


NBYTES = 3 << 20
KINDS = [shared_memory, memfd, private_file, read_only_file, read_only, private_pages]


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_many_kinds_is_pinned(
    stager: xferlib.Stager, kind: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever the folder for temporary files lies on.
    monkeypatch.setattr(proc_maps, "IN_MEMORY", frozenset({"tmpfs"}))
    with kind(tmp_path) as array:
        with stager.pin(array):
            assert pinned(stager, array)
            assert np.array_equal(stager.put(array).result(), array)
            assert stager.stats().synchronous == 0
        assert not pinned(stager, array)
        del array


def test_a_writable_shared_mapping_of_a_file_is_refused_before_the_driver_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc_maps, "file_system", lambda device: "ext4")
    backend = tampered()
    backend.pin = lambda address, nbytes: pytest.fail("the driver was asked")
    array = np.memmap(file_of(tmp_path), np.uint8, "r+")
    with xferlib.stager(backend) as stager:
        with pytest.raises(ValueError, match=r"writable shared mapping of a file on disk, '.*values\.bin' \(ext4\).*mode 'c'"):
            stager.pin(array[100:])
        backend.pin = backend.inner.pin
        with stager.pin(np.ones(10)):
            assert stager._pool.usage().asked == 80
        assert stager._pool.usage().asked == 0


def test_a_writable_shared_mapping_of_a_file_in_memory_is_pinned(
    stager: xferlib.Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc_maps, "file_system", lambda device: "tmpfs")
    array = np.memmap(file_of(tmp_path), np.uint8, "r+")
    with stager.pin(array):
        assert pinned(stager, array)


def test_memory_that_another_library_has_pinned_is_not_staged(stager: xferlib.Stager) -> None:
    array = np.arange(1000.0)
    out = np.zeros(1000)
    with ExitStack() as pins:
        for memory in (array, out):
            stager.backend.pin(memory.ctypes.data, memory.nbytes)
            pins.callback(stager.backend.unpin, memory.ctypes.data)
        device = stager.put(array).result()
        assert stager.get(device, out=out).result() is out
        assert np.array_equal(out, array)
        assert stager.stats().synchronous == 0
    stager.put(array[:10]).synchronize()
    assert stager.stats().synchronous == 1


@pytest.mark.parametrize("part", [np.s_[:600], np.s_[400:], np.s_[:]])
def test_memory_that_another_library_has_pinned_needs_no_pin(stager: xferlib.Stager, part: slice) -> None:
    array = np.arange(1000.0)
    stager.backend.pin(array[part].ctypes.data, array[part].nbytes)
    with pytest.raises(ValueError, match=r"pinned already, all or part of it.*Leave pin out") as caught:
        stager.pin(array)
    assert isinstance(caught.value.__cause__, stager.backend.failures)
    stager.backend.unpin(array[part].ctypes.data)
    with stager.pin(array):
        assert pinned(stager, array)


MAPS = """\
7f0000000000-7f0000002000 rw-s 00000000 00:1b 12                         /dev/shm/psm x
7f0000002000-7f0000003000 r--s 00000000 fd:01 13                         /data/a b.npy
7f0000003000-7f0000005000 rw-s 00001000 fd:01 14                         /data/c.npy (deleted)
7f0000005000-7f0000006000 rw-p 00000000 fd:01 14                         /data/c.npy
7f0000006000-7f0000007000 rw-s 00000000 00:01 15                         /memfd:batch (deleted)
7f0000007000-7f0000008000 rw-p 00000000 00:00 0
"""
MOUNTS = """\
22 1 253:1 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:27 / /dev/shm rw,nosuid shared:3 master:4 - tmpfs tmpfs rw
24 22 0:29 / /work rw - overlay overlay rw
"""
BASE = 0x7F0000000000


def test_a_range_is_write_protected_if_nothing_in_it_may_be_written() -> None:
    page = mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, 3 * page), np.uint8)
    start = memory.ctypes.data
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, mmap.PROT_READ) == 0
    assert proc_maps.is_write_protected(start + page, page)
    assert proc_maps.is_write_protected(start + page + 8, 1)
    for offset, nbytes in ((0, page), (0, 3 * page), (page - 1, 2), (page, page + 1)):
        assert not proc_maps.is_write_protected(start + offset, nbytes)
    # Nothing is there.
    assert not proc_maps.is_write_protected(8, 8)


def test_what_lies_under_a_range_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    table, mounts = tmp_path / "maps", tmp_path / "mountinfo"
    table.write_text(MAPS)
    mounts.write_text(MOUNTS)
    found = proc_maps.mappings(BASE + 0x1FFF, 0x2002, table=table)
    assert [(part.start - BASE, part.permissions, part.device, part.path) for part in found] == [
        (0, "rw-s", "0:27", "/dev/shm/psm x"),
        (0x2000, "r--s", "253:1", "/data/a b.npy"),
        (0x3000, "rw-s", "253:1", "/data/c.npy (deleted)"),
    ]
    (last,) = proc_maps.mappings(BASE + 0x7000, 1, table=table)
    assert last.path == ""
    types = {device: proc_maps.file_system(device, table=mounts) for device in ("253:1", "0:27", "0:29", "0:1", "0:0")}
    assert types == {"253:1": "ext4", "0:27": "tmpfs", "0:29": "overlay", "0:1": None, "0:0": None}


@pytest.mark.parametrize(
    ("offset", "nbytes", "refused"),
    [
        (0, 0x2000, False),
        (0x2000, 0x1000, False),
        (0x3000, 0x1000, True),
        (0, 0x8000, True),
        (0x5000, 0x3000, False),
    ],
)
def test_only_files_on_disk_that_are_written_to_cannot_be_locked(
    offset: int, nbytes: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, mounts = tmp_path / "maps", tmp_path / "mountinfo"
    table.write_text(MAPS)
    mounts.write_text(MOUNTS)
    look, kind = proc_maps.mappings, proc_maps.file_system
    monkeypatch.setattr(proc_maps, "mappings", lambda address, nbytes: look(address, nbytes, table=table))
    monkeypatch.setattr(proc_maps, "file_system", lambda device: kind(device, table=mounts))
    assert (proc_maps.why_unlockable(BASE + offset, nbytes) is not None) is refused


@pytest.mark.parametrize("wanted", [np.s_[:], np.s_[10:20], None], ids=["all of it", "part of it", "other memory"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_memory_stays_locked_until_another_stager_s_transfer_of_it_is_done(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch, direction: str, wanted: slice | None
) -> None:
    array, looked = np.arange(1000.0), threading.Event()

    def looking(*arguments: Any) -> bool:
        looked.set()
        return wait_for_others(*arguments)

    monkeypatch.setattr(registered, "wait_for_others", looking)
    with xferlib.stager(tampered(is_pinned=stager.backend.is_pinned)) as other, ExitStack() as pins:
        part = other.empty_pinned(5, np.float64) if wanted is None else array[wanted]
        device = other.put(part.copy()).result()
        pins.enter_context(stager.pin(array))
        with held(getattr(other.backend, direction)):
            transfer = other.put(part, borrow=True) if direction == "h2d" else other.get(device, out=part)
            closing = on_thread(pins.close)
            assert looked.wait(20)
            if wanted is None:
                closing.result(20)
            assert pinned(stager, array) == (wanted is not None)
        closing.result(20)
        assert not pinned(stager, array)
        transfer.result(20)


def test_memory_stays_locked_until_the_last_of_another_stager_s_transfers_is_done(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []

    def looking(*arguments: Any) -> bool:
        looks.append(None)
        return wait_for_others(*arguments)

    monkeypatch.setattr(registered, "wait_for_others", looking)
    array = np.arange(1000.0)
    with xferlib.stager(tampered(is_pinned=stager.backend.is_pinned)) as other, ExitStack() as pins:
        device = other.put(array.copy()).result()
        pins.enter_context(stager.pin(array))
        with held(other.backend.d2h):  # type: ignore[attr-defined]  # the host backend's own
            with held(other.backend.h2d):  # type: ignore[attr-defined]  # the host backend's own
                first = other.put(array)
                last = other.get(device, out=array)
                closing = on_thread(pins.close)
                assert until(lambda: len(looks) == 1)
            first.result(20)
            assert until(lambda: len(looks) == 2)
            assert pinned(stager, array)
        last.result(20)
        closing.result(20)
        assert not pinned(stager, array)


@contextmanager
def used_by_another(stager: xferlib.Stager, array: np.ndarray[Any, Any]) -> Iterator[xferlib.Stager]:
    """Have another stager read the memory, until the block is left."""
    with xferlib.stager(tampered(is_pinned=stager.backend.is_pinned)) as other:
        with held(other.backend.h2d):  # type: ignore[attr-defined]  # the host backend's own
            transfer = other.put(array, borrow=True)
            yield other
        transfer.result(20)


def test_a_stager_that_closes_unlocks_memory_when_another_stager_s_transfer_of_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    array, looked = np.arange(1000.0), threading.Event()

    def looking(*arguments: Any) -> bool:
        looked.set()
        return wait_for_others(*arguments)

    monkeypatch.setattr(registered, "wait_for_others", looking)
    stager = xferlib.stager("host")
    pin = stager.pin(array)
    with used_by_another(stager, array):
        closing = on_thread(stager.close)
        assert until(lambda: looked.is_set() or closing.done())
        assert pinned(stager, array)
    closing.result(20)
    assert not pinned(stager, array)
    pin.close()


def test_what_is_put_while_memory_is_about_to_be_unlocked_is_staged_so_that_a_loop_of_puts_keeps_nobody_waiting(
    stager: xferlib.Stager,
) -> None:
    array = np.arange(1000.0)
    pin = stager.pin(array)
    with used_by_another(stager, array) as other:

        def users() -> int:
            return sum(entry.uses_host(array.ctypes.data, array.nbytes) for entry in other._ledger.entries())

        closing = on_thread(pin.close)
        assert until(lambda: stager._pins.splits(array.ctypes.data, array.nbytes))
        assert users() == 1
        later = other.put(array), other.put([array[:9], array[9:]])
        assert users() == 1
        assert pinned(stager, array)
    closing.result(20)
    for transfer in later:
        transfer.synchronize()
    with stager.pin(array):
        assert not stager._pins.splits(array.ctypes.data, array.nbytes)


@pytest.mark.parametrize("close", ["pin", "stager"])
def test_a_finalizer_on_a_thread_that_copies_unlocks_no_memory_that_another_stager_uses(close: str) -> None:
    with xferlib.stager("host") as stager:
        array, apart = np.arange(1000.0), np.arange(10.0)
        pin, other_pin = stager.pin(array), stager.pin(apart)
        with used_by_another(stager, array):

            def finalize(closes: Any) -> None:
                note_copy_thread()
                closes.close()

            with pytest.raises(xferlib.XferError, match="wait for transfers on a thread that makes the copies"):
                on_thread(lambda: finalize(pin if close == "pin" else stager)).result(20)
            assert pinned(stager, array)
            if close == "pin":
                on_thread(lambda: finalize(other_pin)).result(20)
                assert not pinned(stager, apart)
        on_thread(lambda: finalize(pin)).result(20)
        assert not pinned(stager, array)


def test_memory_is_unlocked_while_the_cpu_reads_it_for_another_stager(stager: xferlib.Stager) -> None:
    array = np.zeros(1 << 18)
    pin = stager.pin(array)
    with xferlib.stager("host") as other:  # its driver knows of no pins of others, so it stages
        with held(other.backend.h2d):  # type: ignore[attr-defined]  # the host backend's own
            transfer = other.put(array, borrow=True)
            assert other._ledger.jobs.h2d
            on_thread(pin.close).result(10)
            assert not transfer.done()
        transfer.result(20)


@pytest.mark.parametrize("dropped", [False, True])
def test_memory_stays_locked_until_work_on_another_stager_s_view_of_it_is_done(stager: xferlib.Stager, dropped: bool) -> None:
    array, gate = np.arange(1000.0), threading.Event()
    pin = stager.pin(array)
    with xferlib.stager(tampered(is_pinned=stager.backend.is_pinned)) as other, Stream() as stream:
        views = [other.mapped(array[10:], stream=stream)]
        stream.submit(gate.wait, 20)
        if dropped:
            views.clear()
        asked = until_asked(other)
        closing = on_thread(pin.close)
        assert until(lambda: bool(asked) or closing.done())
        assert pinned(stager, array)
        gate.set()
        closing.result(20)
        assert not pinned(stager, array)


def until_asked(stager: xferlib.Stager) -> list[None]:
    """Return a list that is not empty any more when somebody waits for work on the stager's views."""
    views, asked = stager._ledger.views, list[None]()
    wait_all = views.wait_all

    def waiting() -> None:
        asked.append(None)
        wait_all()

    views.wait_all = waiting  # type: ignore[method-assign]
    return asked
