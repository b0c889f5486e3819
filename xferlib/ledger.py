"""Everything of one stager that is in flight: copies behind an event, what other threads are still to start, views of host memory.

Full tables, rings and whoever overwrites memory ask here, and ask every stager: one may use another's memory. There is no lock, as
in `in_flight`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, final

from xferlib.engine.jobs import Job, next_id
from xferlib.errors import XferError
from xferlib.in_flight import Concerns, Entry, InFlight, meet
from xferlib.latch import WAIT_SECONDS, Latch, is_copy_thread
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.mapped import Views
from xferlib.protocol import HostStager, Source
from xferlib.reaper import remaining, watch

__all__ = [
    "DeviceHolders",
    "Fill",
    "Jobs",
    "Ledger",
    "PinnedHolders",
    "Reading",
    "all_ledgers",
    "all_views",
    "puts_under_way",
    "reap_all",
    "wait_for_others",
]

FILL_LOOK_SECONDS = 0.0001
"""How often a waiting thread looks whether another one has filled its memory."""

_ID = attrgetter("id")


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

    __slots__ = ("_dropped", "_over", "closing", "device", "drop", "finds_later", "id", "maker", "threads")

    holds = False

    def __init__(self, device: Sequence[Source], *, finds_later: bool = False) -> None:
        self.id = next_id()
        self.device = device
        self.finds_later = finds_later
        """Whether it holds arrays of which nobody knows yet where they lie, or not any more."""
        self.maker: int | None = threading.get_ident()
        """The thread that is to read, and that nobody but its own code holds up. None: others are to."""
        self.threads: dict[int, None] = {}
        """Threads of ours that read. Changed in single steps: finalizers ask."""
        self.closing: int | None = None
        """The thread that lets go of the arrays, since nothing more is read, and ends this then."""
        self._over = Latch()
        self._dropped: SimpleQueue[None] = SimpleQueue()
        self.drop = self._dropped.put
        """What the ticket of whoever reads posts with: a finalizer written in Python could be cut by an interrupt."""

    @property
    def owner(self) -> int | None:
        """The calling thread, if it is one of those that are to read, or to end this."""
        me = threading.get_ident()
        return me if me in (self.maker, self.closing) or me in self.threads else None

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is read. Never blocks."""
        return self.closing is not None or self.reached()

    def end(self) -> None:
        """Let whoever waits pass: all that will be read is read, or in flight. Twice is fine."""
        self.closing = threading.get_ident()
        # Behind the arrays: who waits for their memory looks for room next. Until then it goes on waiting.
        self.finds_later = True
        self.device = ()
        self._over.open()

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
            self._over.wait(WAIT_SECONDS)


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
        return [job for job in jobs if any(meet(*one, *other) for one in job.memory for other in memory) and not job.reached()]

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
        # First: whoever looks for views meanwhile finds them here, or with the reaper.
        self.views.close()
        if self.views.settle():
            watch(self.views)
        _open.pop(id(self), None)
        self.jobs.cut_readings()
        self.jobs.reap()


_open: dict[int, Ledger] = {}
"""The ledgers of all stagers of this process that are not closed. A stager that is dropped is closed, too, though later."""
# What is in flight stayed with the parent.
os.register_at_fork(after_in_child=_open.clear)


def all_views() -> list[Views]:
    """Return the views of all stagers of this process, also of closed ones. Any thread."""
    # In this order: those of a stager that closes meanwhile are in the second.
    return [*(ledger.views for ledger in all_ledgers()), *(left for left in remaining() if isinstance(left, Views))]


def all_ledgers() -> list[Ledger]:
    """Return what the stagers of this process have in flight. Any thread."""
    return list(_open.values())


def reap_all() -> bool:
    """Have every stager let go of what its copies are done with, and tell whether there was anything. Never blocks."""
    found = [ledger.reap() for ledger in all_ledgers()]
    return any(found)


def puts_under_way() -> bool:
    """Tell whether any stager's puts are under way, and let go of those that are done. Never blocks."""
    for ledger in all_ledgers():
        ledger.h2d.reap()
        if ledger.h2d.busy or any(not job.reached() for job in list(ledger.jobs.h2d.values())):
            return True
    return False


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

    reap = staticmethod(reap_all)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.owns: Callable[[Source], bool] = lambda source: False
        """Whether memory is the stager's."""

    def wait_oldest(self) -> bool:
        """Block until something has ended. Returns False if nothing was in flight."""
        return self._ledger.wait_oldest() or wait_for_others(self._ledger, self._is_read, self._is_read)

    def _is_read(self, work: Entry | Job | Reading) -> bool:
        if any(map(self.owns, work.device)):
            return True
        # They may be this stager's, and nobody else has them perhaps. Asked second: one that ends forgets first where they lie.
        return isinstance(work, Reading) and work.finds_later and not work.reached()


@final
class PinnedHolders:
    """What may make room in one stager's pinned pool: chunks that are idle, and transfers that will end, of whatever stager."""

    reap = staticmethod(reap_all)

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
