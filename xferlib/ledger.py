"""Everything of one stager that is in flight: copies behind an event, what other threads are still to start, views of host memory.

Full tables, rings and whoever overwrites memory ask here, and ask every stager: one may use another's memory. There is no lock, as
in `in_flight`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, final

from xferlib.engine.jobs import Job
from xferlib.errors import XferError
from xferlib.in_flight import Concerns, Entry, InFlight
from xferlib.latch import is_copy_thread
from xferlib.memory.arrays import address_of
from xferlib.memory.mapped import Views
from xferlib.pending import Jobs, Reading
from xferlib.protocol import DeviceRange, HostStager
from xferlib.reaper import closed_tables, watch

__all__ = [
    "Ledger",
    "all_ledgers",
    "all_views",
    "puts_under_way",
    "reap_all",
    "refuse_to_wait",
    "wait_for_others",
]

WAITS_FOR_ITSELF = (
    "a finalizer would wait for transfers on a thread that makes the copies, and so for itself: the garbage collector "
    "runs finalizers on any thread. Close stagers and pins in ordinary code"
)


@final
class Ledger:
    """Everything of one stager that is in flight. It refers to no stager and no pool, so that either may be dropped."""

    def __init__(self, backend: HostStager[Any]) -> None:
        self.h2d = InFlight(backend.record_h2d, backend.failures)
        self.d2h = InFlight(backend.record_d2h, backend.failures)
        self.jobs = Jobs()
        self.views = Views(backend)
        self.backend_device = (backend.name, backend.device)
        """Stagers for which this is equal can have their streams wait for each other's events."""
        _open[id(self)] = self

    @property
    def busy(self) -> bool:
        """Whether anything may be in flight."""
        return self.h2d.busy or self.d2h.busy or self.jobs.busy or self.views.busy

    @property
    def has_no_readers(self) -> bool:
        """Whether nothing in flight can be reading device memory of the caller's: this stager is the only one, and gets nothing."""
        return not self.jobs.d2h and not self.jobs.readings and not self.d2h.table and len(_open) == 1

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

    def wait_for_device(self, owns: Callable[[DeviceRange], bool]) -> bool:
        """Block until something has ended that may hold device memory of this stager, whatever stager's it is. False: there was
        none. `owns` tells whether memory is this one's.
        """

        def reads(work: Entry | Job | Reading) -> bool:
            if any(map(owns, work.device_ranges)):
                return True
            # What it will read may be this stager's, and nobody else may have it. Asked second: `Reading.end` sets `finds_later`
            # before it clears the ranges.
            return isinstance(work, Reading) and work.finds_later and not work.reached()

        return self.wait_oldest() or wait_for_others(self, reads, reads)

    def wait_for_pinned(self, owns: Callable[[int, int], bool]) -> bool:
        """Block until something has ended that may hold memory of this stager's pinned pool, as `wait_for_device` does."""

        def uses_array(entry: Entry) -> bool:
            return any(owns(address_of(array), array.nbytes) for array in entry.host_arrays)

        def uses_memory(work: Job | Reading) -> bool:
            # A job that has no chunk yet may be waiting for room itself, and so may a reading.
            return isinstance(work, Job) and work.holds and any(owns(*memory) for memory in work.host_ranges)

        return self.wait_oldest(pinned=True) or wait_for_others(self, uses_array, uses_memory)

    def wait_all(self) -> None:
        """Block until everything started before the call is done. Raises `XferError` on a thread that copies would wait for."""
        if is_copy_thread() and self.busy:
            raise XferError(WAITS_FOR_ITSELF)
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
    return [*(ledger.views for ledger in all_ledgers()), *(left for left in closed_tables() if isinstance(left, Views))]


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


def refuse_to_wait(own: Ledger, concerns: Concerns) -> None:
    """Raise `XferError` on a thread that copies would wait for, if a copy of another stager that concerns the caller may be under
    way: `wait_for_others` would not wait for it there.
    """
    if is_copy_thread():
        reap_all()
        if any(concerns(entry) for ledger in all_ledgers() if ledger is not own for entry in ledger.entries()):
            raise XferError(WAITS_FOR_ITSELF)


def wait_for_others(own: Ledger | None, concerns: Concerns, job_concerns: Callable[[Job | Reading], bool]) -> bool:
    """Block until the oldest copy, or job, of another stager that concerns the caller is done. None: of whatever stager. False:
    there was none that this thread can wait for.
    """
    others = [] if is_copy_thread() else [ledger for ledger in all_ledgers() if ledger is not own]
    return any(
        ledger.h2d.wait_oldest(concerns) or ledger.d2h.wait_oldest(concerns) or ledger.jobs.wait_user(job_concerns)
        for ledger in others
    )
