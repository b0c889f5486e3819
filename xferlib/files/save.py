"""What is on the device to files, while the program goes on.

Some threads each take the next piece of the file: they have the device copy it to pinned memory of theirs, and write it where it
belongs. So a state of any size passes through as much pinned memory as these have, and copies and writes go on side by side.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import warnings
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

from xferlib.byte_reader import ByteReader, Span
from xferlib.checks import positive_nbytes, uncopied, whole_number
from xferlib.engine.cores import usable_cores
from xferlib.errors import AllocationError, BackendUnavailableError
from xferlib.files.formats import SUFFIXES, VALUES, npy_header, safetensors_layout
from xferlib.files.names import Named, named
from xferlib.files.temporary import TemporaryFile
from xferlib.latch import Latch
from xferlib.memory.arrays import Array
from xferlib.reaper import uninterrupted
from xferlib.stager import Stager, check_stager
from xferlib.tree import trees_of
from xferlib.words import in_words

__all__ = ["Save", "save"]

PIECE_NBYTES = 16 << 20
"""Bytes: many times what a write and a copy cost beside their bytes."""
LEAST_NBYTES = 4 << 10
MEMORY = 256 << 20
MOST_THREADS = 16
LONGEST_MEMBER = 60_000
"""Bytes of the name of an archive's member: the format has two bytes for their number."""
JSON = (str, int, float)
"""What rides along and is the same when JSON has had it; a bool is an int."""


