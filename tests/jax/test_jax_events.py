"""Events of CUDA are the process's, and recorded anew only when nobody can ask about them; by a driver that notes its calls."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from tests.interrupts.repeated import interrupted
from tests.jax.garbage import Cycle, eventually
from xferlib.handles import FIRST, unreferenced
from xferlib.stager import Stager


class NotingDriver:
    ordinal = -1

    def __init__(self) -> None:
        self.created = 0
        self.recorded: list[tuple[int, int]] = []
        self.reached: set[int] = set()
        self.refuses = False

    def create_event(self) -> int:
        self.created += 1
        return 1000 + self.created

    def record(self, handle: int, stream: int) -> None:
        if self.refuses:
            raise ArithmeticError("on purpose")
        # A copy: to note a handle must not be to use it.
        self.recorded.append((int(str(handle)), stream))
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
    live = [pool.record(7) for _ in range(20)]
    assert len({handle for handle, _ in driver.recorded}) == 20
    created = driver.created
    del live[:]
    for _ in range(1000):
        pool.record(8)
    assert driver.created == created == len(pool.handles)


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
    kept = [pool.record(9) for _ in range(3 * FIRST)]
    assert driver.recorded[0][0] in {event.handle for event in kept}


def test_a_handle_whose_recording_failed_is_used_again(pool: Any, driver: NotingDriver) -> None:
    pool.record(7)
    created = driver.created
    driver.refuses = True
    for _ in range(3 * created):
        with pytest.raises(ArithmeticError):
            pool.record(7)
    driver.refuses = False
    pool.record(7)
    assert driver.created == created


def test_no_interrupt_loses_a_handle(pool: Any, driver: NotingDriver) -> None:
    def work() -> None:
        while True:
            events = [pool.record(7) for _ in range(3)]
            del events

    interrupted(work, 400)
    # Where a call was interrupted, another thread may still make what it asked for, and the next call asks for as many again.
    pool.handles.free.clear()
    eventually(lambda: len(list(unreferenced(pool.handles._owned))) == driver.created)


def test_threads_that_record_share_no_handle(pool: Any, driver: NotingDriver) -> None:
    shared: list[int] = []
    in_use: dict[int, None] = {}

    def work() -> None:
        for _ in range(2000):
            event = pool.record(7)
            handle = event.handle
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
    # Each may have found none at the very beginning.
    assert driver.created <= 3 * FIRST


def test_stagers_of_one_device_share_their_events(stager: Stager) -> None:
    from xferlib_jax import _events

    first, second = NotingDriver(), NotingDriver()
    try:
        pool = _events.event_pool(first)  # type: ignore[arg-type]
        pool.record(7)
        assert _events.event_pool(second) is pool  # type: ignore[arg-type]
        pool.record(7)
        assert first.created > 0 == second.created
    finally:
        del _events._pools[NotingDriver.ordinal]
