"""Tables that are interrupted at every point, and whose every call of the backend fails: nothing is lost, nothing given twice."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Device, Idle, Point, tampered, until
from tests.core.garbage import collected_when_told  # noqa: F401  # A fixture for each test.
from tests.core.points import interrupted_at
from tests.memory.test_pinned_pool import Driver
from xferlib import ledger
from xferlib.errors import XferError
from xferlib.memory import device_pool, registered
from xferlib.memory.device_pool import DevicePool
from xferlib.memory.mapped import Views
from xferlib.memory.pinned_pool import HostBlock, PinnedPool
from xferlib.protocol import Stream
from xferlib.staging.profile import StagingProfile

KIB, MIB = 1 << 10, 1 << 20
TABLES = (
    "xferlib/memory/device_pool.py",
    "memory/idle_blocks.py",
    "memory/pinned_pool.py",
    "memory/segments.py",
    "memory/ranges.py",
    "memory/blocks.py",
    "memory/table.py",
    "memory/registered.py",
    "memory/mapped.py",
    "tickets.py",
)
ENGINE = ("engine/jobs.py", "engine/lanes.py", "staging/pageable.py", "staging/bounce.py")
FAILURES: list[type[Exception]] = [OSError, MemoryError]
"""One of the backend's own, and one that it does not name."""


class Failing:
    """Fails at the call of such-and-such a number, once. 0: never."""

    def __init__(self) -> None:
        self.left = 0
        self.failure: type[Exception] = OSError

    def __call__(self) -> None:
        self.left -= 1
        if not self.left:
            raise self.failure("refused")


def failed_at(number: int, failing: Failing, failure: type[Exception], call: Callable[[], object]) -> bool:
    """Call, with the backend's call of such-and-such a number failing; False: there were fewer."""
    failing.left, failing.failure = number, failure
    with suppress(XferError, failure):
        call()
    came = failing.left <= 0
    failing.left = 0
    return came


class Fence(Point):
    """An event that may fail."""

    def __init__(self, failing: Failing, *, reached: bool) -> None:
        super().__init__(reached=reached)
        self._failing = failing

    def done(self) -> bool:
        self._failing()
        return super().done()

    def synchronize(self) -> None:
        self._failing()
        super().synchronize()


class FailingDevice(Device):
    """A device whose every call may fail. What could not be freed is the framework's own again."""

    def __init__(self, *, fresh_is_ready: bool) -> None:
        super().__init__()
        self.failing = Failing()
        self.fresh_is_ready = fresh_is_ready
        self.reached = True

    def sweep(self) -> None:
        self.failing()

    def alloc_device(self, nbytes: int) -> Any:
        self.failing()
        return super().alloc_device(nbytes)

    def free_device(self, block: Any) -> None:
        super().free_device(block)
        self.failing()

    def record_h2d(self) -> Point:
        self.failing()
        return Fence(self.failing, reached=True)

    def retire(self, streams: Any) -> Point | None:
        self.failing()
        return Fence(self.failing, reached=self.reached) if list(streams) else None

    def order_h2d(self, after: object) -> None:
        self.failing()
        super().order_h2d(after)

    def lost(self, block: Any) -> bool:
        self.failing()
        return super().lost(block)


