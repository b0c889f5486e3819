"""Calls of the CUDA driver are made in the device's context, and leave the thread where it was; by a driver that takes notes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.core.fakes import WATCHDOG, on_thread
from tests.cuda.driver import CONTEXT, ELSEWHERE, REFUSED, RELAXED, THREAD_LOCAL, built_driver, elsewhere, made, use_driver
from tests.engine.build import COMPILER
from tests.interrupts.repeated import interrupted

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: a driver of C was not tried")

INVALID_VALUE, NOT_READY, BROKEN = 1, 600, 700
EVENT, STREAM, HERE, THERE = 0xE100, 0xF100, 0x7F0012345600, 0x7F0112345600


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a `Driver` on a thread that is elsewhere, and see that it still is."""
    from xferlib_jax import _driver

    use_driver(library, monkeypatch)
    monkeypatch.setattr(_driver, "LIBRARY", library._name)
    with elsewhere(library):
        yield _driver.Driver(0)


CALLS: dict[str, tuple[Callable[[Any], object], tuple[int, ...]]] = {
    "cuMemcpyHtoDAsync_v2": (lambda driver: driver.copy_h2d(THERE, HERE, 1 << 33, STREAM), (THERE, HERE, 1 << 33, STREAM)),
    "cuMemcpyDtoHAsync_v2": (lambda driver: driver.copy_d2h(HERE, THERE, 1 << 33, STREAM), (HERE, THERE, 1 << 33, STREAM)),
    "cuEventRecord": (lambda driver: driver.record(EVENT, STREAM), (EVENT, STREAM)),
    "cuStreamWaitEvent": (lambda driver: driver.wait(STREAM, EVENT), (STREAM, EVENT, 0)),
    "cuEventQuery": (lambda driver: driver.query(EVENT), (EVENT,)),
    "cuStreamQuery": (lambda driver: driver.is_idle(STREAM), (STREAM,)),
    "cuEventSynchronize": (lambda driver: driver.synchronize(EVENT), (EVENT,)),
    "cuMemHostRegister_v2": (lambda driver: driver.register(HERE, 4096), (HERE, 4096, 1)),
    "cuMemHostUnregister": (lambda driver: driver.unregister(HERE), (HERE,)),
    "cuMemFreeHost": (lambda driver: driver.free_host(HERE), (HERE,)),
    "cuMemHostAlloc": (lambda driver: driver.alloc_write_combined(4096), (0, 4096, 5)),
    "cuPointerGetAttribute": (lambda driver: driver.is_page_locked(HERE), (0, 2, HERE)),
    "cuEventCreate": (lambda driver: driver.create_event(), (0, 2)),
    "cuLaunchHostFunc": (lambda driver: driver.call_on(STREAM, HERE, 7), (STREAM, HERE, 7)),
}
HARMLESS = {"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuStreamWaitEvent"}
"""What may be called while others capture."""
QUESTIONS = {"cuEventQuery", "cuStreamQuery"}


@pytest.fixture(params=CALLS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_a_call_is_made_in_the_context_and_relaxed_where_it_must_be(driver: Any, library: ctypes.CDLL, name: str) -> None:
    call, given = CALLS[name]
    noted = made(library, name)
    before = noted.count
    for _ in range(3):
        call(driver)
    assert noted.count == before + 3
    assert (noted.context, noted.mode) == (CONTEXT, THREAD_LOCAL if name in HARMLESS else RELAXED)
    assert tuple(noted.given)[: len(given)] == given


def test_a_call_that_fails_says_which_and_leaves_the_thread_as_it_came(driver: Any, library: ctypes.CDLL, name: str) -> None:
    from xferlib_jax._driver import CudaError

    noted = made(library, name)
    noted.status = BROKEN
    try:
        for _ in range(3):
            with pytest.raises(CudaError, match=rf"^{name} failed: CUDA_ERROR_OTHER \({BROKEN}\)$") as raised:
                CALLS[name][0](driver)
            assert raised.value.status == BROKEN
            assert (library.driver_depth(), library.driver_mode()) == (1, THREAD_LOCAL)
    finally:
        noted.status = 0
    CALLS[name][0](driver)


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_a_question_is_answered(driver: Any, library: ctypes.CDLL, name: str) -> None:
    noted = made(library, name)
    answers = []
    try:
        for noted.status in (0, NOT_READY, 0):
            answers.append(CALLS[name][0](driver))
    finally:
        noted.status = 0
    assert answers == [True, False, True]


def test_memory_of_nobodys_is_not_page_locked(driver: Any, library: ctypes.CDLL) -> None:
    noted = made(library, "cuPointerGetAttribute")
    assert driver.is_page_locked(HERE)
    try:
        noted.status = INVALID_VALUE
        assert not driver.is_page_locked(HERE)
    finally:
        noted.status = 0


def test_where_the_context_cannot_be_entered_nothing_is_called(driver: Any, library: ctypes.CDLL, name: str) -> None:
    from xferlib_jax._driver import CudaError

    noted = made(library, name)
    before = noted.count
    library.driver_refuse(CONTEXT)
    try:
        with pytest.raises(CudaError, match=rf"^({name}|cuCtxPushCurrent) failed: CUDA_ERROR_OTHER \({REFUSED}\)$"):
            CALLS[name][0](driver)
    finally:
        library.driver_refuse(None)
    assert noted.count == before


def test_no_interrupt_leaves_the_thread_elsewhere_or_relaxed(driver: Any, library: ctypes.CDLL) -> None:
    calls = [call for call, _ in CALLS.values()]

    def work() -> None:
        while True:
            for call in calls:
                call(driver)

    interrupted(work, 400)
    assert (library.driver_depth(), library.driver_context(), library.driver_mode()) == (1, ELSEWHERE, THREAD_LOCAL)


def test_other_threads_run_while_a_call_waits_for_the_drivers_lock(driver: Any, library: ctypes.CDLL, name: str) -> None:
    """Else the thread that has the lock, and needs the interpreter to give it back, never does."""
    noted = made(library, name)
    before = noted.count

    def release() -> None:
        while noted.count == before:
            time.sleep(0.001)
        library.driver_hold(0)

    library.driver_hold(1)
    released = on_thread(release)
    try:
        CALLS[name][0](driver)
    finally:
        library.driver_hold(0)
    released.result(WATCHDOG)
