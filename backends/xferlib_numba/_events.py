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
from typing import Any, final

from xferlib.cuda.fences import Wait
from xferlib.handles import Handles, Keep
from xferlib.protocol import Event, Stream
from xferlib_numba._device import Device
from xferlib_numba._streams import Handle, Streams

__all__ = ["EventPool", "NumbaEvent", "events_of"]

DISABLE_TIMING = 2
NO_FLAGS = 0
NOT_READY = 600


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

    def new_event(self) -> tuple[Event, int]:
        """See `DriverCalls`."""
        event = NumbaEvent(self.handles.take(), self)
        return event, event.handle

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

    def enqueue_wait(self, wait: Wait, handle: Handle | int) -> None:
        wait(handle, self._handle, NO_FLAGS)


_pools: dict[int, EventPool] = {}
"""By the ordinal of the device."""


def events_of(device: Device) -> EventPool:
    """Return the process's events of a device."""
    return _pools.setdefault(device.ordinal, EventPool(device))
