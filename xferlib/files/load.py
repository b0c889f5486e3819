"""Files of arrays to the device: what files hold is mapped into memory, not read, and put as it is.

The files' pages are pageable memory to `put`, so files of any size pass through as much pinned memory as the stager may have. The
engine reads runs of bytes from the file straight into its chunks, and other ranges through the mapping. Arrays are put piece by
piece: while one is on its way, the system reads those behind it, and those before it are converted.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, final, overload

import numpy as np

from xferlib.checks import translated
from xferlib.errors import REFUSALS, AllocationError, CapabilityError, XferError
from xferlib.files.ahead import FileRange, ReadAhead, Unmapping
from xferlib.files.dtypes import Conversions, DtypeRule
from xferlib.files.names import NamedLeaves, named_leaves
from xferlib.files.outcome import is_saved_to
from xferlib.files.patterns import check_patterns
from xferlib.files.progress import Tell, told
from xferlib.files.readers import Reader, shown
from xferlib.files.shards import Paths, Selection, select
from xferlib.memory.arrays import Array
from xferlib.protocol import HostStager
from xferlib.stager import Stager, check_stager
from xferlib.tree import Trees, trees_of, unflatten, with_riders
from xferlib.typed import TreeT

__all__ = ["Puts", "load"]

T = TypeVar("T")

SMALL_NBYTES = 64 << 10
"""Bytes. So small ones are put together: some frameworks need a compilation for each group of them."""
PIECE_NBYTES = 128 << 20
"""Bytes of arrays that are put at once, unless one array has more: enough that nothing waits between two of them."""
SMALL_AT_ONCE_NBYTES = 8 << 20
"""Bytes of small arrays that are read into memory, and put at once."""
TRIM_AFTER_NBYTES = 1 << 30
"""Bytes. When so much was converted, the memory of the arrays before conversion is given back: the next ones may be of another
size, and what they become is made by the framework, which has a pool of its own."""
PIECES_AHEAD = 2
"""So many pieces are on their way at once, or twice as many that together have no more bytes, and so many are read ahead.
Of arrays that are read into memory, one piece is on its way while the next is read."""


class Started(Protocol):
    """What `Puts.put` returns: as a `Transfer`."""

    @property
    def value(self) -> Any:
        """The device arrays by name. Asked once, by the loading thread, when `synchronize` has returned."""

    def synchronize(self) -> None:
        """Block until the copies are done. Raises if one failed."""


class Puts(Protocol):
    """What may stand in a stager's place: it puts the arrays of files elsewhere than onto one device.

    Attributes:
        backend: Says which dtypes there are, and what the device arrays are.
        whole: Whether all bytes of the arrays are read. If so, the system is told to read ahead.
        patterns: Patterns of names that the caller gave, by the argument, in order: each must have an effect.
    """

    @property
    def backend(self) -> HostStager[Any]: ...

    @property
    def whole(self) -> bool: ...

    @property
    def patterns(self) -> Mapping[str, Collection[str]]: ...

    def put(self, arrays: dict[str, Array], like: dict[str, Any]) -> Started:
        """Start copying host arrays that nobody writes to, and hold them. `like`: what the caller's tree has for each, or nothing.

        Called by the loading thread, for up to four groups before the first is done.
        """

    def idle(self) -> None:
        """Block until all that was put is done, also where an interrupt has lost what `put` returned. Called by the loading thread,
        where a put may have been cut off. Raises `XferError` if it cannot wait."""

    def wait(self, arrays: list[Any]) -> None:
        """Block until what computes these device arrays is done. Raises one of the backend's `failures`."""

    def trim(self) -> None:
        """Give the device the memory of arrays that are gone."""


