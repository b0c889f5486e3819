"""What owns events and gathered memory, tried without a GPU: a driver that hands out numbers, and keeps account of them."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, final

import pytest
from xferlib_numba import _gather, _memory
from xferlib_numba._device import Device
from xferlib_numba._events import EventPool, NumbaEvent
from xferlib_numba._gather import KEPT, Gathering, Run
from xferlib_numba._memory import Block

from tests.core.points import Interrupt, interrupted_in
from xferlib.reaper import start_reaper

STREAM = 7
SECONDS = 10.0


class Handle:
    """As the bindings' handles: an object, whose number is its identity."""

    numbers = itertools.count(1)

    def __init__(self, number: int = 0) -> None:
        self.number = number or next(self.numbers)

    def __int__(self) -> int:
        return self.number


class Failed(Exception):
    """What a call that fails raises."""


@final
class Driver:
    """The part of a `Device` that is asked here."""

    def __init__(self) -> None:
        self.created = 0
        self.refuses = False
        self.relaxed = self.here = lambda call, *arguments: call(*arguments)
        self.record = self.wait = lambda *_: None
        self.event_status = lambda handle: (0,)
        # In C, as the bindings' own.
        binding = SimpleNamespace(CUstream=Handle, CUmemorytype=int, cuEventCreate=self._create)
        self.numba = SimpleNamespace(driver=SimpleNamespace(binding=binding, Stream=SimpleNamespace))
        self.numba.driver.Stream = lambda handle: SimpleNamespace(handle=handle)

    def raw(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            status, found = self._create(*arguments)
            if status:
                raise Failed(name)
            return found

        return call

    def call(self, name: str) -> Callable[..., Any]:
        return lambda *_: None

    def _create(self, flags: int) -> tuple[int, Handle | None]:
        if self.refuses:
            return 2, None
        self.created += 1
        return 0, Handle()


@pytest.fixture
def driver() -> Any:
    return Driver()


@pytest.fixture
def pool(driver: Device) -> EventPool:
    return EventPool(driver)


def number_of(event: NumbaEvent) -> int:
    return int(event._handle)


def test_an_event_in_a_cycle_keeps_its_handle_until_it_is_gone(pool: EventPool) -> None:
    kept = []

    class Last:
        def __init__(self, event: NumbaEvent) -> None:
            self.event = event
            self.me = self

        def __del__(self) -> None:
            kept.append((self.event, number_of(self.event)))

    Last(pool.record(STREAM))
    gc.collect()
    ((event, number),) = kept
    others = [pool.record(STREAM) for _ in range(100)]
    assert number not in {number_of(other) for other in others}
    assert number_of(event) == number


def test_a_driver_without_another_event_says_so(driver: Any, pool: EventPool) -> None:
    driver.refuses = True
    with pytest.raises(Failed, match="cuEventCreate"):
        pool.record(STREAM)
    driver.refuses = False
    assert pool.record(STREAM).done()


@pytest.mark.parametrize("call", ["record", "order"])
def test_an_interrupt_anywhere_loses_no_handle_and_gives_none_to_two(pool: EventPool, call: str) -> None:
    live = [pool.record(STREAM) for _ in range(3)]
    created, step, went_on = len(pool.handles), 0, True
    while went_on:
        went_on = interrupted_in(step, lambda: pool.record(STREAM) if call == "record" else pool.order(Handle(1), Handle(2)))
        step += 1
        handles = [*map(int, pool.handles.free), *map(number_of, live)]
        assert len(set(handles)) == len(handles)
    assert step > 3
    live += [pool.record(STREAM) for _ in range(created // 2 - 3)]
    assert len(pool.handles) == created


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> dict[int, Block]:
    """Device memory that is allocated, by its address."""
    found: dict[int, Block] = {}
    addresses = itertools.count(1 << 30, 1 << 20)

    def alloc(device: object, nbytes: int) -> Block:
        block = Block(next(addresses), nbytes)
        found[block.address] = block
        return block

    monkeypatch.setattr(_memory, "alloc", alloc)
    monkeypatch.setattr(_memory, "free", lambda device, block: found.pop(block.address))
    return found


RUNS = [Run(0, 0, 4, 1, 4, 4)]


def test_gathered_memory_is_used_again_when_nobody_holds_it(driver: Any, blocks: dict[int, Block]) -> None:
    gathering = _gather.Gathering(driver)
    first, held = gathering.copy(0, 1000, RUNS, STREAM)
    second, other = gathering.copy(0, 1000, RUNS, STREAM)
    assert first != second
    del held
    assert gathering.copy(0, 1000, RUNS, STREAM)[0] == first
    # Near sizes share.
    assert gathering.copy(0, 1001, RUNS, STREAM)[0] == first
    del other
    gathering.close()
    assert blocks == {}


def test_memory_for_arrays_of_many_sizes_does_not_pile_up(driver: Any, blocks: dict[int, Block]) -> None:
    gathering = Gathering(driver)
    for turn in range(1, 60):
        gathering.copy(0, turn << 12, RUNS, STREAM)
        assert len(blocks) <= KEPT
    gathering.close()
    assert blocks == {}


def test_gathered_memory_that_outlives_its_stager_is_freed_when_it_is_let_go_of(driver: Any, blocks: dict[int, Block]) -> None:
    start_reaper()
    gathering = Gathering(driver)
    _, held = gathering.copy(0, 1000, RUNS, STREAM)
    gathering.close()
    assert len(blocks) == 1
    del held
    deadline = time.monotonic() + SECONDS
    while blocks:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_memory_that_comes_after_an_interrupt_goes_back(
    driver: Any, blocks: dict[int, Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, alloc = threading.Event(), _memory.alloc

    def alloc_late(device: Device, nbytes: int) -> Block:
        assert gate.wait(SECONDS)
        return alloc(device, nbytes)

    def interrupt(*_: object) -> None:
        raise Interrupt

    monkeypatch.setattr(_memory, "alloc", alloc_late)
    gathering = Gathering(driver)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # Nothing else ends the wait: the gate is shut.
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupt):
            gathering.copy(0, 1000, RUNS, STREAM)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gathering.settle() is False
    gate.set()
    deadline = time.monotonic() + SECONDS
    while not blocks:
        assert time.monotonic() < deadline
    while gathering.settle() or blocks:
        assert time.monotonic() < deadline


def test_an_interrupt_anywhere_loses_no_gathered_memory(driver: Any, blocks: dict[int, Block]) -> None:
    every: list[Gathering] = []
    went_on = True
    while went_on:
        gathering = Gathering(driver)
        gathering.copy(0, 1000, RUNS, STREAM)
        # Once from what is idle, once from what is allocated.
        went_on = interrupted_in(len(every), lambda: [gathering.copy(0, nbytes, RUNS, STREAM) for nbytes in (1000, 9000)])  # noqa: B023
        every.append(gathering)
    assert len(every) > 10
    # What was interrupted goes on to its end, on another thread.
    deadline = time.monotonic() + SECONDS
    while [each for each in every if each.settle()] or blocks:
        assert time.monotonic() < deadline
        time.sleep(0.001)
