"""What copies under way still need: sources, destinations and blocks, held until the copies' event is done.

Invariant: an entry leaves only when its event is done or has failed, whatever the caller dropped in the meantime.
Events of one queue are reached in order, so one that is done answers for all before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

from xferlib.landing import Landing
from xferlib.protocol import Event, HostStager

__all__ = ["InFlight", "Landings", "Traffic"]

LOOK_EVERY = 16
"""Transfers. Asking the driver costs as much as starting a small copy does."""
LARGE = 64 << 10
"""Bytes. Above this the copy outweighs the question, and the memory held is worth asking for."""


@final
class InFlight:
    """One direction's queue. Any thread."""

    def __init__(self, record: Callable[[], Event], failures: tuple[type[Exception], ...]) -> None:
        self.nbytes = 0
        self._record = record
        self._failures = failures
        self._lock = threading.Lock()
        self._entries: list[tuple[Event, object]] = []
        self._since_look = 0

    def add(self, nbytes: int, keepalive: object) -> Event:
        """Record an event behind everything started so far, and hold `keepalive` until it is done."""
        with self._lock:
            # Under the lock, so that the queue is in the order of the events.
            event = self._record()
            self._entries.append((event, keepalive))
            self.nbytes += nbytes
            self._since_look += 1
            look = nbytes >= LARGE or self._since_look >= LOOK_EVERY
        if look:
            self.reap()
        return event

    def settle(self, keepalive: object) -> None:
        """Block until what a failed start has left under way is done, so that its memory is at rest."""
        with suppress(*self._failures):
            self.add(0, keepalive).synchronize()

    def reap(self) -> None:
        """Let go of what is done. Never blocks."""
        # Whoever has the lock is adding or reaping: nothing is missed for long. What is let go of may run foreign finalizers,
        # which may come back here: so outside the lock.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._since_look = 0
            count = self._count_done()
            gone = self._entries[:count]
            del self._entries[:count]
        finally:
            self._lock.release()
        del gone

    def wait_oldest(self) -> bool:
        """Block until the oldest entry is done. Returns False if there was none."""
        try:
            event, _ = self._entries[0]
        except IndexError:
            return False
        with suppress(*self._failures):
            event.synchronize()
        self.reap()
        return True

    def _count_done(self) -> int:
        low, high = 0, len(self._entries)
        while low < high:
            middle = (low + high) // 2
            if self._ended(self._entries[middle][0]):
                low = middle + 1
            else:
                high = middle
        return low

    def _ended(self, event: Event) -> bool:
        try:
            return event.done()
        except self._failures:
            # A failed copy writes no more; its transfer says so to whoever asks.
            return True


@final
class Landings:
    """Gets whose last step is a CPU copy. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Landing] = deque()

    def add(self, landing: Landing) -> None:
        """Count a landing as in flight until it is reached."""
        with self._lock:
            while self._entries and self._entries[0].reached():
                self._entries.popleft()
            self._entries.append(landing)

    def wait_oldest(self) -> bool:
        """Block until the oldest landing is reached. Returns False if there was none."""
        try:
            landing = self._entries[0]
        except IndexError:
            return False
        landing.wait()
        with self._lock:
            if self._entries and self._entries[0] is landing:
                self._entries.popleft()
        return True


@final
class Traffic:
    """Everything of one stager that is in flight. It refers to no stager and no pool, so that either may be dropped."""

    def __init__(self, backend: HostStager[Any]) -> None:
        self.h2d = InFlight(backend.record_h2d, backend.failures)
        self.d2h = InFlight(backend.record_d2h, backend.failures)
        self.landings = Landings()

    def wait_oldest(self) -> bool:
        """Block until something has ended. Returns False if nothing was in flight."""
        return self.h2d.wait_oldest() or self.d2h.wait_oldest() or self.landings.wait_oldest()

    def reap(self) -> None:
        """Let go of what is done. Never blocks."""
        self.h2d.reap()
        self.d2h.reap()

    def wait_all(self) -> None:
        """Block until everything started so far is done."""
        while self.wait_oldest():
            pass
