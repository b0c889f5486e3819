"""Where staging fails in the middle: whoever is told of it, or owns the memory next, finds it at rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Gated, held, on_thread, tampered
from xferlib.engine.jobs import Job
from xferlib.engine.lanes import Lane
from xferlib.staging.profile import StagingProfile

MIB = 1 << 20
RING = StagingProfile(1, MIB)
SEVERAL = StagingProfile(4, MIB)
SMALL = 100_000
SECONDS = 10.0

pytestmark = pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")


class RecordBroke(Exception):
    """What the backend raises."""


def numbers(nbytes: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + nbytes // 4, dtype=np.uint32)


def fails(times: int, call: Callable[[], Any], failed: threading.Event) -> Callable[[], Any]:
    """Return a call that fails the first times, and tells of the last of them."""
    left = iter(range(times))

    def failing() -> Any:
        number = next(left, None)
        if number is not None:
            if number == times - 1:
                failed.set()
            raise RecordBroke("no event to be had")
        return call()

    return failing


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


@pytest.mark.parametrize("nbytes", [SMALL, 3 * MIB], ids=["small", "large"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_memory_that_may_be_in_use_for_ever_is_given_to_nobody(direction: str, nbytes: int) -> None:
    backend = tampered(failures=(RecordBroke,))
    real = getattr(backend.inner, f"record_{direction}")
    failed = threading.Event()
    # What a thread of its own cannot record is recorded again, by whoever settles it.
    setattr(backend, f"record_{direction}", fails(2 if (direction, nbytes) == ("h2d", SMALL) else 1, real, failed))

    def start(stager: xferlib.Stager) -> None:
        if direction == "h2d":
            stager.put(np.full(nbytes, 100, np.uint8))
        else:
            stager.get(np.full(nbytes, 100, np.uint8), out=np.zeros(nbytes, np.uint8)).synchronize()

    with xferlib.stager(backend, pinned_limit=8 * MIB, staging=RING) as stager:
        with held(getattr(backend.inner, direction)) as gate:
            failing = on_thread(lambda: start(stager))
            assert failed.wait(SECONDS)
            # Chunks that are idle go; that memory stays.
            stager.trim()
            assert stager._pool.usage().used > 0
            mine = stager.empty_pinned(nbytes, np.uint8)
            mine[...] = 1
            gate.set()
            # Whoever is told finds at rest what can be known of.
            with pytest.raises(xferlib.TransferError, match="no event"):
                failing.result(SECONDS)
        real().synchronize()
        assert (mine == 1).all()
        # What is left serves on.
        assert np.array_equal(on_thread(lambda: stager.put(numbers(3 * MIB)).result()).result(SECONDS), numbers(3 * MIB))


def test_closing_a_pin_waits_for_a_lent_put_that_has_more_to_start() -> None:
    gated = Gated(lambda: threading.current_thread().name == "xferlib-dispatcher")
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
def test_what_is_interrupted_on_its_way_to_give_a_put_up_keeps_no_close_waiting(
    monkeypatch: pytest.MonkeyPatch, *, borrow: bool
) -> None:
    def refuse(lane: Lane, job: Job, pieces: object) -> None:
        # As where the engine has no memory for it.
        lane.jobs[job.id] = job
        raise xferlib.XferError("refused on purpose")

    def interrupted(job: Job) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    stager = xferlib.stager("host")
    monkeypatch.setattr(Lane, "submit", refuse)
    monkeypatch.setattr(Job, "abandon", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stager.put(np.zeros(8 << 20, np.uint8), borrow=borrow)
    assert stager.put(np.ones(8 << 20, np.uint8)).result().all()
    on_thread(stager.close).result(20)