@overload
def load(
    path: Paths, stager: Stager | Puts, *, like: TreeT, dtype: DtypeRule | None = None, progress: bool | Tell | None = None
) -> TreeT: ...
@overload
def load(
    path: Paths,
    stager: Stager | Puts,
    *,
    names: None = None,
    like: None = None,
    dtype: DtypeRule | None = None,
    progress: bool | Tell | None = None,
) -> Any: ...
@overload
def load(
    path: Paths,
    stager: Stager | Puts,
    *,
    names: Iterable[str],
    like: None = None,
    dtype: DtypeRule | None = None,
    progress: bool | Tell | None = None,
) -> dict[str, Any]: ...
def load(
    path: Paths,
    stager: Any = None,
    *,
    names: Iterable[str] | None = None,
    like: Any = None,
    dtype: DtypeRule | None = None,
    progress: bool | Tell | None = None,
) -> Any:
    """Put what files hold, wait until it is on the device, and return it.

    `path`: a file; several; a pattern such as `"model-*.safetensors"`; or the index of a model in several files, such as
    `"model.safetensors.index.json"`. `.npy` gives an array, in C order; all else a dict of arrays by name, in the order of the
    files or of the index. Each name must be in one file only, and an index must fit its files, which are in its folder.

    `names`: the dict has only these, in their order. One that ends in "." stands for all that begin with it: `"layers.0."`.
    Nothing else is read. By an index, only the files that hold them are opened; without one, the headers of all.

    `like`: a tree of arrays, or of whatever has shapes and dtypes, as it was given to `save`: it comes back with what the files
    hold, text and numbers that rode along among it. Where it has a number, the files may have an array of shape () of that kind: it
    comes back as a number. The files may hold more. Raises `ValueError` where they lack an array, or have another shape or dtype.

    `dtype`: what arrays of floating point are converted to, or a dict of dtypes by patterns of names (`"*.bias"`), of which the
    first that fits counts; a pattern without effect is refused. The device converts, as `astype` of its arrays does, on the calling
    thread's current stream: first the arrays cross as they are. Beside the result, the device has at most 1 GiB more at a time and
    two pieces of 128 MiB, or two arrays that are larger. The stager is trimmed meanwhile. Raises `CapabilityError` where its arrays
    have no `astype`.

    `progress`: True for a bar on the standard error stream, or a function that is called with the bytes done and those of all, as
    the files have them, on the calling thread. What it raises ends the load.

    Members of an `.npz` pass through host memory one by one, small ones 8 MiB at a time; files of the other formats are never read
    as a whole, and must not be changed meanwhile. Whatever is raised, nothing reads the files any more, unless an interrupt cut
    the wait for that.

    Raises `ValueError` for files that are damaged or of another format, `TypeError` for dtypes that the backend does not have and
    for Python objects, `ImportError` with what to type where a package is missing or too old, and as `Stager.put` does.
    """
    if not hasattr(stager, "wait"):
        check_stager(stager, path)
    if like is not None and names is not None:
        raise ValueError("names together with like: like says what to load. Leave one of them out")
    if isinstance(names, str):
        raise TypeError(f"names={names!r} is one string. Pass a list of names")
    if names is not None and not hasattr(names, "__iter__"):
        raise TypeError(f"names={names!r}: expected a list of names")
    puts = _Direct(stager) if isinstance(stager, Stager) else stager
    conversions = Conversions(dtype)
    for target in conversions.targets:
        puts.backend.check_dtype(target)
    trees = trees_of(puts.backend)
    like_leaves = None if like is None else named_leaves(trees, like)
    wanted = (None if names is None else list(names)) if like_leaves is None else like_leaves.names
    with ExitStack() as files:
        try:
            selection = select(path, wanted, files)
        except FileNotFoundError as error:
            if error.filename is None or not is_saved_to(Path(error.filename)):
                raise
            why = "a save to it is under way, and the file gets its name at the end. Call result() of the save first"
            raise FileNotFoundError(errno.ENOENT, why, error.filename) from error
        if selection.is_unnamed and names is not None:
            raise ValueError(f"{selection.shown} holds one array, without a name. Leave names out")
        likes = {} if like_leaves is None else _likes(selection, like_leaves)
        ahead = files.enter_context(ReadAhead()) if puts.whole else None
        behind = files.enter_context(Unmapping())
        tell = files.enter_context(told(progress, selection.readers[0].file.name if len(selection.readers) == 1 else "files"))
        conversions.check(selection.known)
        for argument, patterns in puts.patterns.items():
            check_patterns(argument, patterns, selection.known)
        # Now: whatever is refused here would be refused behind all that was put.
        riders = [] if like_leaves is None else _riders(selection, like_leaves)
        found = _Load(selection, puts, conversions, trees, likes, tell, behind).run(ahead)
        if like_leaves is not None:
            return unflatten(with_riders(like_leaves.spec, riders), [found[name] for name in like_leaves.names])
    return next(iter(found.values())) if selection.is_unnamed else found


