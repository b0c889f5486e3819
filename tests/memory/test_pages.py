"""Pages of our own: there before they are locked, on the right node, the same after a fork, gone when they are freed."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from xferlib_host import open_stager

import xferlib
from tests import children
from tests.huge_pages import gives_huge_pages, huge_nbytes
from tests.mutants.laws.locking import LockingBackend
from xferlib.memory import numa, pages
from xferlib.memory.numa import Near, node_near
from xferlib.memory.pages import HUGE, LEAST_MAPPING_NBYTES, MOST_THREADS, HostPages
from xferlib.memory.proc_maps import mappings

KIB, MIB = 1 << 10, 1 << 20


class Locking(LockingBackend):
    """Notes what it is asked, and may refuse."""

    def __init__(self) -> None:
        super().__init__(open_stager(), {})
        self.pci_bus_id: str | None = None
        self.failures = (*self.inner.failures, ArithmeticError)
        self.pinned: list[tuple[int, int]] = []
        self.on_pin: Callable[[int, int], None] = lambda address, nbytes: None
        self.on_unpin: Callable[[int], None] = lambda address: None

    def pin(self, address: int, nbytes: int) -> None:
        self.on_pin(address, nbytes)
        super().pin(address, nbytes)
        self.pinned.append((address, nbytes))

    def unpin(self, address: int) -> None:
        self.on_unpin(address)
        super().unpin(address)


@pytest.fixture
def backend() -> Iterator[Locking]:
    backend = Locking()
    yield backend
    backend.close()


def mapped(address: int, nbytes: int) -> bool:
    return bool(mappings(address, nbytes))


def resident(address: int, nbytes: int) -> int:
    """Return the bytes that are there of the mappings in this range."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(r"^([0-9a-f]+)-[0-9a-f]+ [\s\S]*?^Rss: +(\d+) kB", text, re.MULTILINE)
    return sum(int(there) << 10 for start, there in found if address <= int(start, 16) < address + nbytes)


def over(address: int, nbytes: int) -> Any:
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B"), np.uint8)


