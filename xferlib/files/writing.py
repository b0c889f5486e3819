"""The threads that write one file.

Each takes the next piece of the file: it has the device copy it to pinned memory of its own, and writes it where it belongs. So a
state of any size passes through as much pinned memory as these have, and copies and writes go on side by side. Whoever asks for a
save waits for none of this, and not for a thread to start.
"""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
import zipfile
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any, final

from xferlib.byte_reader import ByteReader
from xferlib.engine.cores import usable_cores
from xferlib.errors import AllocationError
from xferlib.files.outcome import Outcome, wait_for_all
from xferlib.files.pace import Pace, wait_to_read
from xferlib.files.plan import FilePiece, Layout, Plan
from xferlib.files.series import remove_older
from xferlib.files.sharded import ShardedReader
from xferlib.files.temporary import BORDER, TemporaryFile
from xferlib.latch import give_way
from xferlib.memory.arrays import Array, address_of
from xferlib.uninterrupted import is_refusal

__all__ = ["Writing"]

PIECE_NBYTES = 16 << 20
"""Bytes: many times what a write and a copy cost beside their bytes."""
LEAST_NBYTES = 4 << 10
DIRECT_FROM_NBYTES = 8 << 20
"""Bytes of a file. A smaller one is written as fast through the system's cache, and found there."""
MOST_THREADS = 16
THREADS_TO_MAP = 8
"""From so many on they write more into a mapping than by calls."""