@final
class _Direct:
    """A stager, which puts onto its device."""

    whole = True
    patterns: ClassVar[Mapping[str, Collection[str]]] = {}

    def __init__(self, stager: Stager) -> None:
        self.backend = stager.backend
        self._stager = stager

    def put(self, arrays: dict[str, Array], like: dict[str, Any]) -> Started:
        # Nobody else has the memory, so put need not wait until the CPU has read it.
        return self._stager.put(arrays, borrow=True)

    def idle(self) -> None:
        self._stager.idle()

    def wait(self, arrays: list[Any]) -> None:
        with self._stager.reader(arrays) as reader:
            reader.wait()

    def trim(self) -> None:
        self._stager.trim()


class _OnePut(NamedTuple):
    """Arrays that are put at once, all of one file."""

    reader: Reader
    names: list[str]
    nbytes: int


@final
class _Load:
    """One load, from the open files to the arrays on the device."""

    def __init__(
        self,
        selection: Selection,
        puts: Puts,
        conversions: Conversions,
        trees: Trees,
        likes: dict[str, Any],
        tell: Tell | None,
        behind: Unmapping,
    ) -> None:
        self._selection = selection
        self._puts = puts
        self._conversions = conversions
        self._trees = trees
        self._likes = likes
        self._tell = tell
        self._behind = behind
        self._sizes = {name: reader.nbytes(name) for name, reader in selection.arrays.items()}
        self._total, self._done = sum(self._sizes.values()), 0
        self._found: dict[str, Any] = {}
        self._under_way: deque[tuple[_OnePut, Started]] = deque()
        self._putting = False
        """Whether a put may have started what is not under way above."""
        self._gone = 0
        """Bytes of arrays that were converted since memory was given back."""

    def run(self, ahead: ReadAhead | None) -> dict[str, Any]:
        """Load, and return the arrays by name, in order."""
        if self._likes:
            for name, reader in self._selection.arrays.items():
                if not reader.in_memory:
                    # Now: it costs nothing, and what is refused last would be refused behind all that was put.
                    self._check_alike(reader, name, reader.array(name))
        self._told()
        try:
            self._load(ahead)
        except BaseException as error:
            self._settle(is_lost=self._putting and not isinstance(error, REFUSALS))
            raise
        return {name: self._found[name] for name in self._selection.arrays}

    def _load(self, ahead: ReadAhead | None) -> None:
        for piece in _ahead(self._pieces(), ahead):
            arrays = {name: self._array(piece.reader, name) for name in piece.names}
            while self._under_way and not self._has_room(piece):
                self._finish_oldest()
            while not self._start(piece, arrays):
                self._finish_oldest()
            # Otherwise the next one would be read while this name still has the last.
            del arrays
        while self._under_way:
            self._finish_oldest()
        if self._gone:
            self._puts.trim()

    def _start(self, piece: _OnePut, arrays: dict[str, Array]) -> bool:
        """Put a piece. False: there is no memory for it while others are on their way, which may leave some when they are done."""
        self._putting = True
        try:
            self._under_way.append((piece, self._put(piece, arrays)))
        except AllocationError:
            if not self._under_way:
                raise
            self._putting = False
            return False
        self._putting = False
        return True

    def _has_room(self, piece: _OnePut) -> bool:
        """Tell whether a piece may be put beside those on their way. While several small ones are copied, there is more time to get
        memory of the device for it."""
        count, nbytes = len(self._under_way), sum([other.nbytes for other, _ in self._under_way])
        if piece.reader.in_memory:
            return False
        return count < PIECES_AHEAD or (count < 2 * PIECES_AHEAD and nbytes + piece.nbytes <= PIECES_AHEAD * PIECE_NBYTES)

    def _settle(self, *, is_lost: bool) -> None:
        """Wait for what is under way: it reads files that the caller may change next. `is_lost`: so may a put that nobody has."""
        # A stager that another thread closes refuses what is asked of it below.
        for _, started in self._under_way:
            with suppress(Exception):
                started.synchronize()
        # Only then, since this waits for transfers of others, too, and they may wait for the caller.
        if is_lost:
            with suppress(XferError):
                self._puts.idle()

    def _pieces(self) -> Iterator[_OnePut]:
        of_reader: dict[int, list[str]] = {id(reader): [] for reader in self._selection.readers}
        for name, reader in self._selection.arrays.items():
            of_reader[id(reader)].append(name)
        for reader in self._selection.readers:
            names = of_reader[id(reader)]
            # In the order of the file, whatever the caller's.
            wanted = set(names)
            kinds: dict[tuple[bool, bool], list[str]] = {(False, False): [], (False, True): [], (True, False): [], (True, True): []}
            for name in reader.names:
                if name in wanted:
                    kinds[self._sizes[name] > SMALL_NBYTES, self._changes(reader, name)].append(name)
            # Small ones that stay share memory on the device, and would keep that of those that are converted.
            for (large, _), alike in kinds.items():
                yield from self._split(reader, alike, (0 if large else SMALL_AT_ONCE_NBYTES) if reader.in_memory else PIECE_NBYTES)

    def _changes(self, reader: Reader, name: str) -> bool:
        if not self._conversions.targets:
            return False
        dtype = reader.dtype(name)
        return self._conversions.of(name, dtype) != dtype

    def _split(self, reader: Reader, names: list[str], most: int) -> Iterator[_OnePut]:
        """Iterate pieces of at most so many bytes, unless one array has more."""
        taken: list[str] = []
        nbytes = 0
        for name in names:
            if taken and nbytes + self._sizes[name] > most:
                yield _OnePut(reader, taken, nbytes)
                taken, nbytes = [], 0
            taken.append(name)
            nbytes += self._sizes[name]
        if taken:
            yield _OnePut(reader, taken, nbytes)

    def _array(self, reader: Reader, name: str) -> Array:
        array = reader.array(name)
        if self._likes and reader.in_memory:
            self._check_alike(reader, name, array)
        return array

    def _check_alike(self, reader: Reader, name: str, array: Array) -> None:
        like = self._likes[name]
        expected = self._trees.describe(like)
        if expected is None:
            raise TypeError(f"like: {name!r} is a {type(like).__qualname__}: expected something with a shape and a dtype")
        got = array.shape, self._conversions.of(name, array.dtype)
        if got != expected:
            (shape, dtype), (other, kind) = expected, got
            advice = f". To convert it, pass dtype={{{name!r}: {str(dtype)!r}}}, or give like what the file has"
            raise ValueError(
                f"{shown(reader.file)}: {name!r} is of shape {other} and dtype {kind}, and like has {shape} and {dtype}"
                f"{advice if shape == other else ''}"
            )

    def _put(self, piece: _OnePut, arrays: dict[str, Array]) -> Started:
        try:
            return self._puts.put(arrays, {name: self._likes[name] for name in arrays if name in self._likes})
        except (TypeError, ValueError) as error:
            where = f"at {piece.names[0]!r} in" if len(piece.names) == 1 and piece.reader.in_memory else "in"
            error.add_note(f"{where} {shown(piece.reader.file)}")
            if isinstance(error, TypeError) and any(self._changes(piece.reader, name) for name in piece.names):
                error.add_note(
                    "dtype= converts on the device, which first has the array as the file does. Convert the file instead"
                )
            raise

    def _finish_oldest(self) -> None:
        piece, started = self._under_way[0]
        started.synchronize()
        arrays = started.value
        del self._under_way[0], started
        # While the others are copied. The reader holds the mapping.
        self._behind(_file_ranges(piece), piece.reader)
        self._found |= self._converted(piece, arrays)
        self._done += piece.nbytes
        self._told()

    def _converted(self, piece: _OnePut, arrays: dict[str, Any]) -> dict[str, Any]:
        if not self._conversions.targets:
            return arrays
        changed: list[Any] = []
        for name in piece.names:
            target = self._conversions.of(name, self._dtype(arrays[name]))
            if target != self._dtype(arrays[name]):
                arrays[name] = self._as(name, arrays[name], target)
                changed.append(arrays[name])
                self._gone += self._sizes[name]
        # Nothing refers to the arrays that were converted any more: their memory can be used for the pieces to come.
        if changed:
            with translated(self._puts.backend.failures, "arrays could not be converted"):
                self._puts.wait(changed)
        if self._gone >= TRIM_AFTER_NBYTES:
            self._puts.trim()
            self._gone = 0
        return arrays

    def _dtype(self, array: Any) -> np.dtype[Any]:
        described = self._trees.describe(array)
        assert described is not None, "it was put"
        return described[1]

    def _as(self, name: str, array: Any, dtype: np.dtype[Any]) -> Any:
        backend = self._puts.backend
        convert: Callable[..., Any] | None = getattr(backend, "convert", None)
        astype: Callable[..., Any] | None = getattr(array, "astype", None) if convert is None else partial(convert, array)
        if astype is None:
            raise CapabilityError(
                f"dtype: device arrays of backend {backend.name!r} have no astype that would convert them. "
                "Leave dtype out, and convert them with a kernel of yours, or convert the file"
            )
        failed = f"{name!r} could not be converted to {dtype}"
        try:
            return astype(dtype)
        except MemoryError as error:
            raise AllocationError(f"{failed}: {error}") from error
        except backend.failures as error:
            raise XferError(f"{failed}: {error}") from error

    def _told(self) -> None:
        if self._tell is not None:
            self._tell(self._done, self._total)


