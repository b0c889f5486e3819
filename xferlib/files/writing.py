"""The threads that write one file.

Each takes the next piece of the file: it has the device copy it to pinned memory of its own, and writes it where it belongs. So a
state of any size passes through as much pinned memory as these have, and copies and writes go on side by side. Whoever asks for a
save waits for none of this, and not for a thread to start.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import warnings
import weakref
import zipfile
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Literal, final

from xferlib.byte_reader import ByteReader
from xferlib.engine.cores import usable_cores
from xferlib.errors import AllocationError, ClosedError, XferError
from xferlib.files.plan import MOST_ARRAYS, Layout, Piece, Plan
from xferlib.files.series import remove_older, series_of
from xferlib.files.temporary import BORDER, TemporaryFile
from xferlib.latch import SLICE_SECONDS, Latch, give_way
from xferlib.ledger import puts_under_way
from xferlib.memory.arrays import Array, address_of

__all__ = ["Writing", "is_saved_to", "refuse_late"]

PIECE_NBYTES = 16 << 20
"""Bytes: many times what a write and a copy cost beside their bytes."""
LEAST_NBYTES = 4 << 10
DIRECT_FROM_NBYTES = 8 << 20
"""Bytes of a file. A smaller one is written as fast through the system's cache, and found there."""
MOST_THREADS = 16
THREADS_TO_MAP = 8
"""From so many on they write more into a mapping than by calls."""
READS_AHEAD = 3
"""Pieces whose copies are started, and not done. They keep a link busy, and a get of the program's waits behind no more of them."""
PUTS_SECONDS = 0.005
"""How long the copy of a piece waits for puts. They come first; and where there is always one, a save still comes to its end."""
LEAST_WEIGHT = 0.5
"""Of a piece as large as they come: so much waits for puts. One of a file that goes past the cache, or the last one, is smaller."""
LOOK_SECONDS = 0.0005
"""How often it is looked whether puts are under way."""


