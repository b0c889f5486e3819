"""What copies under way still need: sources, destinations and blocks, held until the copies' event is done.

Invariant: an entry leaves only when its event is done or has failed, whatever the caller dropped in the meantime.

There is no lock in here: tables change in single steps. The garbage collector may run a foreign finalizer anywhere, which may
start a transfer on the same thread, or wait for a thread that is in here; an interrupt may come anywhere, and leaves nothing held.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import NamedTuple, TypeAlias, final

from xferlib.forks import forget_in_child, leak
from xferlib.latch import is_copy_thread
from xferlib.memory.arrays import Array, address_of
from xferlib.protocol import DeviceRange, Event

__all__ = ["Entry", "InFlight", "let_go", "meet", "uses"]

REAP_EVERY_TRANSFERS = 32
"""Asking the driver costs as much as starting a small copy does."""
FEW = 3
"""Entries. Even if hundreds are under way, mostly fewer than this end between one look and the next."""
REAP_FROM_NBYTES = 64 << 10
"""From this size on the copy takes longer than asking the driver, and the memory that is held is worth asking for."""

Concerns: TypeAlias = Callable[["Entry"], bool]
"""Tells whether an entry is waited for."""


@final
class Entry(NamedTuple):
    """Copies behind which an event was recorded, and what they need."""

    asked: int
    event: Event
    recorded: int
    """`asked` and this are points of one count, before and after the event was recorded. If two entries do not overlap, their order
    is known."""
    host_arrays: Sequence[Array]
    """What copies read or write directly; what was staged is not in here."""
    device_ranges: Sequence[DeviceRange]
    """Arrays of the user's that copies read or write."""
    keepalive: object

    def uses_host(self, address: int, nbytes: int) -> bool:
        """Tell whether a copy may still read or write part of this host memory."""
        return any(meet(address_of(array), array.nbytes, address, nbytes) for array in self.host_arrays)

    def uses_device(self, target: DeviceRange) -> bool:
        """Tell whether a copy may still read or write part of this device memory, or of host memory that it is a view of."""
        return any(uses(used, target) for used in self.device_ranges) or self.uses_host(target.address, target.nbytes)


_ASKED, _RECORDED = itemgetter(0), itemgetter(2)
_exhaust: Callable[[Iterator[object]], None] = deque[object](maxlen=0).extend
"""Goes through an iterator and keeps nothing."""
_TURN = 2 * REAP_EVERY_TRANSFERS
_NEW = tuple.__new__
"""Takes a third of the time of a named tuple's constructor."""


