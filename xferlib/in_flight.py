"""What copies under way still need: sources, destinations and blocks, held until the copies' event is done.

Invariant: an entry leaves only when its event is done or has failed, whatever the caller dropped in the meantime.

There is no lock in here: tables change in single steps. The garbage collector may run a foreign finalizer anywhere, which may
start a transfer on the same thread, or wait for a thread that is in here; an interrupt may come anywhere, and leaves nothing held.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter, itemgetter
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias, final

from xferlib.engine.jobs import Job, next_id
from xferlib.errors import XferError
from xferlib.forks import forget_in_child, leave
from xferlib.latch import SLICE_SECONDS, Latch, is_copy_thread
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.mapped import Views, views_left
from xferlib.protocol import Event, HostStager, Source
from xferlib.reaper import watch

__all__ = [
    "DeviceHolders",
    "Entry",
    "Fill",
    "InFlight",
    "Jobs",
    "Ledger",
    "PinnedHolders",
    "Reading",
    "all_ledgers",
    "all_views",
    "let_go",
    "reap_all",
    "uses",
    "wait_for_others",
]

REAP_EVERY_TRANSFERS = 32
"""Asking the driver costs as much as starting a small copy does."""
FEW = 3
"""Entries. Even if hundreds are under way, mostly fewer than this end between one look and the next."""
FILL_LOOK_SECONDS = 0.0001
"""How often a waiting thread looks whether another one has filled its memory."""
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
    host: Sequence[Array]
    """What copies read or write directly; what was staged is not in here."""
    device: Sequence[Source]
    """Arrays of the user's that copies read or write."""
    keepalive: object

    def uses_host(self, address: int, nbytes: int) -> bool:
        """Tell whether a copy may still read or write part of this host memory."""
        return any(_meet(address_of(array), array.nbytes, address, nbytes) for array in self.host)

    def uses_device(self, target: Source) -> bool:
        """Tell whether a copy may still read or write part of this device memory, or of host memory that it is a view of."""
        return any(uses(source, target) for source in self.device) or self.uses_host(target.address, target.nbytes)


_ASKED, _RECORDED, _ID = itemgetter(0), itemgetter(2), attrgetter("id")
_exhaust: Callable[[Iterator[object]], None] = deque[object](maxlen=0).extend
"""Goes through an iterator and keeps nothing."""
_TURN = 2 * REAP_EVERY_TRANSFERS
_NEW = tuple.__new__
"""Takes a third of the time of a named tuple's constructor."""


