"""Files are read into the system's cache in front of the copies, on a thread: otherwise these wait for one page fault each.

It is advice to the system, and may come late or not at all: the copies are right without it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, final

from xferlib.tickets import ticket

__all__ = ["ReadAhead", "Stretch"]

LOOK_EVERY = 4 << 20
"""Bytes: one page in so many is asked whether it is in the system's cache."""
ADVISED = 128 << 10
"""Bytes that the system is asked to read at a time. What is above its own limit it ignores; this is the usual one."""
NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Where the C library has no such flag the page is read, and nothing is asked for."""


class Stretch(NamedTuple):
    """Bytes of an open file."""

    descriptor: int
    start: int
    nbytes: int


@final
class ReadAhead:
    """Has stretches read ahead, in order, until its `with` ends, or it is dropped. The files must be open until then."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Stretch | None] = SimpleQueue()
        self._over: list[None] = []
        # An interrupt may keep the `with` from its end. The thread holds nothing of this object but these two.
        self._ticket = ticket(self._asked.put, None)
        self._thread: threading.Thread | None = None

    def __call__(self, stretches: Iterable[Stretch]) -> None:
        """Have stretches read, which are in the order of their file. Returns at once."""
        for stretch in _joined(stretches):
            # The system's own reading ahead is as good for less.
            if stretch.nbytes >= LOOK_EVERY:
                if self._thread is None:
                    thread = threading.Thread(target=_run, args=(self._asked, self._over), name="xferlib-read-ahead", daemon=True)
                    thread.start()
                    self._thread = thread
                self._asked.put(stretch)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.append(None)
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join()


def _run(asked: SimpleQueue[Stretch | None], over: list[None]) -> None:
    while (stretch := asked.get()) is not None:
        # A file system may take no advice.
        with suppress(OSError):
            _read(stretch, over)


def _read(stretch: Stretch, over: list[None]) -> None:
    descriptor, start, nbytes = stretch
    for block in range(start, start + nbytes, LOOK_EVERY):
        if over:
            return
        if not _is_cached(descriptor, block):
            for at in range(block, min(block + LOOK_EVERY, start + nbytes), ADVISED):
                os.posix_fadvise(descriptor, at, ADVISED, os.POSIX_FADV_WILLNEED)


def _joined(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """Join stretches with little or nothing between them."""
    last: Stretch | None = None
    for stretch in stretches:
        if last is not None and last.descriptor == stretch.descriptor and 0 <= stretch.start - last.start <= last.nbytes + ADVISED:
            last = last._replace(nbytes=stretch.start + stretch.nbytes - last.start)
            continue
        if last is not None:
            yield last
        last = stretch
    if last is not None:
        yield last


def _is_cached(descriptor: int, offset: int) -> bool:
    try:
        # Unlike mincore, it also tells those who may only read the file.
        return bool(os.preadv(descriptor, [bytearray(1)], offset, NOWAIT))
    except OSError:
        # It is not, or the file system cannot tell.
        return False
