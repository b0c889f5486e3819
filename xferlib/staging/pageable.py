"""Pageable memory, moved by the engine: by its threads, through its chunks, beside the interpreter.

To the device: when `stage` returns, the bytes are in pinned memory and their copies are in the stream. `borrow` returns at once,
and the engine reads the arrays later. To the host: the device copies into chunks, and `copy_out` has the engine copy from there
into the arrays. A get waits for its producer in the copy stream directly before its first copy, so that it holds up no earlier get.

Small arrays are copied on the caller's thread; to the host only if nothing stands before the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from xferlib.engine.jobs import Job
from xferlib.engine.lanes import Lane, Pieces, start_threads, usual_threads
from xferlib.engine.native import D2H, FINISHED, H2D, ISSUED, STAGED
from xferlib.errors import XferError
from xferlib.latch import is_copy_thread
from xferlib.ledger import Ledger
from xferlib.memory.arrays import ADDRESS, BYTE, Array, address_of, extent, split
from xferlib.memory.blocks import ALIGNMENT, PAGE
from xferlib.memory.foreign import file_of
from xferlib.memory.pinned_pool import PinnedPool
from xferlib.packing import PackedBlock
from xferlib.protocol import DeviceRange, Event, HostStager, Stream
from xferlib.staging.bounce import LARGEST_BUFFER_NBYTES, BounceBuffers
from xferlib.staging.coalesce import CoalescedCopy, Placed, coalesce, packed_copy
from xferlib.staging.profile import StagingProfile, given_profile
from xferlib.staging.small_gets import SmallGets

__all__ = ["BorrowedCopy", "Staging"]

CHUNKS_NBYTES = 64 << 20
"""At most so much the chunks of one stager take: enough for the rate of the link, few enough for the processor's cache."""
CHUNK_NBYTES = 1 << 20
"""As little as a small transfer takes. The engine copies from and to several at once that lie side by side."""
_NEW = tuple.__new__
"""Takes a third of the time of a named tuple's constructor."""
LEAST_CHUNKS = 2
"""Chunks of one direction: the CPU copies one while the device copies the other."""


