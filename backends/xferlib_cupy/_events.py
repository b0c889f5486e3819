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
from typing import NamedTuple, TypeAlias, final

from cupy.cuda import runtime

from xferlib.cuda.fences import Wait
from xferlib.handles import Handles, Keep
from xferlib.protocol import Event, Stream
from xferlib_cupy._device import Device
from xferlib_cupy._streams import Streams

__all__ = ["CupyEvent", "EventPool", "events_of"]

DISABLE_TIMING = 2
SUCCESS = 0
NOT_READY = 600

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

    def record_users(self, stream: int) -> CupyEvent:
        """Record an event on a user's stream, which is not being captured. As `record`, without a call in between."""
        try:
            event = self.handles.free.pop()
        except IndexError:
            event = self.handles.take()
        self.device.record_users(event.handle, stream)
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

    def new_event(self) -> tuple[Event, int]:
        """See `DriverCalls`."""
        event = self.handles.take()
        return event, event.handle

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

    def enqueue_wait(self, wait: Wait, handle: int) -> None:
        wait(handle, self.handle)


_pools: dict[int, EventPool] = {}
"""By the ordinal of the device."""


def events_of(device: Device) -> EventPool:
    """Return the process's events of a device."""
    return _pools.setdefault(device.ordinal, EventPool(device))
