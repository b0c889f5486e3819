"""Page-locking memory that the caller owns, in place."""

from __future__ import annotations

import itertools
import sys
import threading
from bisect import bisect_right
from contextlib import ExitStack
from operator import methodcaller
from types import TracebackType
from typing import Any, NamedTuple, final

from xferlib.callers import user_line
from xferlib.checks import translated, uncopied
from xferlib.debug import verify_done
from xferlib.errors import AllocationError
from xferlib.forks import forget_in_child, leak
from xferlib.in_flight import meet
from xferlib.ledger import Ledger, all_ledgers, refuse_to_wait, wait_for_others
from xferlib.memory.arrays import Array, address_of, host_array
from xferlib.memory.locker import LOCKER
from xferlib.memory.pinned_pool import PinnedPool, pool_pending
from xferlib.memory.proc_maps import why_unlockable
from xferlib.protocol import HostStager
from xferlib.reaper import close_later
from xferlib.tickets import Returns
from xferlib.uninterrupted import uninterrupted
from xferlib.words import in_words

__all__ = ["Pin", "Pins", "splits"]


@final
class Pin:
    """Memory of the caller's that is page-locked until `close()`; it holds the array meanwhile.

    A context manager that gives the array. Closing waits for the transfers in flight, since one of them may use the memory.
    """

    __reduce_ex__ = uncopied("Threads may share it; another process pins its memory itself")

    def __init__(self, pins: Pins, array: Array, number: int, ticket: object) -> None:
        self.array = array
        self._pins = pins
        self._number = number
        self._ticket = ticket
        self._opened_at = user_line()
        self._open = True

    @property
    def is_locked(self) -> bool:
        """Whether neither this nor its stager is closed."""
        return self._open and not self._pins.closed

    def close(self) -> None:
        """Unlock the memory. Twice is fine. In a finalizer that others would wait for, it is unlocked soon after.

        Raises `XferError` in a finalizer on a thread that makes the copies, where some are in flight: it would wait for itself.
        """
        if self._open and self._pins.reentered:
            close_later(self.close)
        elif self._open:
            # If this is interrupted or refused, it may be called again.
            self._pins.remove(self._number)
            self._open = False

    def __enter__(self) -> Array:
        return self.array

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # Unlocking waits for transfers, and a finalizer may run anywhere: the ticket makes the next call that pins or trims do it.
        if getattr(self, "_open", False) and not self._pins.closed:
            # First: where warnings are errors, the exception keeps this object.
            del self._ticket
            said = f"pin of {in_words(self.array.nbytes)} was never closed. Use it as a context manager"
            self._opened_at.warn(said, ResourceWarning)


@final
class _PinRow(NamedTuple):
    """A range that is locked, or about to be. The array holds its memory."""

    address: int
    nbytes: int
    array: Array


