"""Pageable memory, by way of pinned chunks: what no copy engine can read or write directly.

To the device: the bytes are in pinned memory when `stage` returns, so the caller's memory is free; `lend` returns at once instead.
To the host: threads copy them out of pinned memory as they land, so that a transfer gets done without anyone waiting for it.

What is small goes through a pinned block of its own size, on the caller's thread; what is larger is shared by several threads.
Both count as in flight from the moment they have memory: who waits for room may wait for it, and finds the memory idle then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, final

from xferlib.errors import AllocationError, XferError
from xferlib.inflight import Entry, Traffic, reap_all, uses, wait_for_others
from xferlib.landing import Landing
from xferlib.latch import is_copying
from xferlib.memory.arrays import Array, address_of, extent
from xferlib.memory.pool import PAGE, HostBlock, PinnedPool
from xferlib.protocol import Event, HostStager, Source, Stream
from xferlib.staging.bounce import Bounce, few_parts
from xferlib.staging.calibration import measured_profile
from xferlib.staging.chunks import D2H, H2D, Chunk, Chunks
from xferlib.staging.crew import CREWS, Leader
from xferlib.staging.fill import filling
from xferlib.staging.job import Job
from xferlib.staging.land import Lander
from xferlib.staging.parts import ALIGNMENT, LEAST, Part, Placed, cut, run_of
from xferlib.staging.profile import StagingProfile, given_profile
from xferlib.staging.saved import saved_profile

__all__ = ["Lent", "Room", "Staged", "Staging"]

BUDGET = 64 << 20
"""Bytes that the chunks of one stager take at most: enough for the rate of the link, small enough for the processor's cache."""
LEAST_CHUNKS = 4
"""Two for each direction: one that is copied, one that is sent."""
HAND_OFF = 2 << 20
"""Bytes of a transfer from which the shape of the ring is looked up. Below, no shape would pay."""
FEW = 4
THREADS_FOR_MANY = 3
"""That copy parts of more than a few arrays each. More of them would mostly wait for the interpreter, which each array takes."""
SMALL = 256 << 10
"""Bytes. Arrays up to this size travel together where they lie side by side on the device."""

Staged: TypeAlias = tuple[int, Array]
"""A device address, and the pageable array that is to have what is there."""


@final
class Lent:
    """The event of a put whose sources are still being read: reached when the copies are done.

    Any thread. Failures are those of threads of ours: any `Exception`.
    """

    def __init__(self) -> None:
        self.job: Job
        self.event: Event | None = None

    def enqueued(self) -> Event:
        """Block until every copy is started, and return the event behind them."""
        self.job.over.synchronize()
        assert self.event is not None
        return self.event

    def done(self) -> bool:
        """See `Event.done`."""
        return self.job.over.done() and self.enqueued().done()

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self.enqueued().synchronize()

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """See `Event.stream_wait`. Blocks until the copies are started, not until they are done."""
        return self.enqueued().stream_wait(stream)


@final
class Room:
    """What may make room in the pinned pool: chunks that are idle, and transfers that will end, of whatever stager."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.release: Callable[[], bool] = bool
        self.wait_for_rest: Callable[[], bool] = bool
        self.contains: Callable[[int, int], bool] = lambda address, nbytes: False
        """Whether memory is the pool's."""

    def reap(self) -> bool:
        """Let go of what is done, and tell whether anything was. Never blocks."""
        return reap_all()

    def yield_idle(self) -> bool:
        """Give memory back that is kept for later, and tell whether there was any. Never blocks."""
        return self.release()

    def wait_oldest(self) -> bool:
        """Block until something has ended. Returns False if nothing was in flight."""
        if self.release() or self._traffic.wait_oldest(pinned=True) or self.wait_for_rest():
            return True
        return wait_for_others(self._traffic, self._concerns)

    def _concerns(self, entry: Entry) -> bool:
        return any(self.contains(address_of(array), array.nbytes) for array in entry.host)


