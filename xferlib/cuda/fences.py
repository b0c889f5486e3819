"""Events behind the work on users' streams, whichever streams these are: default streams, streams that are being captured, several.

Each is made of events of the framework's. This file does not decide which streams may be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, final

from xferlib.cuda.driver import Failure
from xferlib.cuda.streams import LEGACY, PER_THREAD
from xferlib.errors import CapabilityError
from xferlib.protocol import Event, Stream

__all__ = ["AllEvents", "LaterEvent", "Recorded", "StreamFences", "Wait"]

CAPTURE_UNSUPPORTED = 900

Wait: TypeAlias = Callable[..., object]
"""The framework's call that makes a stream wait for an event, or one of several. An event gives it the arguments that it takes."""


class Recorded(Protocol):
    """What every event of such a backend is: the protocol's `Event`, and a copy stream can be made to wait for it."""

    def done(self) -> bool: ...

    def synchronize(self) -> None: ...

    def stream_wait(self, stream: object | None = None) -> Stream: ...

    def enqueue_wait(self, wait: Wait, handle: Any) -> None:
        """Make a stream wait, by the framework's call for such streams. The stream is not being captured."""


@final
class StreamFences:
    """Makes the events for `HostStager.retire`, by the framework's calls. Any thread. It refers to no stager.

    - `record(handle)` returns an event behind what a user's stream has enqueued. The stream is not being captured.
    - `is_capturing(handle)` tells whether nothing may be recorded on a stream now because of a capture.
    - `find(stream)` returns what `Event.stream_wait` does, and raises as it does.
    - `wait` makes a user's stream wait.
    - `failure` makes the framework's error for a call that was not made.
    """

    __slots__ = ("failure", "find", "is_capturing", "record", "wait")

    def __init__(
        self,
        *,
        record: Callable[[int], Recorded],
        is_capturing: Callable[[int], bool],
        find: Callable[[object | None], Stream],
        wait: Wait,
        failure: Failure,
    ) -> None:
        self.record = record
        self.is_capturing = is_capturing
        self.find = find
        self.wait = wait
        self.failure = failure

    def retire(self, streams: Iterable[Stream]) -> Event | None:
        """See `HostStager`."""
        if not streams:
            # The usual case, and the path of every small put.
            return None
        events = list(map(self._behind, streams))
        if len(events) > 1:
            return AllEvents(tuple(events), self)
        return events[0] if events else None

    def _behind(self, stream: Stream) -> Recorded:
        if stream.handle == PER_THREAD:
            # It may be another thread's, which cannot be named from here. The legacy stream waits for all of them.
            stream = Stream(LEGACY, stream.keepalive)
        if self.is_capturing(stream.handle):
            return LaterEvent(stream, self)
        return self.record(stream.handle)


@final
class LaterEvent:
    """The work on a stream that is being captured. It is recorded when it is first asked for after the capture has ended.

    Recording during the capture would put a node into the user's graph, and querying that would invalidate it. What is enqueued
    before the recording counts, too: the event may be reached late, but never early.
    """

    __slots__ = ("_event", "_fences", "_stream")

    def __init__(self, stream: Stream, fences: StreamFences) -> None:
        self._stream = stream
        self._fences = fences
        self._event: Recorded | None = None

    def done(self) -> bool:
        event = self._recorded()
        return event is not None and event.done()

    def synchronize(self) -> None:
        """Refuse, as CUDA does for a capturing stream: the caller might wait for a capture that only the caller can end."""
        event = self._recorded()
        if event is None:
            raise self._fences.failure("cuEventSynchronize", CAPTURE_UNSUPPORTED)
        event.synchronize()

    def stream_wait(self, stream: object | None = None) -> Stream:
        found = self._fences.find(stream)
        self.enqueue_wait(self._fences.wait, found.handle)
        return found

    def enqueue_wait(self, wait: Wait, handle: Any) -> None:
        event = self._recorded()
        if event is None:
            raise CapabilityError(
                f"stream {self._stream.handle:#x} is being captured into a graph, so nothing can wait for what it did before. "
                "End the capture first, or raise device_limit, so that other memory is taken"
            )
        event.enqueue_wait(wait, handle)

    def _recorded(self) -> Recorded | None:
        # Two threads at once may record two events: either is right.
        if self._event is None and not self._fences.is_capturing(self._stream.handle):
            self._event = self._fences.record(self._stream.handle)
        return self._event


@final
class AllEvents:
    """Reached when all of several events are.

    They are not joined on a further stream, since that is first in, first out: a fence for streams that are done would wait behind
    one for streams that are not, and the memory would be taken for busy.
    """

    __slots__ = ("_fences", "_left")

    def __init__(self, events: tuple[Recorded, ...], fences: StreamFences) -> None:
        self._left = events
        self._fences = fences

    def done(self) -> bool:
        # A new tuple each time: another thread may be going through the old one.
        left = self._left
        while left and left[-1].done():
            left = left[:-1]
        self._left = left
        return not left

    def synchronize(self) -> None:
        for event in self._left:
            event.synchronize()

    def stream_wait(self, stream: object | None = None) -> Stream:
        found = self._fences.find(stream)
        self.enqueue_wait(self._fences.wait, found.handle)
        return found

    def enqueue_wait(self, wait: Wait, handle: Any) -> None:
        for event in self._left:
            event.enqueue_wait(wait, handle)