def _ahead(pieces: Iterator[_OnePut], ahead: ReadAhead | None) -> Iterator[_OnePut]:
    """Have each piece read while those before it are put."""
    waiting: deque[_OnePut] = deque()
    for piece in pieces:
        if ahead is not None:
            ahead(_file_ranges(piece))
        waiting.append(piece)
        if len(waiting) > PIECES_AHEAD:
            yield waiting.popleft()
    yield from waiting


def _file_ranges(piece: _OnePut) -> Iterator[FileRange]:
    """Iterate where the arrays of a piece are mapped, if anything is to be done about that."""
    if piece.reader.pinned:
        return iter(())
    return (file_range for file_range in map(piece.reader.file_range, piece.names) if file_range is not None)


def _likes(selection: Selection, like_leaves: NamedLeaves) -> dict[str, Any]:
    """Return what `like` has for each array. Raises `ValueError` for a tree where the file's one array has no name."""
    if selection.is_unnamed and like_leaves.spec is not None:
        raise ValueError(f"{selection.shown} holds one array, and like is a tree")
    likes = dict(zip(like_leaves.names, like_leaves.leaves, strict=True))
    for name in likes:
        if name not in selection.arrays:
            raise ValueError(f"{selection.shown} has no array named {name!r}")
    return likes


