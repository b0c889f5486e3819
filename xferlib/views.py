"""Device views of host memory: what holds the memory until no work on the device may use it any more.

A lease stands for "some view may reach this memory". It ends on any thread, inside the garbage collector, so its end takes no lock:
it appends to a deque. The next look turns ended leases into memory behind an event, for the work that was enqueued before the end,
and lets it go when the event is done.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, TypeAlias, final

from xferlib.forks import forget_in_child, leave
from xferlib.protocol import Event, HostStager, Stream

__all__ = ["ViewLease", "Views"]

Entry: TypeAlias = tuple[object, Event]
"""Memory, and the event after which it may be let go."""


@final
class _Ended:
    """A lease that has ended. Compared by identity, so that it can be taken out from among others that are added meanwhile."""

    __slots__ = ("memory", "stream")

    def __init__(self, memory: object, stream: Stream) -> None:
        self.memory = memory
        self.stream = stream


@final
class ViewLease:
    """The hold of a view on host memory. `stream` is where work on the view is enqueued; None: nothing is to be waited for."""

    __slots__ = ("__weakref__", "_views", "memory", "stream")

    def __init__(self, views: Views, memory: object) -> None:
        self._views = views
        self.memory = memory
        self.stream: Stream | None = None

    def __del__(self) -> None:
        if self.stream is None:
            return
        if self.stream.keepalive is None:
            # Its owner may destroy the stream as soon as the view is gone.
            self._views.fence(self.memory, self.stream)
            return
        self._views.ended.append(_Ended(self.memory, self.stream))


@final
class Views:
    """The views of one stager. Any thread. What is in flight, for whoever waits for memory: see `Flow` of the pool."""

    def __init__(self, backend: HostStager[Any]) -> None:
        self.ended: deque[_Ended] = deque()
        self._backend = backend
        self._failures = backend.failures
        self._fenced: deque[Entry] = deque()
        self._stuck: deque[object] = deque()
        self._live: weakref.WeakSet[ViewLease] = weakref.WeakSet()
        self._over = False
        # Never waited for: whoever has it is looking, and may be this very thread, interrupted by a finalizer.
        self._looking = threading.Lock()
        self._adding = threading.RLock()
        forget_in_child(self)

    @property
    def busy(self) -> bool:
        """Whether work on views that are gone may be under way."""
        return bool(self.ended or self._fenced)

    def lease(self, memory: object) -> ViewLease:
        """Return a lease that a view of this memory is to hold."""
        lease = ViewLease(self, memory)
        with self._adding:
            self._live.add(lease)
        return lease

    def fence(self, memory: object, stream: Stream) -> None:
        """Hold memory until the work enqueued on the stream so far is done. Takes no lock."""
        if self._over:
            # The backend is asked nothing any more; its own free waits for the work.
            return
        try:
            event = self._backend.retire((stream,))
        except self._failures:
            # Nobody can say any more when the work ends: better to lose the memory than to have it written under its next owner.
            self._stuck.append(memory)
            return
        if event is not None:
            self._fenced.append((memory, event))

    def reap(self) -> bool:
        """Let go of memory whose work is done, and tell whether there was any. Never blocks."""
        if not self.busy or not self._looking.acquire(blocking=False):
            return False
        gone: list[Entry] = []
        try:
            self._fence_ended()
            fenced = self._fenced
            for _ in range(len(fenced)):
                # In place, and turned in one step: what is not over must be found by whoever waits meanwhile.
                if self._is_over(fenced[0][1]):
                    gone.append(fenced.popleft())
                else:
                    fenced.rotate(-1)
        finally:
            self._looking.release()
        # What is let go of now may run foreign finalizers, which may come back here: so outside the lock.
        return bool(gone)

    def wait_oldest(self) -> bool:
        """Block until some memory is let go of. Returns False if there was none that this thread can wait for."""
        self._fence_ended()
        try:
            event = self._fenced[0][1]
        except IndexError:
            return False
        self._wait(event)
        return self.reap()

    def wait_all(self) -> None:
        """Block until the work enqueued before the call is done, on views that are gone and on those that are not."""
        self._fence_ended()
        with self._adding:
            live = [lease.stream for lease in self._live]
        for stream in {stream.handle: stream for stream in live if stream is not None}.values():
            with suppress(*self._failures):
                event = self._backend.retire((stream,))
                if event is not None:
                    event.synchronize()
        for _, event in self._fenced.copy():
            self._wait(event)
        self.reap()

    def close(self) -> None:
        """Ask the backend nothing any more: from here on the end of a lease is the end of its hold."""
        self._over = True
        self.ended, self._fenced = deque(maxlen=0), deque(maxlen=0)

    def forget(self) -> None:
        """See `Forgetful`."""
        leave(self.ended, self._fenced, self._stuck)
        self._over = True
        self.ended, self._fenced = deque(), deque()
        self._looking, self._adding = threading.Lock(), threading.RLock()

    def _fence_ended(self) -> None:
        for end in self.ended.copy():
            self.fence(end.memory, end.stream)
            # Not before: whoever waits meanwhile must find it. Two threads may do the same, and memory held twice is held.
            with suppress(ValueError):
                self.ended.remove(end)

    def _is_over(self, event: Event) -> bool:
        try:
            return event.done()
        except self._failures:
            return True

    def _wait(self, event: Event) -> None:
        with suppress(*self._failures):
            event.synchronize()
