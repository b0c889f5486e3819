"""Lanes: one copy stream of a stager each, with the pinned chunks that its jobs pass through.

A job is submitted first and given chunks afterwards: while it waits for one, none of the lane's can be taken back. Chunks
come from the stager's pool when they are first wanted. When the pool needs the room, `release` gives them back.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np

from xferlib.daemon import end_daemons
from xferlib.engine.cores import usable_cores
from xferlib.engine.dispatcher import DISPATCHER, Served
from xferlib.engine.jobs import Job, next_id, refuse_parents
from xferlib.engine.native import BUSY, FINISHED, H2D, NOT_YET, OK, STOPPED, File, Piece, gil_library, library
from xferlib.errors import AllocationError, XferError
from xferlib.latch import is_copy_thread
from xferlib.memory.numa import node_near
from xferlib.memory.pinned_pool import KEPT_SHARE, HostBlock, PinnedPool
from xferlib.protocol import DriverCalls, Event, HostStager
from xferlib.tracing.log import LOG
from xferlib.uninterrupted import uninterrupted

__all__ = ["Lane", "Pieces", "start_threads", "usual_threads"]

Pieces: TypeAlias = Sequence[tuple[int, int, int, int]] | np.ndarray[Any, np.dtype[np.uint64]]
"""Each: host address, device address, bytes, and the number of its block of device memory. As an array they take less time."""

USUAL_THREADS, MOST_THREADS = 6, 10
"""On an H100 machine with 16 cores ten threads took batches of 16 MiB in 0.9 of the time that eight took, and twelve in a
little less than that. There are more than six only if they are no more than five eighths of the cores: small transfers wait
for all of them to wake, and the program has work of its own."""
CHUNKS_OF_BLOCK = 32
"""So many chunks are taken in one block, in less time than one by one. On an H100 machine the first put of 64 MiB took 18 to 22 ms
with eight, and 12 to 14 with 32; the first get 18 to 28 and 9 to 13."""
CPU_SET_NBYTES = 1024
"""Bytes of a set of CPUs, with a bit for each: as many as Linux can have."""
STOP_MICROSECONDS = 2_000_000
LEAVE_SECONDS = 0.0001

_nodes: dict[str, int | None] = {}
"""Of each device that was asked for."""
_lanes = itertools.count(1)
_chunks = itertools.count(1)
_kept: list[object] = []
"""The memory of chunks that are lost."""


def usual_threads(pci_bus_id: str | None) -> int:
    """Return how many threads copy at the rate of a usual link, or as many as there are cores.

    They are half as many more for each further device of a node that has been asked for, up to five eighths of the cores. On a
    machine with two H200 and 32 cores, loops over 256 MiB for both devices took 1.7 times as much in a second as for one with
    fifteen threads, 1.3 with ten, and 1.6 with twenty, which were slower for one.
    """
    cores = usable_cores()
    most = cores * 5 // 8
    one = max(min(USUAL_THREADS, cores), min(MOST_THREADS, most))
    if pci_bus_id is None:
        return one
    near = node_near(pci_bus_id)
    node = _nodes.setdefault(pci_bus_id, None if near is None else near.node)
    beside = list(_nodes.values()).count(node) - 1
    return max(one, min(one + beside * one // 2, most))


def start_threads(count: int, pci_bus_id: str | None) -> None:
    """Have at least so many threads, on CPUs near the device if the machine has several NUMA nodes.

    Those of each node are started when a device of it is first used, and all of them serve all devices. Raises `RuntimeError` if
    there can be none.
    """
    near = node_near(pci_bus_id)
    if near is not None:
        cpus = sum([1 << cpu for cpu in near.cpus]).to_bytes(CPU_SET_NBYTES, "little")
        # More would take turns there, while other CPUs are idle.
        library().xe_start_near(min(count, len(near.cpus)), near.node, cpus, len(cpus))
    if library().xe_start(count) == 0:
        raise RuntimeError("can't start new thread")


@final
class Lane:
    """One direction of one stager in the engine: a copy stream, its jobs, and the chunks that these pass through. Any thread."""

    def __init__(
        self, direction: int, backend: HostStager[Any], pool: PinnedPool, jobs: dict[int, Job], *, nbytes: int, most: int
    ) -> None:
        """`jobs`: where those that have not finished are entered; `most`: how many chunks of `nbytes` bytes it may have."""
        self.direction = direction
        self.nbytes = nbytes
        self.jobs = jobs
        """By id, all that have not finished."""
        self._number = next(_lanes)
        self._id = next_id()
        """Tells that this process has opened it: see `refuse_parents`."""
        self._pool = pool
        self._most = most
        self._blocks: dict[int, HostBlock] = {}
        """By the number of the chunk."""
        self._leaving: dict[int, HostBlock] = {}
        """Those that go back to the pool."""
        self._events: dict[int, Event] = {}
        self._releasing = threading.RLock()
        self._growing: dict[int, None] = {}
        # Reentrant: a finalizer may transfer while its thread is in here. Held for a few steps.
        self._counting = threading.RLock()
        self._calls: DriverCalls | None = getattr(backend, "driver_calls", None)
        self._served: Served | None = None
        if self._calls is None:
            self._served = Served(self._number, backend, direction, self.jobs)
            DISPATCHER.start()
        self._open()

    def _open(self) -> None:
        calls = self._calls
        address, stream = (None, None) if calls is None else (ctypes.byref(calls.calls), calls.streams[self.direction])
        if gil_library().xe_open_lane(self._number, self.direction, address, stream) != OK:
            raise XferError("the engine has no memory, or the interpreter ends")

    def failure(self, status: int, at: str) -> Exception:
        """Return the exception for a status of the device."""
        if self._calls is None:
            return XferError(f"{at} failed with status {status}")
        return self._calls.failure(status)

    def job(self, *, owner: int | None = None) -> Job:
        """Return a job that `submit` may start. See `Job`."""
        return Job(self.jobs, self.failure, self.let_go_of_lost, owner=owner)

    def submit(self, job: Job, pieces: Pieces) -> None:
        """Start a job.

        `feed` must follow, or `Job.abandon` where anything is raised.
        """
        refuse_parents(job.id)
        if LOG.on:
            # Before the first copy can be started.
            told = pieces.tolist() if isinstance(pieces, np.ndarray) else pieces
            LOG.job("h2d" if self.direction == H2D else "d2h", told)
        layout: Any = Piece * len(pieces)
        listed = layout.from_buffer(pieces) if isinstance(pieces, np.ndarray) else layout(*pieces)
        after = done = None
        if self._calls is not None:
            job.event, done = self._calls.new_event()
            after = None if job.after is None else self._calls.handle(job.after)
        self.jobs[job.id] = job
        if self._served is not None:
            # First: it also ends the job where an interrupt comes between here and `abandon`.
            DISPATCHER.work(self._served)
        # From here on the engine has the file open, whoever closes it.
        file = None if job.file is None else File(job.file.address, len(job.file), job.file.stream.fileno())
        status = gil_library().xe_submit(job.id, self._number, listed, len(pieces), file, after, done)
        if status != OK:
            raise XferError("the interpreter ends" if status == STOPPED else f"the engine refused a transfer ({status})")
        job.submitted = True

    def feed(self, job: Job, nbytes: int, blocks: int) -> None:
        """Get chunks for a job of so many bytes, as far as the pool has room, and at least one. Raises `AllocationError`."""
        # As many as it fills, so that all its copies can be in the stream before the first is done; and as many as earlier jobs
        # have, since they keep theirs while they are held. To the device, a part ends where its block of device memory ends.
        job.most_chunks = -(-nbytes // self.nbytes) + blocks - 1
        goal = min(self._most, sum([other.most_chunks for other in list(self.jobs.values())]))
        if len(self._blocks) + len(self._growing) < goal:
            uninterrupted(partial(self._grow_to, goal))
        while not self._blocks:
            if is_copy_thread():
                raise AllocationError(
                    "pinned memory asked by a finalizer on a thread that makes the copies. Ask from ordinary code"
                )
            try:
                uninterrupted(self._ask)
            except AllocationError:
                # One that was on its way back to the pool may have stayed, since this job wants it.
                if not self._blocks:
                    raise
        # In this order: from now on, whoever waits for room may wait for this job.
        job.owner, job.holds = None, True

    @property
    def has_chunks(self) -> bool:
        """Whether a job needs no memory of the pool's to begin with."""
        return bool(self._blocks)

    def release(self) -> bool:
        """Give idle chunks back to the pool, and tell whether there were any.

        Waits for no copy. If the device has made all copies of a job, it waits until the engine has seen that.
        """
        refuse_parents(self._id)
        if self._releasing._is_owned():  # type: ignore[attr-defined]  # As `threading.Condition` asks.
            # A finalizer, inside a release.
            return False
        if self.direction == H2D and not is_copy_thread():
            for job in list(self.jobs.values()):
                # The copies are made, and the engine is about to see it.
                if job.is_copied():
                    job.wait_for(FINISHED)
        with self._releasing:
            found = self._settle()
            for number, block in self._blocks.copy().items():
                # From here on no job counts on it. Whatever cuts this short, it is kept until the engine no longer has it.
                self._leaving[number] = block
                self._blocks.pop(number, None)
                found = self._settle() or found
        return found

    def let_go_of_lost(self) -> None:
        """Give up chunks that are lost, so that others take their place: their memory is nobody's any more."""
        with self._releasing:
            self._note_lost()
            self._settle()

    def _note_lost(self) -> None:
        for number, block in self._blocks.copy().items():
            if gil_library().xe_add_chunk(self._number, number, block.address, self.nbytes, 0, None) == BUSY:
                self._leaving[number] = block
                self._blocks.pop(number, None)

    def _settle(self) -> bool:
        found = False
        for number, block in self._leaving.copy().items():
            status = gil_library().xe_take_chunk(self._number, number)
            if status == NOT_YET:
                self._blocks[number] = block
            else:
                if status == BUSY:
                    _kept.append((block, self._events.get(number)))
                # An interrupt may also have left it here, as a chunk to be counted on that the engine no longer has.
                self._blocks.pop(number, None)
                self._events.pop(number, None)
            self._leaving.pop(number, None)
            found = found or status == OK
        return found

    def close(self) -> None:
        """End what nobody waits for, and give the chunks back."""
        for job in list(self.jobs.values()):
            job.abandon()
            job.wait_for(FINISHED)
        self.release()
        # What is left may be written for ever.
        _kept.extend(left for left in (self._blocks, self._leaving) if left)
        while gil_library().xe_close_lane(self._number) == BUSY:
            # A thread is about to leave it.
            time.sleep(LEAVE_SECONDS)
        if self._served is not None:
            DISPATCHER.leave(self._served)

    def _grow_to(self, goal: int) -> None:
        # Not for ever: whoever releases meanwhile takes back what no job wants any more.
        for _ in range(goal):
            if len(self._blocks) + len(self._growing) >= goal or not self._grow(goal):
                break

    def _grow(self, goal: int) -> bool:
        """Add some chunks, in one block if there is room for it; False: there are enough, or there is no room."""
        with self._counting:
            lacking = goal - len(self._blocks) - len(self._growing)
            # Several in one block only if the limit can spare the block until the last of them is back.
            together = max(1, min(lacking, CHUNKS_OF_BLOCK, self._pool.limit // KEPT_SHARE // self.nbytes))
            numbers = list(itertools.islice(_chunks, together if lacking > 0 else 0))
            self._growing.update(dict.fromkeys(numbers))
        try:
            for count in dict.fromkeys((len(numbers), 1) if numbers else ()):
                # If the driver refuses, that does not matter while there are other chunks. If there are none, `_ask` says why.
                with suppress(AllocationError):
                    block = self._pool.try_take(count * self.nbytes)
                    if block is not None:
                        for number, chunk in zip(numbers, block.split(self.nbytes), strict=False):
                            self._add(number, chunk, numbers[0])
                        return True
        finally:
            for number in numbers:
                self._growing.pop(number, None)
        return False

    def _ask(self) -> None:
        number = next(_chunks)
        self._add(number, self._pool.take(self.nbytes), number)

    def _add(self, number: int, block: HostBlock, whole: int) -> None:
        event = None
        if self._calls is not None:
            self._events[number], event = self._calls.new_event()
        # Otherwise whoever releases meanwhile would hear that the engine has no such chunk, and take it for one that is back.
        with self._releasing:
            self._blocks[number] = block
            if gil_library().xe_add_chunk(self._number, number, block.address, self.nbytes, whole, event) != OK:
                self._blocks.pop(number, None)
                raise XferError("the engine has no memory, or the interpreter ends")


def _stop() -> None:
    """At exit: issue nothing more, wait for copies of memory that run, and leave the rest to the end of the process."""
    end_daemons()
    if library.cache_info().currsize:
        library().xe_stop(STOP_MICROSECONDS)


atexit.register(_stop)