def save(
    path: str | os.PathLike[str],
    tree: Any,
    stager: Stager,
    *,
    stream: object | None = None,
    metadata: Mapping[str, str] | None = None,
    memory: int = MEMORY,
    rate_limit: float | None = None,
    keep: int | None = None,
) -> Save:
    """Start writing a tree of device arrays to a file and return at once. `load` reads it, and so does whoever reads the format.

    The file has what the arrays hold at this point of `stream` (None: the calling thread's current one). It is written under
    another name and renamed when the disk has all of it: under `path` is the earlier file, or the whole new one, whatever happens.
    Files whose names differ in their last number alone, if at all, come into their folder in the order of the calls.

    The arrays are read until `Save.wait_read` returns: until then do not overwrite them by work of your own, nor donate or delete
    them. `put(into=)` waits by itself. Dropping them is fine. The program does not end before its saves have.

    - `path` ends in `.safetensors` for a tree of any kind, with names like "params.dense.kernel": dots join the keys, and an array
      alone is "array". Text and numbers that ride along are in the file's metadata, and `load(like=)` brings them back. It ends in
      `.npz` for a tree of arrays, and in `.npy` for one array, where NumPy is to read them.
    - `metadata`: text to store beside the arrays, in a `.safetensors` file.
    - `memory`: bytes of pinned memory that the save may take from the stager's pool where that has room, half of its limit at most.
    - `rate_limit`: bytes per second that are read from the device at most.
    - `keep`: of the files in the folder whose names differ from this one in their last number alone, such as
      "step_100.safetensors", so many stay, the newest. The others are removed when this one is there; a `RuntimeWarning` says which
      could not be.

    Raises `ValueError` and `TypeError` for arguments, and as `Stager.get` does. What goes wrong later, a full disk for example, is
    raised by `Save.result`.
    """
    check_stager(stager, path, comes="third")
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{str(file)!r}: expected a name that ends in .safetensors, .npz or .npy, which says how to write it")
    memory = min(positive_nbytes(memory, "memory"), stager.stats().pinned_limit_nbytes // 2)
    if rate_limit is not None and not rate_limit > 0:
        raise ValueError(f"rate_limit={rate_limit!r}: expected bytes per second, greater than 0")
    keep = None if keep is None else whole_number(keep, "keep", least=1)
    if keep is not None and not _numbers(file.stem):
        advice = f"Name it like 'step_100{file.suffix}'"
        raise ValueError(f"keep: {file.name!r} has no number that tells it from earlier files. {advice}")
    parts = named(trees_of(stager.backend), tree)
    texts = _texts(file, parts, metadata)
    reader = stager.reader(tree, stream=stream)
    try:
        work = _Work(file, _planned(file, parts, reader, texts), reader, memory, rate_limit, keep)
    except BaseException:
        reader.close()
        raise
    return work.start()


@final
class Save:
    """A file that is being written. `save` returns it; drop it at any time, the file is written all the same.

    Any thread. If the save failed and nobody was told of it, a `RuntimeWarning` says so when the last reference goes.

    Attributes:
        path: Where the file is going to be.
        nbytes: Bytes of all arrays.
    """

    __reduce_ex__ = uncopied("Another process cannot wait for this one's threads")

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._told = False
        self.path = work.file
        self.nbytes = work.plan.nbytes

    @property
    def written(self) -> int:
        """How many of the arrays' bytes are written."""
        return self._work.written

    def done(self) -> bool:
        """Tell whether the file is there. Raises what `result` raises if the save has failed. Never blocks."""
        self._refuse_children()
        if not self._work.ended.is_open():
            return False
        self._raise_failure()
        return True

    def result(self, timeout: float | None = None) -> Path:
        """Block until the file is there and return its path.

        Raises `TimeoutError` after `timeout` seconds, and why the save failed: `OSError` for what the system refuses, `XferError`
        for the device. The earlier file is there then.
        """
        self._refuse_children()
        if not self._work.ended.wait(timeout):
            raise TimeoutError(f"the save to {str(self.path)!r} has not ended after {timeout} seconds")
        self._raise_failure()
        return self.path

    def wait_read(self, timeout: float | None = None) -> None:
        """Block until the arrays have been read, or will not be any more: they may be overwritten and donated then.

        Raises `TimeoutError` after `timeout` seconds. Says nothing of a failure.
        """
        self._refuse_children()
        if not self._work.was_read.wait(timeout):
            raise TimeoutError(f"the arrays have not been read after {timeout} seconds")

    def _raise_failure(self) -> None:
        error = self._work.error
        if error is not None:
            self._told = True
            # Without the frames of whoever was told before.
            raise error.with_traceback(None)

    def _refuse_children(self) -> None:
        if os.getpid() != self._work.process:
            raise BackendUnavailableError(
                f"the save to {str(self.path)!r} cannot be waited for here: this process was forked after it was started. "
                "Wait for it in the parent"
            )

    def __repr__(self) -> str:
        work = self._work
        state = "failed" if work.error is not None else "done" if work.ended.is_open() else "under way"
        return f"<Save to {str(self.path)!r}: {in_words(work.written)} of {in_words(self.nbytes)} written, {state}>"

    def __del__(self) -> None:
        # It says so, and no more. Of a constructor that was cut off nobody has had the handle.
        work = self.__dict__.get("_work")
        if work is not None and work.error is not None and not self._told:
            work.say_failed()


class _Piece(NamedTuple):
    """Part of a file: bytes of arrays, one behind the other."""

    offset: int
    nbytes: int
    spans: list[Span]


@final
class _Plan(NamedTuple):
    """`headers`: what stands before the arrays: before all of them, or in an archive before each. `order`: see `FileLayout`."""

    headers: list[bytes]
    order: list[int]
    sizes: list[int]
    members: list[str]
    """Of an archive; else empty."""
    nbytes: int

    def pieces(self, nbytes: int) -> Iterator[_Piece]:
        """Iterate the pieces of a file that is no archive, of at most so many bytes."""
        offset = start = len(self.headers[0])
        spans: list[Span] = []
        for index in self.order:
            at = 0
            while at < self.sizes[index]:
                taken = min(self.sizes[index] - at, start + nbytes - offset)
                spans.append(Span(index, at, taken))
                at, offset = at + taken, offset + taken
                if offset == start + nbytes:
                    yield _Piece(start, offset - start, spans)
                    start, spans = offset, []
        if spans:
            yield _Piece(start, offset - start, spans)

    def by_member(self, nbytes: int) -> Iterator[list[_Piece]]:
        """Iterate the pieces of each member of an archive. The writer knows where they belong."""
        for index, size in enumerate(self.sizes):
            starts = range(0, size, nbytes)
            yield [_Piece(0, min(nbytes, size - start), [Span(index, start, min(nbytes, size - start))]) for start in starts]


def _planned(file: Path, parts: Named, reader: ByteReader, texts: dict[str, str]) -> _Plan:
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in reader.described]
    order = list(range(len(sizes)))
    members: list[str] = []
    match file.suffix.lower():
        case ".safetensors":
            layout = safetensors_layout(parts.names, reader.described, texts)
            headers, order = [layout.header], layout.order
        case ".npy":
            headers = [npy_header(parts.names[0], *reader.described[0])]
        case _:
            headers = [npy_header(name, *alike) for name, alike in zip(parts.names, reader.described, strict=True)]
            members = [_member(name) for name in parts.names]
    return _Plan(headers, order, sizes, members, sum(sizes))


def _member(name: str) -> str:
    """Return what an archive calls an array. Raises `ValueError` for a name that it would not give back."""
    if not name.isprintable() or len(name.encode()) > LONGEST_MEMBER:
        raise ValueError(f"{name[:80]!r} is no name for an array in an archive: it is too long, or has unprintable characters")
    return f"{name}.npy"


