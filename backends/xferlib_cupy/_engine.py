"""What the engine is given to move pageable memory: the driver's functions, and CuPy's streams and events."""

from __future__ import annotations

from typing import cast, final

from cupy.cuda import runtime

from xferlib.engine.cuda import cuda_calls
from xferlib.protocol import Event
from xferlib_cupy._device import Device
from xferlib_cupy._events import CupyEvent, EventPool

__all__ = ["EngineCalls"]


@final
class EngineCalls:
    """The `DriverCalls` of one stager."""

    def __init__(self, device: Device, events: EventPool, streams: tuple[int, int]) -> None:
        self.calls = cuda_calls(device.contexts.context)
        self.streams = streams
        self._events = events

    def new_event(self) -> tuple[Event, int]:
        event = self._events.handles.take()
        return event, event.handle

    def handle(self, event: Event) -> int:
        return cast("CupyEvent", event).handle

    def failure(self, status: int) -> Exception:
        return cast("Exception", runtime.CUDARuntimeError(status))
