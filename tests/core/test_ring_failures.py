"""Where staging fails in the middle: whoever is told of it, or owns the memory next, finds it at rest."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Gated, held, on_thread, tampered
from xferlib.staging.crew import CREWS
from xferlib.staging.parts import pick_up as picked_up
from xferlib.staging.profile import StagingProfile

MIB = 1 << 20
RING = StagingProfile(1, MIB)
SEVERAL = StagingProfile(4, MIB)
SECONDS = 10.0

pytestmark = pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")


class RecordBroke(Exception):
    """What the backend raises."""


def numbers(nbytes: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + nbytes // 4, dtype=np.uint32)


def fails(times: int, call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that fails the first times."""
    left = iter(range(times))

    def failing() -> Any:
        if next(left, None) is not None:
            raise RecordBroke("no event to be had")
        return call()

    return failing


def test_a_get_that_fails_in_its_last_step_is_told_when_nothing_is_written_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tampered()
    steps = iter(range(100))

    def pick_up(source: Any, part: Any) -> None:
        if next(steps) == 0:
            raise OSError("no such page")
        picked_up(source, part)

    monkeypatch.setattr("xferlib.staging.land.pick_up", pick_up)
    nbytes = 300_000
    gates: list[Any] = []
    copies = iter(range(100))

    def copy(dst: int, src: int, nbytes: int) -> None:
        if next(copies) == 2:
            hold = held(backend.inner.d2h)
            gates.append((hold, hold.__enter__()))
        backend.inner.copy_d2h(dst, src, nbytes)

    backend.copy_d2h = copy
    with xferlib.stager(backend, pinned_limit=8 * MIB, staging=RING) as stager:
        device = [np.full(nbytes, 100 + number, np.uint8) for number in range(4)]
        out = [np.zeros(nbytes, np.uint8) for _ in device]
        with held(backend.inner.d2h):
            transfer = stager.get(device, out=out)
        with pytest.raises(TimeoutError):
            on_thread(transfer.synchronize).result(0.3)
        mine = [stager.empty_pinned(nbytes, np.uint8) for _ in device]
        for array in mine:
            array[...] = 1
        gates[0][0].__exit__(None, None, None)
        with pytest.raises(xferlib.TransferError, match="no such page"):
            on_thread(transfer.synchronize).result(SECONDS)
        backend.inner.record_d2h().synchronize()
        assert all((array == 1).all() for array in mine)


@pytest.mark.parametrize("shape", [RING, SEVERAL], ids=["alone", "several"])
def test_each_get_behind_copies_that_fail_says_so(shape: StagingProfile) -> None:
    def broken() -> None:
        raise RuntimeError("the engine broke")

    with xferlib.stager("host", pinned_limit=64 * MIB, staging=shape) as stager:
        device, out = numbers(16 * MIB), np.zeros(4 * MIB, np.uint32)
        stager.get(device, out=out).result()
        stager.backend.d2h.submit(broken)  # type: ignore[attr-defined]  # the host backend's
        for _ in range(4):
            with pytest.raises(xferlib.TransferError):
                on_thread(lambda: stager.get(device, out=out).result()).result(SECONDS)


