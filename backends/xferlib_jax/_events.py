"""Events of CUDA: points in our streams that are reached or not. The process owns their handles, in a table for each device.

Handles are never destroyed, since events outlive stagers, and used again, by whichever stager comes next: creating one costs three
times what recording does. A wait that was enqueued on an event keeps what the event meant then, so recording it anew disturbs
nobody; who asks would be answered for the new point. So a handle is recorded again only when nobody can ask any more: when the
ticket of its last event is gone, not when the event was finalized, since other finalizers may still ask it.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from ctypes import c_void_p
from typing import final

from xferlib.errors import CapabilityError
from xferlib.protocol import Stream
from xferlib.tickets import Returns
from xferlib_jax._driver import Driver

__all__ = ["CudaEvent", "EventPool", "event_pool"]


@final
class EventPool:
    """The handles of one device. Any thread. There is one for each device: `event_pool`.

    A row is a handle, under the number of the ticket that its event holds. It is made empty, and filled by the driver in place.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._numbers = itertools.count()
        self._returns = Returns()
        self._rows: dict[int, c_void_p] = {}
        self._free: deque[int] = deque()  # Numbers to try first. Those that somebody else was faster with are no rows any more.

    @property
    def handles(self) -> int:
        """How many handles there are, in use or not."""
        return len(self._rows)

    def record(self, stream: int) -> CudaEvent:
        number = next(self._numbers)
        ticket = self._returns.ticket(number)
        if not self._take(number):
            self._rows[number] = c_void_p()
        row = self._rows[number]
        if row.value is None:
            self.driver.create_event(row)
        handle = row.value
        assert handle is not None
        self.driver.record(handle, stream)
        return CudaEvent(handle, ticket, self.driver)

    def _take(self, number: int) -> bool:
        """Give a row that nobody holds a new number, if there is one."""
        while True:
            try:
                free = self._free.pop()
            except IndexError:
                self._free.extend(self._returns.unsettled())
                if not self._free:
                    return False
                continue
            taken = zip((number,), map(self._rows.pop, (free,)), strict=False)
            try:
                # One call: no interrupt leaves the row without a number, and of two threads one has it.
                self._rows.update(taken)
            except KeyError:
                continue
            finally:
                self._returns.settled(free)
            return True


@final
class CudaEvent:
    """A recorded event. `ticket` lets its handle be recorded again when it is gone."""

    __slots__ = ("_driver", "_handle", "_ticket")

    def __init__(self, handle: int, ticket: object, driver: Driver) -> None:
        self._handle = handle
        self._ticket = ticket
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
