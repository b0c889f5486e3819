"""In which order a device runs what was enqueued: which calls a call waits for, and by which rule. Pure.

Each piece of work follows the one before it on its stream, what an event made its stream wait for, and, between the NULL stream and
blocking streams, everything before it on the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, final

from xferlib.overlap.calls import LEGACY, CudaCall, HeldSteps

__all__ = ["Edge", "path"]


class Edge(NamedTuple):
    """`after` may not start before `before` has ended, for this reason."""

    kind: Literal["stream", "event", "null"]
    before: CudaCall
    after: CudaCall


def path(call: CudaCall, hold: HeldSteps, calls: Sequence[CudaCall]) -> list[Edge] | None:
    """Return why a call waits for what is held: edges from something held to the call, a shortest way. None: it does not."""
    order = _WaitOrder(hold, calls)
    if order.is_held(call):
        return []
    ways: deque[tuple[CudaCall, list[Edge]]] = deque([(call, [])])
    seen = {call.serial}
    while ways:
        at, way = ways.popleft()
        for edge in order.edges(at):
            if edge.before.serial in seen:
                continue
            seen.add(edge.before.serial)
            longer = [edge, *way]
            if order.is_held(edge.before):
                return longer
            ways.append((edge.before, longer))
    return None


@final
class _WaitOrder:
    """What each call since the start of a hold waits for."""

    def __init__(self, hold: HeldSteps, calls: Sequence[CudaCall]) -> None:
        self._gates = hold.gates
        self._calls = [call for call in calls if hold.start <= call.serial < hold.end]

    def is_held(self, call: CudaCall) -> bool:
        """Tell whether the call enqueued something on a stream that is held, behind the gate."""
        return _enqueues(call) and call.stream in self._gates and call.serial >= self._gates[call.stream]

    def edges(self, call: CudaCall) -> Iterator[Edge]:
        if call.kind == "memory" or call.kind == "sync device":
            yield from (Edge("stream", last, call) for last in self._last_of_each(call, lambda _: True))
            return
        if call.kind in ("wait", "sync event"):
            record = self._last(call, lambda other: other.kind == "record" and other.event == call.event)
            if record is not None:
                yield Edge("event", record, call)
            if call.kind == "sync event":
                return
        last = self._last(call, lambda other: other.stream == call.stream)
        if last is not None:
            yield Edge("stream", last, call)
        if call.stream == LEGACY:
            yield from (Edge("null", last, call) for last in self._last_of_each(call, lambda other: other.blocking))
        elif call.blocking:
            null = self._last(call, lambda other: other.stream == LEGACY)
            if null is not None:
                yield Edge("null", null, call)

    def _last(self, call: CudaCall, suits: Callable[[CudaCall], bool]) -> CudaCall | None:
        found = None
        for other in self._calls:
            if other.serial >= call.serial:
                break
            if _enqueues(other) and suits(other):
                found = other
        return found

    def _last_of_each(self, call: CudaCall, suits: Callable[[CudaCall], bool]) -> Iterator[CudaCall]:
        last = {
            other.stream: other
            for other in self._calls
            if other.serial < call.serial and _enqueues(other) and other.stream != LEGACY and suits(other)
        }
        if call.stream != LEGACY:
            last |= {other.stream: other for other in self._calls if other.serial < call.serial and other.stream == LEGACY}
        yield from last.values()


def _enqueues(call: CudaCall) -> bool:
    return call.kind in ("launch", "copy", "set", "record", "wait") and call.stream is not None
