"""The bounded pool of pinned host memory.

Invariants: the bytes pinned, here and beside the pool by `reserve`, never exceed the limit; memory that a copy may still read or
write is never handed out again, because what is in flight holds the `HostBlock`; nothing is pinned or unpinned while requests fit
what is already there, since both may wait for kernels. Sizes are exact up to alignment. Memory goes back to the system by `trim()`,
by `close()`, and to make room under the limit; never by a timer. Nobody waits if nothing would end the wait: see `WhenFull`.

Whoever asks for pinned memory by name waits for its page-lock. Results of gets come at once: new memory for them is mapped, and
locked later by a thread for that (`locker`). Until then it is pageable, and counts as pinned.

A `HostBlock` holds a ticket, whose end posts a number; the next request takes the memory back. An interrupt may come anywhere: what
is true stands in `segments`.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, final

import numpy as np

from xferlib.errors import AllocationError
from xferlib.forks import forget_in_child
from xferlib.latch import give_way, is_copy_thread
from xferlib.ledger import Ledger, all_ledgers, reap_all
from xferlib.memory.arrays import Array
from xferlib.memory.blocks import ALIGNMENT, PAGE, HostBlock, PoolRequest, Usage, WhenFull, check_when_full, round_up
from xferlib.memory.locker import LOCKER, lock_later, pause_after
from xferlib.memory.pages import HostPages
from xferlib.memory.ranges import Ranges
from xferlib.memory.segments import PinnedRow, Segment, Segments
from xferlib.memory.table import ROOM_LOOK_SECONDS, Growth, Table
from xferlib.protocol import Event
from xferlib.reaper import watch
from xferlib.tickets import ticket
from xferlib.tree import ShapeDtype
from xferlib.uninterrupted import collects, uninterrupted
from xferlib.words import in_words

__all__ = ["HostBlock", "PinnedPool", "pinned_or_pending", "pool_pending"]

LARGE_FROM_NBYTES, SHARED_SEGMENT_NBYTES = 1 << 20, 2 << 20
"""Smaller requests share segments of this size: a page-lock costs milliseconds and whole pages."""
KEPT_SHARE = 16
"""The limit must have room for so many blocks of a size before staging keeps one for later, as chunks and bounce buffers. What the
pool itself keeps idle has no bound but the limit."""
STAGING_NBYTES = 64 << 20
"""Or half of the limit where that is less. With `when_full="stage"`, arrays leave so much to staging."""
UNLOCKED_FROM_NBYTES = 8 << 20
"""If the results of one get need so much new memory, or more, it is locked later. Locking less takes no longer than a detour
through chunks."""
MOST_LOOKS = 100
"""How often a request looks again before it says that there is no room, where staging has memory that it would give back, and
nothing is in flight: other threads may use that memory again and again, each time just when they are asked for it."""


_NEW = tuple.__new__
"""Takes a third of the time of a named tuple's constructor."""


@final
class _Result(NamedTuple):
    """A large array of `results`. `position`: among those wanted."""

    position: int
    request: PoolRequest
    number: int
    ticket: object


