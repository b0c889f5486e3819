"""Which files have their pages in the system's cache page-locked, so that the device reads them by itself.

A file is the one that was locked only while its number, its size and the times of its last changes say so: whoever replaces it, or
changes it, gives others what it holds then.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import IO, NamedTuple, final

from xferlib.memory.arrays import Array

__all__ = ["Content", "content", "enter", "leave", "locked_pages"]

TICK_SECONDS = 0.02
"""The clock by which file systems note changes may stand still for so long: a second change meanwhile would look like the first."""


@final
class Content(NamedTuple):
    """What tells one content of a file from another. Times are in nanoseconds."""

    device: int
    number: int
    nbytes: int
    modified: int
    changed: int


_pages: dict[Content, weakref.ref[Array]] = {}
"""For as long as somebody holds the pin."""
# In a forked child nothing is locked.
os.register_at_fork(after_in_child=_pages.clear)


def content(stream: IO[bytes]) -> Content:
    """Return what every change of an open file from here on will change."""
    found = _content(stream)
    since = time.time() - max(found.modified, found.changed) / 1e9
    if 0 <= since < TICK_SECONDS:
        # If it is changed meanwhile, nobody will find what is locked.
        time.sleep(TICK_SECONDS - since)
    return found


def enter(pages: Mapping[Content, Array]) -> None:
    """Have these found, until they are gone or leave."""
    for gone in [found for found, reference in _pages.copy().items() if reference() is None]:
        _pages.pop(gone, None)
    _pages.update({found: weakref.ref(array) for found, array in pages.items()})


def leave(contents: Iterable[Content]) -> None:
    """Have these found no more."""
    for found in contents:
        _pages.pop(found, None)


def locked_pages(stream: IO[bytes]) -> Array | None:
    """Return the pages of an open file if they are locked, and are those of what it holds now."""
    reference = _pages.get(_content(stream)) if _pages else None
    return None if reference is None else reference()


def _content(stream: IO[bytes]) -> Content:
    found = os.fstat(stream.fileno())
    return Content(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
