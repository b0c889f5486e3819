"""What copies under way still need: sources, destinations and blocks, held until the copies' event is done.

Invariant: an entry leaves only when its event is done or has failed, whatever the caller dropped in the meantime.
Events of one direction are reached in the order in which they were recorded, so one that is done answers for all before it.

The garbage collector may run a foreign finalizer anywhere in here, and that may start a transfer: on the same thread, inside the
lock. What it adds goes to a list of its own, since its place in the order is not known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, final

from xferlib.forks import forget_in_child, leave
from xferlib.landing import Landing
from xferlib.protocol import Event, HostStager, Source
from xferlib.views import Views

__all__ = ["InFlight", "Landings", "Traffic"]

LOOK_EVERY = 16
"""Transfers. Asking the driver costs as much as starting a small copy does."""
LARGE = 64 << 10
"""Bytes. Above this the copy outweighs the question, and the memory held is worth asking for."""


_Entry: TypeAlias = tuple[Event, object, Sequence[Source]]
"""Event, keepalive, and the device memory that is read."""


@final
class InFlight:
    """One direction's copies. Any thread."""

    def __init__(self, record: Callable[[], Event], failures: tuple[type[Exception], ...]) -> None:
        self.nbytes = 0
        self._record = record
        self._failures = failures
        self._lock = threading.RLock()
        self._inside = False
        self._entries: list[_Entry] = []
        self._unordered: list[_Entry] = []
        self._stuck: list[object] = []
        forget_in_child(self)

    @property
    def busy(self) -> bool:
        """Whether anything may be in flight."""
        return bool(self._entries or self._unordered)

    def add(self, nbytes: int, keepalive: object, sources: Sequence[Source] = ()) -> Event:
        """Record an event behind everything started so far, and hold `keepalive` and `sources` until it is done."""
        with self._lock:
            if self._inside:
                return self._add_unordered(nbytes, keepalive, sources)
            self._inside = True
            try:
                # Under the lock, so that the entries are in the order of their events.
                event = self._record()
                self._entries.append((event, keepalive, sources))
            finally:
                self._inside = False
            self.nbytes += nbytes
            look = nbytes >= LARGE or len(self._entries) % LOOK_EVERY == 0
        if look:
            self.reap()
        return event

    def settle(self, keepalive: object) -> bool:
        """Block until what a failed start has left under way is done. False: nobody can know, and `keepalive` is kept for good."""
        try:
            event = self.add(0, keepalive)
        except self._failures:
            # Better to lose the memory than to have it written under its next owner.
            self._stuck.append(keepalive)
            return False
        with suppress(*self._failures):
            event.synchronize()
        return True

    def readers(self, target: Source) -> list[Event]:
        """Return the events after which nothing that is in flight now reads this memory."""
        found = [event for event, _, sources in self._unordered.copy() if _reads(sources, target)]
        for event, _, sources in reversed(self._entries.copy()):
            if _reads(sources, target):
                return [*found, event]
        return found

    def reap(self) -> bool:
        """Let go of what is done, and tell whether anything was. Never blocks."""
        # Whoever has the lock is adding or reaping: nothing is missed for long.
        if not self._lock.acquire(blocking=False):
            return False
        gone: list[_Entry] = []
        try:
            if not self._inside:
                self._inside = True
                try:
                    gone = self._take_done()
                finally:
                    self._inside = False
        finally:
            self._lock.release()
        # What is let go of now may run foreign finalizers, which may come back here: so outside the lock.
        return bool(gone)

    def wait_oldest(self) -> bool:
        """Block until the oldest entry is done. Returns False if there was none, or none that this thread can wait for."""
        entries = self._entries or self._unordered
        try:
            event = entries[0][0]
        except IndexError:
            return False
        self._wait(event)
        if self.entered():
            # Nothing can be let go of before this finalizer returns.
            return False
        self.reap()
        return True

    def entered(self) -> bool:
        """Tell whether the calling thread is in here, and so is a finalizer now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._inside
        finally:
            self._lock.release()

    def wait_all(self) -> None:
        """Block until everything added before the call is done."""
        for event, _, _ in self._unordered + self._entries[-1:]:
            self._wait(event)
        self.reap()

    def forget(self) -> None:
        """See `Forgetful`."""
        leave(self._entries, self._unordered, self._stuck)
        self._entries, self._unordered, self._stuck = [], [], []
        self._lock = threading.RLock()
        self._inside = False

    def _wait(self, event: Event) -> None:
        with suppress(*self._failures):
            event.synchronize()

    def _add_unordered(self, nbytes: int, keepalive: object, sources: Sequence[Source]) -> Event:
        event = self._record()
        self._unordered.append((event, keepalive, sources))
        self.nbytes += nbytes
        return event

    def _take_done(self) -> list[_Entry]:
        low, high = 0, len(self._entries)
        while low < high:
            middle = (low + high) // 2
            if self._ended(self._entries[middle]):
                low = middle + 1
            else:
                high = middle
        gone = self._entries[:low]
        del self._entries[:low]
        for entry in self._unordered.copy():
            if self._ended(entry):
                self._unordered.remove(entry)
                gone.append(entry)
        return gone

    def _ended(self, entry: _Entry) -> bool:
        try:
            return entry[0].done()
        except self._failures:
            # A failed copy writes no more; its transfer says so to whoever asks.
            return True


def _reads(sources: Sequence[Source], target: Source) -> bool:
    end = target.address + target.nbytes
    return any(source.address < end and target.address < source.address + source.nbytes for source in sources)


@final
class Landings:
    """Points that worker threads or other callers will reach without this thread: CPU copies, and memory about to be in flight."""

    def __init__(self) -> None:
        # Changed in single steps: a finalizer may add while its thread is in here.
        self._entries: list[Landing] = []

    @property
    def busy(self) -> bool:
        """Whether a landing is not reached."""
        return bool(self.unreached())

    def unreached(self) -> list[Landing]:
        """Return those that are not reached."""
        return [landing for landing in self._entries.copy() if not landing.reached()]

    def add(self, landing: Landing) -> None:
        """Count a landing as in flight until it is reached."""
        self._entries.append(landing)
        for entry in self._entries.copy():
            if entry.reached():
                with suppress(ValueError):
                    self._entries.remove(entry)

    def wait_oldest(self, *, pinned: bool = False) -> bool:
        """Block until the oldest landing that this thread can wait for is reached. Returns False if there was none.

        `pinned`: only one that then gives pinned memory back. The others may be waiting for some themselves.
        """
        for landing in self._waited_for():
            if not landing.reached() and (landing.holds or not pinned):
                landing.wait()
                return True
        return False

    def wait_all(self) -> None:
        """Block until every landing added before the call, that this thread can wait for, is reached."""
        for landing in self._waited_for():
            landing.wait()

    def _waited_for(self) -> list[Landing]:
        me = threading.get_ident()
        return [landing for landing in self._entries.copy() if landing.owner != me]


@final
class Traffic:
    """Everything of one stager that is in flight. It refers to no stager and no pool, so that either may be dropped."""

    def __init__(self, backend: HostStager[Any]) -> None:
        self.h2d = InFlight(backend.record_h2d, backend.failures)
        self.d2h = InFlight(backend.record_d2h, backend.failures)
        self.landings = Landings()
        self.views = Views(backend)

    @property
    def busy(self) -> bool:
        """Whether anything may be in flight."""
        return self.h2d.busy or self.d2h.busy or self.landings.busy or self.views.busy

    def reap(self) -> bool:
        """Let go of what is done, and tell whether anything was. Never blocks."""
        down, up, seen = self.d2h.reap(), self.h2d.reap(), self.views.reap()
        return down or up or seen

    def wait_oldest(self, *, pinned: bool = False) -> bool:
        """Block until something has ended. Returns False if nothing was in flight. `pinned`: see `Landings.wait_oldest`."""
        # What is done in one direction must not wait for the other.
        if self.reap() or self.h2d.wait_oldest() or self.d2h.wait_oldest():
            return True
        # Another thread may need our lock to get to its landing.
        if not (self.h2d.entered() or self.d2h.entered()) and self.landings.wait_oldest(pinned=pinned):
            return True
        return self.views.wait_oldest()

    def under_way(self) -> list[Event]:
        """Return events after which nothing that was started before the call uses host memory of the caller's."""
        events: list[Event] = [*self.landings.unreached()]
        return events + [direction.add(0, None) for direction in (self.h2d, self.d2h) if direction.busy]

    def wait_all(self) -> None:
        """Block until everything started before the call is done."""
        # What lands late adds its entry before it has landed.
        self.landings.wait_all()
        self.h2d.wait_all()
        self.d2h.wait_all()
        self.views.wait_all()
