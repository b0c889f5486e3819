"""Events: points in streams that are reached or not, with handles that the process owns.

Numba's own events are not used: each is destroyed by a queue, which is flushed, and blocks, at the eleventh. Handles are used
again: a wait that was enqueued on an event keeps what the event meant then, so recording it anew disturbs nobody. This file does
not decide which streams may be waited for.

No event has a finalizer: other objects of its reference cycle may use it in their finalizers, and a transfer whose event was given
away would seem done. A handle is free when nobody refers to it. Nothing else has to be kept in step, so it comes back whatever an
interrupt cuts short.
"""

from __future__ import annotations

from itertools import filterfalse
from operator import itemgetter
from typing import Any, Protocol, final

from xferlib.errors import CapabilityError
from xferlib.handles import Handles, Keep
from xferlib.protocol import Stream
from xferlib_numba._device import Device
from xferlib_numba._streams import Handle, Streams

__all__ = ["AllEvents", "EventPool", "LaterEvent", "NumbaEvent", "Recorded", "events_of"]

DISABLE_TIMING = 2
NO_FLAGS = 0
NOT_READY = 600
CAPTURE_UNSUPPORTED = 900


class Recorded(Protocol):
    """What every event of this backend is: the protocol's `Event`, and the copy streams can be made to wait for it."""

    def done(self) -> bool: ...

    def synchronize(self) -> None: ...

    def stream_wait(self, stream: object | None = None) -> Stream: ...

    def enqueue_wait(self, handle: Handle) -> None:
        """Make a stream wait. It is not being captured."""


@final
class EventPool:
    """The events of one device. Any thread."""

    __slots__ = ("device", "handles", "streams")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.streams = Streams(device)
        # Objects of the bindings.
        self.handles: Handles[Any] = Handles(self._create)

    def record(self, stream: Handle | int) -> NumbaEvent:
        """Record an event on a stream, which is not being captured."""
        handles = self.handles
        try:
            # As `take`, without the call.
            handle = handles.free.pop()
        except IndexError:
            handle = handles.take()
        self.device.record(handle, stream)
        return NumbaEvent(handle, self)

    def order(self, stream: Handle, after: Handle) -> None:
        """Make a stream of our own wait for what a user's, not being captured, has enqueued so far."""
        handles = self.handles
        try:
            # As `take`, without the call.
            handle = handles.free.pop()
        except IndexError:
            handle = handles.take()
        self.device.record(handle, after)
        self.device.wait(stream, handle, NO_FLAGS)
        handles.free.append(handle)

    def _create(self, keep: Keep[Any], count: int) -> None:
        before = len(self.handles)
        # Takes the handle of each pair of status and handle, if the status is 0.
        made = map(self.device.numba.driver.binding.cuEventCreate, (DISABLE_TIMING,) * count)
        # An event is of the context in which it was created.
        self.device.here(keep, map(itemgetter(1), filterfalse(itemgetter(0), made)))
        if len(self.handles) == before:
            # Tried once more, to raise its error.
            keep((self.device.here(self.device.raw("cuEventCreate"), DISABLE_TIMING),))


@final
class NumbaEvent:
    """A recorded event. Its handle is used again when nobody can reach the event any more."""

    __slots__ = ("_handle", "_named", "_pool")

    def __init__(self, handle: Any, pool: EventPool) -> None:
        self._handle = handle
        self._pool = pool
        self._named: Any = None

    @property
    def handle(self) -> int:
        """The handle, as the driver's functions take it. It means this event for as long as anybody refers to the event."""
        return int(self._handle)

    def done(self) -> bool:
        device = self._pool.device
        status = device.relaxed(device.event_status, self._handle)[0]
        if not status:
            return True
        if status == NOT_READY:
            return False
        raise device.failed("cuEventQuery", status)

    def synchronize(self) -> None:
        device = self._pool.device
        device.relaxed(device.synchronize, self._handle)

    def stream_wait(self, stream: object | None = None) -> Stream:
        found = self._pool.streams.find(stream)
        self._pool.device.wait(found.handle, self._handle, NO_FLAGS)
        if self._named is not None and stream is not None and found.keepalive is not None:
            self._named.handle = self._pool.device.numba.driver.binding.CUstream(found.handle)
            self._named.keepalive = found.keepalive
        return found

    def stream_of_arrays(self) -> Any:
        """Return the stream that the arrays behind this event shall name; Numba then uses that stream for them.

        It is the default stream, which `Transfer.value` makes wait, until `stream_wait` names another one. From then on it is that
        one, also for views that exist already. It is never one that its owner may destroy.
        """
        if self._named is None:
            streams = self._pool.streams
            self._named = type(streams.numba_default)(streams.default)
        return self._named

    def enqueue_wait(self, handle: Handle) -> None:
        self._pool.device.wait(handle, self._handle, NO_FLAGS)


@final
class LaterEvent:
    """The work on a stream that is being captured. It is recorded when it is first asked for after the capture has ended.

    Recording during the capture would put a node into the user's graph, and querying that would invalidate it. What is enqueued
    before the recording counts, too: the event may be reached late, but never early.
    """

    __slots__ = ("_event", "_pool", "_stream")

    def __init__(self, stream: Stream, pool: EventPool) -> None:
        self._stream = stream
        self._pool = pool
        self._event: NumbaEvent | None = None

    def done(self) -> bool:
        event = self._recorded()
        return event is not None and event.done()

    def synchronize(self) -> None:
        """Refuse, as CUDA does for a capturing stream: the caller might wait for a capture that only the caller can end."""
        event = self._recorded()
        if event is None:
            device = self._pool.device
            raise device.failed("cuEventSynchronize", device.numba.driver.binding.CUresult(CAPTURE_UNSUPPORTED))
        event.synchronize()

    def stream_wait(self, stream: object | None = None) -> Stream:
        found = self._pool.streams.find(stream)
        self.enqueue_wait(found.handle)
        return found

    def enqueue_wait(self, handle: Handle) -> None:
        event = self._recorded()
        if event is None:
            raise CapabilityError(
                f"stream {self._stream.handle:#x} is being captured into a graph, so nothing can wait for what it did before. "
                "End the capture first, or raise device_limit, so that other memory is taken"
            )
        event.enqueue_wait(handle)

    def _recorded(self) -> NumbaEvent | None:
        # Two threads at once may record two events: either is right.
        if self._event is None and not self._pool.streams.is_capturing(self._stream.handle):
            self._event = self._pool.record(self._stream.handle)
        return self._event


@final
class AllEvents:
    """Reached when all of several events are.

    They are not joined on a further stream, since that is first in, first out: a fence for streams that are done would wait behind
    one for streams that are not, and the memory would be taken for busy.
    """

    __slots__ = ("_left", "_pool")

    def __init__(self, events: tuple[Recorded, ...], pool: EventPool) -> None:
        self._left = events
        self._pool = pool

    def done(self) -> bool:
        # A new tuple each time: another thread may be going through the old one.
        left = self._left
        while left and left[-1].done():
            left = left[:-1]
        self._left = left
        return not left

    def synchronize(self) -> None:
        for event in self._left:
            event.synchronize()

    def stream_wait(self, stream: object | None = None) -> Stream:
        found = self._pool.streams.find(stream)
        self.enqueue_wait(found.handle)
        return found

    def enqueue_wait(self, handle: Handle) -> None:
        for event in self._left:
            event.enqueue_wait(handle)


_pools: dict[int, EventPool] = {}
"""By the ordinal of the device."""


def events_of(device: Device) -> EventPool:
    """Return the process's events of a device."""
    return _pools.setdefault(device.ordinal, EventPool(device))