@final
class Pins:
    """The ranges that one stager has page-locked for callers. Any thread."""

    def __init__(self, backend: HostStager[Any], ledger: Ledger, pool: PinnedPool) -> None:
        self.closed = False
        self._backend = backend
        self._ledger = ledger
        self._pool = pool
        # Reentrant: a finalizer may pin while its thread is in here.
        self._lock = threading.RLock()
        self._count = itertools.count().__next__
        self._returns = Returns()
        self._rows: dict[int, _PinRow] = {}
        self._changing = threading.RLock()
        """Held while the driver locks or unlocks, by threads that no interrupt comes to."""
        self._locks: dict[int, None] = {}
        """The rows that are locked in fact."""
        self._starts: tuple[tuple[int, int], ...] = ()
        """Start and end of each, in order; replaced as a whole, so that it can be read without the lock. They are apart."""
        self._leaving: dict[int, None] = {}
        """The rows that are about to be unlocked: new transfers stage their memory, so that those under way come to an end."""
        _open[id(self)] = self
        forget_in_child(self)

    @property
    def reentered(self) -> bool:
        """Whether this is a finalizer inside a call that transfers or other pins may be waiting for."""
        return self._pool.reentered or LOCKER.is_here()

    def add(self, array: object) -> Pin:
        """Page-lock an array's memory, which counts against the pool's limit until it is unlocked.

        Raises `ValueError` for memory that cannot be locked, or is locked already, and `AllocationError`.
        """
        self.sweep()
        array = host_array(array)
        if array.nbytes == 0:
            raise ValueError("an empty array has no memory to pin")
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            raise ValueError("the array is not contiguous: pin the array that it is a view of")
        number = self._count()
        # First: whatever happens from here on, what is locked by then is unlocked by a later call.
        ticket = self._returns.ticket(number)
        row = _PinRow(address_of(array), array.nbytes, array)
        with self._lock:
            if self._meets(row.address, row.nbytes):
                raise ValueError("this memory is pinned already. Keep the first pin open for as long as any part is needed")
            self._rows[number] = row
            self._sort()
        uninterrupted(self._locked, number, row)
        return Pin(self, array, number, ticket)

    def _locked(self, number: int, row: _PinRow) -> None:
        """Lock a range that is entered, or take it out again. On a thread that no interrupt comes to."""
        with self._changing:
            if number not in self._rows:
                # Given up before it began.
                return
            try:
                self._pool.reserve(row.address, row.nbytes)
                self._lock_pages(row.address, row.nbytes)
                self._pool.note_peaks()
            except BaseException:
                self._drop(number, row)
                raise
            self._locks[number] = None

    def _lock_pages(self, address: int, nbytes: int) -> None:
        # Otherwise it might be locked twice.
        pool = pool_pending(address, nbytes)
        if pool is not None:
            pool.idle()
        reason = why_unlockable(address, nbytes)
        if reason is not None:
            raise ValueError(f"this memory cannot be page-locked: {reason}")
        try:
            self._backend.pin(address, nbytes)
        except self._backend.failures as error:
            # Asked only now: memory with a locked neighbour on the same page would look the same, and can be locked.
            if any(self._backend.is_pinned(end, 1) for end in (address, address + nbytes - 1)):
                raise ValueError(
                    "this memory is pinned already, all or part of it: by the pool of this stager, by another stager or another "
                    "library. It is transferred as it is. Leave pin out"
                ) from error
            raise AllocationError(
                f"{in_words(nbytes)} could not be page-locked: {error}. Transfer them as they are, which stages them, or copy them "
                "into stager.empty_pinned(...)"
            ) from error

    def remove(self, number: int) -> None:
        """Unlock a range once nothing is in flight. Twice is fine."""
        row = self._rows.get(number)
        if row is None:
            return
        self._leaving[number] = None
        self._ledger.wait_all()
        self._wait_for_others(row)
        verify_done()
        uninterrupted(self._unlocked, number)

    def wait_all(self) -> None:
        """Block until no other stager uses what is locked: it is about to be unlocked. Raises as `Ledger.wait_all`."""
        for number, row in self._rows.copy().items():
            self._leaving[number] = None
            self._wait_for_others(row)

    def _wait_for_others(self, row: _PinRow) -> None:
        """Block until no other stager's transfer, nor work on a view of its, uses this memory. Raises as `Ledger.wait_all`."""
        uses = methodcaller("uses_host", row.address, row.nbytes)
        refuse_to_wait(self._ledger, uses)
        # What is a job's is staged: the CPU has it.
        while wait_for_others(self._ledger, uses, lambda job: False):
            pass
        for views in [ledger.views for ledger in all_ledgers() if ledger is not self._ledger]:
            if views.held(row.address, row.nbytes) or views.readers(row.address, row.nbytes):
                views.wait_all()

    def _unlocked(self, number: int) -> None:
        """Unlock a range that nothing uses. On a thread that no interrupt comes to."""
        with self._changing:
            row = self._rows.get(number)
            if row is None:
                return
            if number in self._locks:
                with translated(self._backend.failures, "memory could not be unlocked"):
                    self._backend.unpin(row.address)
            self._drop(number, row)

    def splits(self, address: int, nbytes: int) -> bool:
        """Tell whether a range that is locked begins or ends inside this memory, or is about to be unlocked. Takes no lock."""
        if not self._starts:
            return False
        # The second is on the path of every small put from memory that is pinned so: mostly nothing leaves.
        return self._meets(address, nbytes, but_around=True) or (bool(self._leaving) and self._are_leaving(address, nbytes))

    def _are_leaving(self, address: int, nbytes: int) -> bool:
        # Another thread may have unlocked one before it was entered here.
        leaving = [row for row in map(self._rows.get, list(self._leaving)) if row is not None]
        return any(meet(row.address, row.nbytes, address, nbytes) for row in leaving)

    def _meets(self, address: int, nbytes: int, *, but_around: bool = False) -> bool:
        """Tell whether a range has bytes of this memory. `but_around`: one that has all of them does not count."""
        ranges, end = self._starts, address + nbytes
        after = bisect_right(ranges, (address, sys.maxsize))
        if after and ranges[after - 1][1] > address:
            return not (but_around and ranges[after - 1][1] >= end)
        return after < len(ranges) and ranges[after][0] < end

    def _drop(self, number: int, row: _PinRow) -> None:
        self._pool.unreserve(row.address)
        self._locks.pop(number, None)
        self._rows.pop(number, None)
        self._leaving.pop(number, None)
        self._sort()

    def _sort(self) -> None:
        # Made anew from the rows, so that an interrupt leaves at worst what the next call puts right.
        self._starts = tuple(sorted([(row.address, row.address + row.nbytes) for row in list(self._rows.values())]))

    def sweep(self) -> None:
        """Unlock what was dropped without being closed."""
        if not self._returns:
            return
        with ExitStack() as steps:
            # Each is unlocked whatever the others raise: one that cannot be unlocked is tried again, and keeps no other locked.
            for number in self._returns.unsettled():
                steps.callback(self._settle, number)

    def _settle(self, number: int) -> None:
        self.remove(number)
        self._returns.settled(number)

    def close(self) -> None:
        """Unlock everything, each range whatever the others raise; nothing is in flight."""
        self.closed = True
        with ExitStack() as steps:
            # This runs last: the backend is closed next, and is not asked again for what it refused to unlock.
            steps.callback(self._clear)
            for number in list(self._rows):
                steps.callback(self._unlocked, number)

    def forget(self) -> None:
        """See `ForkSafe`."""
        self.closed = True
        leak(self._rows)
        self._rows, self._starts, self._leaving = {}, (), {}
        self._lock, self._changing = threading.RLock(), threading.RLock()
        _open.pop(id(self), None)

    def _clear(self) -> None:
        _open.pop(id(self), None)
        for row in list(self._rows.values()):
            self._pool.unreserve(row.address)
        self._rows.clear()
        self._leaving.clear()
        self._locks.clear()
        self._starts = ()


_open: dict[int, Pins] = {}
"""The pins of every stager of this process that is not closed."""


def splits(address: int, nbytes: int) -> bool:
    """Tell whether a range that any stager has locked begins or ends inside this memory, or is about to be unlocked: part of it may
    not be locked, or soon not any more.
    """
    return any(pins.splits(address, nbytes) for pins in list(_open.values()))
