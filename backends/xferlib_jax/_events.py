"""Events of CUDA: points in our streams that are reached or not, from a pool of handles of our own.

Handles are used again, since creating one costs three times what recording does: a wait that was enqueued on an event keeps what
the event meant then, so recording it anew disturbs nobody.
"""

from __future__ import annotations

from collections import deque
from typing import Any, final

from xferlib.errors import CapabilityError
from xferlib.protocol import Stream
from xferlib_jax._driver import Driver

__all__ = ["CudaEvent", "EventPool"]


@final
class EventPool:
    """Handles of events that nobody looks at any more. No lock: a deque's ends are safe to use from any thread."""

    __slots__ = ("driver", "free")

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.free: deque[int] = deque()

    def record(self, stream: int) -> CudaEvent:
        try:
            handle = self.free.pop()
        except IndexError:
            handle = self.driver.create_event()
        try:
            self.driver.record(handle, stream)
        except BaseException:
            self.free.append(handle)
            raise
        return CudaEvent(handle, self)

    def __del__(self) -> None:
        # The last event has gone: each of them holds the pool.
        self.driver.destroy_events(self.free)


@final
class CudaEvent:
    """A recorded event. Its handle goes back to the pool when it dies."""

    __slots__ = ("_handle", "_pool")

    def __init__(self, handle: int, pool: EventPool) -> None:
        self._handle = handle
        self._pool = pool

    def done(self) -> bool:
        return self._pool.driver.query(self._handle)

    def synchronize(self) -> None:
        self._pool.driver.synchronize(self._handle)

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """Return None at once: every JAX array waits for its own copy, and JAX has no streams."""
        if stream is not None:
            raise CapabilityError(f"JAX has no streams, so none can wait: got {stream!r}. Leave stream out")
        return None

    def hold_back(self, stream: Any) -> None:
        """Make a stream, ours or one that JAX imports on, wait for this event."""
        self._pool.driver.wait(stream, self._handle)

    def __del__(self) -> None:
        self._pool.free.append(self._handle)
