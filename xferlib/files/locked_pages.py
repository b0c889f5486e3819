"""Which files have their pages in the system's cache page-locked, so that the device reads them by itself.

A file is the one that was locked only while its number, its size and the times of its last changes say so: whoever replaces it, or
changes it, gives others what it holds then.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from typing import IO, NamedTuple, final

from xferlib.memory.arrays import Array
from xferlib.memory.registered import Pin

__all__ = ["Content", "content", "enter", "leave", "locked_pages"]

TICK_SECONDS = 0.02
"""The clock by which file systems note changes may stand still for so long: a second change meanwhile would look like the first."""
COARSE_TICK_SECONDS = 2.0
"""The same of file systems that note whole seconds, or every second one."""
SECOND = 1_000_000_000
"""In nanoseconds."""


@final
class Content(NamedTuple):
    """What tells one content of a file from another. Times are in nanoseconds."""

    device: int
    number: int
    nbytes: int
    modified: int
    changed: int


_pages: dict[Content, weakref.ref[Pin]] = {}
"""For as long as somebody holds the pin."""
# In a forked child nothing is locked.
os.register_at_fork(after_in_child=_pages.clear)


def content(stream: IO[bytes]) -> Content:
    """Return what every change of an open file from here on will change."""
    found = _content(stream)
    tick = TICK_SECONDS if found.changed % SECOND else COARSE_TICK_SECONDS
    # The other time is what the last program to set it says.
    since = time.time() - found.changed / SECOND
    if 0 <= since < tick:
        # If it is changed meanwhile, nobody will find what is locked.
        time.sleep(tick - since)
    return found


def enter(pins: Mapping[Content, Pin]) -> None:
    """Have these found, until they are gone, unlocked, or leave. Raises `ValueError` if one of them is there already."""
    for gone in [found for found, reference in _pages.copy().items() if _locked(reference) is None]:
        _pages.pop(gone, None)
    for found, pin in pins.items():
        if _pages.setdefault(found, weakref.ref(pin))() is not pin:
            raise ValueError("one of the files is pinned already, by another thread")


def leave(pins: Mapping[Content, Pin]) -> None:
    """Have these found no more."""
    for found, pin in pins.items():
        reference = _pages.get(found)
        if reference is not None and reference() is pin:
            _pages.pop(found, None)


def locked_pages(stream: IO[bytes]) -> Array | None:
    """Return the pages of an open file if they are locked, and are those of what it holds now."""
    reference = _pages.get(_content(stream)) if _pages else None
    return None if reference is None else _locked(reference)


def _locked(reference: weakref.ref[Pin]) -> Array | None:
    pin = reference()
    return pin.array if pin is not None and pin.is_locked else None


def _content(stream: IO[bytes]) -> Content:
    found = os.fstat(stream.fileno())
    return Content(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
