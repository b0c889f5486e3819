"""What the engine is given to move pageable memory: the driver's functions, and streams and events by their handles."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast, final

from xferlib.engine.cuda import cuda_calls
from xferlib.protocol import Event
from xferlib_numba._device import Device
from xferlib_numba._events import EventPool, NumbaEvent

__all__ = ["EngineCalls"]


@final
class EngineCalls:
    """The `DriverCalls` of one stager."""

    def __init__(self, device: Device, events: EventPool, streams: tuple[int, int]) -> None:
        self.calls = cuda_calls(device.context)
        self.streams = streams
        self._device = device
        self._events = events

    def new_event(self) -> tuple[Event, int]:
        event = NumbaEvent(self._events.handles.take(), self._events)
        return event, event.handle

    def handle(self, event: Event) -> int:
        return cast("NumbaEvent", event).handle

    def failure(self, status: int) -> Exception:
        named: Any = status
        # A newer driver's status may have no name in the bindings.
        with suppress(ValueError):
            named = self._device.numba.driver.binding.CUresult(status)
        return self._device.failed("the driver by the engine", named)
