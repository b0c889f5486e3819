"""What a trace has recorded: a plain table of events, whoever recorded them. Nothing is judged here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, final

__all__ = ["CPU", "HOST", "Event", "EventKind", "Memory", "Recording"]

HOST = -1
"""The device of events on the host; their `stream` is the kernel's number of the thread."""
CPU = -2
"""The device of a backend whose device is the CPU. Those of GPUs are numbered from 0."""
EventKind: TypeAlias = Literal[
    "h2d", "d2h", "copy", "memset", "kernel", "issue", "wait", "allocation", "put", "get", "source", "range"
]
"""On a device: a copy to it, to the host, or within and between devices; memory that is set; compute.

On the host: a call that starts a copy; one that waits for the device; one that allocates, frees, locks or unlocks memory; `put` and
`get` of a stager; a source that made a batch for which the consumer of a `prefetch` waited; a range that the program named.
"""
Memory: TypeAlias = Literal["pinned", "pageable", "managed", "unknown", ""]
"""What the host's side of a copy is; empty: it has none, or the device is the CPU, for which nothing is pinned."""


class Event(NamedTuple):
    """Something that took time. Times are nanoseconds of the clock of `time.perf_counter_ns`."""

    kind: EventKind
    name: str
    start: int
    end: int
    device: int = HOST
    stream: int = 0
    nbytes: int = 0
    memory: Memory = ""
    site: str = ""
    """Where the program asked for it, "train.py:12"; empty: unknown."""
    issued: int = 0
    """Of a copy: when the call that started it was entered; 0: unknown."""
    blocking: bool = False
    """Of a call that starts a copy: whether it returns when the copy is done."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9


@final
@dataclass(frozen=True, kw_only=True)
class Recording:
    """Everything that a trace has recorded.

    Attributes:
        events: In the order of their starts.
        start, end: When the trace began and ended, as the times of events.
        devices: Names by number.
        streams: Names by device and stream, "stream 13" where there is none.
        null_streams: Device and stream of those that wait for all blocking streams of their device.
        threads: Names of the host's threads.
        notes: What is not in it, in words.
    """

    events: tuple[Event, ...]
    start: int
    end: int
    devices: Mapping[int, str] = field(default_factory=dict)
    streams: Mapping[tuple[int, int], str] = field(default_factory=dict)
    null_streams: frozenset[tuple[int, int]] = frozenset()
    threads: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def name_of(self, device: int, stream: int) -> str:
        """Return the name of a stream, or of a thread of the host."""
        if device == HOST:
            # Of a range nobody knows the thread.
            return self.threads.get(stream, f"thread {stream}") if stream else "named ranges"
        name = self.streams.get((device, stream), f"stream {stream}")
        return f"{name} (NULL stream)" if (device, stream) in self.null_streams else name
