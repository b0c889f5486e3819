"""Records of every size that is known, laid out as cupti_activity.h says."""

from __future__ import annotations

import struct

import pytest

from xferlib.errors import XferError
from xferlib.tracing.records import CONCURRENT_KERNEL, KINDS, MEMCPY, MEMCPY2, MEMSET, Activity, read


def record(kind: int, nbytes: int, *fields: tuple[int, str, int]) -> bytes:
    made = bytearray(nbytes)
    struct.pack_into("<I", made, 0, kind)
    for offset, form, value in fields:
        struct.pack_into(f"<{form}", made, offset, value)
    return bytes(made)


TIMES = ((16, "Q", 1000), (24, "Q", 3000))
WHERE = ((32, "I", 2), (36, "I", 1), (40, "I", 14))


def only(found: bytes) -> Activity:
    (activity,) = read([found], lambda address: f"name at {address}").activities
    return activity


@pytest.mark.parametrize("nbytes", KINDS[MEMCPY][1])
def test_copies(nbytes: int) -> None:
    made = record(MEMCPY, nbytes, (4, "B", 1), (5, "B", 1), (6, "B", 3), (8, "Q", 1 << 33), *TIMES, *WHERE, (44, "I", 77))
    assert only(made) == Activity("h2d", "memcpy", 1000, 3000, 2, 1, 14, 77, 1 << 33, "pageable")


@pytest.mark.parametrize(
    ("way", "source", "target", "kind", "memory"),
    [
        (2, 3, 2, "d2h", "pinned"),
        (1, 5, 3, "h2d", "managed"),
        (1, 0, 3, "h2d", "unknown"),
        (8, 3, 3, "copy", ""),
        (10, 3, 3, "copy", ""),
    ],
)
def test_ways_and_memory(way: int, source: int, target: int, kind: str, memory: str) -> None:
    made = only(record(MEMCPY, 96, (4, "B", way), (5, "B", source), (6, "B", target), *TIMES, *WHERE))
    assert (made.kind, made.memory) == (kind, memory)


@pytest.mark.parametrize("nbytes", KINDS[CONCURRENT_KERNEL][1])
def test_kernels(nbytes: int) -> None:
    where = ((40, "I", 2), (44, "I", 1), (48, "I", 14))
    made = record(CONCURRENT_KERNEL, nbytes, *TIMES, *where, (92, "I", 77), (104, "Q", 0xABC))
    assert only(made) == Activity("kernel", f"name at {0xABC}", 1000, 3000, 2, 1, 14, 77)


@pytest.mark.parametrize("nbytes", KINDS[MEMSET][1])
def test_memory_that_is_set(nbytes: int) -> None:
    made = record(MEMSET, nbytes, (8, "Q", 512), *TIMES, *WHERE, (44, "I", 77))
    assert only(made) == Activity("memset", "memset", 1000, 3000, 2, 1, 14, 77, 512)


def test_copies_between_devices() -> None:
    made = record(MEMCPY2, 96, (8, "Q", 512), *TIMES, *WHERE, (60, "I", 77))
    assert only(made) == Activity("copy", "memcpy between devices", 1000, 3000, 2, 1, 14, 77, 512)


@pytest.mark.parametrize("kind", KINDS)
def test_any_other_size_is_refused(kind: int) -> None:
    with pytest.raises(XferError, match=r"writes records of 1000 bytes .* known are .* Install an older one"):
        read([record(kind, 1000)], str)


def test_kinds_that_nobody_asked_for_are_passed_over() -> None:
    assert read([record(4, 48)], str).activities == []
