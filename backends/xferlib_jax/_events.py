"""Events of CUDA: points in our streams that are reached or not. The process owns them.

Events are used again, by whichever stager comes next: creating one costs three times as much as recording one. A wait that was
enqueued on an event keeps what the event meant then, so recording it anew does not disturb it. But whoever asks an event would be
answered for the new point. So an event is recorded anew only when nobody can ask it any more. It has no finalizer, since other
objects of its reference cycle may still ask it in their finalizers.
"""

from __future__ import annotations

import os
from typing import NamedTuple, final

from xferlib.errors import CapabilityError
from xferlib.handles import Handles, Keep
from xferlib.protocol import Event, Stream
from xferlib.uninterrupted import uninterrupted
from xferlib_jax._driver import Driver

__all__ = ["CudaEvent", "EventPool", "event_pool"]


@final
class EventPool:
    """The events of one device. Any thread. There is one for each device: `event_pool`."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.handles: Handles[CudaEvent] = Handles(self._create)

    def record(self, stream: int) -> CudaEvent:
        event = self.handles.take()
        self.driver.record(event.handle, stream)
        return event

    def new_event(self) -> tuple[Event, int]:
        """See `DriverCalls`."""
        event = self.handles.take()
        return event, event.handle

    def _create(self, keep: Keep[CudaEvent], count: int) -> None:
        def create() -> None:
            for _ in range(count):
                keep((CudaEvent(self.driver.create_event(), self.driver),))

        uninterrupted(create)


@final
class CudaEvent(NamedTuple):
    """A recorded event. It is recorded anew when nobody can reach it any more."""

    handle: int
    driver: Driver

    def done(self) -> bool:
        return self.driver.query(self.handle)

    def synchronize(self) -> None:
        self.driver.synchronize(self.handle)

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """Return None at once: every JAX array waits for its own copy, and JAX has no streams."""
        if stream is not None:
            raise CapabilityError(f"JAX has no streams, so none can wait: got {stream!r}. Leave stream out")
        return None

    def hold_back(self, stream: int) -> None:
        """Make a stream, ours or one that JAX imports on, wait for this event."""
        self.driver.wait(stream, self.handle)


def event_pool(driver: Driver) -> EventPool:
    """Return this process's events of the driver's device."""
    return _pools.setdefault(driver.ordinal, EventPool(driver))


_pools: dict[int, EventPool] = {}
# In a forked child they are the parent's.
os.register_at_fork(after_in_child=_pools.clear)