@pytest.mark.parametrize("nbytes", [4096, 12288, HUGE, HUGE + 4096, 2 * LEAST_MAPPING_NBYTES + 4096, 48 * MIB])
def test_every_page_is_there_before_it_is_locked(backend: Locking, nbytes: int) -> None:
    there: list[int] = []
    backend.on_pin = lambda address, nbytes: there.append(resident(address, nbytes))
    host = HostPages(backend)
    address = host.allocate(nbytes)
    assert nbytes <= there[0] < nbytes + HUGE
    assert backend.pinned == [(address, nbytes)]
    memory = over(address, nbytes)
    memory[[0, -1]] = 7
    assert address % (HUGE if nbytes >= HUGE else 4096) == 0
    found = mappings(address, nbytes)
    assert (found[0].start, found[-1].end) == (address, address + nbytes)
    # Each is a file of the kernel's, and threads fetch the pages of several faster than those of one.
    assert len(found) == min(MOST_THREADS, -(-nbytes // LEAST_MAPPING_NBYTES))
    host.free(address)
    assert not mapped(address, nbytes)
    assert backend.locked == {}


@pytest.mark.parametrize(
    ("nbytes", "huge", "room"),
    [
        (HUGE - 4096, 0, HUGE - 4096),
        (HUGE, 1, HUGE),
        (5 * MIB, 2, 5 * MIB),
        # Nearly a huge page more, which would be much of so little.
        (5 * MIB + 900 * KIB, 2, 5 * MIB + 900 * KIB),
        (13 * MIB + 511 * KIB, 6, 13 * MIB + 512 * KIB),
        (13 * MIB + 512 * KIB, 7, 14 * MIB),
        (14 * MIB - 1, 7, 14 * MIB),
        (48 * MIB, 24, 48 * MIB),
    ],
)
def test_memory_is_in_huge_pages_and_asks_for_one_more_where_little_of_it_is_left_over(
    backend: Locking, nbytes: int, huge: int, room: int
) -> None:
    there: list[int] = []
    backend.on_pin = lambda address, nbytes: there.append(huge_nbytes(address, nbytes))
    host = HostPages(backend)
    address = host.allocate(nbytes)
    assert there == [huge * HUGE if gives_huge_pages() else 0]
    # What is left over is not locked.
    assert backend.pinned == [(address, nbytes)]
    assert mappings(address, room)[-1].end == address + room
    host.free(address)
    assert not mapped(address, room)


def test_memory_that_is_mapped_with_what_is_small_is_in_huge_pages_too(backend: Locking) -> None:
    host = HostPages(backend)
    nbytes = 13 * MIB + 600 * KIB
    large, small = host.map([nbytes, 4096])
    # None is split where something is left over.
    assert [piece.end - piece.start for piece in mappings(large, 14 * MIB)] == [4 * MIB, 4 * MIB, 4 * MIB, 2 * MIB]
    host.lock(large)
    assert huge_nbytes(large, nbytes) == (14 * MIB if gives_huge_pages() else 0)
    for address in (large, small):
        host.free(address)


def test_much_memory_takes_fewer_mappings_of_which_a_process_may_have_only_so_many(
    backend: Locking, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_pieces_of(host: HostPages, nbytes: int) -> list[int]:
        (address,) = host.map((nbytes,))
        kept.append((host, address))
        return [piece.end - piece.start for piece in mappings(address, nbytes)]

    kept: list[tuple[HostPages, int]] = []
    monkeypatch.setattr(pages, "MOST_MAPPINGS", 8)
    monkeypatch.setattr(pages, "_of_process", {})
    # Nothing is touched. It is counted for all pools together, and no more of what is free again.
    assert in_pieces_of(HostPages(backend), 64 * MIB) == [8 * MIB] * 8
    assert in_pieces_of(HostPages(backend), 64 * MIB) == [16 * MIB] * 4
    assert in_pieces_of(HostPages(backend), 65 * MIB) == [26 * MIB, 26 * MIB, 13 * MIB]
    for host, address in kept:
        host.free(address)
    kept.clear()
    assert in_pieces_of(HostPages(backend), 64 * MIB) == [8 * MIB] * 8
    kept[0][0].free(kept[0][1])


def test_memory_that_is_mapped_together_is_freed_one_by_one(backend: Locking) -> None:
    host = HostPages(backend)
    sizes = [3 * MIB, HUGE, 4096, 5 * MIB + 4096, 48 * MIB]
    addresses = host.map(sizes)
    assert [address % HUGE for address in addresses] == [0] * len(sizes)
    for address, nbytes in zip(addresses, sizes, strict=True):
        found = mappings(address, -(-nbytes // HUGE) * HUGE)
        # Nothing is kept of the room between them.
        assert (found[0].start, found[-1].end) == (address, address + nbytes)
        over(address, nbytes)[:] = 7
    freed: set[int] = set()
    for index in (2, 0, 4, 3, 1):
        host.lock(addresses[index])
        host.free(addresses[index])
        freed.add(index)
        left = [mapped(address, nbytes) for address, nbytes in zip(addresses, sizes, strict=True)]
        assert left == [index not in freed for index in range(len(sizes))]
    assert backend.locked == {}


def test_memory_smaller_than_a_huge_page_asks_for_none(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(pages, "_madvise", lambda address, nbytes, advice: advised.append((address, nbytes)))
    host = HostPages(backend)
    large, small, other = addresses = host.map([2 * HUGE, MIB, HUGE])
    assert advised == [(large, 2 * HUGE), (other, HUGE)]
    assert small not in dict(advised)
    addresses += host.map([HUGE, 3 * HUGE])
    # Together, where all of them do.
    assert advised[2:] == [(addresses[3], 4 * HUGE)]
    for address in addresses:
        host.free(address)


def test_memory_is_unlocked_before_it_is_unmapped(backend: Locking) -> None:
    host = HostPages(backend)
    address = host.allocate(3 * MIB)
    there: list[bool] = []
    backend.on_unpin = lambda address: there.append(mapped(address, 3 * MIB))
    host.free(address)
    assert there == [True]


def test_memory_that_could_not_be_unlocked_stays(backend: Locking) -> None:
    host = HostPages(backend)
    address = host.allocate(MIB)

    def refuse(address: int) -> None:
        raise ArithmeticError("busy")

    backend.on_unpin = refuse
    with pytest.raises(ArithmeticError):
        host.free(address)
    over(address, MIB)[:] = 1
    backend.on_unpin = lambda address: None
    host.free(address)
    assert not mapped(address, MIB)


def test_memory_that_could_not_be_unmapped_is_gone_all_the_same(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unlocked, so nobody may get it again as pinned memory."""
    own = HostPages(backend)
    address = own.allocate(MIB)
    refused: list[int] = []

    def refuse(address: int, nbytes: int) -> None:
        refused.append(address)
        raise OSError(errno.EINVAL, "no")

    with monkeypatch.context() as patch:
        patch.setattr(pages, "_unmap", refuse)
        own.free(address)
    assert refused == [address]
    pages._unmap(address, MIB)


def test_what_the_backend_allocated_is_freed_by_the_backend_alone(backend: Locking) -> None:
    freed: list[int] = []
    unpinned: list[int] = []
    backend.free_pinned = freed.append  # type: ignore[assignment, method-assign]  # noted
    backend.on_unpin = unpinned.append
    HostPages(backend).free(4096)
    assert (freed, unpinned) == ([4096], [])


def test_what_could_not_be_cut_off_a_mapping_is_an_allocation_error(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped_now, unmap = pages._mapped, pages._munmap
    rooms: list[tuple[int, int]] = []

    def note(at: int | None, nbytes: int, protection: int, flags: int) -> int:
        address = mapped_now(at, nbytes, protection, flags)
        if at is None:
            rooms.append((address, nbytes))
        return address

    def refuse(address: int, nbytes: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(pages, "_mapped", note)
    monkeypatch.setattr(pages, "_munmap", refuse)
    with pytest.raises(xferlib.AllocationError, match="the system did not unmap the memory"):
        HostPages(backend).allocate(HUGE)
    assert backend.locked == {}
    assert [unmap(*room) for room in rooms] == [0]


def test_what_is_cut_off_a_mapping_is_not_cut_off_twice(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may have it by then."""
    unmap, calls = pages._munmap, 0
    cut: list[range] = []

    def refuse_second(address: int, nbytes: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            ctypes.set_errno(errno.ENOMEM)
            return -1
        assert not any(part.start < address + nbytes and address < part.stop for part in cut)
        cut.append(range(address, address + nbytes))
        return int(unmap(address, nbytes))

    monkeypatch.setattr(pages, "_munmap", refuse_second)
    with pytest.raises(xferlib.AllocationError, match="the system did not unmap the memory"):
        HostPages(backend).map([3 * MIB, 5 * MIB])
    # Reserved for both, in whole huge pages, and for the border of the first.
    assert sum(map(len, cut)) == 4 * MIB + 6 * MIB + HUGE


@pytest.mark.parametrize("error", [ArithmeticError("no"), KeyboardInterrupt()])
def test_memory_that_could_not_be_locked_is_unmapped(backend: Locking, error: BaseException) -> None:
    seen: list[tuple[int, int]] = []

    def refuse(address: int, nbytes: int) -> None:
        seen.append((address, nbytes))
        raise error

    backend.on_pin = refuse
    expected = xferlib.AllocationError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        HostPages(backend).allocate(3 * MIB)
    assert not mapped(*seen[0])
    if isinstance(error, Exception):
        assert caught.value.__cause__ is error
        assert "3.0 MiB of pinned memory could not be had: no" in str(caught.value)


def test_what_the_machine_does_not_have_is_not_touched(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "available_memory", lambda: 5 * MIB)
    monkeypatch.setattr(pages, "_available", (0.0, 0))
    host = HostPages(backend)
    with pytest.raises(xferlib.AllocationError, match=r"5\.0 MiB are available"):
        host.allocate(6 * MIB)
    assert backend.pinned == []
    host.free(host.allocate(5 * MIB))
    # Of this, a whole huge page more is mapped.
    monkeypatch.setattr(pages, "available_memory", lambda: 14 * MIB - 1)
    monkeypatch.setattr(pages, "_available", (0.0, 0))
    with pytest.raises(xferlib.AllocationError, match=r"14\.0 MiB of pinned memory could not be had"):
        host.map([13 * MIB + 512 * KIB])


def test_what_was_taken_since_the_system_was_asked_is_not_there_any_more(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def available() -> int:
        asked.append(1)
        return 40 * MIB

    monkeypatch.setattr(pages, "available_memory", available)
    monkeypatch.setattr(pages, "_available", (0.0, 0))
    monkeypatch.setattr(pages, "AVAILABLE_SECONDS", 1000.0)
    host = HostPages(backend)
    # A small part of what is left is had for the asking; what would be a fourth of it is asked for anew.
    addresses = [host.allocate(9 * MIB) for _ in range(2)]
    assert len(asked) == 2
    addresses += [host.allocate(MIB) for _ in range(28)]
    assert len(asked) == 2
    addresses.append(host.allocate(MIB))
    assert len(asked) == 3
    for address in addresses:
        host.free(address)


def test_what_is_mapped_and_not_locked_is_promised(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages come one by one, and until then the system takes them for available."""
    left = 21 * MIB
    monkeypatch.setattr(pages, "available_memory", lambda: left)
    monkeypatch.setattr(pages, "_available", (0.0, 0))
    monkeypatch.setattr(pages, "AVAILABLE_SECONDS", -1.0)
    host = HostPages(backend)
    # With what is left over of a huge page.
    (address,) = host.map([15 * MIB + 600 * KIB])
    with pytest.raises(xferlib.AllocationError, match=r"6\.0 MiB of pinned memory could not be had: 5\.0 MiB are available"):
        host.map([6 * MIB])
    host.lock(address)
    left = 5 * MIB
    with pytest.raises(xferlib.AllocationError, match=r"5\.0 MiB are available"):
        host.map([6 * MIB])
    host.free(host.allocate(5 * MIB))
    host.free(address)


def test_the_system_s_refusal_is_an_allocation_error(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "available_memory", lambda: 1 << 62)
    monkeypatch.setattr(pages, "_available", (0.0, 0))
    with pytest.raises(xferlib.AllocationError, match="the system did not map the memory"):
        HostPages(backend).allocate(1 << 55)


def test_memory_is_touched_on_the_cpus_near_the_device(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    near = Near(0, frozenset({max(before)}))
    asked: list[str | None] = []
    ran: list[set[int]] = []

    def find(pci_bus_id: str | None) -> Near:
        asked.append(pci_bus_id)
        return near

    def fetch(address: int, nbytes: int, real: Callable[[int, int], None] = pages._fetch) -> None:
        ran.append(os.sched_getaffinity(0))
        real(address, nbytes)

    monkeypatch.setattr(pages, "node_near", find)
    monkeypatch.setattr(pages, "_fetch", fetch)
    backend.pci_bus_id = "0000:3B:00.0"
    host = HostPages(backend)
    for nbytes in (4096, 2 * LEAST_MAPPING_NBYTES):
        host.free(host.allocate(nbytes))
    assert asked == ["0000:3B:00.0"] * 2
    assert ran == [near.cpus] * 3
    assert os.sched_getaffinity(0) == before


def test_where_no_thread_can_be_had_the_caller_touches(backend: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pages, "ThreadPoolExecutor", refuse)
    monkeypatch.setattr(pages, "node_near", lambda pci_bus_id: Near(0, frozenset({0})))
    host = HostPages(backend)
    address = host.allocate(2 * HUGE)
    assert resident(address, 2 * HUGE) >= 2 * HUGE
    host.free(address)


def test_a_fork_moves_nothing_from_under_the_lock(backend: Locking) -> None:
    """The child sees what the parent writes afterwards: so the parent still writes to the pages that were locked."""
    host = HostPages(backend)
    address = host.allocate(3 * MIB)
    memory = over(address, 3 * MIB)
    written, wait = os.pipe(), os.pipe()
    memory[:] = 1
    child = children.fork()
    if not child:
        os.read(wait[0], 1)
        os.write(written[1], bytes([memory[0], memory[-1]]))
        os._exit(0)
    memory[:] = 2
    os.write(wait[1], b"x")
    assert os.read(written[0], 2) == bytes([2, 2])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (memory == 2).all()
    host.free(address)
    for pipe in (written, wait):
        os.close(pipe[0])
        os.close(pipe[1])


def test_a_child_unmaps_nothing_of_its_parent_s(backend: Locking) -> None:
    with xferlib.stager(backend, pinned_limit=64 * MIB) as stager:
        array = stager.empty_pinned(3 * MIB, np.uint8)
        array[:] = 5
        child = children.fork()
        if not child:
            address = array.ctypes.data
            same = bool((array == 5).all())
            del array
            gc.collect()
            stager.close()
            os._exit(0 if same and mapped(address, 3 * MIB) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (array == 5).all()
        assert backend.is_pinned(array.ctypes.data, array.nbytes)


def test_65_mib_lock_at_most_67(backend: Locking) -> None:
    process = psutil.Process()
    with xferlib.stager(backend, pinned_limit=256 * MIB) as stager:
        before = process.memory_info().rss
        array = stager.empty_pinned(65 * MIB, np.uint8)
        assert sum(nbytes for _, nbytes in backend.pinned) <= 67 * MIB
        assert stager.stats().pinned_nbytes <= 67 * MIB
        assert process.memory_info().rss - before <= 68 * MIB
        assert stager.stats().waste < 0.03
        del array


def test_trimmed_pages_are_back_with_the_system(backend: Locking) -> None:
    process = psutil.Process()
    with xferlib.stager(backend, pinned_limit=256 * MIB) as stager:
        before = process.memory_info().rss
        array = stager.empty_pinned(96 * MIB, np.uint8)
        address = array.ctypes.data
        assert process.memory_info().rss - before > 90 * MIB
        del array
        assert backend.locked != {}
        stager.trim()
        assert process.memory_info().rss - before < 8 * MIB
        assert backend.locked == {}
        assert not mapped(address, 96 * MIB)
        assert stager.stats().pinned_nbytes == 0


def test_a_backend_that_cannot_lock_in_place_allocates_itself() -> None:
    backend = Locking()
    backend.capabilities = xferlib.Capabilities(pinned=True, register=False)
    with xferlib.stager(backend, pinned_limit=64 * MIB) as stager:
        array = stager.empty_pinned(3 * MIB, np.uint8)
        assert backend.pinned == []
        assert array.ctypes.data in backend.locked
        del array
        stager.trim()
        assert backend.locked == {}


@pytest.mark.parametrize("combined", [False, True])
def test_what_the_backend_cannot_allocate_is_an_allocation_error(backend: Locking, *, combined: bool) -> None:
    def refuse(nbytes: int) -> int:
        raise ArithmeticError("no")

    backend.capabilities = xferlib.Capabilities(pinned=True, write_combined=True)
    vars(backend).update(alloc_pinned=refuse, alloc_write_combined=refuse)
    found = pages.allocators(backend)
    allocate = found.allocate_write_combined if combined else found.allocate
    assert allocate is not None
    with pytest.raises(xferlib.AllocationError, match=r"4\.0 KiB of pinned memory could not be had: no") as caught:
        allocate(4096)
    assert isinstance(caught.value.__cause__, ArithmeticError)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, Path]:
    """Two nodes, with a device on the second."""
    for file, text in {
        "nodes/online": "0-1\n",
        "nodes/node0/cpulist": "1000-1001\n",
        "nodes/node1/cpulist": f"{min(os.sched_getaffinity(0))},2000-2003\n",
        "devices/0000:3b:00.0/numa_node": "1\n",
        "devices/0000:4b:00.0/numa_node": "-1\n",
        "devices/0000:5b:00.0/numa_node": "0\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return {"devices": tmp_path / "devices", "nodes": tmp_path / "nodes"}


@pytest.mark.parametrize("name", ["0000:3b:00.0", "0000:3B:00.0", "00000000:3B:00.0", "3b:00.0"])
def test_the_cpus_near_a_device_are_those_of_its_node_that_are_allowed(machine: dict[str, Path], name: str) -> None:
    assert node_near(name, **machine) == (1, frozenset({min(os.sched_getaffinity(0))}))


@pytest.mark.parametrize("name", [None, "", "0000:4b:00.0", "0000:5b:00.0", "0000:ff:00.0", "../../etc/passwd"])
def test_a_node_that_is_unknown_or_not_ours_to_use_is_none(machine: dict[str, Path], name: str | None) -> None:
    assert node_near(name, **machine) is None


def test_one_node_is_no_choice(machine: dict[str, Path]) -> None:
    (machine["nodes"] / "online").write_text("0\n")
    assert node_near("0000:3b:00.0", **machine) is None


def test_lists_of_numbers_are_read_as_the_kernel_writes_them() -> None:
    assert numa._numbers("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numa._numbers("\n") == set()