@final
class Staging:
    """Moves pageable memory for one stager: to the device by `stage` and `borrow`, to the host by `copy_out`. Any thread.

    Owns the two lanes, and gives their chunks back by `release` and `close`.
    """

    def __init__(self, backend: HostStager[Any], pool: PinnedPool, ledger: Ledger, profile: StagingProfile | None = None) -> None:
        self.synchronous = 0
        """How many leaves made their callers wait for a CPU copy."""
        self._ledger = ledger
        self.profile = profile or given_profile() or StagingProfile(usual_threads(backend.pci_bus_id), CHUNK_NBYTES)
        room = max(PAGE, pool.limit // 2)
        self._bounce_nbytes = min(self.profile.hand_off_nbytes, room)
        # The caller copies so many bytes of a larger array at a time, while the device copies those before.
        self._split_nbytes = min(LARGEST_BUFFER_NBYTES, room)
        self._bounce = BounceBuffers(backend, pool, ledger)
        self._small_gets = SmallGets(backend, pool, ledger, self._bounce_nbytes)
        # A chunk is a share of the limit, so that each direction has several.
        nbytes = min(self.profile.chunk_nbytes, max(PAGE, pool.limit // 8 // PAGE * PAGE))
        start_threads(self.profile.threads, backend.pci_bus_id)
        most = max(LEAST_CHUNKS, min(CHUNKS_NBYTES // nbytes, pool.limit // 2 // nbytes) // 2)
        self._lanes = (
            Lane(H2D, backend, pool, ledger.jobs.h2d, nbytes=nbytes, most=most),
            Lane(D2H, backend, pool, ledger.jobs.d2h, nbytes=nbytes, most=most),
        )

    def stage(
        self,
        leaves: Sequence[Placed],
        total: int,
        pinned: Sequence[Array] = (),
        overwritten: Sequence[DeviceRange] = (),
        target: object = None,
    ) -> Event | None:
        """Start the copies of pageable arrays; their memory is free on return.

        Small ones are copied by the caller, and the event behind all copies of the put is returned, in flight already. Others are
        copied by the engine, and None is returned: their copies are in the stream, and the caller is to record the event.

        Bytes between leaves of one block, up to the next multiple of 256, may be lost.

        - `total`: bytes of the put.
        - `pinned`: its arrays whose copies are started.
        - `overwritten`: see `Entry.device_ranges`.
        - `target`: what is copied to. A job keeps it while it may start copies, though whoever waits for it is interrupted.
        """
        self._count(len(leaves))
        nbytes = sum([leaf.array.nbytes for leaf in leaves])
        if nbytes + (len(leaves) - 1) * ALIGNMENT <= self._bounce_nbytes:
            copies = [copy for whole in coalesce(leaves) for copy in self._split(whole)]
            # Each is in flight before the next waits for room. The last is entered with what else the put copies, which saves an
            # event.
            for copy in copies[:-1]:
                self._bounce(copy)
            return self._bounce(copies[-1], total, overwritten, target, pinned)
        whole = self._bounce_odd(leaves)
        if not whole:
            return None
        job = self._job(whole, target)
        try:
            self._start(self._lanes[H2D], job, list(map(_piece_of, whole)), nbytes, len({leaf.block for leaf in whole}))
            self.wait_issued(job)
        except BaseException:
            job.abandoned = True
            self.abandon(job)
            raise
        return None

    def stage_packed(self, packed: PackedBlock, address: int, arrays: Sequence[Array], target: object) -> Event | None:
        """Start the copy of the pageable arrays of a packed block, to this address. They are free on return.

        The bytes between them are overwritten. None: they are too many for the caller to copy, and nothing was started.

        `target`: see `BounceBuffers`.
        """
        if packed.extent > self._bounce_nbytes or packed.extent > self._split_nbytes:
            return None
        self._count(len(arrays))
        return self._bounce(packed_copy(packed, address, arrays), packed.nbytes, (), target)

    def begin_packed(self, packed: PackedBlock, address: int, arrays: Sequence[Array], begun: list[Job], target: object) -> bool:
        """Have the engine begin with what `stage_packed` does. False: it cannot read these arrays, and nothing was started.

        `wait_issued` must follow, or `abandon` where anything is raised, for the job in `begun`, which is there before its start.
        `target`: see `stage`.
        """
        hosts = None if is_copy_thread() else _addresses(arrays)
        if hosts is None:
            return False
        self._count(len(arrays))
        copied = packed.pieces.copy()
        copied[:, 0] = hosts
        copied[:, 1] += np.uint64(address)
        begun.append(self._job(arrays, target))
        self._start(self._lanes[H2D], begun[0], copied, packed.nbytes, 1)
        return True

    def wait_issued(self, job: Job) -> None:
        """Block until the sources of a job are free, and all its copies are in the stream. Raises why it failed."""
        job.wait_for(ISSUED)
        job.sources = None
        # Threads may still be at work on one that has failed.
        job.raise_failure()
        job.kept = None

    def abandon(self, job: Job) -> None:
        """Have nothing more started of a job that is `abandoned`, and block until its sources are at rest: before whoever owns them
        hears of a failure. If this is interrupted, the owner may hear of it earlier.
        """
        job.abandon()
        job.sources = None

    def _job(self, sources: object, target: object) -> Job:
        job = self._lanes[H2D].job(owner=threading.get_ident())
        job.sources, job.kept = sources, target
        return job

    def stage_one(self, address: int, array: Array, overwritten: Sequence[DeviceRange], target: object) -> Event | None:
        """Start the copy of one pageable array, which is free on return; None: it would take more than one copy, and nothing was
        started.

        `overwritten`, `target`: see `BounceBuffers`.
        """
        nbytes = array.nbytes
        if nbytes > self._split_nbytes or nbytes > self._bounce_nbytes:
            return None
        self._count(1)
        return self._bounce(_NEW(CoalescedCopy, (address, nbytes, (array,), None, False)), nbytes, overwritten, target)

    def borrow(
        self, leaves: Sequence[Placed], *, until_started: object, beside: Sequence[Array], meanwhile: Callable[[], object]
    ) -> BorrowedCopy:
        """Start the copies of pageable arrays, and return at once: the arrays are read until the event is reached.

        Holds `until_started` until the last copy is started. `beside`: the arrays of the same transfer whose copies the caller has
        started, held until these are done. `meanwhile` is called when the copies are under way; if it raises, no more are started.
        """
        if beside:
            # Entered now: whoever asks who uses this memory must find it until its own copies are done.
            self._ledger.h2d.add(sum([array.nbytes for array in beside]), beside)
        whole = self._bounce_odd(leaves)
        nbytes = sum([leaf.array.nbytes for leaf in leaves])
        if not whole:
            bounced = BorrowedCopy(None, self._ledger.h2d.add(nbytes, (), (), until_started).event)
            meanwhile()
            return bounced
        listed = list(map(_piece_of, whole))
        # Nobody borrows arrays of several files at once, so the first tells for all.
        file = file_of(whole[0].array)
        job = self._job(whole, until_started)
        job.host_ranges, job.file = [(host, size) for host, _, size, _ in listed], file
        self._start(self._lanes[H2D], job, listed, nbytes, len({leaf.block for leaf in whole}), meanwhile)
        self._ledger.h2d.nbytes += nbytes
        return BorrowedCopy(job)

    def copy_out(
        self,
        transfers: Sequence[tuple[int, Array]],
        sources: Sequence[DeviceRange],
        before: Event | None,
        after: Event | None,
        *,
        ours: bool = False,
    ) -> Job:
        """Start copies from device addresses into C-contiguous pageable arrays, behind `after`.

        The job is done when these copies are done, and `before`, if any, is reached. `sources` are held, and known as being read.
        `ours`: the arrays are the pool's, and pinned the next time. The transfer behaves as if they were now.
        """
        if not ours:
            self._count(len(transfers))
        whole = [(address, array) for address, array in transfers if array.nbytes]
        nbytes = sum([array.nbytes for _, array in whole])
        job = self._lanes[D2H].job(owner=threading.get_ident())
        job.kept, job.device_ranges, job.host_ranges = (transfers, sources), sources, [extent(array) for _, array in whole]
        job.after, job.beside, job.ours = after, before, ours
        self._wait_for_writers(job)
        if not self._lanes[D2H].has_chunks or self._small_gets.is_missed:
            # Memory is page-locked now in any case, or comes back from where it was lost, or from others.
            self._small_gets.prepare()
        listed = [(address_of(array), address, array.nbytes, 0) for address, array in whole]
        self._start(self._lanes[D2H], job, listed, nbytes, 1)
        self._ledger.d2h.nbytes += nbytes
        return job

    def fill_small(self, transfers: Sequence[tuple[int, Array]], sources: Sequence[DeviceRange], after: Event | None) -> bool:
        """Copy as `copy_out` does, and block until it is done, if that takes microseconds. False: call `copy_out` instead."""
        small, jobs = self._small_gets, self._ledger.jobs
        # Without chunks of its own the engine would have to wait for the memory of the copy that was given up.
        if not (small.takes(transfers) and self._lanes[D2H].has_chunks):
            return False
        # A job that has finished stays until somebody asks. Some of the others may write the same arrays, or have copies to start.
        if jobs.d2h or jobs.h2d:
            jobs.reap()
        if jobs.d2h or jobs.h2d or not small.fill(transfers, sources, after):
            return False
        self._count(len(transfers))
        nbytes = sum([array.nbytes for _, array in transfers])
        self._ledger.d2h.nbytes += nbytes
        return True

    def release(self) -> bool:
        """Give idle chunks back to the pool, and tell whether there were any. Waits for no copy."""
        found = [self._bounce.release(), self._small_gets.release(), *(lane.release() for lane in self._lanes)]
        return any(found)

    def close(self) -> None:
        """Give the chunks back: nothing is in flight."""
        self._bounce.release()
        self._small_gets.release()
        for lane in self._lanes:
            lane.close()

    def _count(self, leaves: int) -> None:
        # No other thread, nor a finalizer, comes between the two: nothing is called here.
        self.synchronous += leaves

    def _start(
        self, lane: Lane, job: Job, pieces: Pieces, nbytes: int, blocks: int, meanwhile: Callable[[], object] | None = None
    ) -> None:
        try:
            # Until somebody asks, a job that has ended refers to what it should have copied, and counts among those that chunks are
            # wanted for. Before this one is submitted: finalizers of what is let go of may wait until earlier jobs have started
            # their copies, and this one cannot before it has chunks.
            self._ledger.jobs.reap()
            lane.submit(job, pieces)
            lane.feed(job, nbytes, blocks)
            if meanwhile is not None:
                meanwhile()
        except BaseException:
            job.abandoned = True
            job.abandon()
            raise

    def _bounce_odd(self, leaves: Sequence[Placed]) -> list[Placed]:
        """Start the copies of arrays that the engine cannot read, and return the rest.

        It cannot read arrays that are not contiguous, nor any array of a finalizer on a thread that the engine would wait for.
        """
        whole = []
        for leaf in leaves:
            if leaf.array.flags.c_contiguous and not is_copy_thread():
                whole.append(leaf)
                continue
            for copy in self._split(CoalescedCopy(leaf.address, leaf.array.nbytes, (leaf.array,))):
                self._bounce(copy)
        return whole

    def _split(self, copy: CoalescedCopy) -> Iterator[CoalescedCopy]:
        """Split the copy of one large array."""
        if copy.nbytes <= self._split_nbytes or len(copy.arrays) > 1:
            yield copy
            return
        address = copy.address
        for array in split(copy.arrays[0], self._split_nbytes):
            yield CoalescedCopy(address, array.nbytes, (array,))
            address += array.nbytes

    def _wait_for_writers(self, job: Job) -> None:
        """Block until no earlier get writes memory of this one: a small get may overtake it."""
        for other in self._ledger.jobs.using(job.host_ranges):
            # If this thread is starting the other job, this is a finalizer, and the other job can only wait for it.
            if other.owner == job.owner:
                continue
            if is_copy_thread():
                raise XferError(
                    "a finalizer would get into memory that an earlier get still writes, and cannot wait on a thread that "
                    "makes the copies: the garbage collector runs finalizers on any thread. Get in ordinary code"
                )
            other.wait()


@final
class BorrowedCopy:
    """The event of a put that borrows its sources: reached when the copies are done.

    Any thread. Failures are those of threads of ours: any `Exception`.
    """

    def __init__(self, job: Job | None, event: Event | None = None) -> None:
        """`event`: where there is no job."""
        self._job = job
        self._event = event

    def wait_staged(self) -> None:
        """Block until the CPU has copied the sources, or will not any more."""
        job = self._job
        if job is not None:
            job.wait_for(STAGED)
            # They are their owner's again, and the owner may wait until nobody else refers to them.
            job.sources = None

    def enqueued(self) -> Event:
        """Block until every copy is started, and return the event behind them."""
        job = self._job
        if job is not None:
            event = job.enqueued()
            # Perhaps nobody asks for the end of the job before the stager's next transfer.
            job.sources, job.kept, job.host_ranges = None, None, ()
            return event
        assert self._event is not None
        return self._event

    def done(self) -> bool:
        """See `Event.done`."""
        job = self._job
        if job is not None:
            if not job.has_reached(ISSUED):
                return False
            if job.has_reached(FINISHED):
                # The engine knows. To ask the driver would give up the interpreter, which another thread may keep for long.
                self.enqueued()
                return True
        return self.enqueued().done()

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self.enqueued().synchronize()

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """See `Event.stream_wait`. Blocks until the copies are started, not until they are done."""
        return self.enqueued().stream_wait(stream)


def _addresses(arrays: Sequence[Array]) -> list[int] | None:
    """Return where arrays lie; None: they are not all contiguous."""
    try:
        return list(map(ADDRESS, map(BYTE, arrays)))
    except (TypeError, ValueError, BufferError):
        # Read-only, or of a dtype that the buffer protocol does not know: `address_of` knows those, too, and takes longer.
        return [address_of(array) for array in arrays] if all(array.flags.c_contiguous for array in arrays) else None


def _piece_of(leaf: Placed) -> tuple[int, int, int, int]:
    return address_of(leaf.array), leaf.address, leaf.array.nbytes, leaf.block
