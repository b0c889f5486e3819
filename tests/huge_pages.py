"""Huge pages of shared memory: whether this system gives them to whoever asks, and how many a range has."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

from xferlib.memory import pages
from xferlib.memory.pages import HUGE

__all__ = ["gives_huge_pages", "huge_nbytes"]

COLLAPSE = 25
"""`MADV_COLLAPSE` of Linux 6.1."""


@functools.cache
def gives_huge_pages() -> bool:
    """Tell whether shared memory is had in huge pages here: not from older kernels, nor where a system denies them."""
    (address,) = pages._map((HUGE,))
    ctypes.memset(address, 1, HUGE)
    given = pages._madvise(address, HUGE, COLLAPSE) == 0 and huge_nbytes(address, HUGE) == HUGE
    pages._unmap(address, HUGE)
    return given


def huge_nbytes(address: int, nbytes: int) -> int:
    """Return the bytes in huge pages of the shared mappings that begin in this range."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(r"^([0-9a-f]+)-[0-9a-f]+ [\s\S]*?^ShmemPmdMapped: +(\d+) kB", text, re.MULTILINE)
    return sum(int(kib) << 10 for start, kib in found if address <= int(start, 16) < address + nbytes)
