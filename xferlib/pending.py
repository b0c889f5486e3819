"""What is in flight, or about to be, by the work of other threads: the engine's jobs, memory that callers fill, readings.

What these have started, and what direct copies need, stands in `in_flight`. There is no lock, as there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from queue import SimpleQueue
from typing import final

from xferlib.engine.jobs import Job, next_id
from xferlib.engine.native import ISSUED
from xferlib.errors import XferError
from xferlib.in_flight import meet, uses
from xferlib.latch import WAIT_SECONDS, Latch, is_copy_thread
from xferlib.memory.arrays import Array
from xferlib.protocol import DeviceRange

__all__ = ["Fill", "Jobs", "Reading"]

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

    __slots__ = ("_changed", "_dropped", "_over", "closing", "device_ranges", "drop", "finds_later", "id", "maker", "threads")

    holds = False

    def __init__(self, device_ranges: Sequence[DeviceRange], *, finds_later: bool = False) -> None:
        self.id = next_id()
        self.device_ranges = device_ranges
        self.finds_later = finds_later
        """Whether it holds arrays of which nobody knows yet where they lie, or not any more."""
        self.maker: int | None = threading.get_ident()
        """The thread that is to read, and that nobody but its own code holds up. None: others are to."""
        self.threads: dict[int, None] = {}
        """Threads of ours that read. Changed in single steps: finalizers ask."""
        self.closing: int | None = None
        """The thread that lets go of the arrays, since nothing more is read, and ends this then."""
        self._over = False
        self._changed = Latch()
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
        self.device_ranges = ()
        self._over = True
        self._changed.wake()

    def reached(self) -> bool:
        """Tell whether it has ended, or nobody is left to read. Never blocks."""
        return self._over or not self._dropped.empty()

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
        # In slices: nobody tells of one that was dropped.
        while not self._changed.wait_for(self.reached, WAIT_SECONDS):
            pass


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
        return [job for job in jobs if any(meet(*one, *other) for one in job.host_ranges for other in memory) and not job.reached()]

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

    def wait_issued(self, target: DeviceRange | None = None) -> None:
        """Block until earlier gets have started all their copies. `target`: only those gets that read it; None: all gets.

        Their copies would wait for whatever enters the stream before them. Raises `XferError` on a thread that copies wait for, if
        `target` would otherwise be overwritten too early.
        """
        me = threading.get_ident()
        for job in list(self.d2h.values()):
            if target is not None and not any(uses(used, target) for used in job.device_ranges):
                continue
            # If this thread is starting it, this is a finalizer, and the job can only wait for that.
            if not is_copy_thread() and job.owner != me:
                job.wait_for(ISSUED)
            elif target is not None and not job.has_reached(ISSUED):
                raise XferError(
                    "a finalizer would overwrite an array that a get still reads, and cannot wait on a thread that makes the "
                    "copies or starts them: the garbage collector runs finalizers on any thread. Put into arrays in ordinary code"
                )

    def is_issuing(self) -> bool:
        """Tell whether earlier gets still have copies to start, and a later get may queue with them rather than wait for them."""
        return bool(self.d2h) and not is_copy_thread() and not all(job.has_reached(ISSUED) for job in list(self.d2h.values()))

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
