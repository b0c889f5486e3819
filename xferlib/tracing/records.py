"""The records that CUPTI writes, as far as they are read here: their layouts are facts of cupti_activity.h.

From CUDA 12.0 to 13.4 a record keeps what it has and grows at its end, so a record is known by its kind and its size. One of any
other size is of a CUPTI that nobody has looked at, and is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias, final

from xferlib.tracing.events import EventKind, Memory
from xferlib.tracing.library import CuptiError

__all__ = [
    "CONCURRENT_KERNEL",
    "KINDS",
    "MARKER",
    "MEMCPY",
    "MEMCPY2",
    "MEMSET",
    "STREAM",
    "Activity",
    "Records",
    "check_size",
    "read",
]

MEMCPY, MEMSET, CONCURRENT_KERNEL, MARKER, MEMCPY2, STREAM = 1, 2, 10, 12, 22, 37
KINDS: Final = {
    MEMCPY: ("copies", (88, 96, 112)),  # CUpti_ActivityMemcpy5, 6, 7
    MEMSET: ("memory that is set", (88, 104)),  # Memset4, 5
    CONCURRENT_KERNEL: ("kernels", (208, 216, 224, 232, 248)),  # Kernel9, 10, 11, 12, 13
    MARKER: ("named ranges", (56,)),  # Marker2
    MEMCPY2: ("copies between devices", (96,)),  # MemcpyPtoP4
    STREAM: ("streams", (24,)),
}
"""What a kind is, and the sizes of its records in bytes."""

_KIND = struct.Struct("<I")
_MEMCPY = struct.Struct("<IBBBBQQQIIII")
_MEMSET = struct.Struct("<IIQQQIIII")
_KERNEL_TIMES = struct.Struct("<QQQIII")
_KERNEL_TIMES_AT, _KERNEL_CORRELATION_AT, _KERNEL_NAME_AT = 16, 92, 104
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MEMCPY2 = struct.Struct("<IBBBBQQQIIIIIIII")
_MARKER = struct.Struct("<IIQI")
_MARKER_NAME_AT = 40
_STREAM = struct.Struct("<IIIIII")
START, END = 2, 4
NULL_STREAM = 3

_COPIES: Final[dict[int, EventKind]] = {1: "h2d", 3: "h2d", 2: "d2h", 4: "d2h"}
_MEMORY: Final[dict[int, Memory]] = {1: "pageable", 2: "pinned", 5: "managed", 7: "managed"}

NameOf: TypeAlias = Callable[[int], str]
"""Reads a string at an address."""


class Activity(NamedTuple):
    """Something that a device has done; see `Event`."""

    kind: EventKind
    name: str
    start: int
    end: int
    device: int
    context: int
    stream: int
    correlation: int
    nbytes: int = 0
    memory: Memory = ""


@final
@dataclass
class Records:
    """What was read."""

    activities: list[Activity] = field(default_factory=list)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, start and end of what the program has named."""
    null_streams: set[tuple[int, int]] = field(default_factory=set)
    """Context and stream."""
    incomplete: int = 0
    """How many had no times."""
    _open: dict[int, tuple[str, int]] = field(default_factory=dict)


def check_size(kind: int, nbytes: int) -> None:
    """Raise `CuptiError` unless a record of this kind and size is known."""
    what, sizes = KINDS[kind]
    if nbytes not in sizes:
        raise CuptiError(
            f"this CUPTI writes records of {nbytes} bytes for {what} (kind {kind}); known are {', '.join(map(str, sizes))}, of "
            "CUDA 12.0 to 13.4. Install an older one, such as nvidia-cuda-cupti==13.4.*, or a newer xferlib"
        )


def read(records: Iterable[bytes], name: NameOf, into: Records | None = None) -> Records:
    """Read records, and add what they say to `into`. Kinds that are not read here are passed over. Raises `CuptiError`."""
    found = Records() if into is None else into
    readers = _readers(found, name)
    for record in records:
        (kind,) = _KIND.unpack_from(record)
        if kind in KINDS:
            check_size(kind, len(record))
            readers[kind](record)
    return found


def _readers(found: Records, name: NameOf) -> dict[int, Callable[[bytes], None]]:
    names: dict[int, str] = {}

    def named(address: int) -> str:
        if address not in names:
            names[address] = name(address) if address else ""
        return names[address]

    def add(activity: Activity) -> None:
        # A record that was not completed, or a kernel for whose times there was no room.
        if 0 < activity.start <= activity.end:
            found.activities.append(activity)
        else:
            found.incomplete += 1

    def memcpy(record: bytes) -> None:
        _, way, source, target, _, nbytes, start, end, device, context, stream, correlation = _MEMCPY.unpack_from(record)
        kind: EventKind = _COPIES.get(way, "copy")
        side = {"h2d": source, "d2h": target}.get(kind)
        memory: Memory = "" if side is None else _MEMORY.get(side, "unknown")
        add(Activity(kind, "memcpy", start, end, device, context, stream, correlation, nbytes, memory))

    def memcpy2(record: bytes) -> None:
        _, _, _, _, _, nbytes, start, end, device, context, stream, _, _, _, _, correlation = _MEMCPY2.unpack_from(record)
        add(Activity("copy", "memcpy between devices", start, end, device, context, stream, correlation, nbytes))

    def memset(record: bytes) -> None:
        _, _, nbytes, start, end, device, context, stream, correlation = _MEMSET.unpack_from(record)
        add(Activity("memset", "memset", start, end, device, context, stream, correlation, nbytes))

    def kernel(record: bytes) -> None:
        start, end, _, device, context, stream = _KERNEL_TIMES.unpack_from(record, _KERNEL_TIMES_AT)
        (correlation,) = _U32.unpack_from(record, _KERNEL_CORRELATION_AT)
        (address,) = _U64.unpack_from(record, _KERNEL_NAME_AT)
        add(Activity("kernel", named(address), start, end, device, context, stream, correlation))

    def marker(record: bytes) -> None:
        _, flags, time, number = _MARKER.unpack_from(record)
        if flags & START:
            (address,) = _U64.unpack_from(record, _MARKER_NAME_AT)
            # Not kept by address: the program may write another name to the same place.
            found._open[number] = (name(address) if address else "", time)
        elif flags & END and number in found._open:
            what, start = found._open.pop(number)
            found.ranges.append((what, start, time))

    def stream(record: bytes) -> None:
        _, context, number, _, flag, _ = _STREAM.unpack_from(record)
        if flag == NULL_STREAM:
            found.null_streams.add((context, number))

    return {MEMCPY: memcpy, MEMCPY2: memcpy2, MEMSET: memset, CONCURRENT_KERNEL: kernel, MARKER: marker, STREAM: stream}


def cut(buffer: bytes, ends: Iterable[int]) -> Iterator[bytes]:
    """Cut a buffer into its records. `ends`: where each ends, in order."""
    start = 0
    for end in ends:
        yield buffer[start:end]
        start = end
