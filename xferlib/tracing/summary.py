"""What a recording says: how busy the link was, how much of the copies lay under compute, why compute stood still, and what to do.

Pure functions of a `Recording`. The causes are those of `gaps`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from xferlib.tracing.events import Event, Recording
from xferlib.tracing.gaps import Gap, GapCause, all_gaps
from xferlib.tracing.intervals import Interval, common, length, union
from xferlib.words import counted, doubt, in_words

__all__ = ["Device", "Gaps", "Link", "Pageable", "Summary", "cause_words", "summarize"]

SHOWN = 0.02
"""Share of the time of a device from which on a cause is a finding."""
FEW_COPIES = 5
"""With fewer one of them decides, such as the first, which pays for what is done once."""


@final
@dataclass(frozen=True, kw_only=True)
class Link:
    """The copies of one device in one direction.

    Attributes:
        direction: "h2d" or "d2h".
        copies, nbytes: How many, and their bytes.
        seconds: In which at least one of them was under way.
        use: Those, as a share of the time of the device.
        hidden: The share of those that lies under kernels; 0 where there are no copies.
        pageable_nbytes: Of pageable memory.
    """

    direction: Literal["h2d", "d2h"]
    copies: int
    nbytes: int
    seconds: float
    use: float
    hidden: float
    pageable_nbytes: int

    @property
    def gb_per_second(self) -> float:
        """GB/s while a copy was under way; 0 where there were none."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Gaps:
    """All gaps of one device with the same cause and line. `count`: how many pieces; `share`: of the time of the device."""

    cause: GapCause
    direction: str
    site: str
    count: int
    seconds: float
    share: float

    @property
    def cause_words(self) -> str:
        """The cause, and what to do about it."""
        return cause_words(self)

    @property
    def words(self) -> str:
        """The same, with the line."""
        return f"{self.cause_words}{_AT[self.cause].format(site=self.site) if self.site else ''}"

    @property
    def is_finding(self) -> bool:
        """Whether something should be done about it. A busy link and short gaps are as they should be."""
        return self.share >= SHOWN and self.cause not in ("link", "short")


