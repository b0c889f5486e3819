"""Events: points in streams that are reached or not. The process owns them.

CuPy's `Event.done` answers "not yet" for ever once the device has failed; here the status is asked for and raised. Events are used
again, since creating one costs three times as much as recording one. A wait that was enqueued on an event keeps what the event
meant then, so recording it anew disturbs nobody. This file does not decide which streams may be waited for.

No event has a finalizer: other objects of its reference cycle may use it in their finalizers, and a transfer whose event was given
away would seem done. An event is free when nobody refers to it. Nothing else has to be kept in step, so it comes back whatever an
interrupt cuts short.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol, TypeAlias, final

from cupy.cuda import runtime

from xferlib.errors import CapabilityError
from xferlib.handles import Handles, Keep
from xferlib.protocol import Stream
from xferlib_cupy._device import Device
from xferlib_cupy._streams import Streams

__all__ = ["AllEvents", "CupyEvent", "EventPool", "LaterEvent", "Recorded", "events_of"]

DISABLE_TIMING = 2
SUCCESS = 0
NOT_READY = 600
CAPTURE_UNSUPPORTED = 900


class Recorded(Protocol):
    """What every event of this backend is: the protocol's `Event`, and the copy streams can be made to wait for it."""

    def done(self) -> bool: ...

    def synchronize(self) -> None: ...

    def stream_wait(self, stream: object | None = None) -> Stream: ...

    def enqueue_wait(self, wait: Call, handle: int) -> None:
        """Make a stream wait, by the device's call for such streams. The stream is not being captured."""


Call: TypeAlias = Callable[[int, int], None]


@final
class EventPool:
    """The events of one device. Any thread."""

    __slots__ = ("device", "handles", "streams")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.streams = Streams(device)
        self.handles: Handles[CupyEvent] = Handles(self._create)

    def record(self, record: Call, stream: int) -> CupyEvent:
        """Record an event on a stream, by the device's call for such streams. The stream is not being captured."""
        try:
            # As `take`, without the call.
            event = self.handles.free.pop()
        except IndexError:
            event = self.handles.take()
        record(event.handle, stream)
        return event

    def order(self, stream: int, after: int) -> None:
        """Make a stream of our own wait for what a user's has enqueued so far."""
        device, events = self.device, self.handles
        try:
            # As `take`, without the call.
            event = events.free.pop()
        except IndexError:
            event = events.take()
        device.record_users(event.handle, after)
        device.wait(stream, event.handle)
        events.free.append(event)

    def _create(self, keep: Keep[CupyEvent], count: int) -> None:
        made = map(runtime.eventCreateWithFlags, (DISABLE_TIMING,) * count)
        # The only call here that depends on the current device: an event is of the device on which it was created. No Python code
        # runs between creating and keeping.
        self.device.here(keep, map(partial(tuple.__new__, CupyEvent), zip(made, repeat(self))))


@final
class CupyEvent(NamedTuple):
    """A recorded event. It is recorded anew when nobody can reach it any more."""

    handle: int
    pool: EventPool

    def done(self) -> bool:
        device = self.pool.device
        status = device.capture_mode.relaxed(device.query, self.handle)
        if status == SUCCESS:
            return True
        if status == NOT_READY:
            return False
        raise runtime.CUDARuntimeError(status)

    def synchronize(self) -> None:
        device = self.pool.device
        device.capture_mode.relaxed(device.synchronize, self.handle)

    def stream_wait(self, stream: object | None = None) -> Stream:
        found = self.pool.streams.find(stream)
        self.pool.device.wait_users(found.handle, self.handle)
        return found

    def enqueue_wait(self, wait: Call, handle: int) -> None:
        wait(handle, self.handle)


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
        self._event: CupyEvent | None = None

    def done(self) -> bool:
        event = self._recorded()
        return event is not None and event.done()

    def synchronize(self) -> None:
        """Refuse, as CUDA does for a capturing stream: the caller might wait for a capture that only the caller can end."""
        event = self._recorded()
        if event is None:
            raise runtime.CUDARuntimeError(CAPTURE_UNSUPPORTED)
        event.synchronize()

    def stream_wait(self, stream: object | None = None) -> Stream:
        found = self._pool.streams.find(stream)
        self.enqueue_wait(self._pool.device.wait_users, found.handle)
        return found

    def enqueue_wait(self, wait: Call, handle: int) -> None:
        event = self._recorded()
        if event is None:
            raise CapabilityError(
                f"stream {self._stream.handle:#x} is being captured into a graph, so nothing can wait for what it did before. "
                "End the capture first, or raise device_limit, so that other memory is taken"
            )
        event.enqueue_wait(wait, handle)

    def _recorded(self) -> CupyEvent | None:
        # Two threads at once may record two events: either is right.
        if self._event is None and not self._pool.streams.is_capturing(self._stream.handle):
            self._event = self._pool.record(self._pool.device.record_users, self._stream.handle)
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
        self.enqueue_wait(self._pool.device.wait_users, found.handle)
        return found

    def enqueue_wait(self, wait: Call, handle: int) -> None:
        for event in self._left:
            event.enqueue_wait(wait, handle)


_pools: dict[int, EventPool] = {}
"""By the ordinal of the device."""


def events_of(device: Device) -> EventPool:
    """Return the process's events of a device."""
    return _pools.setdefault(device.ordinal, EventPool(device))
