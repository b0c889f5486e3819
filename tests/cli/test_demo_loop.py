"""The loop: every batch arrives once, and whatever goes wrong, wherever, ends all threads and leaves by the calling thread."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

import xferlib
from tests.children import threads
from xferlib.cli.demo import reference
from xferlib.cli.demo.loop import Loop, ahead, median_seconds, tuned
from xferlib.cli.demo.source import from_array
from xferlib.registry import workload_of
from xferlib.workload import EdgeJob, EdgeSpec

FRAMES, BATCH, HEIGHT, WIDTH = 23, 3, 12, 10
SOURCE = np.random.default_rng(11).integers(0, 256, (FRAMES, HEIGHT, WIDTH), np.uint8)

Array = npt.NDArray[Any]


class Broken(Exception):
    """What a stage raises in these tests."""


@pytest.fixture(params=[1, 3], ids=["one thread each", "three threads each"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    before = threads()
    count, depth = request.param, 2
    spec = EdgeSpec(frames=BATCH, height=HEIGHT, width=WIDTH, channels=None, dtype=np.dtype(np.uint8), slots=depth + 1)
    with (
        ThreadPoolExecutor(count) as readers,
        xferlib.stager("host") as stager,
        xferlib.Ring(stager, ((BATCH, HEIGHT, WIDTH), np.uint8), slots=depth + count) as ring,
        workload_of("host").edge_job(spec) as job,
    ):
        yield Loop(stager, ring, job, spec, from_array(SOURCE, "noise"), readers, threads=count, depth=depth)
    assert threads() == before


def reading(loop: Loop, read: Callable[[int, Array], None]) -> Loop:
    """Return the loop with another function to read by."""
    return replace(loop, source=replace(loop.source, read=read))


def room() -> Array:
    return np.zeros(SOURCE.shape, np.uint8)


def failing_after(count: int) -> Callable[..., None]:
    calls = itertools.count()

    def stage(*_: object) -> None:
        if next(calls) == count:
            raise Broken

    return stage


def test_every_frame_arrives_where_it_belongs(loop: Loop) -> None:
    result = room()
    told: list[int] = []
    run = loop.run(FRAMES, rounds=2, out=result, progress=told.append)
    np.testing.assert_array_equal(result, [reference.edges(frame, rounds=2) for frame in SOURCE])
    assert sum(told) == FRAMES
    assert 0 < run.read_seconds < run.total_seconds


def test_frames_are_there_when_progress_is_told_of_them(loop: Loop) -> None:
    result = room()
    there = 0

    def look(frames: int) -> None:
        nonlocal there
        expected = [reference.edges(frame, rounds=1) for frame in SOURCE[there : there + frames]]
        np.testing.assert_array_equal(result[there : there + frames], expected)
        there += frames

    loop.run(FRAMES, rounds=1, out=result, progress=look)
    assert there == FRAMES


def test_a_loop_can_run_again_and_stop_short(loop: Loop) -> None:
    for frames in (FRAMES, 1, BATCH, FRAMES):
        told: list[int] = []
        loop.run(frames, rounds=0, out=room(), progress=told.append)
        assert sum(told) == frames


def test_rounds_are_tuned_unless_they_are_given(loop: Loop) -> None:
    rounds, alone = loop.alone(7)
    assert rounds == 7
    assert set(alone) == {"h2d", "compute", "d2h"}
    assert min(alone.values()) > 0
    tuned, _ = loop.alone(None)
    assert tuned >= 1
    # All slots came back.
    loop.run(FRAMES, rounds=tuned, out=room())


@pytest.mark.parametrize("goal", [0.0, 1e9])
def test_more_rounds_are_measured_only_where_one_is_too_short(goal: float) -> None:
    asked: list[int] = []
    rounds = tuned(asked.append, goal)
    assert set(asked) == ({1} if goal == 0 else {1, 5})
    assert rounds >= 1


def test_a_burst_that_takes_long_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    bursts: list[None] = []
    assert median_seconds(lambda: bursts.append(None)) == 10
    # And once before, which warms up.
    assert len(bursts) == 2


@pytest.mark.parametrize("count", [0, 5])
def test_what_a_read_raises_ends_the_run(loop: Loop, count: int) -> None:
    with pytest.raises(Broken):
        reading(loop, failing_after(count)).run(FRAMES, rounds=1, out=room())


@pytest.mark.parametrize("count", [0, 5])
def test_what_progress_raises_ends_the_run(loop: Loop, count: int) -> None:
    with pytest.raises(Broken):
        loop.run(FRAMES, rounds=1, out=room(), progress=failing_after(count))


def test_a_copy_that_fails_ends_the_run(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise xferlib.TransferError("nothing moves")

    monkeypatch.setattr(xferlib.Stager, "put", refuse)
    with pytest.raises(xferlib.TransferError):
        loop.run(FRAMES, rounds=1, out=room())


def test_device_work_that_fails_behind_the_last_result_is_told(loop: Loop) -> None:
    class Late:
        """A job whose last failure nobody is told of but who asks."""

        launch = loop.job.launch

        def synchronize(self) -> None:
            raise Broken

    with pytest.raises(Broken):
        replace(loop, job=cast("EdgeJob", Late())).run(FRAMES, rounds=1, out=room())


def test_ctrl_c_ends_the_run_while_every_stage_waits(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.main_thread().ident
    assert main is not None
    within, heard, closing = threading.Event(), threading.Event(), threading.Event()
    close = xferlib.Prefetch.close

    class Job:
        """The loop's, which tells when the main thread launches the first batch: it waits for the second one then."""

        synchronize = loop.job.synchronize

        def launch(self, *arguments: Any, rounds: int) -> Any:
            within.set()
            return loop.job.launch(*arguments, rounds=rounds)

    def interrupted(start: int, out: Array) -> None:
        if start == 0:
            return
        within.wait(30)
        # A signal that comes just before the main thread falls asleep is heard when it wakes: by the next one.
        while not heard.wait(0.01):
            signal.pthread_kill(main, signal.SIGINT)
        # Nothing else can go on: all of them wait for this batch until the main thread says that it is over.
        closing.wait(30)

    def hear(*_: object) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def tell(self: xferlib.Prefetch) -> None:
        closing.set()
        close(self)

    monkeypatch.setattr(xferlib.Prefetch, "close", tell)
    before = signal.signal(signal.SIGINT, hear)
    try:
        with pytest.raises(KeyboardInterrupt):
            replace(reading(loop, interrupted), job=cast("EdgeJob", Job())).run(FRAMES, rounds=1, out=room())
        assert closing.is_set()
    finally:
        closing.set()
        # Whoever is about to send a signal does so before the handler goes.
        loop.readers.shutdown()
        signal.signal(signal.SIGINT, before)


