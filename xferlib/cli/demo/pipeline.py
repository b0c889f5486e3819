"""The loop: batches through read, H2D, compute, D2H and write, all five at once.

Some threads read into pinned slots, some write from pinned outputs, and the calling thread in between starts transfers and compute
and never waits for the newest batch. A slot goes round: filled, put, filled again when that transfer is done; an output likewise,
from the launch into it to the end of its write. So what is under way is bounded by the number of slots and outputs.
Batches may overtake each other: each says where it belongs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt

from xferlib.stager import Stager
from xferlib.transfer import Transfer
from xferlib.workload import EdgeJob, EdgeSpec

__all__ = ["Batch", "Pipeline", "Run", "batches"]

T = TypeVar("T")
Array = npt.NDArray[Any]


class Batch(NamedTuple):
    """Consecutive frames."""

    start: int
    frames: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the clock said. For read and write: the time their threads were at work, not waiting, over the number of threads."""

    total_seconds: float
    read_seconds: float
    write_seconds: float


@final
class Pipeline:
    """Pinned slots and outputs for batches of one spec. The thread that calls `run` has entered the job."""

    def __init__(self, stager: Stager, job: EdgeJob, spec: EdgeSpec, *, threads: int) -> None:
        plane = (spec.frames, spec.height, spec.width)
        self.stager = stager
        self.job = job
        self.threads = threads
        self.slots = [stager.empty_pinned((spec.frames, *spec.frame_shape), spec.dtype) for _ in range(spec.slots)]
        self.outputs = [stager.empty_pinned(plane, np.dtype(np.uint8)) for _ in range(spec.slots)]

    def run(
        self,
        work: Sequence[Batch],
        *,
        rounds: int,
        read: Callable[[int, Array], None],
        write: Callable[[int, Array], None],
        progress: Callable[[int], None] = lambda frames: None,
    ) -> Run:
        """Stream the batches and return when the last is written.

        `read(start, slot)` fills a slot, `write(start, frames)` takes a result, `progress(frames)` is told what was written; all
        three on several threads at once. What any of them raises, or Ctrl-C, ends all threads and is raised here.
        """
        return _Pass(self, work, rounds, read, write, progress).go()


class _Drained(NamedTuple):
    batch: Batch
    output: int
    transfer: Transfer


class _Stopped(Exception):
    """Raised inside a thread for which there is nothing more to do."""


@final
class _Pass:
    """One run of a pipeline: its queues, its clocks, its end."""

    def __init__(
        self,
        pipeline: Pipeline,
        work: Sequence[Batch],
        rounds: int,
        read: Callable[[int, Array], None],
        write: Callable[[int, Array], None],
        progress: Callable[[int], None],
    ) -> None:
        self._pipeline = pipeline
        self._work = work
        self._rounds = rounds
        self._read, self._write, self._progress = read, write, progress
        self._todo: SimpleQueue[Batch | None] = SimpleQueue()
        self._free: SimpleQueue[tuple[Array, Transfer | None] | None] = SimpleQueue()
        self._filled: SimpleQueue[tuple[Batch, Array] | None] = SimpleQueue()
        self._outputs: SimpleQueue[int | None] = SimpleQueue()
        self._drained: SimpleQueue[_Drained | None] = SimpleQueue()
        self._h2d, self._d2h = threading.Lock(), threading.Lock()
        self._stopping = False
        self._errors: list[BaseException] = []
        self._read_seconds: list[float] = []
        self._write_seconds: list[float] = []

    def go(self) -> Run:
        count = self._pipeline.threads
        readers = [threading.Thread(target=self._guard, args=(self._fill,), daemon=True) for _ in range(count)]
        writers = [threading.Thread(target=self._guard, args=(self._drain,), daemon=True) for _ in range(count)]
        self._deal()
        began = time.perf_counter()
        try:
            for thread in (*readers, *writers):
                thread.start()
            with suppress(_Stopped):
                self._feed()
            for _ in writers:
                self._drained.put(None)
            for thread in writers:
                thread.join()
            total = time.perf_counter() - began
        finally:
            self._stop()
            for thread in (*readers, *writers):
                if thread.ident is not None:
                    thread.join()
        if self._errors:
            raise self._errors[0]
        return Run(
            total_seconds=total, read_seconds=sum(self._read_seconds) / count, write_seconds=sum(self._write_seconds) / count
        )

    def _deal(self) -> None:
        for batch in self._work:
            self._todo.put(batch)
        for slot in self._pipeline.slots:
            self._free.put((slot, None))
        for index in range(len(self._pipeline.outputs)):
            self._outputs.put(index)

    def _feed(self) -> None:
        stager, job = self._pipeline.stager, self._pipeline.job
        for _ in self._work:
            batch, slot = self._next(self._filled)
            # Before there is room for the result: H2D then runs while earlier batches are computed and written.
            transfer = stager.put(slot[: batch.frames])
            self._free.put((slot, transfer))
            index = self._next(self._outputs)
            result = job.launch(transfer.value, index, rounds=self._rounds)
            out = self._pipeline.outputs[index][: batch.frames]
            self._drained.put(_Drained(batch, index, stager.get(result, out=out)))

    def _fill(self) -> None:
        while True:
            batch = self._next(self._todo)
            slot = self._free_slot()
            began = time.perf_counter()
            self._read(batch.start, slot[: batch.frames])
            self._read_seconds.append(time.perf_counter() - began)
            self._filled.put((batch, slot))

    def _drain(self) -> None:
        while True:
            batch, index = self._landed()
            began = time.perf_counter()
            self._write(batch.start, self._pipeline.outputs[index][: batch.frames])
            self._write_seconds.append(time.perf_counter() - began)
            self._outputs.put(index)
            self._progress(batch.frames)

    def _free_slot(self) -> Array:
        # One thread at a time, because waiting for a device may spin: the others sleep at the lock and leave their cores to copies.
        with self._h2d:
            slot, transfer = self._next(self._free)
            if transfer is not None:
                transfer.synchronize()
            return slot

    def _landed(self) -> tuple[Batch, int]:
        with self._d2h:
            batch, index, transfer = self._next(self._drained)
            transfer.synchronize()
            return batch, index

    def _next(self, channel: SimpleQueue[T | None]) -> T:
        item = channel.get()
        if item is None or self._stopping:
            raise _Stopped
        return item

    def _guard(self, stage: Callable[[], None]) -> None:
        try:
            stage()
        except _Stopped:
            pass
        except BaseException as error:
            self._errors.append(error)
            self._stop()

    def _stop(self) -> None:
        """Wake up whoever waits, and let nobody begin anything new."""
        self._stopping = True
        for _ in range(self._pipeline.threads):
            for channel in (self._todo, self._free, self._filled, self._outputs, self._drained):
                channel.put(None)


def batches(frames: int, size: int) -> list[Batch]:
    """Cut `frames` frames into batches of `size`, the last one perhaps smaller."""
    return [Batch(start, min(size, frames - start)) for start in range(0, frames, size)]