@final
class Writing:
    """What the threads of one save share, and who owns its reader from `start` on. It does not refer to the handle."""

    def __init__(self, file: Path, plan: Plan, reader: ByteReader, memory: int, rate_limit: float | None, keep: int | None) -> None:
        self.file = file
        self.plan = plan
        self.process = os.getpid()
        self.written = 0
        self.told = False
        """Whether somebody knows of the failure."""
        self.warned: Warning | None = None
        """What was to be said of older files, where warnings are errors. The file is there."""
        self.was_read, self.ended = Latch(), Latch()
        # Now: the working directory may be another one when the threads come to it. And what a symbolic link leads to is replaced.
        self._target = Path(os.path.realpath(file))
        self._series = f"{self._target.parent}/{series_of(self._target.name)}"
        self.is_snapshot = reader.snapshot
        self._number = next(_numbers)
        # Python waits for threads that are none before anything else at its end: for ever, if daemons go on to start some.
        self._by_daemons = not threading.main_thread().is_alive() and threading.current_thread().daemon
        self._keep = keep
        self._reader = reader
        self._rate_limit = rate_limit
        self._memory = memory
        self._piece_nbytes = max(LEAST_NBYTES, min(PIECE_NBYTES, memory // 2, plan.nbytes))
        self._left = 1
        self._layout: Layout | None = None
        self._border = 1
        self._pieces: Iterator[Piece] = iter(())
        self._lock = threading.Lock()
        self._reads: SimpleQueue[None] = SimpleQueue()
        """As many as may be started. Taken and put back in calls of C, which wake one thread each."""
        for _ in range(READS_AHEAD):
            self._reads.put(None)
        self._issued = self._read = 0
        self._weight = 0.0
        """What was read since puts were waited for, in pieces as large as they come."""
        self._due = 0.0
        """When the next piece may be read, by the rate."""
        self._temporary: TemporaryFile | None = None
        self._handle: weakref.ref[Any] | None = None
        self._stop = Latch()
        """Open when no more is to be written."""
        self._cancelled = XferError(f"the save to {str(file)!r} was cancelled. What was there before is there")
        self._fate: dict[None, Literal["started", "dropped"]] = {}
        """Whether somebody writes, or the caller was interrupted before that: who comes first says it, in one step."""
        self._verdict: dict[None, Exception | None] = {}
        """None: the file is getting its name. Else why it does not. Who comes first says it."""

    @property
    def error(self) -> Exception | None:
        """Why there will be no file; None: there is, or there may be."""
        return self._verdict.get(None)

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` is why there will be no file."""
        return self.error is self._cancelled

    @property
    def is_dropped(self) -> bool:
        """Whether the caller was interrupted before anybody began."""
        return self._fate.get(None) == "dropped"

    def is_before(self, other: Writing) -> bool:
        """Tell whether this one's file must be there before the other's: it is of the same series, and was called for earlier."""
        return self._series == other._series and self._number < other._number

    def start(self, handle: weakref.ref[Any]) -> None:
        """Have threads write the file. Waits for none, unless there is none to be had: then the caller writes the file."""
        try:
            self._handle = handle
            self._reader.hand_over()
            if self.is_snapshot:
                self.was_read.open()
            _under_way[self._number] = self
            # Again: either the end of the program finds this one, or it is refused.
            refuse_late()
            if not self._on_threads():
                self._alone()
        except BaseException:
            if self._fate.setdefault(None, "dropped") == "dropped":
                self._reader.close()
                _under_way.pop(self._number, None)
            raise

    def cancel(self) -> bool:
        """Write no more; tell whether that is why there will be no file."""
        self._verdict.setdefault(None, self._cancelled)
        if self.is_cancelled:
            self.told = True
            self._stop.open()
        return self.is_cancelled

    def say_failed(self) -> None:
        """Warn of a failure that nobody has asked about."""
        if self.told or (self.error is None and self.warned is None):
            return
        # The handle may go while the last thread leaves, and both say it.
        self.told = True
        failed = f"the save to {str(self.file)!r} failed, and nobody has asked for its result: {self.error}"
        warnings.warn(str(self.warned) if self.error is None else failed, RuntimeWarning, 2)

    def _on_threads(self) -> bool:
        """Have a thread start the others: it takes one call in C, which an interrupt does not cut. False: the system has none."""
        try:
            start_new_thread(self._start_threads, ())
        except RuntimeError:
            return False
        return True

    def _alone(self) -> None:
        """Write the file on the calling thread, to which an interrupt may come at any point."""
        try:
            if self._fate.setdefault(None, "started") == "started":
                self._run(cut=True)
        except BaseException as error:
            # It may have cut off what ends a save.
            self._fail(error)
            self.told = True
            self._end()
            raise

    def _start_threads(self) -> None:
        """They are no daemons: while the interpreter ends, it waits for them. Else `_wait_for_all` does."""
        if self._fate.setdefault(None, "started") != "started":
            return
        most = 1 if self.plan.is_archive else -(-self.plan.nbytes // self._piece_nbytes)
        wanted = max(1, min(most, MOST_THREADS, self._memory // self._piece_nbytes, max(2, usable_cores())))
        started, self._left = 0, wanted
        # Those that run do what others do not, but slower.
        while started < wanted and self._start_one():
            started += 1
            # Else all would want the interpreter at once, and whoever launches work would wait behind each.
            give_way()
        for _ in range(wanted - max(1, started)):
            self._leave()
        if not started:
            self._run()

    def _start_one(self) -> bool:
        """Start a thread; False: the system has none."""
        try:
            threading.Thread(target=self._run, name="xferlib-save", daemon=self._by_daemons).start()
        except (RuntimeError, MemoryError):
            return False
        return True

    def _run(self, *, cut: bool = False) -> None:
        """Take part, and end the save if the others have. `cut`: an interrupt may come here, and ends the save."""
        try:
            self._reader.join()
            self._take_part()
        except BaseException as error:
            self._fail(error)
            if cut and not isinstance(error, Exception):
                self.told = True
                raise
        finally:
            self._reader.leave()
            self._leave()

    def _take_part(self) -> None:
        with self._lock:
            memory = self._begin() if self._temporary is None and self.error is None else None
        if memory is None and self.error is None:
            with suppress(AllocationError):
                # Others go on without this thread where there is no more.
                memory = self._reader.empty(self._piece_nbytes, wait=False)
        if memory is not None and self.error is None:
            self._write(memory)

    def _begin(self) -> Array:
        """Begin the file, and return memory to read into: less than was thought of, where the pool has no more."""
        self._layout = layout = self.plan.laid_out()
        self._temporary = temporary = TemporaryFile(self._target)
        temporary.begin()
        nbytes = self.plan.nbytes + sum(map(len, layout.headers))
        temporary.check_room(nbytes)
        if not layout.members and self._left >= THREADS_TO_MAP:
            temporary.map(nbytes)
        memory = None
        while memory is None:
            smallest = self._piece_nbytes // 2 < LEAST_NBYTES
            try:
                memory = self._reader.empty(self._piece_nbytes, wait=smallest)
            except AllocationError:
                if smallest:
                    raise
                self._piece_nbytes //= 2
        most, border = self._piece_nbytes, 1
        if not layout.members and nbytes >= DIRECT_FROM_NBYTES and most > 2 * BORDER and temporary.go_direct(nbytes):
            # Each piece lies in its memory as in the file's blocks, wherever the memory begins.
            most, border = most - BORDER, BORDER
        self._border = border
        self._pieces = layout.pieces(most, border)
        if not layout.members:
            temporary.write(memoryview(layout.headers[0]), 0)
        return memory

    def _write(self, memory: Array) -> None:
        assert self._temporary is not None
        assert self._layout is not None
        layout = self._layout
        if not layout.members:
            for offset, data in self._data(memory):
                self._temporary.write(data, offset)
                self._note_written(data.nbytes)
            return
        with self._temporary.as_file() as stream, zipfile.ZipFile(stream, "w") as archive:
            self._write_members(archive, layout, memory)

    # Loops in functions of their own: an interrupt must come to what is around them.

    def _write_members(self, archive: zipfile.ZipFile, layout: Layout, memory: Array) -> None:
        for member, header, pieces in zip(layout.members, layout.headers, layout.by_member(memory.nbytes), strict=True):
            self._pieces = iter(pieces)
            with archive.open(member, "w", force_zip64=True) as entry:
                self._write_member(entry, header, memory)
            if self.error is not None:
                return

    def _write_member(self, entry: IO[bytes], header: bytes, memory: Array) -> None:
        entry.write(header)
        for _, data in self._data(memory):
            entry.write(data)
            self._note_written(data.nbytes)

    def _data(self, memory: Array) -> Iterator[tuple[int, memoryview]]:
        """Iterate what this thread is to write, and where: the next pieces that no other has taken, read into this memory."""
        while (piece := self._take_piece()) is not None:
            part = self._place(piece, memory)
            self._reads.get()
            try:
                # Not with the lock: others have pieces to note.
                if not self._may_read(piece):
                    return
                with self._lock:
                    transfer = self._start_read(piece, part)
                data = transfer.result()
            finally:
                self._reads.put(None)
            self._note_read(piece.nbytes)
            yield piece.offset, memoryview(data)

    def _take_piece(self) -> Piece | None:
        with self._lock:
            # Named: an interrupt behind the call comes while the lock is still given back.
            piece = next(self._pieces, None)
        return piece  # noqa: RET504  # As said.

    def _may_read(self, piece: Piece) -> bool:
        """Wait for the rate, and for the program's puts, which come first. False: nothing is to be read any more."""
        with self._lock:
            seconds = self._seconds_until(piece.nbytes)
            waits = self._is_behind_puts(piece)
        if seconds > 0 and self._stop.wait(seconds):
            return False
        deadline = time.monotonic() + PUTS_SECONDS
        while waits and puts_under_way() and time.monotonic() < deadline:
            if self._stop.wait(LOOK_SECONDS):
                return False
        return self.error is None

    def _is_behind_puts(self, piece: Piece) -> bool:
        """Tell whether a piece is to wait for puts. A member of an archive is one, however small: of those, many wait together."""
        self._weight += max(piece.nbytes / self._piece_nbytes, len(piece.arrays) / MOST_ARRAYS)
        if self._weight < LEAST_WEIGHT:
            return False
        self._weight = 0.0
        return True

    def _place(self, piece: Piece, memory: Array) -> Array:
        """Return the part of its memory that a piece is read into."""
        return memory[(piece.offset - address_of(memory)) % self._border :]

    def _seconds_until(self, nbytes: int) -> float:
        """Return how long the next piece, of so many bytes, has to wait until it may be read."""
        if self._rate_limit is None:
            return 0.0
        now = time.monotonic()
        # Time in which nothing could be read is not made up for.
        due = max(now, self._due)
        self._due = due + nbytes / self._rate_limit
        return due - now

    def _start_read(self, piece: Piece, memory: Array) -> Any:
        transfer = self._reader.read_row(piece.arrays, piece.skipped, piece.nbytes, memory)
        self._issued += piece.nbytes
        if self._issued == self.plan.nbytes:
            # From here on the copies are known as what they are.
            self._reader.close()
        return transfer

    def _note_read(self, nbytes: int) -> None:
        with self._lock:
            self._read += nbytes
            is_all = self._read == self.plan.nbytes
        if is_all:
            # Else they are held until somebody transfers something.
            self._reader.let_go()
            self.was_read.open()

    def _note_written(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes

    def _fail(self, error: BaseException) -> None:
        known = error if isinstance(error, Exception) else RuntimeError(f"the save was cut off: {error!r}")
        if isinstance(known, OSError) and known.errno is not None and known.filename is None:
            # The system says of no write to which file it was.
            known.filename = str(self.file)
        # Their frames would hold memory for as long as the handle.
        for one in _chain(known):
            one.__traceback__ = None
        self._verdict.setdefault(None, known)
        self._stop.open()

    def _leave(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            self._reader.close()
            self._reader.let_go()
            self.was_read.open()
            self._publish()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._end()
        handle = self._handle
        if handle is None or handle() is None:
            self.say_failed()

    def _end(self) -> None:
        """Leave nothing behind, and let whoever waits pass. Twice is fine."""
        self._reader.close()
        self._reader.let_go()
        self.was_read.open()
        with suppress(OSError):
            if self._temporary is not None:
                self._temporary.close()
        self._temporary = None
        _under_way.pop(self._number, None)
        self.ended.open()

    def _publish(self) -> None:
        self._wait_for_older()
        # From here on nobody cancels it.
        if self._temporary is None or self._verdict.setdefault(None, None) is not None:
            return
        try:
            self._temporary.publish()
        except BaseException:
            del self._verdict[None]
            raise
        for words in [] if self._keep is None else remove_older(self._target, self._keep):
            try:
                warnings.warn(words, RuntimeWarning, 2)
            except RuntimeWarning as warned:
                self.warned = warned

    def _wait_for_older(self) -> None:
        """Wait for the saves of the same series that were started before this one: they must not come behind it."""
        older = [writing._number for writing in _found() if writing.is_before(self)]
        for number in older:
            while self.error is None and _goes_on(number):
                pass


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and those behind it: what it was raised from, and what was handled then."""
    found = [error]
    for one in found:
        found += [behind for behind in (one.__cause__, one.__context__) if behind is not None and behind not in found]
    return found


def _found() -> list[Writing]:
    """Return the saves that may be under way. Its references are listed in one step: other threads add meanwhile."""
    return [writing for writing in [reference() for reference in _under_way.valuerefs()] if writing is not None]


def is_saved_to(file: Path) -> bool:
    """Tell whether a save of this process is under way that will give its file this name."""
    target = Path(os.path.realpath(file))
    return any(writing._target == target and writing.error is None and not writing.is_dropped for writing in _found())


def _goes_on(number: int) -> bool:
    """Wait a moment for a save, and tell whether it goes on.

    Not for good: one whose start was interrupted never ends, and is gone when nobody has it.
    """
    writing = _under_way.get(number)
    return writing is not None and not writing.is_dropped and not writing.ended.wait(SLICE_SECONDS)


_numbers = itertools.count()
_under_way: weakref.WeakValueDictionary[int, Writing] = weakref.WeakValueDictionary()
"""By their numbers, which are those of the calls. The threads of each hold it."""
_over = False
"""Whether the interpreter ends, and waits for no more saves."""


def refuse_late() -> None:
    """Raise `ClosedError` in a program that has ended but for handlers of `atexit` from before the import."""
    if _over:
        raise ClosedError("this program ends, and nothing is saved any more. Register the handler that saves after import xferlib")


def _wait_for_all() -> None:
    """At the end of the interpreter, which waits by itself only for threads that are started already."""
    global _over
    _over = True
    for number in [writing._number for writing in _found()]:
        while _goes_on(number):
            pass


def _forget() -> None:
    """In a forked child: the threads stayed with the parent."""
    global _under_way
    _under_way = weakref.WeakValueDictionary()


atexit.register(_wait_for_all)
os.register_at_fork(after_in_child=_forget)
