"""Files are read into the system's cache and mapped in front of the copies, on a thread: otherwise these wait for page faults.

It is advice to the system, and may come late or not at all: the copies are right without it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, final

from xferlib.tickets import ticket

__all__ = ["ReadAhead", "Stretch", "unmap"]

LOOK_EVERY = 4 << 20
"""Bytes: one page in so many is asked whether it is in the system's cache."""
ADVISED = 128 << 10
"""Bytes that the system is asked to read at a time. What is above its own limit it ignores; this is the usual one."""
NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Where the C library has no such flag the page is read, and nothing is asked for."""
MADV_POPULATE_READ = 22
"""Linux has it since 5.14: https://man7.org/linux/man-pages/man2/madvise.2.html"""
# Unlike the method of `mmap` it does not keep the interpreter meanwhile.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Stretch(NamedTuple):
    """Bytes of an open file, and where they are mapped, for as long as somebody holds the mapping."""

    descriptor: int
    start: int
    nbytes: int
    address: int


def unmap(stretches: Iterable[Stretch]) -> None:
    """Have the system forget where pages of stretches lie, which are in the order of their file. Readers find them again.

    With pages of 4 KiB this takes 60 ms for each GiB on a small machine: if it is left to the end, nothing is copied meanwhile.
    """
    for stretch in _joined(stretches):
        first = -(-stretch.address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (stretch.address + stretch.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            _madvise(first, end - first, mmap.MADV_DONTNEED)


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
    descriptor, start, nbytes, address = stretch
    for block in range(start, start + nbytes, LOOK_EVERY):
        if over:
            return
        end = min(block + LOOK_EVERY, start + nbytes)
        if _is_cached(descriptor, block):
            # Where an interrupt has kept the `with` from its end it may come when other memory is there. That is read, and no more.
            first = (address + block - start) // mmap.PAGESIZE * mmap.PAGESIZE
            _madvise(first, address + end - start - first, MADV_POPULATE_READ)
            continue
        for at in range(block, end, ADVISED):
            os.posix_fadvise(descriptor, at, ADVISED, os.POSIX_FADV_WILLNEED)


def _joined(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """Join stretches with little or nothing between them."""
    first: Stretch | None = None
    end = 0
    for stretch in stretches:
        if first is not None and first.descriptor == stretch.descriptor and 0 <= stretch.start - first.start <= end + ADVISED:
            end = stretch.start + stretch.nbytes - first.start
            continue
        if first is not None:
            yield first._replace(nbytes=end)
        first, end = stretch, stretch.nbytes
    if first is not None:
        yield first._replace(nbytes=end)


def _is_cached(descriptor: int, offset: int) -> bool:
    try:
        # Unlike mincore, it also tells those who may only read the file.
        return bool(os.preadv(descriptor, [bytearray(1)], offset, NOWAIT))
    except OSError:
        # It is not, or the file system cannot tell.
        return False