def _riders(selection: Selection, like_leaves: NamedLeaves) -> list[Any]:
    """Return what rode along when the files were saved, in the order of `like`."""
    values = [reader.values() for reader in selection.readers] if like_leaves.riders else []
    return [_as(selection, name, values, value) for name, value in like_leaves.riders.items()]


def _as(selection: Selection, name: str, values: list[dict[str, Any]], like: Any) -> Any:
    """Return one value. Raises `ValueError` if it is not there or of another type, and where two files do not agree."""
    said = selection.shown
    found = [of_file[name] for of_file in values if name in of_file]
    found = found or [_number(reader, name, like) for reader in selection.readers if name in reader.names]
    if not found:
        raise ValueError(f"{said} has no value named {name!r}. Leave it out of like, and add it afterwards")
    for value in found:
        if type(value) is not type(like):
            kinds = type(value).__qualname__, type(like).__qualname__
            raise ValueError(f"{said}: {name!r} is of type {kinds[0]} there, and of type {kinds[1]} in like")
    # Not a number is the same in both, too.
    if any(repr(value) != repr(found[0]) for value in found):
        raise ValueError(f"{said}: {name!r} has one value in one file, and another in another. Load one of them by itself")
    return found[0]


def _number(reader: Reader, name: str, like: Any) -> Any:
    """Return the number that an array of shape () is: a step counter begins as a number, and the first step makes an array of it.

    Raises `ValueError` for an array that is none of the type of `like`.
    """
    array = reader.array(name)
    file_range = reader.file_range(name)
    if array.shape == () and file_range is not None:
        # Not through the mapping: where the file was cut off meanwhile, that would end the process.
        raw = os.pread(file_range.descriptor, file_range.nbytes, file_range.start)
        if len(raw) < file_range.nbytes:
            raise ValueError(f"{shown(reader.file)} was cut off while it was loaded")
        array = np.frombuffer(raw, array.dtype).reshape(())
    number = array.item() if array.shape == () else None
    if type(number) is not type(like):
        kind = f"an array of shape {array.shape} and dtype {array.dtype}"
        raise ValueError(f"{shown(reader.file)}: {name!r} is {kind}, and a {type(like).__qualname__} in like")
    return number