@final
@dataclass(frozen=True, kw_only=True)
class Device:
    """One device. `seconds`: from its first event to its last; `compute_seconds`: in which at least one kernel ran."""

    number: int
    name: str
    seconds: float
    kernels: int
    compute_seconds: float
    h2d: Link
    d2h: Link
    gaps: tuple[Gaps, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Pageable:
    """Copies of pageable memory that were issued on one line; `site` is empty where nobody knows."""

    direction: Literal["h2d", "d2h"]
    site: str
    copies: int
    nbytes: int
    seconds: float


@final
@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a trace says. `str()` of it is for people.

    Attributes:
        seconds: How long the trace ran.
        devices: Those that did something.
        findings: The gaps that matter, the longest first.
        pageable: Copies of pageable memory, by line, the most bytes first.
        notes: What was not recorded, in words.
    """

    seconds: float
    devices: tuple[Device, ...]
    findings: tuple[Gaps, ...]
    pageable: tuple[Pageable, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the lines of the text."""
        if not self.devices:
            return [f"traced {self.seconds:.3f} s: {self.verdict}", *self.notes]
        lines = []
        for device in self.devices:
            lines.append(
                f"{device.name}: {device.seconds:.3f} s from first to last; {counted(device.kernels, 'kernel')} in "
                f"{_time(device.compute_seconds)} ({_share(device.compute_seconds, device.seconds)})"
            )
            lines.extend(f"  {_link_words(link, device.kernels)}" for link in (device.h2d, device.d2h) if link.copies)
            if device.kernels:
                idle = sum([gaps.seconds for gaps in device.gaps])
                lines.append(f"  compute stood still for {_time(idle)} ({_share(idle, device.seconds)}) between its kernels")
            shown = [gaps for gaps in device.gaps if gaps.share >= SHOWN / 4]
            lines.extend(f"    {_time(gaps.seconds)} ({gaps.share:.0%}): {gaps.words}" for gaps in shown)
        if self.pageable:
            lines.append("copies of pageable memory:")
            for found in self.pageable:
                where = found.site or "on a thread that runs no Python"
                lines.append(
                    f"  {where}: {counted(found.copies, 'copy', 'copies')} {_TO[found.direction]}, {in_words(found.nbytes)} in "
                    f"{_time(found.seconds)}"
                )
        return [*lines, *([] if self.findings else [self.verdict]), *self.doubts, *self.notes]

    @property
    def verdict(self) -> str:
        """The most important thing, in a line."""
        if not self.devices:
            return "no copy and no kernel was recorded"
        if not any(device.kernels for device in self.devices):
            return "no kernel was recorded, so there is nothing that copies could lie under"
        if not self.findings:
            return "nothing to mend was found"
        first = self.findings[0]
        return f"compute stood still for {first.share:.0%} of the time: {first.words}"

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why another trace of the same program may say otherwise; empty: it is long enough to tell."""
        computing = [device for device in self.devices if device.kernels]
        if not computing:
            return ()
        copies = sum([device.h2d.copies + device.d2h.copies for device in computing])
        few = (f"of {counted(copies, 'copy', 'copies')} little can be told: take more steps",) if 0 < copies < FEW_COPIES else ()
        return doubt(max(device.seconds for device in computing), "steps") or few


def summarize(recording: Recording, gaps: Mapping[int, Sequence[Gap]] | None = None) -> Summary:
    """Say what a recording shows. It is not changed, and nothing else is looked at. `gaps`: of `all_gaps`, if it was asked."""
    known = all_gaps(recording) if gaps is None else gaps
    devices = tuple([_device(recording, number, of_device) for number, of_device in known.items()])
    findings = sorted([gaps for device in devices for gaps in device.gaps if gaps.is_finding], key=lambda gaps: -gaps.seconds)
    return Summary(
        seconds=(recording.end - recording.start) / 1e9,
        devices=devices,
        findings=tuple(findings),
        pageable=_pageable(recording.events),
        notes=recording.notes,
    )


def cause_words(gap: Gap | Gaps) -> str:
    """Return the cause of a gap in words, and what to do about it."""
    return _WORDS[gap.cause].format(copies=f"copies {_TO[gap.direction]}" if gap.direction else "")


def _device(recording: Recording, number: int, gaps: Iterable[Gap]) -> Device:
    events = [event for event in recording.events if event.device == number]
    span = max(event.end for event in events) - min(event.start for event in events)
    kernels = union((event.start, event.end) for event in events if event.kind == "kernel")
    grouped: dict[tuple[GapCause, str, str], list[Gap]] = defaultdict(list)
    for gap in gaps:
        grouped[gap.cause, gap.direction, gap.site].append(gap)
    groups = [_group(key, alike, span) for key, alike in grouped.items()]
    return Device(
        number=number,
        name=recording.devices.get(number, f"device {number}"),
        seconds=span / 1e9,
        kernels=sum([event.kind == "kernel" for event in events]),
        compute_seconds=length(kernels) / 1e9,
        h2d=_link("h2d", events, kernels, span),
        d2h=_link("d2h", events, kernels, span),
        gaps=tuple(sorted(groups, key=lambda group: -group.seconds)),
    )


def _link(direction: Literal["h2d", "d2h"], events: Iterable[Event], kernels: Sequence[Interval], span: int) -> Link:
    copies = [event for event in events if event.kind == direction]
    busy = union((event.start, event.end) for event in copies)
    under = length(common(busy, kernels))
    return Link(
        direction=direction,
        copies=len(copies),
        nbytes=sum([event.nbytes for event in copies]),
        seconds=length(busy) / 1e9,
        use=length(busy) / span if span else 0.0,
        hidden=under / length(busy) if busy else 0.0,
        pageable_nbytes=sum([event.nbytes for event in copies if event.memory == "pageable"]),
    )


def _group(key: tuple[GapCause, str, str], gaps: Sequence[Gap], span: int) -> Gaps:
    cause, direction, site = key
    total = sum([gap.end - gap.start for gap in gaps])
    return Gaps(
        cause=cause,
        direction=direction,
        site=site,
        count=len(gaps),
        seconds=total / 1e9,
        share=total / span if span else 0.0,
    )


def _pageable(events: Iterable[Event]) -> tuple[Pageable, ...]:
    groups: dict[tuple[Literal["h2d", "d2h"], str], list[Event]] = defaultdict(list)
    for event in events:
        if event.memory == "pageable" and (event.kind == "h2d" or event.kind == "d2h"):
            groups[event.kind, event.site].append(event)
    found = [
        Pageable(
            direction=direction,
            site=site,
            copies=len(copies),
            nbytes=sum([event.nbytes for event in copies]),
            seconds=sum([event.end - event.start for event in copies]) / 1e9,
        )
        for (direction, site), copies in groups.items()
    ]
    return tuple(sorted(found, key=lambda group: -group.nbytes))


def _link_words(link: Link, kernels: int) -> str:
    # Where none was recorded, a share would look like a fault.
    under = f"; {link.hidden:.0%} of that under kernels" if kernels else ""
    pageable = f", {link.pageable_nbytes / link.nbytes:.0%} of it pageable" if link.pageable_nbytes else ""
    return (
        f"{counted(link.copies, 'copy', 'copies')} {_TO[link.direction]}, {in_words(link.nbytes)}{pageable}: under way for "
        f"{_time(link.seconds)} ({link.use:.0%}) at {link.gb_per_second:.1f} GB/s{under}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


_TO: Mapping[str, str] = {"h2d": "to the device", "d2h": "to the host"}
_WORDS: Mapping[GapCause, str] = {
    "pageable": "{copies} of pageable memory, which the driver stages on one thread while the caller waits. Prefetch them, or fill "
    "memory from empty_pinned",
    "link": "{copies}: the link is busy all the time. Fewer bytes, or more compute for each",
    "null stream": "{copies} on the NULL stream, which waits for all work on blocking streams. Copy on a non-blocking stream",
    "same stream": "{copies} on a stream that also computes: they run behind its kernels. Copy on a stream of their own",
    "held back": "{copies} that were issued in time and waited for compute, although the link was idle. Find what they wait for",
    "late": "{copies} that were issued when compute had nothing left to do. Issue them a step earlier",
    "device": "the device set or copied memory of its own",
    "allocation": "memory was allocated, freed, locked or unlocked. Keep it and use it again",
    "staging": "put copied pageable memory on the CPU, and its caller waited. Prefetch, or borrow",
    "source": "a prefetch waited for its source, which was making a batch. Make batches faster, or on several threads or processes",
    "wait": "the host had waited for the device before it enqueued more. Read results a step later",
    "host": "nothing was enqueued: the host had other work, such as making a batch",
    "short": "short gaps between kernels",
}
_AT: Mapping[GapCause, str] = {
    **dict.fromkeys(("pageable", "link", "null stream", "same stream", "held back", "late", "device"), " [issued at {site}]"),
    **dict.fromkeys(("allocation", "staging", "wait", "host", "short"), " [at {site}]"),
    "source": " [prefetch at {site}]",
}