def test_a_read_that_takes_longer_lets_others_go_on_with_the_slots_there_are(loop: Loop) -> None:
    if loop.threads == 1:
        pytest.skip("one thread reads one batch after the other")
    begun: list[int] = []
    enough = threading.Event()

    def read(start: int, out: Array) -> None:
        begun.append(start)
        # The first holds its own slot, and all others but the one that the prefetch would hold can be filled behind it.
        if len(begun) == loop.ring.slots - 1:
            enough.set()
        assert start or enough.wait(30)
        loop.source.read(start, out)

    result = room()
    reading(loop, read).run(FRAMES, rounds=2, out=result)
    np.testing.assert_array_equal(result, [reference.edges(frame, rounds=2) for frame in SOURCE])


def test_the_oldest_batch_finds_a_slot_however_late_it_asks_for_one(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    if loop.threads == 1:
        pytest.skip("one thread asks for one slot after the other")
    acquire = xferlib.Ring.acquire
    held = loop.ring.slots - 2
    lock, others, asked = threading.Lock(), threading.Semaphore(0), threading.Event()
    first = True

    class Readers(ThreadPoolExecutor):
        """Tells when the prefetch waits for the oldest batch: all that may be read ahead of it is submitted then."""

        submitted = 0

        def submit(self, *arguments: Any, **named: Any) -> Any:
            future = super().submit(*arguments, **named)
            self.submitted += 1
            result = future.result

            def ask(timeout: float | None = None) -> Any:
                asked.set()
                return result(timeout)

            future.result = ask  # type: ignore[method-assign]
            return future

    def late(ring: xferlib.Ring[Any]) -> xferlib.Slot[Any]:
        nonlocal first
        with lock:
            oldest, first = first, False
        if oldest:
            assert asked.wait(30)
            # Whatever else was submitted has its slot, and keeps it until the oldest is put.
            assert readers.submitted - 1 <= held
            for _ in range(readers.submitted - 1):
                assert others.acquire(timeout=30)
        return acquire(ring)

    def read(start: int, out: Array) -> None:
        loop.source.read(start, out)
        others.release()

    monkeypatch.setattr(xferlib.Ring, "acquire", late)
    result = room()
    with Readers(loop.threads) as readers:
        replace(reading(loop, read), readers=readers).run(FRAMES, rounds=1, out=result)
    np.testing.assert_array_equal(result, [reference.edges(frame, rounds=1) for frame in SOURCE])


def test_as_many_results_as_its_depth_are_behind_the_one_that_is_taken(loop: Loop) -> None:
    class Job:
        """The loop's, which counts."""

        synchronize = loop.job.synchronize
        launched = 0

        def launch(self, *arguments: Any, rounds: int) -> Any:
            self.launched += 1
            return loop.job.launch(*arguments, rounds=rounds)

    job = Job()
    behind: list[int] = []
    replace(loop, job=cast("EdgeJob", job)).run(
        FRAMES, rounds=1, out=room(), progress=lambda frames: behind.append(job.launched - len(behind) - 1)
    )
    batches = -(-FRAMES // BATCH)
    assert behind == [min(loop.depth, batches - taken) for taken in range(1, batches + 1)]


class Clock(threading.local):
    """Each thread's own. A look at it takes a second."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("xferlib.cli.demo.loop.time", made)
    return made


def test_reads_take_the_time_at_work_and_the_run_takes_all(loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = xferlib.Ring.acquire

    def slow(ring: xferlib.Ring[Any]) -> xferlib.Slot[Any]:
        clock.now += 1000
        return acquire(ring)

    def progress(frames: int) -> None:
        clock.now += 10

    monkeypatch.setattr(xferlib.Ring, "acquire", slow)
    run = loop.run(FRAMES, rounds=1, out=room(), progress=progress)
    batches = -(-FRAMES // BATCH)
    assert run == (10 * batches + 1, batches / loop.threads)


def test_what_is_measured_alone_is_per_batch_and_copied_back_as_in_the_run(
    loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = xferlib.Stager.get
    pinned: list[bool] = []

    def noting(stager: xferlib.Stager, tree: Any, *, out: Any = None) -> Any:
        pinned.append(out is None or stager.backend.is_pinned(out.ctypes.data, out.nbytes))
        return get(stager, tree, out=out)

    monkeypatch.setattr(xferlib.Stager, "get", noting)
    assert loop.alone(2) == (2, dict.fromkeys(("h2d", "compute", "d2h"), 1 / loop.spec.slots))
    assert pinned
    assert not any(pinned)


@pytest.mark.parametrize("count", [1, 3])
def test_ahead_keeps_the_order_and_to_its_number(count: int) -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        return item

    with ThreadPoolExecutor(8) as pool:
        items = ahead(pool, work, range(9), count)
        assert next(items) == 0
        pool.shutdown(cancel_futures=False)
        assert sorted(begun) == list(range(count))


def test_ahead_gives_every_item_in_order() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(ahead(pool, str, range(20), 3)) == list(map(str, range(20)))
