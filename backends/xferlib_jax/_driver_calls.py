"""What the engine is given to move pageable memory on a GPU: the driver's functions, and this backend's streams and events."""

from __future__ import annotations

from typing import cast, final

from xferlib.engine.cuda import cuda_calls
from xferlib.protocol import Event
from xferlib_jax._driver import Driver
from xferlib_jax._events import CudaEvent, EventPool

__all__ = ["EngineCalls"]


@final
class EngineCalls:
    """The `DriverCalls` of one stager."""

    def __init__(self, driver: Driver, events: EventPool, streams: tuple[int, int]) -> None:
        self.calls = cuda_calls(driver.context)
        self.streams = streams
        self._driver = driver
        self._events = events

    def new_event(self) -> tuple[Event, int]:
        event = self._events.handles.take()
        return event, event.handle

    def handle(self, event: Event) -> int:
        return cast("CudaEvent", event).handle

    def failure(self, status: int) -> Exception:
        return self._driver.failure("a copy by the engine", status)