@final
class InFlight:
    """One direction's copies. Any thread."""

    def __init__(self, record: Callable[[], Event], failures: tuple[type[Exception], ...]) -> None:
        self.nbytes = 0
        self._record = record
        self._failures = failures
        self._count = itertools.count().__next__
        self._entries: dict[int, Entry] = {}
        """By `asked`."""
        self._stuck: list[object] = []
        forget_in_child(self)

    @property
    def busy(self) -> bool:
        """Whether anything may be in flight."""
        return bool(self._entries)

    @property
    def table(self) -> dict[int, Entry]:
        """The table itself, by `asked`: an entry is in it until its copies are known to be done."""
        return self._entries

    def entries(self) -> list[Entry]:
        """Return what may be in flight, about in the order of its start."""
        # One call: other threads add meanwhile.
        return list(self._entries.values())

    def add(
        self, nbytes: int, host: Sequence[Array], device: Sequence[Source] = (), keepalive: object = None, *, looked: bool = False
    ) -> Entry:
        """Record an event behind everything started so far, and hold all that until it is done. Return its entry.

        `looked`: the caller has let go of what is done, or will when it matters.
        """
        asked = self._count()
        event = self._record()
        entry: Entry = _NEW(Entry, (asked, event, self._count(), host, device, keepalive))
        self._entries[asked] = entry
        self.nbytes += nbytes
        # The count decides, which a transfer advances by two. The number of entries does not: it stays the same while as many end
        # as start.
        if (nbytes >= REAP_FROM_NBYTES and not looked) or asked % _TURN >= _TURN - 2:
            self.reap(newest=asked)
        return entry

    def settle(self, keepalive: object, host: Sequence[Array] = (), device: Sequence[Source] = ()) -> bool:
        """Block until what a failed start has left under way is done. False: nobody can know, and `keepalive` is kept for good.

        If this is interrupted in turn, what may still be read or written is in flight as ever: `host`, `device`, see `Entry`. Only
        an interrupt before its first instruction leaves that known to nobody.
        A finalizer on a thread that makes the copies does not wait, since it would wait for itself: `keepalive` is held meanwhile.
        """
        try:
            event = self.add(0, host, device, keepalive).event
        except self._failures:
            # Better to lose the memory than to have it written under its next owner.
            self._stuck.append(keepalive)
            return False
        except BaseException:
            self._hold(keepalive, host, device)
            raise
        if not is_copy_thread():
            self.wait(event)
        return True

    def _hold(self, keepalive: object, host: Sequence[Array], device: Sequence[Source]) -> None:
        """Hold it until nobody uses it, though `settle` was interrupted, or met what the backend does not name: else for good."""
        if any(entry.keepalive is keepalive for entry in self.entries()):
            return
        try:
            self.add(0, host, device, keepalive)
        except BaseException:
            self._stuck.append(keepalive)

    def reap(self, *, newest: int | None = None) -> bool:
        """Let go of what is done, and tell whether anything was. Never blocks.

        `newest`: the number of an entry that has just been added. It is asked only if there are many before it.
        """
        found, more = False, True
        # What is let go of here may run foreign finalizers, which may come back here.
        while more and self._entries:
            gone, more = self._take_done(newest)
            found = found or bool(gone)
        return found

    def wait_oldest(self, concerns: Concerns = lambda entry: True) -> bool:
        """Block until the oldest entry that `concerns` the caller is done. Returns False if there was none."""
        for entry in self.entries():
            if concerns(entry):
                self.wait(entry.event)
                self._entries.pop(entry.asked, None)
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
            self._entries.pop(entry.asked, None)

    def forget(self) -> None:
        """See `Forgetful`."""
        leave(self._entries, self._stuck)
        self._entries, self._stuck = {}, []

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
        _exhaust(map(self._entries.pop, map(_ASKED, gone), itertools.repeat(None)))
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
            return list(itertools.islice(self._entries.values(), count))
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


def uses(source: Source, target: Source) -> bool:
    """Tell whether a copy, or the work that gathers its elements before it, uses part of the target's memory."""
    if _meet(source.address, source.nbytes, target.address, target.nbytes):
        return True
    return source.origin is not None and _meet(*source.origin, target.address, target.nbytes)


def _meet(one: int, one_nbytes: int, other: int, other_nbytes: int) -> bool:
    return one < other + other_nbytes and other < one + one_nbytes


@final
class Fill:
    """Pinned memory that a thread fills before it starts the copy: neither idle nor in flight yet. It is waited for as a `Job`
    is."""

    __slots__ = ("id", "memory", "over", "owner")

    holds = True

    def __init__(self) -> None:
        self.id = next_id()
        self.owner = threading.get_ident()
        self.memory: Array | None = None
        self.over = False
        """Set by its thread, when the memory is in flight or idle. No interrupt comes between an assignment and what it assigns."""

    def reached(self) -> bool:
        """Tell whether it is over. Never blocks."""
        return self.over

    def wait(self) -> None:
        """Block until it is over. This looks again and again, since a fill takes less time than waking somebody."""
        while not self.over:
            time.sleep(FILL_LOOK_SECONDS)


