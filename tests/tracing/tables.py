"""Recordings made by hand. Times are in milliseconds, so that answers can be computed in the head."""

from __future__ import annotations

from typing import Any

from xferlib.tracing.events import HOST, Event, EventKind, Memory, Recording

COMPUTE, COPIES, NULL = 1, 2, 7
MIB = 1 << 20


def ms(value: float) -> int:
    return round(value * 1e6)


def kernel(start: float, end: float, *, stream: int = COMPUTE, name: str = "kernel", device: int = 0) -> Event:
    return Event("kernel", name, ms(start), ms(end), device, stream)


def copy(
    start: float,
    end: float,
    *,
    kind: EventKind = "h2d",
    stream: int = COPIES,
    nbytes: int = MIB,
    memory: Memory = "pinned",
    site: str = "train.py:3",
    issued: float | None = None,
    device: int = 0,
) -> Event:
    begun = ms(start if issued is None else issued)
    return Event(kind, "memcpy", ms(start), ms(end), device, stream, nbytes, memory, site, begun)


def call(
    kind: EventKind,
    start: float,
    end: float,
    *,
    site: str = "train.py:9",
    memory: Memory = "",
    blocking: bool = False,
    name: str = "call",
) -> Event:
    return Event(kind, name, ms(start), ms(end), HOST, 100, 0, memory, site, ms(start), blocking)


def recording(*events: Event, null: bool = False, **rest: Any) -> Recording:
    return Recording(
        events=tuple(sorted(events, key=lambda event: event.start)),
        start=0,
        end=max([event.end for event in events], default=0),
        devices={0: "GPU 0"},
        null_streams=frozenset({(0, NULL)} if null else ()),
        threads={100: "MainThread"},
        **rest,
    )