@final
class PinnedPool(Table):
    """Hands out pinned memory as NumPy arrays. Any thread. `allocate` and `free` are the backend's.

    `unlocked`: where memory comes from that is locked later; None: nobody gets any that is not locked.
    Write-combined memory lies in segments of its own: only whoever asks for it gets it.
    """

    def __init__(
        self,
        *,
        allocate: Callable[[int], int],
        free: Callable[[int], None],
        ledger: Ledger,
        limit: int,
        allocate_write_combined: Callable[[int], int] | None = None,
        unlocked: HostPages | None = None,
        when_full: WhenFull = "wait",
    ) -> None:
        check_when_full(when_full)
        if unlocked is not None:
            LOCKER.start()
        super().__init__("pinned memory")
        self.limit = limit
        self.when_full = when_full
        self._arrays_limit = limit - min(STAGING_NBYTES, limit // 2) if when_full == "stage" else limit
        self._allocate = allocate
        self._allocate_write_combined = allocate_write_combined
        self._unlocked = unlocked
        self._free = free
        self._ledger = ledger
        self.release: Callable[[], bool] = bool
        """Gives back what staging keeps for later, and tells whether there was any. Never blocks. Set by who makes both."""
        self._segments = Segments()
        self.contains = self._segments.contains
        """Tells whether a range, given as address and bytes, lies inside one segment that is locked. Takes no lock."""
        self._reserved: dict[int, int] = {}
        """Bytes that are locked beside the pool, by their address."""
        self._reserved_asked = 0
        self._freeing = threading.RLock()
        """Held while the driver unlocks, by threads that no interrupt comes to."""
        self.hits = self.misses = self.waits = self.fallbacks = 0
        self.wait_seconds = 0.0
        self.peak_nbytes = self._asked_peak = 0
        forget_in_child(self)

    @property
    def nbytes(self) -> int:
        """Bytes that are page-locked, or about to be."""
        return self._counted(self._segments.by_number) + sum(list(self._reserved.values()))

    @property
    def used_nbytes(self) -> int:
        """Bytes that are handed out."""
        return self._segments.used_nbytes

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, write_combined: bool = False) -> Array:
        """Return an array in pinned memory, contents undefined; see `WhenFull`. Raises `AllocationError`, saying what to do."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        try:
            block = self.take(nbytes, write_combined=write_combined, for_array=True)
        except AllocationError:
            if self.when_full != "stage":
                raise
            self.fallbacks += 1
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, buffer=np.asarray(block))

    def results(self, wanted: Sequence[ShapeDtype]) -> list[Array]:
        """Return arrays for gets to fill. This does what `empty` does, but does not wait until much memory is page-locked.

        If there is no idle memory for large ones, and the limit has room for them and for staging, they are pageable when they are
        returned, and pinned soon after.
        """
        found: list[Array | None] = [None] * len(wanted)
        lacking: list[_Result] = []
        # A finalizer on a thread that makes the copies needs its memory at once, and such that it can be copied to without that
        # thread.
        if self._unlocked is not None and not is_copy_thread():
            asked: list[_Result] = []
            for index, (shape, dtype) in enumerate(wanted):
                nbytes = math.prod(shape) * dtype.itemsize
                if nbytes >= LARGE_FROM_NBYTES:
                    request = _NEW(PoolRequest, (round_up(nbytes, ALIGNMENT), nbytes, None, False, True))
                    number = self._count()
                    asked.append(_Result(index, request, number, ticket(self._returns.put, number)))
            for result, row in zip(asked, self._step(self._reuse_for_results, asked) if asked else (), strict=True):
                if row is None:
                    lacking.append(result)
                else:
                    found[result.position] = _array(row, result.ticket, *wanted[result.position])
        counted = bool(lacking) and self._step(self._count_unlocked, lacking)
        if counted:
            give_way()
            # If this call is interrupted, all rows go back with their tickets.
            rows = uninterrupted(self._map_unlocked, lacking)
            give_way()
            for result, row in zip(lacking, rows, strict=False):
                found[result.position] = _array(row, result.ticket, *wanted[result.position])
        return [self.empty(*one) if array is None else array for one, array in zip(wanted, found, strict=True)]

    def take(
        self, nbytes: int, taken: Callable[[], None] | None = None, *, write_combined: bool = False, for_array: bool = False
    ) -> HostBlock:
        """Return `nbytes` bytes (at least 1), waiting for transfers in flight where that makes room; see `PoolRequest`."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self.limit // PAGE * PAGE:
            raise AllocationError(
                f"{in_words(nbytes)} of pinned memory asked, more than pinned_limit={self.limit} ({in_words(self.limit)}). "
                "Raise pinned_limit, use smaller arrays, or open the stager with when_full='stage', which makes them pageable"
            )
        request = _NEW(PoolRequest, (size, nbytes, taken, write_combined, for_array))
        number = self._count()
        # First: whatever happens from here on, the row goes back.
        held = ticket(self._returns.put, number)
        row = self._step(self._reuse, request, number)
        if row is None:
            row = self._find(request, number)
        return HostBlock(row.address, size, held)

    def try_take(self, nbytes: int, taken: Callable[[], None] | None = None) -> HostBlock | None:
        """Return `nbytes` bytes for staging as `take` does, where that neither waits for a transfer nor unpins."""
        request = PoolRequest(round_up(nbytes, ALIGNMENT), nbytes, taken, False, False)
        number = self._count()
        held = ticket(self._returns.put, number)
        found = self._step(self._reuse_or_count, request, number, False)
        if isinstance(found, Ranges):
            found = uninterrupted(self._lock_new, request, number, found)
        return None if found is None else HostBlock(found.address, found.size, held)

    def _find(self, request: PoolRequest, number: int) -> PinnedRow:
        """Make room, step by step, after a first look has found no idle memory."""
        # Copies that are done may hold the last reference to what is asked for.
        reap_all()
        waits = not request.for_array or self.when_full == "wait"
        released = collected = False
        looks = 0
        while True:
            changes = self._changes
            found = self._step(self._reuse_or_count, request, number, True)
            if isinstance(found, Ranges):
                # Outside the lock: page-locking takes milliseconds, and other threads may find idle memory meanwhile.
                return uninterrupted(self._lock_new, request, number, found)
            if found is not None:
                return found
            if self._segments.freeable():
                uninterrupted(self._free_evicted)
            elif not released:
                # Memory that is only kept for later is given back before any wait.
                self.release()
                released = True
            elif (waits and self._wait()) or self._worth_another_look(changes):
                pass
            elif collected and waits and looks < MOST_LOOKS and self._segments.used_nbytes > self._segments.arrays_nbytes:
                # Staging has some: in use when it was asked for that, at rest when it was asked what ends next, and perhaps in use
                # again by now.
                looks += 1
                time.sleep(ROOM_LOOK_SECONDS)
            elif collected or (request.for_array and self.when_full == "stage"):
                raise self._full(request.asked, waits=waits)
            else:
                # Arrays in reference cycles hold pinned memory until the collector runs, and it knows nothing of the limit.
                gc.collect()
                collected = True

    def reserve(self, address: int, nbytes: int) -> None:
        """Count memory that is about to be page-locked beside the pool, until `unreserve`.

        Idle memory is unpinned first, where that makes room. It waits for no transfer. Raises `AllocationError`, saying what to do.
        """
        for make_room in (reap_all, self.release, gc.collect, None):
            while True:
                changes = self._changes
                if self._step(self._try_reserve, address, nbytes):
                    return
                if self._segments.freeable():
                    uninterrupted(self._free_evicted)
                elif not self._worth_another_look(changes):
                    break
            if make_room is not None:
                make_room()
        raise AllocationError(
            f"{in_words(nbytes)} to be page-locked, for which there is no room: {self._in_use()}. "
            "Raise pinned_limit, close pins or rings, or drop pinned arrays"
        )

    def unreserve(self, address: int) -> None:
        """Count it no more: it is unlocked. Twice is fine."""
        self._reserved.pop(address, None)
        self._reserved_asked = sum(list(self._reserved.values()))
        self._changes += 1

    @property
    def has_arrays(self) -> bool:
        """Whether any array over this pool may be alive."""
        return self._segments.arrays_nbytes > 0

    def owns(self, address: int, nbytes: int) -> bool:
        """Tell whether the range lies inside one segment, even one that is not locked. Takes no lock."""
        return self.contains(address, nbytes) or self._segments.around(address, nbytes) is not None

    def is_pending(self, address: int, nbytes: int) -> bool:
        """Tell whether the range lies inside a segment that is pageable now, and pinned soon. Takes no lock."""
        segment = self._segments.around(address, nbytes)
        return segment is not None and segment.pending

    def is_pinned_or_pending(self, address: int, nbytes: int) -> bool:
        """Tell whether the range lies inside a segment that is pinned, now or soon. Takes no lock."""
        segment = self._segments.around(address, nbytes)
        return segment is not None and not segment.refused

    def idle(self) -> None:
        """Block until all is locked that is to be. Raises `AllocationError` in a finalizer that would wait for ever."""
        told = False
        while not (self._closed or LOCKER.over) and any(segment.pending for segment in list(self._segments.by_number.values())):
            if LOCKER.is_here() or collects() or self.reentered:
                raise AllocationError(
                    "a finalizer would wait until memory is page-locked, perhaps by the call that it runs inside of. "
                    "Ask from ordinary code"
                )
            if not told:
                # An interrupted call may not have told the locker.
                lock_later(self.lock_next)
                told = True
            # Where this raises, nothing is locked either.
            self._step(bool)
            time.sleep(ROOM_LOOK_SECONDS)

    def lock_next(self) -> int:
        """Lock some memory that is to be locked: see `lock_later`."""
        # From before it is claimed: whoever finds no room except what is claimed waits for this.
        with self._at_work:
            segment = self._step(self._claim)
            if segment is None:
                return 0
            assert self._unlocked is not None
            try:
                self._unlocked.lock(segment.start)
                self._step(self._segments.note_locked, segment)
            except BaseException as error:
                # Whoever has it now has pageable memory, as good as any.
                segment.refused = True
                if not isinstance(error, AllocationError):
                    raise
            finally:
                segment.claimed = False
                self._changes += 1
            return segment.nbytes

    def usage(self) -> Usage:
        """Return the figures of this moment."""
        if not self.reentered:
            self._step(bool)
        reserved = sum(list(self._reserved.values()))
        # Looked at once, or what goes meanwhile would be taken off twice.
        segments = {number: segment for number, segment in self._segments.by_number.copy().items() if not segment.refused}
        pinned = self._counted(segments) + reserved
        return Usage(pinned, self.peak_nbytes, self.used_nbytes, self._segments.asked_nbytes + reserved, self._asked_peak)

    def close(self) -> None:
        """Unpin what is idle now; what arrays still hold is unpinned when the last of them is gone. No interrupt comes here."""
        self._closed = True
        _locking_later.pop(id(self), None)
        try:
            self._trim()
        except BaseException:
            # The caller is told what was refused. It is tried again only where the reaper is needed anyway, for what is still held.
            if self._segments.rows or self._growing:
                watch(self)
            raise
        if self._is_left:
            watch(self)

    def settle(self) -> bool:
        """After `close`, unpin what no array holds any more; tell whether anything is left. See `ClosedTable`."""
        # Copies of another stager that are done may hold the last reference, and perhaps nobody calls that stager.
        reap_all()
        try:
            self._trim()
        except Exception:
            # Raised only when nothing else is left: an exception ends the looking.
            if self._segments.rows or self._growing:
                return True
            raise
        return self._is_left

    @property
    def _is_left(self) -> bool:
        # Not the rows: whoever asks for figures takes back rows that come back after a look, but unpins nothing.
        # In this order: what is entered meanwhile is in the second.
        return bool(self._growing or self._segments.by_number)

    def forget(self) -> None:
        """See `ForkSafe`."""
        self._free = _leak
        self._closed = True
        _locking_later.pop(id(self), None)
        self._renew()

    def _mend(self) -> None:
        self._segments.derive()

    def _take_back(self, number: int, fences: list[Event | None]) -> bool:
        return self._segments.take_back(number)

    def _wait(self) -> bool:
        """Block until something in flight has ended. Returns False if nothing could."""
        start = time.perf_counter()
        if not (self.release() or self._ledger.wait_for_pinned(self.owns)):
            return False
        seconds = time.perf_counter() - start
        # Nothing is called in these two lines, so no other thread comes in between.
        self.waits += 1
        self.wait_seconds += seconds
        return True

    def _reuse(self, request: PoolRequest, number: int) -> PinnedRow | None:
        """Enter a row in idle memory."""
        if request.for_array and not self._fits_arrays(request.size):
            return None
        ranges = self._ranges_for(request)
        address = ranges.take(request.size)
        if address is None:
            return None
        self.hits += 1
        return self._hand_out(address, ranges, request, number)

    def _reuse_or_count(self, request: PoolRequest, number: int, may_evict: bool) -> PinnedRow | Ranges | None:
        """Enter a row in idle memory, or count a new segment of the ranges returned. None: neither; some may be freeable now."""
        row = self._reuse(request, number)
        if row is not None:
            return row
        if request.for_array and not self._fits_arrays(request.size):
            return None
        if self._closed and not may_evict:
            # An interrupted call may have left work running: nobody would take back the chunks that a closed pool gave it.
            return None
        ranges, exact = self._ranges_for(request), round_up(request.size, PAGE)
        for nbytes in (SHARED_SEGMENT_NBYTES, exact) if ranges is self._segments.small else (exact,):
            excess = self.nbytes + nbytes - self.limit
            if excess <= 0:
                self._growing[number] = Growth(nbytes)
                return ranges
            if may_evict and self._segments.evict(excess):
                break
        return None

    def _ranges_for(self, request: PoolRequest) -> Ranges:
        if request.write_combined:
            return self._segments.write_combined
        shares = request.size < LARGE_FROM_NBYTES and self.limit >= 2 * SHARED_SEGMENT_NBYTES
        return self._segments.small if shares else self._segments.large

    def _fits_arrays(self, nbytes: int) -> bool:
        return self._segments.arrays_nbytes + nbytes <= self._arrays_limit

    def _reuse_for_results(self, asked: Sequence[_Result]) -> list[PinnedRow | None]:
        """Enter rows of results in idle memory, locked or not; if staging has no room beside it, only in locked memory."""
        large, pageable = self._segments.large, self._segments.pageable
        kinds = (large, pageable) if self.nbytes + STAGING_NBYTES <= self.limit else (large,)
        return [self._reuse_for_result(result.request, result.number, kinds) for result in asked]

    def _reuse_for_result(self, request: PoolRequest, number: int, kinds: tuple[Ranges, ...]) -> PinnedRow | None:
        for ranges in kinds if self._fits_arrays(request.size) else ():
            address = ranges.take(request.size)
            if address is not None:
                self.hits += 1
                if ranges is self._segments.pageable:
                    self._try_again(address)
                return self._hand_out(address, ranges, request, number)
        return None

    def _try_again(self, address: int) -> None:
        """If memory is handed out again that the driver refused once, have it locked: it may have been short of memory then."""
        segment = self._segments.around(address, 1)
        if segment is not None and segment.refused and not segment.tried_again:
            # In this order: an interrupt in between leaves it refused.
            segment.tried_again = True
            segment.refused = False
            lock_later(self.lock_next)

    def _count_unlocked(self, lacking: list[_Result]) -> bool:
        """Count what is to be mapped for these. False: so little that it is locked at once, or the limit has no room."""
        sizes = [round_up(result.request.size, PAGE) for result in lacking]
        total = sum(sizes)
        fits = self._fits_arrays(sum([result.request.size for result in lacking]))
        room = fits and self.nbytes + total + STAGING_NBYTES <= self.limit
        if total < UNLOCKED_FROM_NBYTES or not room or self._closed:
            return False
        for result, size in zip(lacking, sizes, strict=True):
            self._growing[result.number] = Growth(size)
        return True

    def _map_unlocked(self, lacking: list[_Result]) -> list[PinnedRow]:
        """Map the segments that were counted, and enter the rows; none where the system refuses. No interrupt comes here."""
        assert self._unlocked is not None
        _locking_later[id(self)] = self
        with self._grows(*[result.number for result in lacking]):
            sizes = [self._growing[result.number].nbytes for result in lacking]
            try:
                starts = self._unlocked.map(sizes)
            except AllocationError:
                return []
            pageable = self._segments.pageable
            fresh = [
                (Segment(result.number, start, nbytes, pageable, locked=False), result.request)
                for result, start, nbytes in zip(lacking, starts, sizes, strict=True)
            ]
            rows = self._step(self._enter, fresh)
        lock_later(self.lock_next)
        return rows

    def _claim(self) -> Segment | None:
        # What a closed pool has left is pageable memory like any.
        return None if self._closed else self._segments.claim()

    def _try_reserve(self, address: int, nbytes: int) -> bool:
        """Reserve, or else have idle segments freed, if they are enough."""
        excess = self.nbytes + nbytes - self.limit
        if excess > 0:
            self._segments.evict(excess)
            return False
        self._reserved[address] = nbytes
        return True

    def _lock_new(self, request: PoolRequest, number: int, ranges: Ranges) -> PinnedRow:
        """Page-lock a segment that was counted, and enter the row at its start. On a thread that no interrupt comes to."""
        allocate = self._allocate_write_combined if ranges is self._segments.write_combined else self._allocate
        assert allocate is not None
        with self._grows(number):
            nbytes = self._growing[number].nbytes
            (row,) = self._step(self._enter, [(Segment(number, allocate(nbytes), nbytes, ranges), request)])
            return row

    def _enter(self, fresh: Sequence[tuple[Segment, PoolRequest]]) -> list[PinnedRow]:
        """Enter new segments, and at the start of each the row, where somebody still waits for it."""
        rows = [self._enter_one(segment, request) for segment, request in fresh]
        self.note_peaks()
        return rows

    def _enter_one(self, segment: Segment, request: PoolRequest) -> PinnedRow:
        self._segments.add(segment)
        # Only now: a segment that was refused never counts.
        self.misses += 1
        self._changes += 1
        if not self._grown(segment.number):
            return PinnedRow(segment.start, 0, 0, False, segment.ranges)
        # Out of the new segment, not the best fit: another thread may have asked meanwhile.
        segment.ranges.take_at(segment.start, request.size)
        return self._hand_out(segment.start, segment.ranges, request, segment.number)

    def _hand_out(self, address: int, ranges: Ranges, request: PoolRequest, number: int) -> PinnedRow:
        row = self._segments.hand_out(address, ranges, request, number)
        if self._segments.asked_nbytes + self._reserved_asked > self._asked_peak:
            self._asked_peak = self._segments.asked_nbytes + self._reserved_asked
        if request.taken is not None:
            request.taken()
        return row

    def note_peaks(self) -> None:
        """Note how much there is, when new memory is locked: a lock that was refused never counts."""
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        self._reserved_asked = sum(list(self._reserved.values()))
        self._asked_peak = max(self._asked_peak, self._segments.asked_nbytes + self._reserved_asked)

    def _trim(self) -> None:
        self._step(self._segments.evict, None)
        self._free_evicted(pauses=any(ledger.busy for ledger in all_ledgers()))

    def _free_evicted(self, *, pauses: bool = False) -> None:
        """Unpin the segments to be freed, each of them whatever the others raise. On a thread without interrupts.

        `pauses`: others are at work, and get their turn in between.
        """
        with ExitStack() as steps:
            for segment in self._segments.freeable():
                if pauses:
                    steps.callback(pause_after, segment.nbytes)
                steps.callback(self._unpin, segment)

    def _unpin(self, segment: Segment) -> None:
        """Unpin a segment, and only then take it off the account: the limit holds at every moment."""
        with self._at_work, self._freeing:
            if segment.claimed or not segment.freeing:
                # Another thread was faster, and was perhaps refused; or this is a finalizer in the middle of such a call.
                return
            segment.claimed = True
            try:
                self._free(segment.start)
            except Exception:
                # Refused: it is still there, and the next request or trim finds it.
                self._restore(segment)
                raise
            except BaseException:
                # Memory that may be gone is handed out to nobody.
                self._remove(segment)
                raise
            self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        self._changes += 1

    def _restore(self, segment: Segment) -> None:
        segment.freeing = segment.claimed = False
        with self._lock:
            # What is free follows from the segments.
            self._torn = True
        self._changes += 1

    def _in_use(self) -> str:
        reserved = sum(list(self._reserved.values()))
        beside = f", {in_words(reserved)} by pins and shared rings" if reserved else ""
        return f"pinned_limit={self.limit} has {in_words(self.used_nbytes)} of {in_words(self.limit)} in use by arrays{beside}"

    def _full(self, nbytes: int, *, waits: bool) -> AllocationError:
        why = "nothing is in flight that could free more" if waits else f"when_full={self.when_full!r} waits for nothing"
        if waits and is_copy_thread():
            why = "a finalizer on a thread that makes the copies waits for none"
        fragmented = self.used_nbytes + sum(list(self._reserved.values())) + nbytes <= self._arrays_limit
        gap = f" (and no piece of {in_words(nbytes)} is free between them)" if fragmented else ""
        return AllocationError(
            f"pinned memory is full: {in_words(nbytes)} asked, {self._in_use()}{gap}, and {why}. "
            "Raise pinned_limit, lower the depth, drop pinned arrays, or close pins and shared rings"
        )


def _array(row: PinnedRow, ticket: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.ndarray(shape, dtype, buffer=np.asarray(HostBlock(row.address, row.size, ticket)))


_locking_later: dict[int, PinnedPool] = {}
"""The pools that have had memory which is locked later, and are not closed. Memory of one stager may be given to another."""


def pool_pending(address: int, nbytes: int) -> PinnedPool | None:
    """Return the pool, of whatever stager, that is still to lock the range."""
    return next((pool for pool in list(_locking_later.values()) if pool.is_pending(address, nbytes)), None)


def pinned_or_pending(address: int, nbytes: int) -> bool:
    """Tell whether the range is in memory that a pool, of whatever stager, locks later or has locked so."""
    return bool(_locking_later) and any(pool.is_pinned_or_pending(address, nbytes) for pool in list(_locking_later.values()))


def _leak(address: int) -> None:
    """Stand in for `free` in a forked child."""
