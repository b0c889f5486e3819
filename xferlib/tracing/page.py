"""A recording as one page of HTML: data, script and style are in it, and it loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, final

from xferlib.tracing.atomic import atomic_text
from xferlib.tracing.collection import uncollected
from xferlib.tracing.events import Recording
from xferlib.tracing.gaps import Gap, all_gaps
from xferlib.tracing.rows import MOST_ROWS, Row, least_apart, rows, thinned
from xferlib.tracing.summary import Link, summarize
from xferlib.words import counted

__all__ = ["MOST_NBYTES", "write"]

MOST_NBYTES = 2_000_000
MOST_NAME = 120
"""Characters. Names of kernels that are templates have thousands."""
MOST_LINES = 40
"""Of a table."""
MARK_NBYTES = 20
"""A mark takes ten numbers, and so many bytes at least."""
FIRST_APART = 1_000
"""Nanoseconds."""


def write(recording: Recording, path: Path, *, most_nbytes: int = MOST_NBYTES) -> None:
    """Write a page of at most so many bytes. If not all events fit, those that lie close together are drawn as one."""
    text = page(recording, most_nbytes=most_nbytes)
    with atomic_text(path) as file:
        file.write(text)


def page(recording: Recording, *, most_nbytes: int = MOST_NBYTES) -> str:
    """Return the text of the page."""
    return uncollected(_page, recording, most_nbytes)


def _page(recording: Recording, most_nbytes: int) -> str:
    gaps = all_gaps(recording)
    told = _told(recording, gaps)
    doubts = told.pop("doubts")
    everything = rows(recording, gaps)
    drawn, apart = everything[:MOST_ROWS], 0
    room = most_nbytes - len(_template())
    # Of a long trace all marks would be a text of gigabytes, and to try one distance after the other would take long.
    most = room // MARK_NBYTES
    while True:
        marks = _marks(drawn)
        while sum(marks) > most and max(marks) > 1:
            least = least_apart(drawn, most)
            apart = max(FIRST_APART, least if least > apart else 2 * apart)
            drawn = thinned(drawn, apart)
            marks = _marks(drawn)
        notes = [*doubts, *recording.notes, *_thinning(recording, everything, drawn, apart)]
        text = json.dumps({**told, **_encoded(drawn), "notes": notes}, separators=(",", ":"))
        # Nothing of the data may end the element that it is in.
        text = text.replace("<", "\\u003c")
        if len(text) <= room or max(marks, default=0) <= 1:
            return _template().replace("__DATA__", text)
        most = sum(marks) * room // len(text)


def _marks(drawn: Sequence[Row]) -> list[int]:
    """Return how many there are in each lane."""
    return [len(lane) for row in drawn for lane in row.lanes]


def _told(recording: Recording, all_of_them: Mapping[int, Sequence[Gap]]) -> dict[str, Any]:
    """Return the tables."""
    summary = summarize(recording, all_of_them)
    longest: dict[tuple[int, str, str, str], Gap] = {}
    for device in summary.devices:
        for gap in all_of_them[device.number]:
            key = (device.number, gap.cause, gap.direction, gap.site)
            if key not in longest or gap.end - gap.start > longest[key].end - longest[key].start:
                longest[key] = gap
    gaps: list[dict[str, Any]] = []
    for device in summary.devices:
        for group in device.gaps:
            gap = longest[device.number, group.cause, group.direction, group.site]
            start, end = gap.start - recording.start, gap.end - recording.start
            told = {"words": group.cause_words, "site": group.site, "time": _ns(group.seconds), "share": group.share}
            gaps.append({**told, "count": group.count, "finding": group.is_finding, "start": start, "end": end})
    return {
        "title": "",
        "verdict": summary.verdict[:1].upper() + summary.verdict[1:],
        "doubts": summary.doubts,
        "lead": f"{counted(len(recording.events), 'event')} in {summary.seconds:.3f} s",
        "span": recording.end - recording.start,
        "devices": [
            {
                "name": device.name,
                "kernels": device.kernels,
                "compute": _ns(device.compute_seconds),
                "span": max(1, _ns(device.seconds)),
                "links": [_link(link) for link in (device.h2d, device.d2h) if link.copies],
            }
            for device in summary.devices
        ],
        "gaps": sorted(gaps, key=lambda gap: -gap["time"])[:MOST_LINES],
        "pageable": [
            {
                "direction": found.direction,
                "site": found.site,
                "copies": found.copies,
                "nbytes": found.nbytes,
                "time": _ns(found.seconds),
            }
            for found in summary.pageable[:MOST_LINES]
        ],
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        "direction": link.direction,
        "copies": link.copies,
        "nbytes": link.nbytes,
        "time": _ns(link.seconds),
        "use": link.use,
        "hidden": link.hidden,
    }


def _encoded(drawn: Sequence[Row]) -> dict[str, Any]:
    """Return rows as columns of numbers, and the strings that they name by number."""
    numbers = _StringNumbers()
    encoded = []
    for row in drawn:
        lanes = []
        for lane in row.lanes:
            starts, ends, kinds, names, nbytes, memories, sites, waited, events, busy = zip(*lane, strict=True)
            lanes.append(
                {
                    "s": [start - before for start, before in zip(starts, (0, *ends[:-1]), strict=True)],
                    "d": [end - start for start, end in zip(starts, ends, strict=True)],
                    "k": [numbers[kind] for kind in kinds],
                    "n": [numbers[name] for name in names],
                    "b": nbytes,
                    "m": [numbers[memory] for memory in memories],
                    "p": [numbers[site] for site in sites],
                    "c": events,
                    "w": busy,
                    "i": waited,
                }
            )
        encoded.append({"group": row.group, "name": row.name, "lanes": lanes})
    return {"rows": encoded, "strings": list(numbers.shown)}


@final
class _StringNumbers(dict[str, int]):
    """The number of each string, as it is shown: a long one is cut."""

    def __init__(self) -> None:
        self.shown = {"": 0}

    def __missing__(self, text: str) -> int:
        cut = text if len(text) <= MOST_NAME else text[: MOST_NAME - 3] + "..."
        self[text] = self.shown.setdefault(cut, len(self.shown))
        return self[text]


def _thinning(recording: Recording, everything: Sequence[Row], drawn: Sequence[Row], apart: int) -> list[str]:
    notes = []
    if apart:
        marks = sum(_marks(drawn))
        closer = f"{apart / 1e3:.0f} µs" if apart < 1e6 else f"{apart / 1e6:.1f} ms"
        notes.append(
            f"Thinned out: {len(recording.events)} events are drawn as {marks} marks. What is closer together than {closer} is one "
            "mark. The tables count everything, and the JSON of the trace has it"
        )
    if len(everything) > MOST_ROWS:
        notes.append(f"{len(everything)} streams and threads were recorded; the first {MOST_ROWS} are drawn")
    return notes


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


@cache
def _template() -> str:
    return (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
