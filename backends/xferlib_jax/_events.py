"""Events of CUDA: points in our streams that are reached or not, with handles that the process owns.

Handles are used again, by whichever stager comes next: creating one costs three times what recording does. A wait that was enqueued
on an event keeps what the event meant then, so recording it anew disturbs nobody; who asks would be answered for the new point. So
a handle is recorded again only when nobody can ask any more: an event has no finalizer, and others of its reference cycle may still
ask it in theirs.
"""

from __future__ import annotations

import os
from typing import final

from xferlib.errors import CapabilityError
from xferlib.handles import Handles, Keep
from xferlib.protocol import Stream
from xferlib.reaper import uninterrupted
from xferlib_jax._driver import Driver

__all__ = ["CudaEvent", "EventPool", "event_pool"]


@final
class EventPool:
    """The events of one device. Any thread. There is one for each device: `event_pool`."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.handles: Handles[int] = Handles(self._create)

    def record(self, stream: int) -> CudaEvent:
        handle = self.handles.take()
        self.driver.record(handle, stream)
        return CudaEvent(handle, self.driver)

    def _create(self, keep: Keep[int], count: int) -> None:
        def create() -> None:
            for _ in range(count):
                keep((self.driver.create_event(),))

        uninterrupted(create)


@final
class CudaEvent:
    """A recorded event. Its handle is recorded again when nobody can reach the event any more."""

    __slots__ = ("_driver", "_handle")

    def __init__(self, handle: int, driver: Driver) -> None:
        self._handle = handle
        self._driver = driver

    def done(self) -> bool:
        return self._driver.query(self._handle)

    def synchronize(self) -> None:
        self._driver.synchronize(self._handle)

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """Return None at once: every JAX array waits for its own copy, and JAX has no streams."""
        if stream is not None:
            raise CapabilityError(f"JAX has no streams, so none can wait: got {stream!r}. Leave stream out")
        return None

    def hold_back(self, stream: int) -> None:
        """Make a stream, ours or one that JAX imports on, wait for this event."""
        self._driver.wait(stream, self._handle)


def event_pool(driver: Driver) -> EventPool:
    """Return this process's events of the driver's device."""
    return _pools.setdefault(driver.ordinal, EventPool(driver))


_pools: dict[int, EventPool] = {}
# In a forked child they are the parent's.
os.register_at_fork(after_in_child=_pools.clear)