@final
class Reading:
    """Arrays of the caller's that are read piece by piece: the copies of some are not started yet. Waited for as a `Job` is.

    Any thread. Nobody waits for it on a thread that is to start the copies, or to make them: the wait would never end.
    """

    __slots__ = ("_dropped", "_over", "device", "drop", "finds_later", "id", "maker", "threads")

    holds = False

    def __init__(self, device: Sequence[Source], *, finds_later: bool = False) -> None:
        self.id = next_id()
        self.device = device
        self.finds_later = finds_later
        """Whether it holds arrays of which nobody knows yet where they lie."""
        self.maker: int | None = threading.get_ident()
        """The thread that is to read, and that nobody but its own code holds up. None: others are to."""
        self.threads: dict[int, None] = {}
        """Threads of ours that read. Changed in single steps: finalizers ask."""
        self._over = Latch()
        self._dropped: SimpleQueue[None] = SimpleQueue()
        self.drop = self._dropped.put
        """What the ticket of whoever reads posts with: a finalizer written in Python could be cut by an interrupt."""

    @property
    def owner(self) -> int | None:
        """The calling thread, if it is one of those that are to read."""
        me = threading.get_ident()
        return me if me == self.maker or me in self.threads else None

    def end(self) -> None:
        """Let everybody pass who waits: all that will be read is read, or in flight. Twice is fine."""
        self._over.open()
        self.device = ()

    def reached(self) -> bool:
        """Tell whether it has ended, or nobody is left to read. Never blocks."""
        return self._over.is_open() or not self._dropped.empty()

    def wait(self) -> None:
        """Block until it has ended. Raises `XferError` where that would be for good."""
        if not self.reached() and self.maker == threading.get_ident():
            raise XferError(
                "this thread reads the array by stager.reader(...), which is not closed: to overwrite it would wait for that. "
                "Close the reader first"
            )
        if not self.reached() and (is_copy_thread() or self.owner is not None):
            raise XferError(
                "a finalizer would wait until arrays are read, on the thread that reads them: the garbage collector runs "
                "finalizers on any thread. Put into arrays in ordinary code"
            )
        # In slices: nobody opens it for one that was dropped.
        while not self.reached():
            self._over.wait(SLICE_SECONDS)


@final
class Jobs:
    """What is in flight, or about to be, by the work of other threads: the engine's jobs, blocks that callers fill, readings."""

    def __init__(self) -> None:
        # Changed in single steps: a finalizer may add while its thread is in here.
        self.readings: dict[int, Reading] = {}
        """By id."""
        self.h2d: dict[int, Job] = {}
        """By id. A lane enters its jobs, and each leaves when it is seen to have finished."""
        self.d2h: dict[int, Job] = {}
        self._fills: dict[int, Fill] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self.under_way())

    def under_way(self) -> list[Job | Fill | Reading]:
        """Return what is not over, the oldest first."""
        return [work for work in self._entries() if not work.reached()]

    def using(self, memory: Sequence[tuple[int, int]]) -> list[Job]:
        """Return the jobs that still read or write part of this memory of the caller's: address and bytes of each range."""
        jobs = [*self.h2d.values(), *self.d2h.values()]
        return [job for job in jobs if any(_meet(*one, *other) for one in job.memory for other in memory) and not job.reached()]

    def add(self, fill: Fill) -> None:
        """Count memory as in flight until its thread says that it is."""
        self._fills[fill.id] = fill

    def remove(self, fill: Fill) -> None:
        """Forget a fill that is over. Twice is fine, and so is not at all: then `reap` forgets it.

        Its thread sets `over` itself, in line: an interrupt may come at the entry of this, as of any function.
        """
        self._fills.pop(fill.id, None)

    def reap(self) -> bool:
        """Let go of what is over, and tell whether anything was. Never blocks."""
        # A job leaves when it is asked.
        over = [work for work in self._entries() if work.reached()]
        for work in over:
            self._fills.pop(work.id, None)
            self.readings.pop(work.id, None)
        return bool(over)

    def wait_oldest(self, *, pinned: bool = False) -> bool:
        """Block until the oldest that this thread can wait for is over. Returns False if there was none.

        `pinned`: only one that gives pinned memory back when it is over. The others may be waiting for pinned memory themselves.
        """
        # If this thread fills and waits for room, this is a finalizer in the middle of the fill. Another thread's fill may be
        # waiting for this one in the same way: both would wait for good.
        fills = any(work.owner == threading.get_ident() and not work.over for work in list(self._fills.values()))
        for work in self._waited_for():
            if not work.reached() and (work.holds or not pinned) and not (fills and isinstance(work, Fill)):
                work.wait()
                return True
        return False

    def wait_user(self, uses_it: Callable[[Job | Reading], bool]) -> bool:
        """Block until the oldest job or reading that uses some memory, and that this thread can wait for, is over. False: there
        was none.
        """
        for work in self._waited_for():
            if not isinstance(work, Fill) and uses_it(work):
                work.wait()
                # One that was dropped, and not closed, would be found again and again.
                self.readings.pop(work.id, None)
                return True
        return False

    @property
    def reads_here(self) -> bool:
        """Whether this is a finalizer on a thread of ours that reads arrays, and must come to its end first."""
        me = threading.get_ident()
        return any(me in reading.threads for reading in list(self.readings.values()))

    def cut_readings(self) -> None:
        """End what is still to be read: the stager closes."""
        for reading in list(self.readings.values()):
            reading.end()

    def wait_all(self) -> None:
        """Block until everything added before the call, that this thread can wait for, is over."""
        for work in self._waited_for():
            work.wait()

    def _entries(self) -> list[Job | Fill | Reading]:
        # One call each: other threads add meanwhile.
        found: list[Job | Fill | Reading] = [
            *self.h2d.values(),
            *self.d2h.values(),
            *self._fills.values(),
            *self.readings.values(),
        ]
        found.sort(key=_ID)
        return found

    def _waited_for(self) -> list[Job | Fill | Reading]:
        me = threading.get_ident()
        return [work for work in self._entries() if work.owner != me]