class Blocks:
    """A cache at half of its limit: one block leased, two of one size and one of another idle, one whose lease has just ended."""

    def __init__(self, *, reached: bool, fresh_is_ready: bool = True) -> None:
        self.device = FailingDevice(fresh_is_ready=fresh_is_ready)
        self.device.reached = reached
        self.cache = DevicePool(self.device, Idle(), 8 * MIB)  # type: ignore[arg-type]  # As in the other tests of it.
        streams: dict[int, Stream] = {1: Stream(1, None)} if not reached else {}
        self.held = self.cache.lease(MIB, streams)
        leases = [self.cache.lease(size, streams) for size in (MIB, MIB, 512 * KIB)]
        leases.clear()
        self.cache.lease(256 * KIB, streams)

    def check(self) -> None:
        cache, device = self.cache, self.device
        assert until(lambda: not cache._at_work)
        cache._step(bool)
        idle = [row for cell in cache._idle.values() for row in cell]
        leased, doomed = list(cache._leased.values()), list(cache._doomed)
        assert sorted(map(id, idle + leased + doomed)) == sorted(map(id, cache._rows.values()))
        assert [row.block for row in leased] == [self.held[0]]
        assert {place: row for place, row in cache._places.items() if not row.doomed} == {row.address: row for row in idle + leased}
        assert not cache._growing
        assert cache.nbytes == sum(block.nbytes for block in device.made if block not in device.freed)
        assert cache.lease(4 * MIB, {})[0].nbytes == 4 * MIB
        assert cache.lease(MIB, {})[0] is not self.held[0]
        cache.trim()
        assert cache.nbytes == MIB
        cache.close()
        del self.held
        assert not cache.settle()
        assert sorted(map(id, device.freed)) == sorted(map(id, device.made))
        assert cache.nbytes == 0


BLOCKS: dict[str, Callable[[DevicePool], object]] = {
    "a lease of an idle block": lambda cache: cache.lease(MIB, {}),
    "leases of idle blocks, and what came back": lambda cache: [
        cache.lease_idle([MIB, 512 * KIB, MIB], {}),
        cache.settle_posted(),  # type: ignore[func-returns-value]  # Only that it is called behind the other.
    ],
    "a lease of a new block": lambda cache: cache.lease(2 * MIB, {}),
    "a lease that others make room for": lambda cache: cache.lease(6 * MIB, {}),
    "trim": lambda cache: cache.trim(),
}
KINDS = {
    "read": {"reached": False},
    "at rest": {"reached": True},
    "fresh ones not ready": {"reached": True, "fresh_is_ready": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BLOCKS)
def test_an_interrupt_at_any_point_loses_no_block(name: str, kind: str) -> None:
    for point in itertools.count(1):
        blocks = Blocks(**KINDS[kind])
        if not interrupted_at(point, TABLES, lambda: BLOCKS[name](blocks.cache)):  # noqa: B023  # Called in this turn alone.
            break
        blocks.check()
    assert point >= 3


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*BLOCKS, "settle"])
def test_a_failure_of_any_call_loses_no_block(name: str, kind: str, failure: type[Exception]) -> None:
    for number in itertools.count(1):
        blocks = Blocks(**KINDS[kind])
        call = BLOCKS.get(name, DevicePool._trim)
        if not failed_at(number, blocks.device.failing, failure, lambda: call(blocks.cache)):  # noqa: B023  # As above.
            break
        blocks.check()
    assert number > 2


