"""Events of CUDA are the process's, and recorded anew only when nobody can ask about them; by a driver that notes its calls."""

from __future__ import annotations

import gc
import threading
from ctypes import c_void_p
from typing import Any

import pytest

from tests.interrupts.repeated import interrupted
from tests.jax.garbage import Cycle
from xferlib.stager import Stager


class NotingDriver:
    ordinal = -1

    def __init__(self) -> None:
        self.created = 0
        self.recorded: list[tuple[int, int]] = []
        self.reached: set[int] = set()
        self.refuses = False

    def create_event(self, handle: c_void_p) -> None:
        self.created += 1
        handle.value = 1000 + self.created

    def record(self, handle: int, stream: int) -> None:
        if self.refuses:
            raise ArithmeticError("on purpose")
        self.recorded.append((handle, stream))
        self.reached.discard(handle)

    def query(self, handle: int) -> bool:
        return handle in self.reached


@pytest.fixture
def driver() -> NotingDriver:
    return NotingDriver()


@pytest.fixture
def pool(stager: Stager, driver: NotingDriver) -> Any:
    from xferlib_jax._events import EventPool

    return EventPool(driver)  # type: ignore[arg-type]  # It has what the pool calls.


def test_a_handle_is_recorded_again_when_its_event_is_gone(pool: Any, driver: NotingDriver) -> None:
    first, second = pool.record(7), pool.record(7)
    assert driver.created == 2
    del first
    third = pool.record(8)
    assert driver.recorded == [(1001, 7), (1002, 7), (1001, 8)]
    del second, third
    kept = [pool.record(9) for _ in range(3)]
    assert (driver.created, pool.handles) == (3, 3)
    assert len({handle for handle, _ in driver.recorded[-3:]}) == 3
    del kept


def test_an_event_in_a_cycle_is_not_recorded_anew_before_every_finalizer_has_asked(pool: Any, driver: NotingDriver) -> None:
    answers: list[bool] = []

    def make_garbage() -> None:
        event = pool.record(7)

        def ask() -> None:
            # As other work goes on meanwhile: its event is reached at once.
            other = pool.record(8)
            driver.reached.add(driver.recorded[-1][0])
            assert other.done()
            answers.append(event.done())

        # Made after the event, and so finalized after it.
        Cycle(ask, event)

    make_garbage()
    gc.collect()
    assert answers == [False]
    # Now nobody can ask any more.
    kept = [pool.record(9) for _ in range(2)]
    assert driver.created == 2
    del kept


def test_a_handle_whose_recording_failed_is_used_again(pool: Any, driver: NotingDriver) -> None:
    driver.refuses = True
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            pool.record(7)
    driver.refuses = False
    pool.record(7)
    assert (driver.created, pool.handles) == (1, 1)


def test_no_interrupt_loses_a_handle(pool: Any, driver: NotingDriver) -> None:
    def work() -> None:
        while True:
            events = [pool.record(7) for _ in range(3)]
            del events

    interrupted(work, 400)
    assert pool.handles <= 4
    events = [pool.record(7) for _ in range(pool.handles)]
    assert len({handle for handle, _ in driver.recorded[-len(events) :]}) == len(events)
    assert driver.created <= 4


def test_threads_that_record_share_no_handle(pool: Any, driver: NotingDriver) -> None:
    shared: list[int] = []
    in_use: dict[int, None] = {}

    def work() -> None:
        for _ in range(2000):
            event = pool.record(7)
            handle = event._handle
            if handle in in_use:
                shared.append(handle)
            in_use[handle] = None
            del in_use[handle], event

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared == []
    assert driver.created <= 3 + 3


def test_stagers_of_one_device_share_their_events(stager: Stager) -> None:
    from xferlib_jax import _events

    first, second = NotingDriver(), NotingDriver()
    try:
        pool = _events.event_pool(first)  # type: ignore[arg-type]
        pool.record(7)
        assert _events.event_pool(second) is pool  # type: ignore[arg-type]
        pool.record(7)
        assert (first.created, second.created) == (1, 0)
    finally:
        del _events._pools[NotingDriver.ordinal]
