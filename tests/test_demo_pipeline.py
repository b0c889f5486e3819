"""The loop: every batch arrives once, and whatever goes wrong, wherever, ends all threads and leaves by the calling thread."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import xferlib
from tests.children import threads
from xferlib.cli.companions import workload
from xferlib.cli.demo import reference
from xferlib.cli.demo.pipeline import Pipeline, batches
from xferlib.workload import EdgeSpec

FRAMES, BATCH, HEIGHT, WIDTH = 23, 3, 12, 10
SOURCE = np.random.default_rng(11).integers(0, 256, (FRAMES, HEIGHT, WIDTH), np.uint8)

Array = npt.NDArray[Any]


class Broken(Exception):
    """What a stage raises in these tests."""


@pytest.fixture(params=[1, 3], ids=["one thread each", "three threads each"])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    before = threads()
    spec = EdgeSpec(frames=BATCH, height=HEIGHT, width=WIDTH, channels=None, dtype=np.dtype(np.uint8), slots=4)
    with xferlib.stager("host") as stager, workload("host").edge_job(spec) as job:
        yield Pipeline(stager, job, spec, threads=request.param)
    assert threads() == before


def read(start: int, slot: Array) -> None:
    np.copyto(slot, SOURCE[start : start + len(slot)])


def drop(start: int, frames: Array) -> None:
    pass


def failing_after(count: int) -> Callable[..., None]:
    calls = itertools.count()

    def stage(*_: object) -> None:
        if next(calls) == count:
            raise Broken

    return stage


def test_every_frame_arrives_where_it_belongs(pipeline: Pipeline) -> None:
    result = np.zeros(SOURCE.shape, np.uint8)
    written: list[int] = []

    def write(start: int, frames: Array) -> None:
        result[start : start + len(frames)] = frames

    run = pipeline.run(batches(FRAMES, BATCH), rounds=2, read=read, write=write, progress=written.append)
    np.testing.assert_array_equal(result, [reference.edges(frame, rounds=2) for frame in SOURCE])
    assert sum(written) == FRAMES
    assert 0 < run.read_seconds < run.total_seconds
    assert 0 < run.write_seconds < run.total_seconds


def test_a_pipeline_can_run_again(pipeline: Pipeline) -> None:
    for _ in range(3):
        written: list[int] = []
        pipeline.run(batches(FRAMES, BATCH), rounds=0, read=read, write=drop, progress=written.append)
        assert sum(written) == FRAMES


@pytest.mark.parametrize("count", [0, 5])
def test_what_a_read_raises_ends_the_run(pipeline: Pipeline, count: int) -> None:
    with pytest.raises(Broken):
        pipeline.run(batches(FRAMES, BATCH), rounds=1, read=failing_after(count), write=drop)


@pytest.mark.parametrize("count", [0, 5])
def test_what_a_write_raises_ends_the_run(pipeline: Pipeline, count: int) -> None:
    with pytest.raises(Broken):
        pipeline.run(batches(FRAMES, BATCH), rounds=1, read=read, write=failing_after(count))


def test_a_put_that_fails_ends_the_run(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "stager", RefusesPuts())
    with pytest.raises(xferlib.TransferError):
        pipeline.run(batches(FRAMES, BATCH), rounds=1, read=read, write=drop)


class RefusesPuts:
    """A stager that cannot start a transfer."""

    def put(self, tree: object) -> None:
        raise xferlib.TransferError("nothing moves")


def test_ctrl_c_ends_the_run_while_every_stage_waits(pipeline: Pipeline) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupted(start: int, slot: Array) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        # Nothing else can go on: all of them wait for this batch until the main thread says that it is over.
        opened.wait(30)

    opened = threading.Event()
    original = threading.Thread.join

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        opened.set()
        original(thread, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "join", join)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(batches(FRAMES, BATCH), rounds=1, read=interrupted, write=drop)
    assert opened.is_set()


def test_batches_cover_all_frames_once() -> None:
    work = batches(FRAMES, BATCH)
    assert [frame for batch in work for frame in range(batch.start, batch.start + batch.frames)] == list(range(FRAMES))