@final
class Ledger:
    """Everything of one stager that is in flight. It refers to no stager and no pool, so that either may be dropped."""

    def __init__(self, backend: HostStager[Any]) -> None:
        self.h2d = InFlight(backend.record_h2d, backend.failures)
        self.d2h = InFlight(backend.record_d2h, backend.failures)
        self.jobs = Jobs()
        self.views = Views(backend)
        self.place = (backend.name, backend.device)
        """Which backend and device. If two stagers have the same place, their streams can wait for each other's events."""
        self.wait_issued: Callable[[Source], None] = lambda target: None
        """Blocks until the copies that read this memory, and are not started yet, are started."""
        _open[id(self)] = self

    @property
    def busy(self) -> bool:
        """Whether anything may be in flight."""
        return self.h2d.busy or self.d2h.busy or self.jobs.busy or self.views.busy

    @property
    def has_no_readers(self) -> bool:
        """Whether nothing in flight can be reading device memory of the caller's: this stager is the only one, and gets nothing."""
        return not self.jobs.d2h and not self.jobs.readings and not self.d2h._entries and len(_open) == 1

    def entries(self) -> Iterator[Entry]:
        """Iterate the copies of both directions that may be in flight."""
        yield from self.h2d.entries()
        yield from self.d2h.entries()

    def reap(self) -> bool:
        """Let go of what is done, and tell whether anything was. Never blocks."""
        found = [self.d2h.reap(), self.h2d.reap(), self.jobs.reap(), self.views.reap()]
        return any(found)

    def wait_oldest(self, *, pinned: bool = False) -> bool:
        """Block until something has ended. Returns False if nothing was in flight that this thread can wait for: a thread that
        makes the copies would wait for itself. `pinned`: see `Jobs.wait_oldest`.
        """
        # What is done in one direction must not wait for the other.
        if self.reap():
            return True
        if is_copy_thread():
            return False
        if self.h2d.wait_oldest() or self.d2h.wait_oldest():
            return True
        return self.jobs.wait_oldest(pinned=pinned) or self.views.wait_oldest()

    def wait_all(self) -> None:
        """Block until everything started before the call is done. Raises `XferError` on a thread that copies would wait for."""
        if is_copy_thread() and self.busy:
            raise XferError(
                "a finalizer would wait for transfers on a thread that makes the copies, and so for itself: the garbage collector "
                "runs finalizers on any thread. Close stagers and pins in ordinary code"
            )
        self.jobs.wait_all()
        self.h2d.wait_all()
        self.d2h.wait_all()
        self.views.wait_all()

    def close(self) -> None:
        """Leave the table of open ledgers. Nothing is in flight, and nothing will be."""
        # First: whoever looks for views meanwhile finds them here, or among those that are left.
        self.views.close()
        _open.pop(id(self), None)
        self.jobs.cut_readings()
        self.jobs.reap()
        if self.views.settle():
            watch(self.views)


