"""The right to wait: time-outs, failures that are raised every time, streams."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import xferlib_host

import xferlib
from tests.core.fakes import WATCHDOG, Point, held, on_thread, succeeds, tampered, until
from xferlib.latch import note_copy_thread
from xferlib.staging.profile import StagingProfile
from xferlib.transfer import LazyValue, Transfer


class Broke(Exception):
    """What the backend raises."""


def transfer(point: Point, *, on_host: bool = False) -> Transfer:
    return Transfer("value", point, (Broke,), on_host)


def test_a_result_comes_in_time_or_not_at_all(stager: xferlib.Stager) -> None:
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        started = stager.put(np.ones(3))
        for timeout in (0, 0.001):
            with pytest.raises(TimeoutError, match=f"not done after {timeout} seconds"):
                started.result(timeout)
        assert "in flight" in repr(started)
    assert started.result(10).tolist() == [1] * 3
    assert started.result(0).tolist() == [1] * 3
    assert "done" in repr(started)


def test_a_done_event_is_not_asked_again() -> None:
    point = Point(reached=True)
    ended = transfer(point)
    assert [ended.done() for _ in range(3)] == [True] * 3
    assert point.asked == 1


@pytest.mark.parametrize("on_host", [True, False])
def test_a_failure_is_raised_every_time_with_its_cause(on_host: bool) -> None:
    point = Point(error=Broke("down"))
    failed = transfer(point, on_host=on_host)
    waits: list[Callable[[], object]] = [
        failed.done,
        failed.synchronize,
        failed.result,
        lambda: failed.result(1),
        failed.stream_wait,
    ]
    for wait in waits * 2:
        with pytest.raises(xferlib.TransferError, match="the copy failed: down") as caught:
            wait()
        assert isinstance(caught.value.__cause__, Broke)
    assert "failed" in repr(failed)


def test_arrays_that_could_not_be_made_can_be_asked_for_again() -> None:
    errors = [Broke("no room"), None]

    def make() -> str:
        error = errors.pop(0)
        if error is not None:
            raise error
        return "arrays"

    started: Transfer = Transfer(LazyValue(make), Point(reached=True), (Broke,), False)
    with pytest.raises(xferlib.TransferError, match="the arrays could not be made: no room") as caught:
        _ = started.value
    assert isinstance(caught.value.__cause__, Broke)
    assert started.done()
    assert started.value == "arrays"


def test_the_failure_of_a_copy_says_more_than_that_of_making_its_arrays() -> None:
    point = Point()

    def make() -> None:
        point.error = Broke("down")
        raise Broke("no room")

    started: Transfer = Transfer(LazyValue(make), point, (Broke,), False)
    for _ in range(2):
        with pytest.raises(xferlib.TransferError, match="the copy failed: down"):
            _ = started.value


@pytest.mark.parametrize("refusal", [xferlib.TransferError, xferlib.CapabilityError])
def test_who_makes_arrays_refuses_in_its_own_words(refusal: type[Exception]) -> None:
    def make() -> None:
        raise refusal("Put it again")

    started: Transfer = Transfer(LazyValue(make), Point(reached=True), (Exception,), False)
    for _ in range(2):
        with pytest.raises(refusal, match=r"^Put it again$"):
            _ = started.value
    assert started.done()


def test_what_is_not_a_failure_of_the_framework_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        transfer(Point(error=ZeroDivisionError())).done()


def test_a_failed_transfer_keeps_nothing_alive_once_it_is_dropped() -> None:
    failed = transfer(Point(error=Broke("down")))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(xferlib.TransferError):
            failed.synchronize()
        alive = weakref.ref(failed)
        del failed
        assert alive() is None
    finally:
        gc.enable()


def test_the_int_0_is_refused(stager: xferlib.Stager) -> None:
    started = stager.put(np.ones(3))
    with pytest.raises(ValueError, match="stream=0 is ambiguous"):
        started.stream_wait(0)


def test_no_stream_can_wait_for_a_get_that_ends_with_a_cpu_copy(stager: xferlib.Stager) -> None:
    started = stager.get(np.ones(3), out=np.zeros(3))
    for _ in range(2):
        with pytest.raises(xferlib.CapabilityError, match=r"pageable memory.*empty_pinned"):
            started.stream_wait()
    assert started.result().tolist() == [1] * 3


def test_a_transfer_outlives_its_stager(stager: xferlib.Stager) -> None:
    started = stager.put(np.ones(3))
    stager.close()
    assert started.done()
    assert started.result().tolist() == [1] * 3


LENT = 4 << 20


def fails(*args: object, **options: object) -> None:
    raise Broke("none left")


WAITS: dict[str, Callable[[Transfer], object]] = {
    # Where it rightly says no at first.
    "done": lambda transfer: until(transfer.done),
    "synchronize": Transfer.synchronize,
    "result": Transfer.result,
    "result in time": lambda transfer: transfer.result(10),
    "stream_wait": Transfer.stream_wait,
    "value": lambda transfer: transfer.value,
}


@pytest.mark.parametrize("first", WAITS)
def test_a_put_of_lent_sources_that_fails_does_so_whatever_is_asked_first(first: str) -> None:
    backend = tampered(failures=(Broke,), copy_h2d=fails)
    with xferlib.stager(backend, pinned_limit=64 << 20, staging=StagingProfile(1, 1 << 20)) as stager:
        failed = stager.put(np.ones(LENT, np.uint8), borrow=True)
        for wait in (WAITS[first], *WAITS.values()):
            with pytest.raises(xferlib.TransferError, match="none left") as caught:
                wait(failed)
            assert isinstance(caught.value.__cause__, Broke)


@pytest.mark.parametrize("first", WAITS)
def test_where_arrays_cannot_be_made_only_who_wants_them_is_told(first: str) -> None:
    backend = tampered(failures=(Broke,), as_array=fails)
    with xferlib.stager(backend, pinned_limit=64 << 20, staging=StagingProfile(1, 1 << 20)) as stager:
        sound = stager.put(np.ones(LENT, np.uint8), borrow=True)
        for name in (first, *WAITS):
            if name in ("value", "result", "result in time"):
                with pytest.raises(xferlib.TransferError, match="the arrays could not be made: none left") as caught:
                    WAITS[name](sound)
                assert isinstance(caught.value.__cause__, Broke)
            else:
                WAITS[name](sound)


@pytest.mark.parametrize("copying", [False, True])
def test_to_wait_until_sources_are_staged_says_nothing_of_a_failure(copying: bool) -> None:
    with xferlib.stager(tampered(failures=(Broke,), copy_h2d=fails), pinned_limit=64 << 20) as stager:
        failed = stager.put(np.ones(LENT, np.uint8), borrow="staged")
        with pytest.raises(xferlib.TransferError, match="none left"):
            failed.synchronize()
        on_thread(partial(waits_staged, failed, copying=copying)).result(WATCHDOG)


@pytest.mark.parametrize("copying", [False, True])
def test_where_nothing_is_staged_nobody_waits_for_it(stager: xferlib.Stager, copying: bool) -> None:
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        started = stager.put(stager.empty_pinned(3, np.uint8))
        on_thread(partial(waits_staged, started, copying=copying)).result(WATCHDOG)
        assert not started.done()


def waits_staged(transfer: Transfer, *, copying: bool) -> None:
    if copying:
        # As a finalizer that the collector runs on a thread of the engine's.
        note_copy_thread()
    transfer.wait_staged()


def test_a_stream_that_is_refused_leaves_a_put_of_lent_sources_sound() -> None:
    closed = xferlib_host.Stream()
    closed.close()
    with xferlib.stager("host", staging=StagingProfile(1, 1 << 20)) as stager:
        started = stager.put(np.ones(LENT, np.uint8), borrow=True)
        with pytest.raises(TypeError, match=r"xferlib_host\.Stream"):
            started.stream_wait("no stream")
        with pytest.raises(xferlib.ClosedError):
            started.stream_wait(closed)
        assert started.result().all()


def test_a_forked_child_waits_for_no_transfer_of_its_parent_s() -> None:
    said = succeeds(
        """
        import os, sys, threading, numpy as np, xferlib
        from xferlib.staging.profile import StagingProfile
        from tests.core.test_transfer import LENT, WAITS

        def refuses(transfer):
            for name, wait in WAITS.items():
                for waiting in (transfer, transfer.completion):
                    try:
                        wait(waiting)
                    except xferlib.BackendUnavailableError as error:
                        assert "forked after the transfer was started" in str(error)
                    else:
                        print(name, "returned")

        with xferlib.stager("host", staging=StagingProfile(1, 1 << 20)) as s:
            early = s.get(np.ones(3))
            early.synchronize()
            gate = threading.Event()
            s.backend.h2d.submit(gate.wait)
            s.backend.d2h.submit(gate.wait)
            transfers = [
                s.put(s.empty_pinned(3, "u1")),
                s.put(np.ones(LENT, "u1"), borrow=True),
                s.put(np.ones(3), into=np.zeros(3)),
                s.get(np.ones(3)),
                s.get(np.ones(3), out=np.zeros(3)),
            ]
            pid = os.fork()
            if not pid:
                for transfer in transfers:
                    refuses(transfer)
                assert early.done() and early.result().all()
                with xferlib.stager("host") as own:
                    mine = own.put(np.ones(3))
                    assert mine.result().all() and mine.completion.done()
                    pid = os.fork()
                    if not pid:
                        refuses(transfers[0])
                        try:
                            mine.stream_wait()
                        except xferlib.BackendUnavailableError:
                            os._exit(7)
                        os._exit(1)
                    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            gate.set()
            for transfer in transfers:
                transfer.synchronize()
        """
    )
    assert said == ""


@pytest.mark.parametrize(
    "wait", [lambda transfer: transfer.synchronize(), lambda transfer: transfer.result(5), lambda transfer: until(transfer.done)]
)
@pytest.mark.parametrize("direction", ["put", "put into", "get"])
def test_whoever_has_seen_the_end_of_a_transfer_keeps_nothing_that_it_needed(
    stager: xferlib.Stager, direction: str, wait: Callable[[Transfer], object]
) -> None:
    """Nobody has to call the stager once more."""
    source = stager.empty_pinned(1000, np.uint8)
    source[:] = 5
    if direction == "get":
        source = stager.put(source).result()
    kept = weakref.ref(source)
    if direction == "get":
        started = stager.get(source)
    else:
        started = stager.put(source, into=np.zeros(1000, np.uint8) if direction == "put into" else None)
    del source
    wait(started)
    gc.collect()
    assert kept() is None
    assert (started.result() == 5).all()


def test_a_transfer_that_ended_before_a_later_one_lets_go_of_nothing_of_that(stager: xferlib.Stager) -> None:
    sources = [stager.empty_pinned(1000, np.uint8) for _ in range(2)]
    refs = [weakref.ref(source) for source in sources]
    first = stager.put(sources[0])
    first.synchronize()
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        second = stager.put(sources[1])
        assert first.done()
        assert first.result().nbytes == 1000
        del sources
        assert [ref() is None for ref in refs] == [True, False]
    second.synchronize()
    assert [ref() is None for ref in refs] == [True, True]


def test_other_tasks_run_while_a_transfer_is_awaited(stager: xferlib.Stager) -> None:
    async def main() -> None:
        with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
            started = [stager.put(np.full(3, number)) for number in range(4)]
            awaited = asyncio.gather(*started)
            for _ in range(3):
                await asyncio.sleep(0)
            assert not awaited.done()
            gate.set()
            assert [array.tolist() for array in await awaited] == [[number] * 3 for number in range(4)]
        # Nobody else need run for what is done.
        with pytest.raises(StopIteration) as caught:
            started[0].__await__().send(None)
        assert caught.value.value.tolist() == [0] * 3
        assert (await stager.get(started[1].value)).tolist() == [1] * 3

    asyncio.run(main())


def test_whoever_no_longer_awaits_a_transfer_leaves_it_sound(stager: xferlib.Stager) -> None:
    async def main() -> None:
        with held(stager.backend.h2d) as gate:  # type: ignore[attr-defined]  # the host backend's
            started = stager.put(np.ones(3))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(started, 0.001)
            assert not started.done()
            gate.set()
            assert (await started).tolist() == [1] * 3

    asyncio.run(main())


@pytest.mark.parametrize("on_host", [True, False])
def test_a_failure_is_raised_each_time_that_it_is_awaited(on_host: bool) -> None:
    async def main() -> None:
        failed = transfer(Point(error=Broke("down")), on_host=on_host)
        for _ in range(2):
            with pytest.raises(xferlib.TransferError, match="the copy failed: down") as caught:
                await failed
            assert isinstance(caught.value.__cause__, Broke)

    asyncio.run(main())


def test_an_awaited_transfer_is_asked_for_less_often_the_longer_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    naps: list[float] = []
    point = Point()

    async def sleep(seconds: float) -> None:
        nonlocal now
        naps.append(seconds)
        now += seconds or 50e-6
        point.reached = now > 1

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr("xferlib.transfer.time", SimpleNamespace(monotonic=lambda: now))
    waiting: Awaitable[object] = transfer(point, on_host=True)

    async def main() -> object:
        return await waiting

    with pytest.raises(StopIteration, match="value"):
        main().send(None)
    # First at each turn of the event loop, then after a quarter of the time that it took, a hundred times a second at least.
    assert naps[:4] == [0] * 4
    assert naps == sorted(naps)
    assert naps[4] == 50e-6
    assert naps[-1] == 10e-3
    assert len(naps) < 150
    # The host did not wait.
    assert point.synchronized == 0