def _texts(file: Path, parts: Named, metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return what goes into the file's metadata. Raises `TypeError` and `ValueError` for what has no place there."""
    texts = dict(metadata or {})
    kind = file.suffix.lower()
    if kind == ".npy" and parts.spec is not None:
        raise ValueError(f"{str(file)!r}: a .npy file holds one array, and this is a tree. Save it as .safetensors or .npz")
    if kind != ".safetensors" and (texts or parts.riders):
        found = "metadata" if texts else f"{next(iter(parts.riders))!r}, which is no array"
        raise ValueError(f"{str(file)!r}: a {kind} file has no place for {found}. Save it as .safetensors, or leave it out")
    for key, text in texts.items():
        if not (isinstance(key, str) and isinstance(text, str)) or key == VALUES:
            raise TypeError(f"metadata: {key!r}: {text!r}: expected text for both, and a key other than {VALUES!r}")
    for name, value in parts.riders.items():
        # Of a class that is also a number or text, JSON keeps the number.
        if type(value) not in (*JSON, bool):
            raise TypeError(
                f"{name!r} is a {type(value).__qualname__}, and a file has a place for arrays, text and numbers. Leave it out"
            )
    if parts.riders:
        texts[VALUES] = json.dumps(parts.riders)
    return texts


@final
class _Work:
    """What the threads of one save share, and who owns its reader from the start on. It does not refer to the handle."""

    def __init__(
        self, file: Path, plan: _Plan, reader: ByteReader, memory: int, rate_limit: float | None, keep: int | None
    ) -> None:
        self.file = file
        self.plan = plan
        self.process = os.getpid()
        self.written = 0
        self.error: Exception | None = None
        self.was_read, self.ended = Latch(), Latch()
        # Now: the working directory may be another one when the threads come to it. And what a symbolic link leads to is replaced.
        self._target = Path(os.path.realpath(file))
        self._keep = keep
        self._reader = reader
        self._rate_limit = rate_limit
        self._piece_nbytes = max(LEAST_NBYTES, min(PIECE_NBYTES, memory // 2, plan.nbytes))
        most = 1 if plan.members else -(-plan.nbytes // self._piece_nbytes)
        self._threads = max(1, min(most, MOST_THREADS, max(1, memory // self._piece_nbytes), max(2, usable_cores())))
        self._left = self._threads
        self._pieces: Iterator[_Piece] = iter(())
        self._lock = threading.Lock()
        self._issued = self._read = 0
        self._began = time.monotonic()
        self._temporary: TemporaryFile | None = None
        self._before: _Work | None = None
        self._handle: weakref.ref[Save] | None = None
        self._fate: dict[None, str] = {}
        """Whether the threads are started, or the caller was interrupted before that: who comes first says it, in one step."""

    def start(self) -> Save:
        """Start the threads, and return the handle."""
        try:
            handle = Save(self)
            self._handle = weakref.ref(handle)
            # Interrupted from here on, the caller has no handle, and the file is written all the same.
            uninterrupted(self._start_threads)
            return handle
        except BaseException:
            if self._fate.setdefault(None, "dropped") == "dropped":
                self._reader.close()
            raise

    def _start_threads(self) -> None:
        """On a thread that no interrupt comes to. They are no daemons: the interpreter waits for them when it ends."""
        if self._fate.setdefault(None, "started") != "started":
            return
        self._reader.hand_over()
        series = f"{self._target.parent}/{_series(self._target.name)}"
        self._before, _newest[series] = _newest.get(series), self
        started = 0
        try:
            while started < self._threads:
                threading.Thread(target=self._run, name="xferlib-save", daemon=False).start()
                started += 1
        except RuntimeError as error:
            # Those that run do it as well, but slower.
            if not started:
                self._fail(error)
        for _ in range(self._threads - started):
            self._leave()

    def say_failed(self) -> None:
        """Warn that nobody has asked about the failure."""
        said = f"the save to {str(self.file)!r} failed, and nobody has asked for its result: {self.error}"
        warnings.warn(said, RuntimeWarning, 2)

    def _run(self) -> None:
        self._reader.join()
        try:
            self._take_part()
        except BaseException as error:
            self._fail(error)
        finally:
            self._reader.leave()
            self._leave()

    def _take_part(self) -> None:
        with self._lock:
            memory = self._begin() if self._temporary is None and self.error is None else None
        if memory is None:
            with suppress(AllocationError):
                # Others go on without this thread where there is no more.
                memory = self._reader.empty(self._piece_nbytes, wait=False)
        if memory is not None and self.error is None:
            self._write(memory)

    def _begin(self) -> Array:
        """Begin the file, and return memory to read into: less than was thought of, where the pool has no more."""
        temporary = TemporaryFile(self._target)
        self._temporary = temporary
        temporary.check_room(self.plan.nbytes + sum(map(len, self.plan.headers)))
        memory = None
        while memory is None:
            smallest = self._piece_nbytes // 2 < LEAST_NBYTES
            try:
                memory = self._reader.empty(self._piece_nbytes, wait=smallest)
            except AllocationError:
                if smallest:
                    raise
                self._piece_nbytes //= 2
        self._pieces = self.plan.pieces(self._piece_nbytes)
        if not self.plan.members:
            temporary.write(memoryview(self.plan.headers[0]), 0)
        return memory

    def _write(self, memory: Array) -> None:
        assert self._temporary is not None
        if not self.plan.members:
            for offset, data in self._data(memory):
                self._temporary.write(data, offset)
                self._note_written(data.nbytes)
            return
        with self._temporary.as_file() as stream, zipfile.ZipFile(stream, "w") as archive:
            by_member = self.plan.by_member(memory.nbytes)
            for member, header, pieces in zip(self.plan.members, self.plan.headers, by_member, strict=True):
                self._pieces = iter(pieces)
                with archive.open(member, "w", force_zip64=True) as entry:
                    entry.write(header)
                    for _, data in self._data(memory):
                        entry.write(data)
                        self._note_written(data.nbytes)

    def _data(self, memory: Array) -> Iterator[tuple[int, memoryview]]:
        """Iterate what this thread is to write, and where: the next pieces that no other has taken, read into this memory."""
        while self.error is None:
            with self._lock:
                piece = next(self._pieces, None)
                if piece is None:
                    return
                transfer = self._start_read(piece, memory)
            data = transfer.result()
            self._note_read(piece.nbytes)
            yield piece.offset, memoryview(data)

    def _start_read(self, piece: _Piece, memory: Array) -> Any:
        if self._rate_limit is not None:
            ahead = self._issued / self._rate_limit - (time.monotonic() - self._began)
            if ahead > 0:
                time.sleep(ahead)
        transfer = self._reader.read(piece.spans, memory)
        self._issued += piece.nbytes
        if self._issued == self.plan.nbytes:
            # From here on the copies are known as what they are.
            self._reader.close()
        return transfer

    def _note_read(self, nbytes: int) -> None:
        with self._lock:
            self._read += nbytes
            if self._read == self.plan.nbytes:
                # Else they are held until somebody transfers something.
                self._reader.let_go()
                self.was_read.open()

    def _note_written(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                known = error if isinstance(error, Exception) else RuntimeError(f"the save was cut off: {error!r}")
                # Its frames would hold memory for as long as the handle.
                self.error = known.with_traceback(None)

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
        finally:
            with suppress(OSError):
                if self._temporary is not None:
                    self._temporary.close()
            self._temporary = None
            self.ended.open()
        handle = self._handle
        if self.error is not None and (handle is None or handle() is None):
            self.say_failed()

    def _publish(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            # It must not come behind this one, which is newer.
            before.ended.wait()
        if self.error is None and self._temporary is not None:
            self._temporary.publish()
            if self._keep is not None:
                _remove_older(self._target, self._keep)


def _numbers(stem: str) -> list[re.Match[str]]:
    return list(re.finditer(r"\d+", stem))


def _series(name: str) -> str:
    """Return what the names of a series of files have in common: what is around their last number."""
    stem, _, suffix = name.rpartition(".")
    numbers = _numbers(stem)
    return name if not numbers else f"{stem[: numbers[-1].start()]}*{stem[numbers[-1].end() :]}.{suffix}"


def _remove_older(file: Path, keep: int) -> None:
    """Remove all files of a series but the newest, of which this is one. One that cannot be removed is said, and stays."""

    def changed(path: Path) -> int:
        # Another save may have removed it.
        with suppress(FileNotFoundError):
            return path.stat().st_mtime_ns
        return 0

    series = _series(file.name)
    others = [path for path in file.parent.iterdir() if path != file and _series(path.name) == series and path.is_file()]
    others.sort(key=changed)
    for path in others[: max(0, len(others) - (keep - 1))]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"{str(path)!r} is older than is to be kept, and could not be removed: {error}", RuntimeWarning, 2)


_newest: weakref.WeakValueDictionary[str, _Work] = weakref.WeakValueDictionary()
"""By the series, the newest save."""
# The threads stayed with the parent.
os.register_at_fork(after_in_child=_newest.clear)