@final
class Staging:
    """The chunk ring of one stager. Any thread."""

    def __init__(self, backend: HostStager[Any], pool: PinnedPool, traffic: Traffic, profile: StagingProfile | None = None) -> None:
        self.leaves = 0
        self._backend = backend
        self._pool = pool
        self._traffic = traffic
        self._given = profile or given_profile()
        self._profile: StagingProfile | None = None
        self._bounce = min(HAND_OFF if self._given is None else self._given.hand_off_nbytes, max(PAGE, pool.limit // 2))
        self._chunks = Chunks(pool, backend.failures)
        self._bounced = Bounce(backend, pool, traffic)
        self._fill = filling(backend, self._chunks, traffic)
        self._lander = Lander(backend, self._chunks, traffic)
        self._leaders = (Leader("feeding"), Leader("landing"))
        self._member = object()
        self._unissued = traffic.unissued
        # Reentrant: a finalizer may transfer while its thread is in here.
        self._shaping = threading.RLock()
        self._landing = threading.RLock()

    @property
    def profile(self) -> StagingProfile:
        """The shape of the ring: given, or kept, or else measured, when it is first wanted."""
        with self._shaping:
            if self._profile is None:
                self._profile = self._given or saved_profile() or measured_profile()
                self._shape(self._profile)
            return self._profile

    def stage(self, leaves: Sequence[Placed]) -> None:
        """Start the copies of pageable arrays; their memory is free on return.

        Bytes between leaves of one block, up to the next multiple of 256, may be overwritten.
        """
        self._count(len(leaves))
        nbytes = _bytes_of([leaf.array for leaf in leaves])
        if nbytes + (len(leaves) - 1) * ALIGNMENT <= self._bounce:
            for part in few_parts(leaves, nbytes):
                self._bounced(part)
            return
        parts = self._parts(leaves, nbytes, ways=self.profile.threads)
        self._chunks.expect(H2D, len(parts))
        job = Job(parts, self._fill, owner=threading.get_ident())
        try:
            self._traffic.landings.add(job.over)
            self._ask(H2D, job, len(parts), many=len(leaves) > FEW * len(parts))
        except BaseException as error:
            job.fail(error)
        job.run()

    def lend(self, leaves: Sequence[Placed], *, until_started: object, beside: Sequence[Array]) -> Lent:
        """Start the copies of pageable arrays, and return at once: the arrays are read until the event is reached.

        Holds an object until the last copy is started. `beside`: the arrays of the same transfer whose copies the caller has
        started, held until these are done.
        """
        nbytes = _bytes_of([leaf.array for leaf in leaves])
        # All threads need not end together: those that have nothing left go on with the next one.
        parts = self._parts(leaves, nbytes, ways=1)
        lent = Lent()

        def end(_: Job, held: object = until_started) -> None:
            try:
                lent.event = self._traffic.h2d.add(nbytes, ())
            except BaseException:
                self._traffic.h2d.settle(held)
                raise

        if beside:
            # Now: whoever asks who uses this memory must find it until its own copies are done.
            self._traffic.h2d.add(_bytes_of(beside), beside)
        self._chunks.expect(H2D, len(parts))
        lent.job = job = Job(parts, self._fill, end=end)
        job.over.memory = [extent(leaf.array) for leaf in leaves]
        self._traffic.landings.add(job.over)
        try:
            self._leaders[H2D].submit(job)
        except BaseException:
            job.over.reach()
            raise
        try:
            self._ask(H2D, job, len(parts), many=len(leaves) > FEW * len(parts))
        except BaseException as error:
            # The caller's memory must be at rest before he hears of it.
            job.fail(error)
            job.over.wait()
            raise
        return lent

    def land(
        self, transfers: Sequence[Staged], sources: Sequence[Source], before: Event | None, after: Event | None = None
    ) -> Landing:
        """Start copies from device addresses into C-contiguous pageable arrays.

        The landing is reached when these are done, and what `before` stands for, if anything. `sources` are held, and known as
        being read.
        """
        self._count(len(transfers))
        nbytes = _bytes_of([array for _, array in transfers])
        parts: list[Part] = []
        if nbytes > self._bounce:
            ways, largest = self.profile.threads, self._chunks.nbytes
            for address, array in transfers:
                parts += cut(address, array, largest=largest, ways=ways, begins=not parts)

        def note() -> None:
            self._traffic.d2h.add(nbytes, (), sources)

        def end(job: Job) -> None:
            # What was started and never landed, because something failed.
            self._lander.abandon(job)
            # No copy is started any more, so nobody asks what it would read: a get of many parts may be the last for long.
            job.issued.open()
            self._forget_issued()
            if before is not None:
                before.synchronize()

        owner = threading.get_ident()
        job = Job(parts, self._lander, owner=owner, before=self._when_flowing, when_begun=note, end=end)
        job.over.memory = [extent(array) for _, array in transfers]
        with self._landing:
            try:
                # An interrupt before this leaves nothing behind that anybody would wait for.
                self._traffic.landings.add(job.over)
                self.wait_issued()
                if parts:
                    self._start_many(job, sources)
                else:
                    self._start_few(job, transfers)
                job.over.owner = None
                self._leaders[D2H].submit(job)
            except BaseException:
                # The caller's memory must be at rest before he hears of the failure.
                self._lander.abandon(job)
                job.issued.open()
                job.over.reach()
                raise
        return job.over

    def wait_issued(self, target: Source | None = None) -> None:
        """Block until the copies that earlier gets still have to start are started; None: all, else of those that read `target`.

        What enters the stream before them, they would wait for. Raises `XferError` on a thread that copies would wait for, where
        `target` would be overwritten too early otherwise.
        """
        if not self._unissued:
            return
        is_finalizer = is_copying()
        for job, sources in self._unissued.copy():
            if target is None or any(uses(source, target) for source in sources):
                if not is_finalizer:
                    job.issued.wait()
                elif target is not None and not job.issued.is_open():
                    raise XferError(
                        "a finalizer would overwrite an array that a get still reads, and cannot wait on a thread that makes the "
                        "copies: the garbage collector runs finalizers on any thread. Put into arrays in ordinary code"
                    )
        self._forget_issued()

    def _forget_issued(self) -> None:
        """Let go of the sources of gets whose copies are all started: from then on those that are in flight are held elsewhere."""
        # One by one: another thread may add meanwhile.
        for entry in self._unissued.copy():
            if entry[0].issued.is_open():
                with suppress(ValueError):
                    self._unissued.remove(entry)

    def release(self) -> bool:
        """Give idle chunks back to the pool, and tell whether there were any. Never blocks."""
        return self._chunks.release()

    def wait_for_rest(self) -> bool:
        """Block until a chunk in use may be idle. Returns False if there is none to wait for."""
        return self._chunks.wait_for_rest()

    def close(self) -> None:
        """End the threads when everything has landed, and give the chunks back."""
        for leader in self._leaders:
            leader.close()
        for crew in CREWS:
            crew.dismiss(self._member)
        self.release()

    def _count(self, leaves: int) -> None:
        with self._shaping:
            self.leaves += leaves

    def _shape(self, profile: StagingProfile) -> None:
        limit = self._pool.limit
        # A share of the limit, and several of them, so that both directions go on.
        nbytes = min(profile.chunk_nbytes, max(PAGE, limit // 8 // PAGE * PAGE))
        count = min(2 * profile.threads, BUDGET // nbytes, limit // 2 // nbytes)
        self._chunks.shape(nbytes=nbytes, count=max(LEAST_CHUNKS, count))
        self._bounce = min(profile.hand_off_nbytes, max(PAGE, limit // 2))

    def _parts(self, leaves: Sequence[Placed], nbytes: int, *, ways: int) -> list[Part]:
        # The profile first: it gives the chunks their size.
        share = nbytes // (2 * self.profile.threads)
        largest = min(self._chunks.nbytes, max(LEAST, share))
        small: list[Placed] = []
        parts: list[Part] = []
        for leaf in leaves:
            if leaf.array.nbytes <= min(SMALL, largest):
                small.append(leaf)
            else:
                # What is lent follows what was lent before.
                parts += cut(leaf.address, leaf.array, largest=largest, ways=ways, begins=ways > 1 and not parts)
        return parts + run_of(small, largest=largest)

    def _ask(self, direction: int, job: Job, parts: int, *, many: bool = False) -> None:
        helpers = min(self.profile.threads, parts, THREADS_FOR_MANY if many else parts) - 1
        if helpers > 0:
            CREWS[direction].ask(self._member, job, helpers)

    def _when_flowing(self, job: Job) -> None:
        """Ask for help when the first part has landed: until then something may hold the stream, and would hold the helpers."""
        if job.parts and job.started:
            job.started[0][1].synchronize()
            self._ask(D2H, job, job.parts)

    def _start_many(self, job: Job, sources: Sequence[Source]) -> None:
        """Start as many parts as there are chunks; one at least, so that whoever leads always gets on."""
        self._chunks.expect(D2H, job.parts)
        with self._chunks.in_use():
            self._begin_what_fits(job)
        if not job.issued.is_open():
            self._unissued.append((job, sources))

    def _begin_what_fits(self, job: Job) -> None:
        self._lander.begin(job, wait=True)
        while self._lander.begin(job, wait=False):
            pass

    def _start_few(self, job: Job, transfers: Sequence[Staged]) -> None:
        for address, array in transfers:
            chunk = Chunk(self._room_for(array.nbytes, job), kept=False)
            self._lander.start(chunk, Part(address, array.nbytes, (array,)), job.started)
            job.over.holds = True
        job.all_begun()

    def _room_for(self, nbytes: int, job: Job) -> HostBlock:
        try:
            return self._pool.take(nbytes)
        except AllocationError:
            if not job.started:
                raise
            # The rest is the user's, so what was started is all that can make room, and nobody lands it before all are started.
            self._lander.land(job)
            return self._pool.take(nbytes)


def _bytes_of(arrays: Sequence[Array]) -> int:
    return sum([array.nbytes for array in arrays])
