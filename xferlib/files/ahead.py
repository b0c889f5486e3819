"""Files are read into the system's cache in front of the copies, and what was mapped of them is unmapped behind these, on threads:
otherwise copies would wait for the disk, and the thread that starts them would wait while the system takes pages out of its tables.

It is advice to the system, and may come late or not at all: the copies are right without it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar, final

from xferlib.engine.native import library
from xferlib.tickets import ticket

__all__ = ["FileRange", "ReadAhead", "Unmapping"]

T = TypeVar("T")

LOOK_EVERY = 4 << 20
"""Bytes: one page in so many is asked whether it is in the system's cache."""
LEAST_UNMAPPED = 1 << 20
"""Bytes."""
GAP = 128 << 10
"""Bytes: ranges with no more than this between them are read as one."""
NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Where the C library has no such flag the page is read, and nothing is asked for."""
# Unlike the method of `mmap` it does not keep the interpreter meanwhile.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FileRange(NamedTuple):
    """Bytes of an open file, and where they are mapped, for as long as somebody holds the mapping."""

    descriptor: int
    start: int
    nbytes: int
    address: int


@final
class _SerialThread(Generic[T]):
    """A thread that works on what it is given, in order. There is none before that.

    It ends by `end` or `no_more`, or when this is dropped and all is done that was given.
    """

    def __init__(self, name: str, work: Callable[[T, list[None]], None]) -> None:
        """`work` ends early where the list is not empty any more."""
        self._name = name
        self._work = work
        self._given: SimpleQueue[T | None] = SimpleQueue()
        self._over: list[None] = []
        # An interrupt may keep the `with` from its end. The thread holds nothing of this object but these two.
        self._ticket = ticket(self._given.put, None)
        self._thread: threading.Thread | None = None

    def give(self, thing: T) -> None:
        """Have it worked on. Returns at once; where the system has no thread nothing is done."""
        if self._thread is None:
            thread = threading.Thread(target=_run, args=(self._work, self._given, self._over), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return
            self._thread = thread
        self._given.put(thing)

    def no_more(self) -> None:
        """Have the thread end when it has done what it was given. Returns at once."""
        self._given.put(None)

    def end(self) -> None:
        """Leave what is not begun, and block until the thread has ended."""
        self._over.append(None)
        self.no_more()
        if self._thread is not None:
            self._thread.join()


def _run(work: Callable[[T, list[None]], None], given: SimpleQueue[T | None], over: list[None]) -> None:
    while (thing := given.get()) is not None:
        work(thing, over)
        # It may hold a mapping, which is not to live until the next one comes.
        del thing


@final
class ReadAhead:
    """Has ranges of files read ahead, in order, until its `with` ends, or it is dropped. The files must be open until then."""

    def __init__(self) -> None:
        self._worker: _SerialThread[FileRange] = _SerialThread("xferlib-read-ahead", _read)

    def __call__(self, file_ranges: Iterable[FileRange]) -> None:
        """Have ranges read, which are in the order of their file. Returns at once."""
        for file_range in _joined(file_ranges):
            # The system's own reading ahead is as good for less.
            if file_range.nbytes >= LOOK_EVERY:
                self._worker.give(file_range)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._worker.end()


@final
class Unmapping:
    """Has the system forget where pages of file ranges lie, of arrays that are no file to the engine. Readers find them again.

    With pages of 4 KiB this takes 30 to 60 ms for each GiB: if it is left to the end, nothing is copied meanwhile, and whoever does
    it between two copies starts these late. So nobody waits for it: it goes on behind the end of a `with` that did not fail.
    """

    def __init__(self) -> None:
        self._worker: _SerialThread[_Unmap] = _SerialThread("xferlib-unmap", _unmap)

    def __call__(self, file_ranges: Iterable[FileRange], mapping: object) -> None:
        """Unmap ranges, which are in the order of their file. Returns at once. `mapping` holds where they are mapped.

        It must: other memory that comes there would lose what is in it.
        """
        # For less there is not enough to be saved.
        joined = [file_range for file_range in _joined(file_ranges) if file_range.nbytes >= LEAST_UNMAPPED]
        if joined:
            self._worker.give(_Unmap(joined, mapping))

    def __enter__(self) -> Unmapping:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._worker.no_more()
        else:
            self._worker.end()


class _Unmap(NamedTuple):
    """What is to be unmapped, and what holds the mapping until then."""

    file_ranges: list[FileRange]
    mapping: object


def _unmap(behind: _Unmap, over: list[None]) -> None:
    for file_range in behind.file_ranges:
        if over:
            return
        first = -(-file_range.address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (file_range.address + file_range.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(first, end - first, mmap.MADV_DONTNEED)


def _read(file_range: FileRange, over: list[None]) -> None:
    descriptor, start, nbytes, _ = file_range
    for block in range(start, start + nbytes, LOOK_EVERY):
        if over:
            return
        if _is_cached(descriptor, block):
            continue
        if _advise(descriptor, block, min(LOOK_EVERY, start + nbytes - block)):
            # A file system may take no advice.
            return


def _advise(descriptor: int, start: int, nbytes: int) -> int:
    """Ask the system to read bytes of a file; return why it does not (errno), or 0.

    In one call: the system takes them in small steps, and with a call for each this thread would want the interpreter so often that
    whoever starts the copies would wait for it at every turn.
    """
    code: int = library().xe_read_ahead(descriptor, start, nbytes)
    return code


def _joined(file_ranges: Iterable[FileRange]) -> Iterator[FileRange]:
    """Join ranges with little or nothing between them."""
    first: FileRange | None = None
    end = 0
    for file_range in file_ranges:
        if first is not None and first.descriptor == file_range.descriptor and 0 <= file_range.start - first.start <= end + GAP:
            end = file_range.start + file_range.nbytes - first.start
            continue
        if first is not None:
            yield first._replace(nbytes=end)
        first, end = file_range, file_range.nbytes
    if first is not None:
        yield first._replace(nbytes=end)


def _is_cached(descriptor: int, offset: int) -> bool:
    try:
        # Unlike mincore, it also tells those who may only read the file.
        return bool(os.preadv(descriptor, [bytearray(1)], offset, NOWAIT))
    except OSError:
        # It is not, or the file system cannot tell.
        return False
