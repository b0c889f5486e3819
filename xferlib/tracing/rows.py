"""A recording as rows to be drawn, one for each stream and thread, and how they are thinned out. For pages and pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, final

from xferlib.tracing.events import HOST, Recording
from xferlib.tracing.gaps import Gap
from xferlib.tracing.summary import cause_words

__all__ = ["Mark", "Row", "least_apart", "rows", "thinned"]

MOST_LEVELS = 6
MOST_ROWS = 120


class Mark(NamedTuple):
    """What is drawn as one: an event, or `events` of them that lie close together. Times in nanoseconds since the trace began."""

    start: int
    end: int
    kind: str
    """An `EventKind`, or "gap"."""
    name: str
    nbytes: int = 0
    memory: str = ""
    site: str = ""
    waited: int = 0
    """Nanoseconds from the call that started it to its start; 0: unknown."""
    events: int = 1
    busy: int = 0
    """Nanoseconds of the events in it."""


@final
@dataclass(frozen=True)
class Row:
    """One stream or thread. In a lane no marks overlap: what is inside of another mark is in a lane further down."""

    group: str
    name: str
    lanes: tuple[tuple[Mark, ...], ...]


def rows(recording: Recording, gaps: Mapping[int, Sequence[Gap]]) -> list[Row]:
    """Return the rows: those of devices first, in each the gaps of compute, then compute, then copies; the host's last.

    `gaps`: what `all_gaps` returns.
    """
    marks: dict[tuple[int, int], list[Mark]] = defaultdict(list)
    for event in recording.events:
        start, end = event.start - recording.start, event.end - recording.start
        waited = max(0, event.start - event.issued) if event.issued and event.device != HOST else 0
        marks[event.device, event.stream].append(
            Mark(start, end, event.kind, event.name, event.nbytes, event.memory, event.site, waited, 1, end - start)
        )
    found: list[tuple[tuple[int, int, int, int], Row]] = []
    for (device, stream), of_stream in marks.items():
        kinds = {mark.kind for mark in of_stream}
        rank = 1 if "kernel" in kinds else 2 if kinds & {"h2d", "d2h"} else 3
        group = "host" if device == HOST else recording.devices.get(device, f"device {device}")
        row = Row(group, recording.name_of(device, stream), _lanes(of_stream))
        found.append(((device == HOST, device, rank, -len(of_stream) if device == HOST else stream), row))
    for device, of_device in gaps.items():
        idle = [
            Mark(
                gap.start - recording.start,
                gap.end - recording.start,
                "gap",
                cause_words(gap),
                gap.nbytes,
                "",
                gap.site,
                0,
                1,
                gap.end - gap.start,
            )
            for gap in of_device
            if gap.cause != "short"
        ]
        if idle:
            group = recording.devices.get(device, f"device {device}")
            found.append(((False, device, 0, 0), Row(group, "compute idle, why", _lanes(idle))))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def thinned(all_rows: Sequence[Row], apart: int) -> list[Row]:
    """Return the rows with marks of a kind drawn as one where no more than `apart` nanoseconds are between them."""
    return [Row(row.group, row.name, tuple([tuple(_joined(lane, apart)) for lane in row.lanes])) for row in all_rows[:MOST_ROWS]]


def _lanes(marks: Iterable[Mark]) -> tuple[tuple[Mark, ...], ...]:
    lanes: list[list[Mark]] = []
    # Whole before part, where two begin at once.
    for mark in sorted(marks, key=lambda mark: (mark.start, -mark.end)):
        for lane in lanes:
            if lane[-1].end <= mark.start:
                lane.append(mark)
                break
        else:
            if len(lanes) < MOST_LEVELS:
                lanes.append([mark])
            elif lanes[-1][-1].end < mark.end:
                # More at once than can be told apart: the last lane shows that something goes on.
                last = lanes[-1][-1]
                lanes[-1][-1] = last._replace(end=mark.end, events=last.events + 1, nbytes=last.nbytes + mark.nbytes)
    return tuple([tuple(lane) for lane in lanes])


def least_apart(all_rows: Sequence[Row], most: int) -> int:
    """Return how many nanoseconds apart marks must be drawn as one, at least, so that no more than `most` marks are left."""
    distances = sorted(
        [mark.start - before.end for row in all_rows for lane in row.lanes for before, mark in pairwise(lane)],
        reverse=True,
    )
    lanes = sum([len(row.lanes) for row in all_rows])
    # The first of each lane has none before it.
    left = max(0, most - lanes)
    return distances[left] if left < len(distances) else 0


def _joined(lane: Sequence[Mark], apart: int) -> list[Mark]:
    joined: list[Mark] = []
    if not lane:
        return joined
    longest, end = lane[0], lane[0].end
    group = [longest]
    for mark in lane[1:]:
        if mark.start - end <= apart:
            alike = (longest.kind, longest.memory, longest.site) == (mark.kind, mark.memory, mark.site)
            # Of what is that short, nobody sees the kind.
            if alike or mark.end - group[0].start <= apart:
                group.append(mark)
                end = max(end, mark.end)
                longest = mark if mark.busy > longest.busy else longest
                continue
        joined.append(_one(group, longest, end))
        group, longest, end = [mark], mark, mark.end
    joined.append(_one(group, longest, end))
    return joined


def _one(group: Sequence[Mark], longest: Mark, end: int) -> Mark:
    """Return the mark that stands for several, as one of the kind of the longest."""
    if len(group) == 1:
        return longest
    alike = len({mark.name for mark in group}) == 1
    return Mark(
        group[0].start,
        end,
        longest.kind,
        longest.name if alike else f"{longest.name.removesuffix(' ...')} ...",
        sum([mark.nbytes for mark in group]),
        longest.memory,
        longest.site,
        0,
        sum([mark.events for mark in group]),
        sum([mark.busy for mark in group]),
    )