@pytest.mark.parametrize("nbytes", [300_000, 3 * MIB], ids=["small", "large"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_memory_that_may_be_in_use_for_ever_is_given_to_nobody(direction: str, nbytes: int) -> None:
    backend = tampered(failures=(RecordBroke,))
    real = getattr(backend.inner, f"record_{direction}")
    setattr(backend, f"record_{direction}", fails(3, real))
    with xferlib.stager(backend, pinned_limit=8 * MIB, staging=RING) as stager:
        with held(getattr(backend.inner, direction)):
            with pytest.raises(xferlib.TransferError, match="no event"):
                if direction == "h2d":
                    stager.put(np.full(nbytes, 100, np.uint8))
                else:
                    stager.get(np.full(nbytes, 100, np.uint8), out=np.zeros(nbytes, np.uint8))
            # Chunks that are idle go; that memory stays.
            stager.trim()
            assert stager._pool.usage().used > 0
            mine = stager.empty_pinned(nbytes, np.uint8)
            mine[...] = 1
        real().synchronize()
        assert (mine == 1).all()
        # What is left serves on.
        assert np.array_equal(on_thread(lambda: stager.put(numbers(3 * MIB)).result()).result(SECONDS), numbers(3 * MIB))


def test_a_lent_put_whose_end_cannot_be_recorded_keeps_its_device_memory() -> None:
    backend = tampered(failures=(RecordBroke,))
    with xferlib.stager(backend, pinned_limit=64 * MIB, staging=RING) as stager:
        freed = backend.inner.memory.calls().device_frees
        with held(backend.inner.h2d):
            # Two chunks have an event each. After them come the end of the put, and what settles it.
            records = iter(range(100))

            def record() -> Any:
                number = next(records)
                if number in (parts, parts + 1):
                    raise RecordBroke("no event to be had")
                return backend.inner.record_h2d()

            parts = 2
            backend.record_h2d = record
            stager._traffic.h2d._record = record
            transfer = stager.put(numbers(2 * MIB), borrow=True)
            with pytest.raises(xferlib.TransferError, match="no event"):
                on_thread(transfer.synchronize).result(SECONDS)
            del transfer
            gc.collect()
            stager.trim()
            assert backend.inner.memory.calls().device_frees == freed


def test_closing_a_pin_waits_for_a_lent_put_that_has_more_to_start() -> None:
    gated = Gated(lambda: threading.current_thread().name == "xferlib-feeding")
    with xferlib.stager(gated.backend, pinned_limit=64 * MIB, staging=RING) as stager:
        mine = np.full(MIB, 7, np.uint8)
        pin = stager.pin(mine)
        with held(gated.backend.inner.h2d) as gate:
            transfer = stager.put({"pinned": mine, "lent": numbers(2 * MIB)}, borrow=True)
            assert gated.entered.wait(SECONDS)
            closing = on_thread(pin.close)
            gated.gate.set()
            with pytest.raises(TimeoutError):
                closing.result(0.3)
            gate.set()
        closing.result(SECONDS)
        assert (transfer.result()["pinned"] == 7).all()
        assert stager.stats().h2d_nbytes == 3 * MIB


def test_close_gives_back_what_a_lent_put_used() -> None:
    gated = Gated()
    stager = xferlib.stager(gated.backend, pinned_limit=64 * MIB, staging=RING)
    with held(gated.backend.inner.h2d) as gate:
        stager.put(numbers(2 * MIB), borrow=True)
        assert gated.entered.wait(SECONDS)
        closing = on_thread(stager.close)
        gated.gate.set()
        with pytest.raises(TimeoutError):
            closing.result(0.3)
        gate.set()
    closing.result(SECONDS)
    calls = gated.backend.inner.memory.calls()
    assert calls.pinned_frees == calls.pinned_allocations > 0


@pytest.mark.parametrize("borrow", [False, True])
def test_an_interrupt_while_helpers_start_leaves_nothing_under_way(borrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not CREWS[0]._threads, "a stager of another test is open"
    start = threading.Thread.start
    interrupts = iter([KeyboardInterrupt()])

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("xferlib-to-device"):
            for interrupt in interrupts:
                raise interrupt

    stager = xferlib.stager(tampered(), pinned_limit=64 * MIB, staging=SEVERAL)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    source = numbers(16 * MIB)
    with pytest.raises(KeyboardInterrupt):
        on_thread(lambda: stager.put(source, borrow=borrow)).result(SECONDS)
    assert not stager._traffic.landings.busy
    assert np.array_equal(on_thread(lambda: stager.put(source).result()).result(SECONDS), source)
    on_thread(stager.close).result(SECONDS)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("xferlib-to-device")]


def test_an_interrupt_while_a_get_waits_for_its_turn_leaves_nothing_to_wait_for() -> None:
    class Interrupted:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    stager = xferlib.stager(tampered(), pinned_limit=64 * MIB, staging=RING)
    ring: Any = stager._staging
    turn = ring._landing
    ring._landing = Interrupted()  # where a thread waits
    with pytest.raises(KeyboardInterrupt):
        stager.get(numbers(MIB), out=np.zeros(MIB // 4, np.uint32))
    ring._landing = turn
    on_thread(stager.close).result(SECONDS)


def test_gets_that_have_copies_to_start_stay_in_one_list() -> None:
    """Another thread may add to it at any moment; one that took its place would have lost that."""
    backend = tampered()
    with xferlib.stager(backend, pinned_limit=64 * MIB, staging=RING) as stager:
        ring: Any = stager._staging
        with held(backend.inner.d2h):
            transfer = stager.get(numbers(16 * MIB), out=np.zeros(4 * MIB, np.uint32))
            entries = ring._unissued
            assert len(entries) == 1
        transfer.synchronize()
        ring.wait_issued()
        assert ring._unissued is entries
        assert not entries