@final
class Writing:
    """What the threads of one save share, and who owns its reader from `start` on. It and the handle do not refer to each other."""

    def __init__(
        self,
        outcome: Outcome,
        plan: Plan,
        reader: ByteReader | ShardedReader,
        memory: int,
        rate_limit: float | None,
        keep: int | None,
    ) -> None:
        self._outcome = outcome
        self._plan = plan
        # Python waits for threads that are none before anything else at its end: for ever, if daemons go on to start some.
        self._by_daemons = not threading.main_thread().is_alive() and threading.current_thread().daemon
        self._keep = keep
        self._reader = reader
        self._memory = memory
        self._piece_nbytes = max(LEAST_NBYTES, min(PIECE_NBYTES, memory // 2, plan.nbytes))
        self._left = 1
        self._layout: Layout | None = None
        self._border = 1
        self._pieces: Iterator[FilePiece] = iter(())
        self._lock = threading.Lock()
        self._pace = Pace(rate_limit)
        self._issued = self._read = 0
        self._temporary: TemporaryFile | None = None
        self._handle: weakref.ref[Any] | None = None

    def start(self, handle: weakref.ref[Any]) -> None:
        """Have threads write the file. Waits for none, unless there is none to be had: then the caller writes the file."""
        try:
            self._handle = handle
            self._reader.hand_over()
            if self._reader.snapshot:
                self._outcome.was_read.open()
            self._outcome.enter()
            if not self._on_threads():
                self._write_here()
        except BaseException:
            if self._outcome.drop():
                self._reader.close()
                self._reader.let_go()
            raise

    def _on_threads(self) -> bool:
        """Have a thread start the others: it takes one call in C, which an interrupt does not cut. False: the system has none."""
        try:
            start_new_thread(self._start_threads, ())
        except (RuntimeError, MemoryError) as error:
            if not is_refusal(error):
                raise
            return False
        return True

    def _write_here(self) -> None:
        """Write the file on the calling thread, to which an interrupt may come at any point."""
        try:
            if self._outcome.begin():
                self._run(cut=True)
        except BaseException as error:
            # It may have cut off what ends a save.
            self._outcome.fail(error)
            self._outcome.told = True
            self._end()
            raise

    def _start_threads(self) -> None:
        """They are no daemons: while the interpreter ends, it waits for them. Else `wait_for_all` does."""
        if not self._outcome.begin():
            return
        most = 1 if self._plan.is_archive else -(-self._plan.nbytes // self._piece_nbytes)
        wanted = max(1, min(most, _most_threads(usable_cores()), self._memory // self._piece_nbytes))
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
            self._outcome.fail(error)
            if cut and not isinstance(error, Exception):
                self._outcome.told = True
                raise
        finally:
            self._reader.leave()
            self._leave()

    def _take_part(self) -> None:
        with self._lock:
            memory = self._begin() if self._temporary is None and self._outcome.error is None else None
        if memory is None and self._outcome.error is None:
            with suppress(AllocationError):
                # Others go on without this thread where there is no more.
                memory = self._reader.empty(self._piece_nbytes, wait=False)
        if memory is not None and self._outcome.error is None:
            self._write(memory)

    def _begin(self) -> Array:
        """Begin the file, and return memory to read into: less than was thought of, where the pool has no more."""
        self._layout = layout = self._plan.laid_out()
        self._temporary = temporary = TemporaryFile(self._outcome.target)
        temporary.begin()
        nbytes = self._plan.nbytes + sum(map(len, layout.headers))
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
            if self._outcome.error is not None:
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
            self._pace.reads.get()
            try:
                # Not with the lock: others have pieces to note.
                if not self._may_read(piece):
                    return
                with self._lock:
                    transfer = self._start_read(piece, part)
                data = transfer.result()
            finally:
                self._pace.reads.put(None)
            self._note_read(piece.nbytes)
            yield piece.offset, memoryview(data)

    def _take_piece(self) -> FilePiece | None:
        with self._lock:
            # Named: an interrupt behind the call comes while the lock is still given back.
            piece = next(self._pieces, None)
        return piece  # noqa: RET504  # As said.

    def _may_read(self, piece: FilePiece) -> bool:
        """Wait for the rate, and for the program's puts, which come first. False: nothing is to be read any more."""
        with self._lock:
            seconds = self._pace.seconds_until(piece.nbytes)
            behind_puts = self._pace.is_behind_puts(piece, self._piece_nbytes)
        return wait_to_read(seconds, behind_puts, self._outcome.stop) and self._outcome.error is None

    def _place(self, piece: FilePiece, memory: Array) -> Array:
        """Return the part of its memory that a piece is read into."""
        return memory[(piece.offset - address_of(memory)) % self._border :]

    def _start_read(self, piece: FilePiece, memory: Array) -> Any:
        transfer = self._reader.read_row(piece.arrays, piece.skipped, piece.nbytes, memory)
        self._issued += piece.nbytes
        if self._issued == self._plan.nbytes:
            # From here on the copies are known as what they are.
            self._reader.close()
        return transfer

    def _note_read(self, nbytes: int) -> None:
        with self._lock:
            self._read += nbytes
            is_all = self._read == self._plan.nbytes
        if is_all:
            # Else they are held until somebody transfers something.
            self._reader.let_go()
            self._outcome.was_read.open()

    def _note_written(self, nbytes: int) -> None:
        with self._lock:
            self._outcome.written += nbytes

    def _leave(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            self._reader.close()
            self._reader.let_go()
            self._outcome.was_read.open()
            self._publish()
        except BaseException as error:
            self._outcome.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._end()
        handle = self._handle
        if handle is None or handle() is None:
            self._outcome.say_failed()

    def _end(self) -> None:
        """Leave nothing behind, and let whoever waits pass. Twice is fine."""
        self._reader.close()
        self._reader.let_go()
        self._outcome.was_read.open()
        with suppress(OSError):
            if self._temporary is not None:
                self._temporary.close()
        self._temporary = None
        self._outcome.end()

    def _publish(self) -> None:
        self._outcome.wait_for_older()
        if self._temporary is None or not self._outcome.commit():
            return
        try:
            self._temporary.publish()
        except BaseException:
            self._outcome.roll_back()
            raise
        for words in [] if self._keep is None else remove_older(self._outcome.target, self._keep):
            try:
                warnings.warn(words, RuntimeWarning, 2)
            except RuntimeWarning as warned:
                self._outcome.warned = warned


def _most_threads(cores: int) -> int:
    """Return how many threads write with so many cores: few enough that a training loop beside them finds one free.

    On two machines with 16 cores the slowest hundredth of the steps of 7.7 ms took 1.13 and 1.42 times as long beside a save by 16
    threads as without one, beside 12 threads 1.18 and 1.03, beside 8 threads 1.09 and 1.03. All wrote 2.4 to 2.7 GB/s to memory.
    """
    return min(MOST_THREADS, max(2, min(THREADS_TO_MAP, cores), cores * 5 // 8))


# Here and not in `outcome`, which `load` imports as well: what is registered last is called first, and while saves go on the
# stagers that they read from stay open.
atexit.register(wait_for_all)
