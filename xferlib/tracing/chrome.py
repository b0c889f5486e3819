"""A recording as the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open: one process a device, one thread a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from xferlib.tracing.atomic import atomic_text
from xferlib.tracing.events import HOST, Event, Recording

__all__ = ["write"]

HOST_PROCESS = 1
"""The number of the host's process; that of device n is n + 10."""
AT_ONCE = 1000


def write(recording: Recording, path: Path) -> None:
    """Write a file. Times are microseconds since the trace began."""
    with atomic_text(path) as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        json.dump({"source": "xferlib", "notes": list(recording.notes)}, file)
        file.write(',"traceEvents":[\n')
        _write_entries(file, _entries(recording))
        file.write("\n]}\n")


def _write_entries(file: TextIO, entries: Iterator[dict[str, Any]]) -> None:
    """Write them some at a time: a call of the encoder takes longer than what it does for one."""
    between = ""
    while some := list(islice(entries, AT_ONCE)):
        file.write(between + json.dumps(some, separators=(",", ":"))[1:-1])
        between = ",\n"


def _entries(recording: Recording) -> Iterator[dict[str, Any]]:
    lanes = dict.fromkeys((event.device, event.stream) for event in recording.events)
    for device in sorted({device for device, _ in lanes}):
        name = "host" if device == HOST else recording.devices.get(device, f"device {device}")
        yield {"ph": "M", "name": "process_name", "pid": _process(device), "tid": 0, "args": {"name": name}}
    for device, stream in lanes:
        name = recording.name_of(device, stream)
        yield {"ph": "M", "name": "thread_name", "pid": _process(device), "tid": stream, "args": {"name": name}}
    for number, event in enumerate(recording.events):
        entry = _entry(event, recording.start)
        if event.kind == "range":
            # Those of several threads may overlap in part, which complete events of one row may not.
            end = entry["ts"] + entry.pop("dur")
            yield entry | {"ph": "b", "id": number}
            yield entry | {"ph": "e", "id": number, "ts": end}
        else:
            yield entry


def _entry(event: Event, start: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "ph": "X",
        "cat": event.kind,
        "name": f"{event.kind} {event.memory}".strip() if event.kind in ("h2d", "d2h") else event.name,
        "ts": (event.start - start) / 1e3,
        "dur": (event.end - event.start) / 1e3,
        "pid": _process(event.device),
        "tid": event.stream,
    }
    told: dict[str, Any] = {}
    if event.nbytes:
        told["bytes"] = event.nbytes
        # A call has a time of its own, which is not the copy's.
        if event.end > event.start and event.device != HOST:
            told["GB/s"] = round(event.nbytes / (event.end - event.start), 3)
    if event.memory:
        told["memory"] = event.memory
    if event.site:
        told["site"] = event.site
    if event.issued and event.device != HOST:
        told["issued"] = (event.issued - start) / 1e3
    if told:
        entry["args"] = told
    return entry


def _process(device: int) -> int:
    return HOST_PROCESS if device == HOST else device + 10