_open: dict[int, Ledger] = {}
"""The ledgers of all stagers of this process that are not closed. A stager that is dropped is closed, too, though later."""
# What is in flight stayed with the parent.
os.register_at_fork(after_in_child=_open.clear)


def all_views() -> list[Views]:
    """Return the views of all stagers of this process, also of closed ones. Any thread."""
    # In this order: those of a stager that closes meanwhile are in the second.
    return [*(ledger.views for ledger in all_ledgers()), *views_left()]


def all_ledgers() -> list[Ledger]:
    """Return what the stagers of this process have in flight. Any thread."""
    return list(_open.values())


def reap_all() -> bool:
    """Have every stager let go of what its copies are done with, and tell whether there was anything. Never blocks."""
    found = [ledger.reap() for ledger in all_ledgers()]
    return any(found)


def wait_for_others(own: Ledger | None, concerns: Concerns, job_concerns: Callable[[Job | Reading], bool]) -> bool:
    """Block until the oldest copy, or job, of another stager that concerns the caller is done. None: of whatever stager. False:
    there was none that this thread can wait for.
    """
    others = [] if is_copy_thread() else [ledger for ledger in all_ledgers() if ledger is not own]
    return any(
        ledger.h2d.wait_oldest(concerns) or ledger.d2h.wait_oldest(concerns) or ledger.jobs.wait_user(job_concerns)
        for ledger in others
    )


@final
class DeviceHolders:
    """What may hold device memory of one stager: transfers in flight, of whatever stager."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.owns: Callable[[Source], bool] = lambda source: False
        """Whether memory is the stager's."""

    def reap(self) -> bool:
        """Let go of what is done, and tell whether anything was. Never blocks."""
        return reap_all()

    def wait_oldest(self) -> bool:
        """Block until something has ended. Returns False if nothing was in flight."""
        return self._ledger.wait_oldest() or wait_for_others(self._ledger, self._is_read, self._is_read)

    def _is_read(self, work: Entry | Job | Reading) -> bool:
        if isinstance(work, Reading) and work.finds_later:
            # They may be this stager's, and nobody else has them perhaps.
            return not work.reached()
        return any(map(self.owns, work.device))


@final
class PinnedHolders:
    """What may make room in one stager's pinned pool: chunks that are idle, and transfers that will end, of whatever stager."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.release: Callable[[], bool] = bool
        """Gives back what staging keeps for later, and tells whether there was any. Never blocks."""
        self.owns: Callable[[int, int], bool] = lambda address, nbytes: False
        """Whether memory is the pool's."""

    @property
    def busy(self) -> bool:
        """Whether anything of the process may be in flight."""
        return any(ledger.busy for ledger in all_ledgers())

    def reap(self) -> bool:
        """Let go of what is done, and tell whether anything was. Never blocks."""
        return reap_all()

    def wait_oldest(self) -> bool:
        """Block until something has ended. Returns False if nothing was in flight."""
        if self.release() or self._ledger.wait_oldest(pinned=True):
            return True
        return wait_for_others(self._ledger, self._concerns, self._is_used)

    def _concerns(self, entry: Entry) -> bool:
        return any(self.owns(address_of(array), array.nbytes) for array in entry.host)

    def _is_used(self, job: Job | Reading) -> bool:
        # A job that has no chunk yet may be waiting for room itself, and so may a reading.
        return isinstance(job, Job) and job.holds and any(self.owns(*memory) for memory in job.memory)