@final
class InFlight:
    """The copies of one direction of one stager, in entries that hold what these need until they are done. Any thread."""

    def __init__(self, record: Callable[[], Event], failures: tuple[type[Exception], ...]) -> None:
        self.nbytes = 0
        self._record = record
        self._failures = failures
        self._count = itertools.count().__next__
        self.table: dict[int, Entry] = {}
        """By `asked`: an entry is in it until its copies are known to be done."""
        self._stuck: list[object] = []
        forget_in_child(self)

    @property
    def busy(self) -> bool:
        """Whether anything may be in flight."""
        return bool(self.table)

    def entries(self) -> list[Entry]:
        """Return what may be in flight, about in the order of its start."""
        # One call: other threads add meanwhile.
        return list(self.table.values())

    def add(
        self,
        nbytes: int,
        host_arrays: Sequence[Array],
        device_ranges: Sequence[DeviceRange] = (),
        keepalive: object = None,
        *,
        reaped: bool = False,
    ) -> Entry:
        """Record an event behind everything started so far, and hold all that until it is done. Return its entry.

        `reaped`: the caller has let go of what is done, or will when it matters.
        """
        asked = self._count()
        event = self._record()
        entry: Entry = _NEW(Entry, (asked, event, self._count(), host_arrays, device_ranges, keepalive))
        self.table[asked] = entry
        self.nbytes += nbytes
        # The count decides, which a transfer advances by two. The number of entries does not: it stays the same while as many end
        # as start.
        if (nbytes >= REAP_FROM_NBYTES and not reaped) or asked % _TURN >= _TURN - 2:
            self.reap(newest=asked)
        return entry

    def quiesce(self, keepalive: object, host_arrays: Sequence[Array] = (), device_ranges: Sequence[DeviceRange] = ()) -> bool:
        """Block until what a failed start has left under way is done. False: nobody can know, and `keepalive` is kept for good.

        If this is interrupted in turn, what may still be read or written is in flight as ever: `host_arrays`, `device_ranges`, see
        `Entry`. Only an interrupt before its first instruction leaves that known to nobody.
        A finalizer on a thread that makes the copies does not wait, since it would wait for itself: `keepalive` is held meanwhile.
        """
        try:
            event = self.add(0, host_arrays, device_ranges, keepalive).event
        except self._failures:
            # Better to lose the memory than to have it written under its next owner.
            self._stuck.append(keepalive)
            return False
        except BaseException:
            self._hold(keepalive, host_arrays, device_ranges)
            raise
        if not is_copy_thread():
            self.wait(event)
        return True

    def _hold(self, keepalive: object, host_arrays: Sequence[Array], device_ranges: Sequence[DeviceRange]) -> None:
        """Hold it until nobody uses it, though `quiesce` was interrupted, or met what the backend does not name: else for good."""
        if any(entry.keepalive is keepalive for entry in self.entries()):
            return
        try:
            self.add(0, host_arrays, device_ranges, keepalive)
        except BaseException:
            self._stuck.append(keepalive)

    def reap(self, *, newest: int | None = None) -> bool:
        """Let go of what is done, and tell whether anything was. Never blocks.

        `newest`: the number of an entry that has just been added. It is asked only if there are many before it.
        """
        found, more = False, True
        # What is let go of here may run foreign finalizers, which may come back here.
        while more and self.table:
            gone, more = self._take_done(newest)
            found = found or bool(gone)
        return found

    def wait_oldest(self, concerns: Concerns = lambda entry: True) -> bool:
        """Block until the oldest entry that `concerns` the caller is done. Returns False if there was none."""
        for entry in self.entries():
            if concerns(entry):
                self.wait(entry.event)
                self.table.pop(entry.asked, None)
                return True
        return False

    def wait_all(self) -> None:
        """Block until everything added before the call is done."""
        entries = self.entries()
        # The last one first: when it is done, the others are done, too, or nearly.
        for entry in reversed(entries):
            self.wait(entry.event)
        # Each by itself: `reap` leaves entries that other threads recorded meanwhile to its next look, and there may be none.
        for entry in entries:
            self.table.pop(entry.asked, None)

    def forget(self) -> None:
        """See `ForkSafe`."""
        leak(self.table, self._stuck)
        self.table, self._stuck = {}, []

    def wait(self, event: Event) -> None:
        """Block until an event is reached, or has failed."""
        with suppress(*self._failures):
            event.synchronize()

    def _take_done(self, newest: int | None) -> tuple[list[Entry], bool]:
        """Let go of entries that are done; also tell whether some that look done were left."""
        gone = entries = self._done(newest)
        if not entries:
            return [], False
        last = entries[-1]
        # Events of one direction are reached in the order in which they were recorded, so one that is done answers for all that
        # were recorded before it. Those that other threads recorded meanwhile must be asked themselves.
        if len(entries) > 1 and max(map(_RECORDED, entries[:-1])) > last.asked:
            gone = [entry for entry in entries if entry is last or entry.recorded < last.asked]
        # A loop in Python takes longer, and this is on the path of small transfers.
        _exhaust(map(self.table.pop, map(_ASKED, gone), itertools.repeat(None)))
        return gone, gone is not entries

    def _done(self, newest: int | None) -> list[Entry]:
        """Return the oldest entries, up to the last that is done. Each question to the driver takes a microsecond."""
        entries = self._oldest(FEW)
        if len(entries) < FEW and entries and entries[-1].asked == newest:
            entries.pop()
        # Mostly there is nothing to let go of, and one question shows that.
        if not entries or not self._ended(entries[0]):
            return []
        if len(entries) < FEW or not self._ended(entries[-1]):
            # Hardly anything is done, perhaps of hundreds.
            return entries[: self._first_pending(entries, 1, min(len(entries), FEW - 1))]
        known, entries = entries[-1], self.entries()
        if len(entries) < FEW or entries[FEW - 1] is not known:
            # Another thread has let go of some meanwhile.
            return self._done(newest)
        # Then mostly all are done except the newest, which have just been started.
        near = max(FEW, len(entries) - FEW)
        if near < len(entries) and self._ended(entries[near]):
            return entries[: self._first_pending(entries, near + 1, len(entries))]
        return entries[: self._first_pending(entries, FEW, near)]

    def _oldest(self, count: int) -> list[Entry]:
        """Return the first `count` of `entries`, without a list of all: there may be hundreds, and a look comes with each."""
        try:
            return list(itertools.islice(self.table.values(), count))
        except RuntimeError:
            # Another thread has added meanwhile.
            return self.entries()[:count]

    def _first_pending(self, entries: list[Entry], low: int, high: int) -> int:
        """Return the index of the first that is not done: all before `low` are done, and the one at `high`, if any, is not."""
        return bisect_left(entries, True, low, high, key=lambda entry: not self._ended(entry))

    def _ended(self, entry: Entry) -> bool:
        try:
            return entry.event.done()
        except self._failures:
            # A failed copy writes no more; its transfer says so to whoever asks.
            return True


def let_go(table: dict[int, Entry], event: Event) -> None:
    """Let go of the newest entry, if that is the event's, which the caller has seen reached.

    So a program that waits for each transfer asks the driver once for each. Others are let go of by `reap`.
    """
    try:
        newest = next(reversed(table))
    except (StopIteration, RuntimeError):
        # There is none, or another thread has added one meanwhile.
        return
    entry = table.get(newest)
    if entry is not None and entry.event is event:
        table.pop(newest, None)


def uses(used: DeviceRange, target: DeviceRange) -> bool:
    """Tell whether a copy, or the work that gathers its elements before it, uses part of the target's memory."""
    if meet(used.address, used.nbytes, target.address, target.nbytes):
        return True
    return used.origin is not None and meet(*used.origin, target.address, target.nbytes)


def meet(one: int, one_nbytes: int, other: int, other_nbytes: int) -> bool:
    """Tell whether two ranges, each an address and its bytes, have a byte in common."""
    return one < other + other_nbytes and other < one + one_nbytes
