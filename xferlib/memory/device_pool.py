"""Device memory that puts take and give back: blocks, leases, and when a block may be written again.

The pool is the table that owns the blocks: only it frees one, when no lease names it. A lease stands for "some array may reach
this block"; it is a ticket, whose end posts a number. The next put turns ended leases into idle blocks, each with an event for the
work that may still read it. A fresh block and an idle one are the same thing: a block with an optional event.

An interrupt may come anywhere. So a block's row says what is true of it, and changes in one step. Lists of idle blocks and sums are
derived from the rows, and are derived anew after a call that did not come to its end.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any, TypeAlias, final

from xferlib.errors import AllocationError, CapabilityError
from xferlib.forks import forget_in_child, leak
from xferlib.latch import is_copy_thread
from xferlib.ledger import Ledger, reap_all
from xferlib.memory.idle_blocks import NOBODY, BlockRow, IdleBlocks, Streams, size_class
from xferlib.memory.table import Growth, Table
from xferlib.protocol import DeviceBlock, DeviceRange, Event, HostStager, Stream
from xferlib.reaper import watch
from xferlib.tickets import ticket
from xferlib.uninterrupted import uninterrupted
from xferlib.words import in_words

__all__ = ["DevicePool", "Lease", "note_reader"]

READERS_BEHIND = 8
"""Blocks of one size that may wait for their readers. If there are so many, a put waits for the oldest and takes no further one."""
WORTH_WAITING_NBYTES = 64 << 20
"""Bytes that such blocks must have together. The many small puts of one step must not wait for the step before."""

SPARES, SPARE_NBYTES = 16, 256 << 10
"""Most blocks, and most bytes, that are taken in addition to one that is wanted: while readers are behind, more will be wanted."""

AT_ONCE = 64
"""Blocks that are counted in one step before the framework is asked for any of them."""

Lease: TypeAlias = tuple[DeviceBlock, object]
"""A block, and the right to it while an array may reach it, which ends when the last reference to the right is gone."""


@final
class DevicePool(Table):
    """Blocks by size class. Any thread.

    It takes the first idle block whose readers are done, or else grows. At the limit, or if many blocks wait for their readers, it
    makes the H2D stream, not the host, wait for the oldest.
    """

    def __init__(self, backend: HostStager[Any], ledger: Ledger, limit: int | None) -> None:
        super().__init__("device memory", backend.sweep)
        self.limit = limit
        self.peak_nbytes = self.waits = 0
        self._backend = backend
        self._failures = backend.failures
        self._lost, self._retire = backend.lost, backend.retire
        self._ledger = ledger
        self._rows: dict[int, BlockRow] = {}
        self._spares_tried: defaultdict[int, int] = defaultdict(int)
        """By size, how often a spare was attempted after a put that came only just too early."""
        # Derived from the rows.
        self._leased: dict[int, BlockRow] = {}
        self._places: dict[int, BlockRow] = {}
        """By address, what is there: leased or idle."""
        self._idle: defaultdict[int, IdleBlocks] = defaultdict(IdleBlocks)
        """By size."""
        self._doomed: deque[BlockRow] = deque()
        self._last_reached: Event | None = None
        """The fence that was last found to be reached."""
        self._generation = object()
        """Another one each time that rows have left, or may have been entered without being counted."""
        self._known_sum: tuple[object, int] = (None, 0)
        """What `_generation` was before the rows were counted, and their bytes."""
        _open[id(self)] = self
        forget_in_child(self)

    @property
    def nbytes(self) -> int:
        """Bytes taken from the framework, in use or idle."""
        return self._counted(self._rows)

    def _taken(self) -> int:
        """Return `nbytes`, in a step. Counts the rows again only where some have left: else many new ones would each count all."""
        generation, nbytes = self._generation, self._known_sum[1]
        if self._known_sum[0] is not generation:
            nbytes = sum([row.nbytes for row in list(self._rows.values())])
            self._known_sum = generation, nbytes
        return nbytes + sum([growth.nbytes for number, growth in self._growing.copy().items() if number not in self._rows])

    def lease(self, nbytes: int, streams: Streams) -> Lease:
        """Lease a block of at least `nbytes` that copies started from now on may write. Raises `AllocationError`."""
        size = size_class(nbytes)
        number = self._count()
        # First: whatever happens from here on, what the lease has by then goes back.
        held = ticket(self._returns.put, number)
        row = self._step(self._reuse, size, number, streams)
        if row is None:
            row = self._find(size, number, streams)
        return row.block, held

    def lease_idle(self, sizes: Sequence[int], streams: Streams) -> list[Lease]:
        """Lease idle blocks that may be written at once, up to the first size of which there is none. In one step, however many.

        What has come back since the last step is not made idle before: the caller has that done by `settle_posted` as soon as its
        copies are under way, since it may take the framework longer than all else.
        """
        numbers = [self._count() for _ in sizes]
        # As in `lease`.
        held = [ticket(self._returns.put, number) for number in numbers]
        rows = self._before_settling(self._reuse_each, list(map(size_class, sizes)), numbers, streams)
        return [(row.block, right) for row, right in zip(rows, held, strict=False)]

    def settle_posted(self) -> None:
        """Make idle what has come back."""
        self._step(bool)

    def lease_at_once(self, sizes: Iterable[int], streams: Streams) -> list[Lease]:
        """Lease blocks as `lease` does, up to the first that something would have to be waited for. On a thread that no interrupt
        comes to. In few steps, since each looks at everything that may have come back."""
        # As in `_find`.
        reap_all()
        if self._doomed:
            self._free_doomed()
        leases: list[Lease] = []
        left = list(map(size_class, sizes))
        while left:
            numbers = [self._count() for _ in left[:AT_ONCE]]
            held = [ticket(self._returns.put, number) for number in numbers]
            rows = self._step(self._reuse_or_count_each, left[:AT_ONCE], numbers, streams)
            counted = {number: size for number, size, row in zip(numbers, left, rows, strict=False) if row is None}
            made = self._grow(counted, streams) if counted else {}
            for number, right, row in zip(numbers, held, rows, strict=False):
                leases.append(((made[number] if row is None else row).block, right))
            if len(rows) < len(numbers):
                break
            del left[:AT_ONCE]
        return leases

    def lacks(self, sizes: Iterable[int]) -> bool:
        """Tell whether two or more of these blocks will have to be allocated, as far as can be told without the lock."""
        wanted = Counter(map(size_class, sizes))
        return sum([max(0, count - len(self._idle.get(size, ()))) for size, count in wanted.items()]) > 1

    def owns(self, memory: DeviceRange) -> bool:
        """Tell whether this memory is in a block that is leased. Takes no lock."""
        return self._found(memory.address) is not None

    def note(self, target: DeviceRange, stream: Stream) -> bool:
        """Note a stream that may read this memory until the lease of its block ends. False: it is in no block of this pool."""
        row = self._found(target.address)
        if row is None:
            return False
        row.streams[stream.handle] = stream
        return True

    def _found(self, address: int) -> BlockRow | None:
        """Return the leased block that has this address."""
        row = self._places.get(address)
        if row is not None and row.lease is not None:
            return row
        for row in list(self._leased.values()):
            if row.address <= address < row.address + row.nbytes:
                return row
        return None

    def close(self) -> None:
        """Free what is idle; a block that an array still reaches is freed when its lease ends.

        Nothing is in flight. Called on a thread that no interrupt comes to.
        """
        _open.pop(id(self), None)
        try:
            self._trim()
        finally:
            self._closed = True
            if self.settle():
                watch(self)

    def settle(self) -> bool:
        """After `close`, free what no lease names any more; tell whether any lease is left. See `ClosedTable`."""
        # What fails now is tried again at the next look.
        with suppress(*self._failures):
            # Copies of another stager that are done may hold the last reference, and perhaps nobody calls that stager.
            reap_all()
            self._trim()
        # In this order: what is entered meanwhile is in the second.
        return bool(self._growing or self._rows)

    def forget(self) -> None:
        """See `ForkSafe`."""
        leak(self._rows, self._idle, self._doomed, self._returns)
        self._closed = True
        self._rows, self._growing, self._leased, self._places = {}, {}, {}, {}
        self._idle = defaultdict(IdleBlocks)
        self._doomed, self._last_reached, self._generation = deque(), None, object()
        self._renew()

    def _mend(self) -> None:
        """Derive anew what follows from the rows."""
        leased: dict[int, BlockRow] = {}
        places: dict[int, BlockRow] = {}
        self._idle, self._doomed = defaultdict(IdleBlocks), deque()
        for row in list(self._rows.values()):
            if row.doomed:
                self._doomed.append(row)
                continue
            places[row.address] = row
            if row.lease is None:
                self._idle[row.nbytes].append(row)
            else:
                leased[row.lease] = row
        # Only when they are whole: whoever asks about memory takes no lock.
        self._leased, self._places = leased, places

    def _take_back(self, number: int, fences: list[Event | None]) -> bool:
        row = self._leased.get(number)
        if row is None or row.lease != number:
            return False
        streams: Sequence[Stream] = ()
        readers, doomed = NOBODY, self._closed
        # Mostly no stream was named, and the two are in the path of every small put.
        if row.streams:
            streams, readers = list(row.streams.values()), tuple(row.streams)
        if doomed:
            # A bare handle had to stay valid until the pool was closed, and no longer.
            streams = [stream for stream in streams if stream.keepalive is not None]
        # If nothing was ever ordered behind its fence, the block has no readers.
        if row.fence is None and (streams or not doomed):
            try:
                if streams:
                    row.fence = self._retire(streams)
                else:
                    # All these leases have ended, so an event that is behind the readers of one is behind those of each. Where the
                    # framework alone knows the readers, it may take longer for the event than a put for all else.
                    if not fences:
                        fences.append(self._retire(streams))
                    row.fence = fences[0]
            except self._failures:
                # Nobody can say when its readers are done. The framework's own free waits for them.
                doomed = True
        # Before the lease: a block that an interrupt leaves is then idle or doomed, but never idle by mistake.
        row.doomed = doomed
        row.lease, row.readers, row.streams, row.since = None, readers, {}, self._changes
        if doomed:
            self._doomed.append(row)
        else:
            self._idle[row.nbytes].append(row)
        del self._leased[number]
        return True

    def _find(self, size: int, number: int, streams: Streams) -> BlockRow:
        """Lease a block when no idle one could be used: wait for one, make room, or allocate."""
        # Whether there are idle ones whose readers were not done just now.
        behind = bool(self._idle.get(size))
        # Copies that are done may hold the last reference to an array, and so to its block.
        reap_all()
        collected = False
        while True:
            changes = self._changes
            row = self._step(self._reuse, size, number, streams)
            if row is not None:
                if behind:
                    self._have_one_more(size)
                return row
            behind = False
            if self._doomed:
                uninterrupted(self._free_doomed)
            row, reserved = self._step(self._make_room, size, number, streams)
            if row is not None:
                return row
            if reserved:
                return uninterrupted(self._grow, {number: size}, streams)[number]
            if self._doomed:
                uninterrupted(self._free_doomed)
            elif self._ledger.wait_for_device(self.owns) or self._worth_another_look(changes):
                continue
            elif collected:
                raise self._full(size)
            else:
                gc.collect()
                collected = True

    def _reuse_or_count_each(self, sizes: Sequence[int], numbers: Sequence[int], streams: Streams) -> list[BlockRow | None]:
        """Lease a block for each size, or count one that is to be allocated (None), up to the first for which there is no room."""
        rows: list[BlockRow | None] = []
        for size, number in zip(sizes, numbers, strict=True):
            row, counted = self._reuse(size, number, streams), False
            if row is None:
                row, counted = self._make_room(size, number, streams)
            if row is None and not counted:
                break
            rows.append(row)
        return rows

    def _make_room(self, size: int, number: int, streams: Streams) -> tuple[BlockRow | None, bool]:
        """Lease a block whose readers the H2D stream waits for; or say whether one may be allocated; or doom others first."""
        behind = len(self._idle.get(size, ()))
        if behind >= READERS_BEHIND and behind * size >= WORTH_WAITING_NBYTES:
            # A program that never waits for the device would otherwise take all of its memory. Let the copies wait instead.
            with suppress(CapabilityError):
                return self._oldest(size, number, streams), False
        if self._reserve(size, number):
            return None, True
        if self._doomed or self._doom_others(size, reached=True):
            return None, False
        row = self._oldest(size, number, streams)
        if row is None:
            self._doom_others(size, reached=False)
        return row, False

    def _reuse(self, size: int, number: int, streams: Streams) -> BlockRow | None:
        """Lease an idle block whose readers are done. Oldest first: those are the likeliest."""
        idle = self._idle.get(size)
        if idle is None:
            return None
        free = idle.free
        for rows in (free,) if free else idle.behind.values():
            if not rows:
                continue
            row = rows[0]
            fence = row.fence
            reached = fence is None or self._reached(fence)
            if reached and not self._lost(row.block):
                # Mostly so, and on the path of every small put: this does what `_leased_to` does, in fewer steps.
                row.fence = None
                row.lease = number
                row.streams = streams
                rows.popleft()
                self._leased[number] = row
                return row
            useless: list[BlockRow] = []
            found = self._first_reached(idle, row, reached, useless)
            self._doom(useless)
            return None if found is None else self._leased_to(found, idle, number, streams)
        return None

    def _reuse_each(self, sizes: Sequence[int], numbers: Sequence[int], streams: Streams) -> list[BlockRow]:
        rows: list[BlockRow] = []
        for size, number in zip(sizes, numbers, strict=True):
            row = self._reuse(size, number, streams)
            if row is None:
                break
            rows.append(row)
        return rows

    def _first_reached(self, idle: IdleBlocks, first: BlockRow, told: bool | None, useless: list[BlockRow]) -> BlockRow | None:
        """Find an idle block whose readers are done. `told` says whether those of `first` are. Enter in `useless` what nobody can
        use."""
        for readers, group in chain([(NOBODY, idle.free)], idle.behind.items()):
            for row in group:
                reached = told if row is first else self._reached(row.fence)
                if reached is None or self._lost(row.block):
                    useless.append(row)
                elif reached:
                    return row
                elif readers:
                    # Then those behind it are not done, either. Asking the driver takes microseconds, and if the device is behind
                    # there may be hundreds.
                    break
        return None

    def _oldest(self, size: int, number: int, streams: Streams) -> BlockRow | None:
        """Lease the oldest idle block of this size, and make the H2D stream wait for its readers."""
        idle = self._idle.get(size)
        if not idle:
            return None
        row = idle.oldest()
        if row.fence is not None:
            self._backend.order_h2d(row.fence)
            self.waits += 1
        return self._leased_to(row, idle, number, streams)

    def _leased_to(self, row: BlockRow, idle: IdleBlocks, number: int, streams: Streams) -> BlockRow:
        idle.remove(row)
        row.fence, row.lease, row.streams = None, number, streams
        self._leased[number] = row
        return row

    def _reached(self, fence: Event | None) -> bool | None:
        """Tell whether a block's readers are done; None if that failed, and nobody can say."""
        # Blocks that came back together have one fence.
        if fence is None or fence is self._last_reached:
            return True
        try:
            reached = fence.done()
        except self._failures:
            return None
        if reached:
            self._last_reached = fence
        return reached

    def _reserve(self, size: int, number: int, *, wanted: bool = True) -> bool:
        """Count a block to be allocated, if the limit has room."""
        if self.limit is not None and self._taken() + size > self.limit:
            return False
        self._growing[number] = Growth(size, wanted=wanted)
        return True

    def _doom_others(self, size: int, *, reached: bool) -> bool:
        """Have idle blocks of other sizes freed, enough to make room under the limit; tell whether there were enough."""
        assert self.limit is not None
        excess = self._taken() + size - self.limit
        chosen: list[BlockRow] = []
        for other, idle in self._idle.items():
            for row in idle if other != size else ():
                if excess > 0 and (not reached or self._reached(row.fence)):
                    chosen.append(row)
                    excess -= other
        if excess > 0:
            return False
        self._doom(chosen)
        return True

    def _doom(self, rows: list[BlockRow]) -> None:
        for row in rows:
            row.doomed = True
            self._idle[row.nbytes].remove(row)
            self._doomed.append(row)

    def _doom_all(self) -> None:
        self._spares_tried.clear()
        self._doom([row for idle in self._idle.values() for row in idle])

    def _trim(self) -> None:
        self._step(self._doom_all)
        self._free_doomed()

    def _free_doomed(self) -> None:
        """Wait for the readers of doomed blocks and free them, without the lock held. On a thread that no interrupt comes to."""
        rows: list[BlockRow] = []
        with self._at_work:
            # With the lock: otherwise a thread that mends the table could list rows again that are taken, and each is freed only
            # once.
            with self._lock:
                self._take_doomed(rows)
            with ExitStack() as steps:
                # Last in, first out, and each whatever the others raise.
                for row in reversed(rows):
                    steps.callback(self._free, row)
                self._wait_for_users(rows)

    def _take_doomed(self, rows: list[BlockRow]) -> None:
        while self._doomed:
            row = self._doomed.popleft()
            if not row.freed:
                row.freed = True
                rows.append(row)
                # If the framework has taken the memory back, another block may be at this address already.
                if self._places.get(row.address) is row:
                    del self._places[row.address]

    def _wait_for_users(self, rows: list[BlockRow]) -> None:
        if not rows:
            return
        if not self._closed:
            # A copy to a block whose lease ended at once may still be under way. This asks now, when no more such copies can begin.
            with suppress(*self._failures):
                self._backend.record_h2d().synchronize()
        for row in rows:
            # What failed reads no more.
            with suppress(*self._failures):
                if row.fence is not None:
                    row.fence.synchronize()

    def _free(self, row: BlockRow) -> None:
        try:
            # What the framework refuses to free is its own again, or nobody's.
            with suppress(*self._failures):
                self._backend.free_device(row.block)
        finally:
            self._rows.pop(row.key, None)
            # Only now: whoever counts before this has the row.
            self._generation = object()
            self._changes += 1

    def _grow(self, counted: dict[int, int], streams: Streams) -> dict[int, BlockRow]:
        """Allocate blocks that were counted, and spares where readers are behind. By number: sizes, and what comes of them. On a
        thread that no interrupt comes to."""
        made: dict[int, BlockRow] = {}
        # Loops are in functions of their own: what guards a call here guards all of it from interrupts, too.
        with self._grows(*counted):
            try:
                self._allocate_each(counted, made)
            finally:
                # What was refused is in no peak.
                self._count_no_more(counted.keys() - made.keys())
                # Now: what is entered is changed in steps alone.
                fenced = self._fenced(made.values())
                self._enter(made.values(), streams)
            # If there are no more, whoever needs one is told.
            with suppress(*self._failures):
                self._add_spares(set(counted.values()))
        with suppress(*self._failures):
            self._have_one_of_each(fenced)
        return made

    def _allocate_each(self, counted: dict[int, int], made: dict[int, BlockRow]) -> None:
        for number, size in counted.items():
            made[number] = BlockRow(number, self._allocated(size, made))

    def _count_no_more(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._growing.pop(number, None)

    def _fenced(self, rows: Iterable[BlockRow]) -> set[int]:
        """Return the sizes of new blocks that may not be written yet."""
        return {row.nbytes for row in rows if row.fence is not None}

    def _have_one_of_each(self, sizes: Iterable[int]) -> None:
        """Have a block of each size idle: a framework that gives a fence may still be reading the memory that it gave us, so the
        next one must be ready before it is needed."""
        for size in sizes:
            if not self._idle.get(size):
                self._add_spare(size)

    def _enter(self, rows: Collection[BlockRow], streams: Streams) -> None:
        """Enter new blocks, leased or, where nobody waits for them, idle."""
        try:
            self._step(self._enter_rows, rows, streams)
        except BaseException:
            # What ended meanwhile could not be settled. The blocks are there all the same: the next step finds them idle.
            with self._lock:
                for row in rows:
                    self._rows.setdefault(row.key, row)
                self._generation = object()
            raise

    def _enter_rows(self, rows: Collection[BlockRow], streams: Streams) -> None:
        for row in rows:
            self._rows[row.key] = row
            generation, nbytes = self._known_sum
            self._known_sum = generation, nbytes + row.nbytes
            self._places[row.address] = row
            if self._grown(row.key):
                row.lease, row.streams = row.key, streams
                self._leased[row.key] = row
            else:
                self._idle[row.nbytes].append(row)
                self._changes += 1
        self.peak_nbytes = max(self.peak_nbytes, self._taken())
        for row in rows:
            # In this step: later the lease may have ended, and the block be idle, or another's. For what is idle now, nobody waits.
            if row.lease is not None and row.fence is not None:
                self._backend.order_h2d(row.fence)
                row.fence = None

    def _allocated(self, size: int, made: dict[int, BlockRow]) -> DeviceBlock:
        """Allocate a block. `made`: those beside it that are not entered yet."""
        with suppress(*self._failures):
            return self._backend.alloc_device(size)
        # Those made were there beside what is freed now.
        self._step(self._note_peak, made)
        # Idle blocks of other sizes may be all that stands in the way.
        self._trim()
        try:
            return self._backend.alloc_device(size)
        except self._failures as error:
            raise AllocationError(
                f"the device has no {in_words(size)} left ({in_words(self._there(made))} are taken by puts): {error}. Drop "
                "arrays, use smaller batches, or free memory that other libraries hold"
            ) from error

    def _there(self, made: dict[int, BlockRow]) -> int:
        """Return the bytes of the blocks that are there, without what is only counted. `made`: those not entered yet."""
        return sum([row.nbytes for row in (self._rows | made).values()])

    def _note_peak(self, made: dict[int, BlockRow]) -> None:
        self.peak_nbytes = max(self.peak_nbytes, self._there(made))

    def _add_spares(self, sizes: Iterable[int]) -> None:
        """Take as many spares of each size as blocks wait for their readers, but only a few: each one costs more than a small put
        does."""
        for size in sizes:
            if size > SPARE_NBYTES:
                continue
            behind = self._step(self._count_idle, size)
            for _ in range(min(behind, SPARES, SPARE_NBYTES // size)):
                if not self._add_spare(size):
                    break

    def _count_idle(self, size: int) -> int:
        return len(self._idle.get(size, ()))

    def _have_one_more(self, size: int) -> None:
        """Allocate a spare after a put that came for its block only just too early: all that follow would, too.

        This is done only a few times for each size, whatever comes of it: a put that waits for nothing must not pay each time.
        """
        attempts = self._spares_tried[size]
        if attempts < min(SPARES, SPARE_NBYTES // size):
            self._spares_tried[size] = attempts + 1
            # The put has its block, so it does not matter to it what happens to the spare.
            with suppress(Exception):
                uninterrupted(self._add_spare, size)

    def _add_spare(self, size: int) -> bool:
        """Allocate a block that nobody needs yet, if the limit has room. On a thread that no interrupt comes to."""
        # Whoever finds no room because of it waits until it is there.
        with self._at_work:
            # Counted and taken back on this thread: no lease has this number, so no lease's end would settle it.
            number = self._count()
            if not self._step(self._reserve_spare, size, number):
                return False
            with self._grows(number):
                self._enter([BlockRow(number, self._backend.alloc_device(size))], {})
            return True

    def _reserve_spare(self, size: int, number: int) -> bool:
        # Whoever wanted it may have been interrupted since, and have closed the stager.
        return not self._closed and self._reserve(size, number, wanted=False)

    def _full(self, size: int) -> AllocationError:
        if is_copy_thread():
            return AllocationError(
                "device memory asked by a finalizer on a thread that makes the copies, where it cannot wait for room. Put from "
                "ordinary code"
            )
        return AllocationError(
            f"device memory is full: {in_words(size)} asked, {in_words(self.nbytes)} of device_limit={self.limit} taken by "
            "arrays that can still be reached. Raise device_limit, or drop arrays that earlier puts returned"
        )


_open: dict[int, DevicePool] = {}
"""The pools of all stagers of this process that are not closed. A closed one frees its blocks, which waits for their readers."""
# In a forked child their memory is the parent's.
os.register_at_fork(after_in_child=_open.clear)


def note_reader(target: DeviceRange, stream: Stream, own: DevicePool) -> None:
    """Note a stream that may read this memory, in the pool that has it. `own` is asked first; if no pool has it, nothing is
    noted."""
    if not own.note(target, stream):
        any(pool.note(target, stream) for pool in list(_open.values()))
