"""Why compute stood still: the gaps between the kernels of a device, and the cause to which each moment of them is put down.

Pure functions of a `Recording`. A *gap* is time between the first and the last kernel of a device in which it runs none. The cause
of a moment is the first that holds:

1. A copy was under way, to the device before to the host: the cause is why that copy does not lie under a kernel. One that could
   only be issued when the source of a `prefetch` had given its batch, in this gap, is put down to the source.
2. The device did something else.
3. The host allocated, freed, locked or unlocked memory.
4. A put copied pageable memory on the CPU.
5. The consumer of a `prefetch` waited for the source to make a batch.
6. The host had waited for the device, and enqueued the next work only then: a call that waits began before the gap and ended in it.
7. Nothing was enqueued.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, final

from xferlib.tracing.events import HOST, Event, Recording
from xferlib.tracing.intervals import Interval, Lengths, inside, length, union, without

__all__ = ["Gap", "GapCause", "all_gaps"]

GapCause: TypeAlias = Literal[
    "pageable",
    "link",
    "null stream",
    "same stream",
    "held back",
    "late",
    "device",
    "allocation",
    "staging",
    "source",
    "wait",
    "host",
    "short",
]

SHORT_NS = 20_000
"""Gaps up to this are what the device needs from one kernel to the next, or what a launch takes."""
SATURATED = 0.9
"""Share of the time between the first and the last kernel from which on a link counts as busy all the time."""
HELD_NS = 100_000
"""A copy that starts so much later than it was issued, although nothing was copied in its direction, waited for something."""


class Gap(NamedTuple):
    """A piece of a gap of one device, in nanoseconds, and its cause."""

    start: int
    end: int
    cause: GapCause
    direction: str
    """Of the copy that it is put down to; else empty."""
    site: str
    nbytes: int
    device: int


def all_gaps(recording: Recording) -> dict[int, list[Gap]]:
    """Return, for each device that did anything, the gaps between its kernels, in their order, each moment with its cause."""
    devices = sorted({event.device for event in recording.events if event.device != HOST})
    return {device: _Attribution(recording, device).found() for device in devices}


@final
class _Layer:
    """Events of one kind, for "which of them was under way when". Those of like length are together, so few are looked at."""

    def __init__(self, events: Iterable[Event]) -> None:
        alike: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            alike[(event.end - event.start).bit_length()].append(event)
        self._alike = [(1 << bits, sorted(group, key=_start_of)) for bits, group in alike.items()]

    def under_way(self, start: int, end: int) -> list[Event]:
        """Return those that share any time with (start, end), by start."""
        found: list[Event] = []
        for longest, group in self._alike:
            first = bisect_right(group, start - longest, key=_start_of)
            last = bisect_left(group, end, lo=first, key=_start_of)
            found.extend([event for event in group[first:last] if event.end > start])
        return sorted(found, key=_start_of)


def _start_of(event: Event) -> int:
    return event.start


def _end_of(event: Event) -> int:
    return event.end


@final
class _Attribution:
    """Puts the gaps of one device down to causes."""

    def __init__(self, recording: Recording, device: int) -> None:
        self._device = device
        self._null_streams = recording.null_streams
        here: dict[str, list[Event]] = defaultdict(list)
        host: dict[str, list[Event]] = defaultdict(list)
        for event in recording.events:
            if event.device == device:
                here[event.kind].append(event)
            elif event.device == HOST:
                host[event.kind].append(event)
        self._kernels = union((event.start, event.end) for event in here["kernel"])
        self._compute_streams = {event.stream for event in here["kernel"]}
        self._copies = {kind: _Layer(here[kind]) for kind in ("h2d", "d2h")}
        busy = {kind: union((event.start, event.end) for event in here[kind]) for kind in ("h2d", "d2h")}
        self._saturated = {kind: self._is_saturated(times) for kind, times in busy.items()}
        self._only_compute = {kind: Lengths(without(self._kernels, times)) for kind, times in busy.items()}
        """The times of kernels, but for those of the copies of a direction. Thousands of these may be enqueued at once."""
        # In the order in which they count.
        self._others: tuple[tuple[GapCause, _Layer], ...] = (
            ("device", _Layer([*here["copy"], *here["memset"]])),
            ("allocation", _Layer(host["allocation"])),
            ("staging", _Layer([event for event in host["put"] if event.memory == "pageable"])),
            ("source", _Layer(host["source"])),
        )
        self._given: dict[str, list[int]] = defaultdict(list)
        """By line of a `prefetch`, when its source gave batches that its consumer waited for."""
        for event in sorted(host["source"], key=_end_of):
            self._given[event.site].append(event.end)
        blocking = [event for event in host["issue"] if event.blocking]
        # A thread without a line of Python is one of a library's, which waits as it pleases: the program does not wait with it.
        self._waits = _Layer([event for event in (*host["wait"], *blocking) if event.site])

    def found(self) -> list[Gap]:
        pieces: list[Gap] = []
        for (_, start), (end, _) in pairwise(self._kernels):
            if end - start <= SHORT_NS:
                pieces.append(self._piece((start, end), "short"))
            else:
                pieces.extend(self._causes(start, end))
        return sorted(pieces)

    def _causes(self, start: int, end: int) -> list[Gap]:
        left: list[Interval] = [(start, end)]
        pieces: list[Gap] = []
        for kind in ("h2d", "d2h"):
            for copy in self._copies[kind].under_way(start, end):
                cause = self._why(copy, start)
                left = self._take(left, copy, cause, "" if cause == "source" else kind, pieces)
        for other, layer in self._others:
            for event in layer.under_way(start, end):
                left = self._take(left, event, other, "", pieces)
        if left:
            waits = [event for event in self._waits.under_way(start, end) if event.start <= start and event.end <= end]
            last = max(waits, key=lambda event: event.end, default=None)
            rest: GapCause = "host" if last is None else "wait"
            site = "" if last is None else last.site
            pieces.extend(self._piece(piece, rest, site=site) for piece in left)
        return pieces

    def _take(self, left: list[Interval], event: Event, cause: GapCause, direction: str, pieces: list[Gap]) -> list[Interval]:
        """Put down to an event what of a gap is left and lies in it; return the rest."""
        here = inside(left, event.start, event.end)
        pieces.extend(self._piece(piece, cause, direction, event.site, event.nbytes) for piece in here)
        return without(left, [(event.start, event.end)])

    def _piece(self, times: Interval, cause: GapCause, direction: str = "", site: str = "", nbytes: int = 0) -> Gap:
        return Gap(times[0], times[1], cause, direction, site, nbytes, self._device)

    def _why(self, copy: Event, start: int) -> GapCause:
        """Say why a copy does not lie under a kernel, but in a gap that began at `start`."""
        if copy.memory == "pageable":
            return "pageable"
        if self._saturated[copy.kind]:
            return "link"
        if (copy.device, copy.stream) in self._null_streams:
            return "null stream"
        if copy.stream in self._compute_streams:
            return "same stream"
        held = copy.start - copy.issued if copy.issued else 0
        # For compute, and not for other copies.
        if held > HELD_NS and self._only_compute[copy.kind].inside(copy.issued, copy.start) > held / 2:
            return "held back"
        return "source" if self._was_awaited(copy, start) else "late"

    def _was_awaited(self, copy: Event, start: int) -> bool:
        """Tell whether the batch that is copied was given later than `start`, while its consumer waited for it."""
        given = self._given.get(copy.site, ()) if copy.site and copy.kind == "h2d" else ()
        # It was issued by the thread of its source, and that asks for the next one only then.
        number = bisect_right(given, copy.issued or copy.start)
        return number > 0 and given[number - 1] > start

    def _is_saturated(self, busy: Sequence[Interval]) -> bool:
        if not self._kernels:
            return False
        start, end = self._kernels[0][0], self._kernels[-1][1]
        return length(inside(busy, start, end)) >= SATURATED * (end - start)