class FailingDriver(Driver):
    """A driver whose every call may fail, before it has done anything."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = Failing()

    def allocate(self, nbytes: int) -> int:
        self.failing()
        return super().allocate(nbytes)

    def free(self, address: int) -> None:
        self.failing()
        super().free(address)


class Pool:
    """A pool of which one array is held, with idle memory of both kinds, and an array that has just ended."""

    def __init__(self) -> None:
        self.driver = FailingDriver()
        self.pool = self.driver.pool(16 * MIB)
        self.held = self.array(100 * KIB)
        kept = [self.array(nbytes) for nbytes in (50 * KIB, 3 * MIB, 2 * MIB)]
        kept.clear()
        self.pool.reserve(1 << 20, MIB)

    def array(self, nbytes: int) -> HostBlock:
        return _over(self.pool, nbytes)

    def check(self) -> None:
        pool, driver = self.pool, self.driver
        assert until(lambda: not pool._at_work)
        pool._step(bool)
        assert not pool._growing
        reserved = sum(pool._reserved.values())
        assert pool.nbytes - reserved == sum(driver.live.values())
        assert pool.used_nbytes == pool._segments.arrays_nbytes == 100 * KIB
        assert pool._segments.asked_nbytes == 100 * KIB
        assert len(pool._segments.rows) == 1
        # Who reserves takes it back himself.
        for address in list(pool._reserved):
            pool.unreserve(address)
        took = self.array(8 * MIB)
        assert pool.used_nbytes == 100 * KIB + took.nbytes
        del took
        pool.reserve(1 << 21, MIB)
        pool.unreserve(1 << 21)
        pool.trim()
        assert list(driver.live.values()) == [2 * MIB]
        pool.close()
        del self.held
        assert not pool.settle()
        assert driver.live == {}
        assert pool.nbytes == pool.used_nbytes == 0


def _over(pool: PinnedPool, nbytes: int) -> HostBlock:
    """Take memory as for an array, but touch none: it is only an address."""
    return pool.take(nbytes, for_array=True)


POOL: dict[str, Callable[[PinnedPool], object]] = {
    "part of a segment": lambda pool: _over(pool, 60 * KIB),
    "a segment": lambda pool: _over(pool, 4 * MIB),
    "a segment that others make room for": lambda pool: _over(pool, 11 * MIB),
    "for staging": lambda pool: pool.take(3 * MIB),
    "perhaps": lambda pool: pool.try_take(4 * MIB),
    "reserve": lambda pool: pool.reserve(1 << 22, 2 * MIB),
    "reserve what others make room for": lambda pool: pool.reserve(1 << 22, 10 * MIB),
    "trim": lambda pool: pool.trim(),
    "usage": lambda pool: pool.usage(),
}


@pytest.mark.parametrize("name", POOL)
def test_an_interrupt_at_any_point_loses_no_pinned_memory(name: str) -> None:
    for point in itertools.count(1):
        pool = Pool()
        if not interrupted_at(point, TABLES, lambda: POOL[name](pool.pool)):  # noqa: B023  # Called in this turn alone.
            break
        pool.check()
    assert point >= 3


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(
    "name", [name for name in POOL if ("segment" in name and "part" not in name) or "others" in name or name == "trim"]
)
def test_a_failure_of_any_call_loses_no_pinned_memory(name: str, failure: type[Exception]) -> None:
    for number in itertools.count(1):
        pool = Pool()
        if not failed_at(number, pool.driver.failing, failure, lambda: POOL[name](pool.pool)):  # noqa: B023  # As above.
            break
        pool.check()
    assert number > 1


def pinned(stager: xferlib.Stager, array: np.ndarray[Any, Any]) -> None:
    stager._pins.add(array).close()


def dropped(stager: xferlib.Stager, array: np.ndarray[Any, Any]) -> None:
    stager._pins.add(array)
    stager._pins.sweep()


@pytest.mark.parametrize("act", [pinned, dropped])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_at_any_point_loses_no_pin(
    act: Callable[[xferlib.Stager, np.ndarray[Any, Any]], None], stager: xferlib.Stager
) -> None:
    array = np.zeros(10 * KIB, np.uint8)
    memory: Any = stager.backend
    for point in itertools.count(1):
        if not interrupted_at(point, TABLES, lambda: act(stager, array)):
            break
        assert until(lambda: not stager._pins._changing._is_owned())  # type: ignore[attr-defined]  # As `Condition` asks.
        with stager.pin(array):
            pass
        stager.trim()
        assert not stager._pins._rows
        assert not stager._pins._locks
        assert not stager._pins._starts
        assert stager._pool.nbytes == 0
        calls = memory.memory.calls()
        assert calls.pins == calls.unpins
    assert point > 20


@pytest.mark.parametrize("failure", [None, MemoryError])
@pytest.mark.parametrize("act", [pinned, dropped])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_failure_of_any_call_loses_no_pin(
    act: Callable[[xferlib.Stager, np.ndarray[Any, Any]], None], failure: type[Exception] | None
) -> None:
    failing, array = Failing(), np.zeros(10 * KIB, np.uint8)

    def pin(address: int, nbytes: int) -> None:
        failing()
        backend.inner.pin(address, nbytes)

    def unpin(address: int) -> None:
        failing()
        backend.inner.unpin(address)

    backend = tampered(pin=pin, unpin=unpin)
    with xferlib.Stager(backend) as stager:
        for number in itertools.count(1):
            if not failed_at(number, failing, failure or backend.inner.failures[0], lambda: act(stager, array)):
                break
            # What could not be unlocked is unlocked by the next call.
            gc.collect()
            with stager.pin(array):
                pass
            stager.trim()
            assert not stager._pins._rows
            assert stager._pool.nbytes == 0
            calls = backend.inner.memory.calls()
            assert calls.pins == calls.unpins
        assert number > 2


class Jobs:
    """A stager with something large to transfer, a job in flight in each direction, and idle chunks."""

    def __init__(self) -> None:
        self.stager = xferlib.stager("host", pinned_limit=16 * MIB, staging=StagingProfile(2, 256 * KIB, 64 * KIB))
        self.source, self.out = np.full(MIB + 5, 4, np.uint8), np.zeros(MIB + 5, np.uint8)
        self.odd = np.full((500, 500), 4, np.uint8)[::2].T
        self.there = self.stager.put(self.source).result()
        self.transfers = [
            self.stager.put(self.source, borrow=True),
            self.stager.get(self.there, out=np.zeros_like(self.out)),
        ]

    def check(self) -> None:
        stager, staging = self.stager, self.stager._staging
        assert (self.source == 4).all()
        assert set(np.unique(self.out)) <= {0, 4}
        self.transfers.clear()
        again = stager.put(self.source, borrow=True).result()
        assert (stager.get(again, out=self.out).result() == 4).all()
        del again
        assert until(lambda: not any(lane.jobs for lane in staging._lanes))
        stager._ledger.wait_all()
        assert not stager._ledger.busy
        stager.trim()
        assert stager._pool.usage().used == stager._pool.nbytes == 0
        for lane in staging._lanes:
            assert not lane._blocks
            assert not lane._leaving
            assert not lane._growing
        stager.close()
        calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # The host backend's.
        assert calls.pinned_allocations == calls.pinned_frees


JOBS: dict[str, Callable[[Jobs], object]] = {
    "put": lambda jobs: jobs.stager.put(jobs.source),
    "put of what is small": lambda jobs: jobs.stager.put(jobs.source[:100]),
    "put of what is not contiguous": lambda jobs: jobs.stager.put([jobs.odd, jobs.source]),
    "put borrowed": lambda jobs: jobs.stager.put(jobs.source, borrow=True),
    "value borrowed": lambda jobs: jobs.stager.put(jobs.source, borrow=True).value,
    "put into": lambda jobs: jobs.stager.put(jobs.source, into=jobs.there),
    "get": lambda jobs: jobs.stager.get(jobs.there, out=jobs.out),
    "result": lambda jobs: jobs.stager.get(jobs.there, out=jobs.out).result(),
}


@pytest.mark.parametrize("name", JOBS)
def test_an_interrupt_at_any_point_loses_no_job_and_no_chunk(name: str) -> None:
    for point in itertools.count(1):
        jobs = Jobs()
        if not interrupted_at(point, ENGINE, lambda: JOBS[name](jobs)):  # noqa: B023  # Called in this turn alone.
            jobs.check()
            break
        jobs.check()
    assert point >= 3


@pytest.mark.parametrize("name", ["put", "put borrowed", "get"])
def test_an_interrupt_at_any_point_of_a_first_transfer_loses_no_job_and_no_chunk(name: str) -> None:
    for point in itertools.count(1):
        jobs = Jobs()
        # Without chunks.
        jobs.transfers.clear()
        jobs.stager._ledger.wait_all()
        jobs.stager.trim()
        if not interrupted_at(point, ENGINE, lambda: JOBS[name](jobs)):  # noqa: B023  # As above.
            jobs.check()
            break
        jobs.check()
    assert point >= 3


class ViewBackend:
    """The part of a backend that views need; every call may fail."""

    failures = (OSError,)

    def __init__(self) -> None:
        self.failing = Failing()
        self.events: list[Fence] = []

    def retire(self, streams: Any) -> Fence:
        self.failing()
        self.events.append(Fence(self.failing, reached=False))
        return self.events[-1]


class Seen:
    """Three views: one is held, one has just gone with work enqueued, and one has gone whose work is fenced."""

    def __init__(self) -> None:
        self.backend = ViewBackend()
        self.views = Views(self.backend)  # type: ignore[arg-type]  # Only what views need is played.
        self.memory = [np.zeros(100, np.uint8) for _ in range(4)]
        self.tickets = [self.enter(self.memory[number]) for number in range(3)]
        self.tickets.pop()
        self.views.busy and self.views.reap()
        self.tickets.pop()

    def enter(self, memory: np.ndarray[Any, Any]) -> object:
        view, ticket = self.views.lease(memory)
        view.stream = Stream(1, None)
        return ticket

    def held(self, number: int) -> bool:
        array = self.memory[number]
        return self.views.held(array.ctypes.data, array.nbytes)

    def check(self) -> None:
        views = self.views
        assert self.held(0)
        # For good, if the backend failed to say when the work on it ends.
        assert self.held(1) == any(memory is self.memory[1] for memory in views._stuck)
        assert not self.held(3)
        for event in self.backend.events:
            event.reached = True
        views.wait_all()
        self.tickets.clear()
        views.reap()
        for event in self.backend.events:
            event.reached = True
        views.reap()
        assert not views.busy
        assert not views.settle()
        views.close()
        assert not views._fenced


VIEWS: dict[str, Callable[[Seen], object]] = {
    "lease": lambda seen: seen.enter(seen.memory[3]),
    "held": lambda seen: seen.held(1),
    "readers": lambda seen: seen.views.readers(seen.memory[1].ctypes.data, 10),
    "reap": lambda seen: seen.views.reap(),
    "wait_oldest": lambda seen: seen.views.wait_oldest(),
    "wait_all": lambda seen: seen.views.wait_all(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_an_interrupt_at_any_point_loses_no_view(name: str) -> None:
    for point in itertools.count(1):
        seen = Seen()
        if not interrupted_at(point, TABLES, lambda: VIEWS[name](seen)):  # noqa: B023  # Called in this turn alone.
            break
        seen.check()
    assert point >= 5


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", [name for name in VIEWS if name != "lease"])
def test_a_failure_of_any_call_loses_no_view(name: str, failure: type[Exception]) -> None:
    for number in itertools.count(1):
        seen = Seen()
        if not failed_at(number, seen.backend.failing, failure, lambda: VIEWS[name](seen)):  # noqa: B023  # As above.
            break
        seen.check()
    assert number > 1


STAGER = (
    "xferlib/stager.py",
    "xferlib/resources.py",
    "xferlib/registry.py",
    "xferlib/reaper.py",
    "xferlib/uninterrupted.py",
    "xferlib/in_flight.py",
    "xferlib/ledger.py",
    "xferlib/pending.py",
    "memory/device_pool.py",
    "memory/idle_blocks.py",
    "memory/registered.py",
    "engine/lanes.py",
)


def used() -> xferlib.Stager:
    """Return a stager that has moved something."""
    stager = xferlib.stager("host", pinned_limit=16 * MIB)
    stager.get(stager.put(np.ones(10 * KIB, np.uint8)).result()).synchronize()
    return stager


def opened() -> Callable[[], object]:
    return lambda: xferlib.stager("host", pinned_limit=16 * MIB)


def closed() -> Callable[[], object]:
    stagers = [used()]
    return lambda: stagers.pop().close()


def let_go() -> Callable[[], object]:
    return [used()].clear


def of_stagers() -> tuple[int, int, int, int]:
    """Return how many entries the tables of the process have of stagers that were not closed, and how many threads they have."""
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("xferlib-host")]
    return len(ledger.all_ledgers()), len(device_pool._open), len(registered._open), len(workers)


@pytest.mark.parametrize("prepare", [opened, closed, let_go])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_at_any_point_leaves_no_stager_open(prepare: Callable[[], Callable[[], object]]) -> None:
    """Nobody has it any more: it is closed, whatever was cut off, its constructor, its `close`, or its finalizer."""
    gc.collect()
    before = of_stagers()
    for point in itertools.count(1):
        call = prepare()
        struck = interrupted_at(point, STAGER, call)
        del call
        gc.collect()
        assert until(lambda: of_stagers() == before), f"at point {point}: {of_stagers()}, not {before}"
        if not struck:
            break
    assert point >= 3
