"""One file of arrays, open to be read: which arrays it has, and each of them in memory of the host.

`.npy` and `.safetensors` are mapped: nothing is read before somebody reads the array. Members of an `.npz` are read one by one.
Nothing is converted, and nothing in a file is executed. Whatever a file says, no more memory is taken than it has bytes for,
and what is wrong is said with its name.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, TypeVar, final

import numpy as np
from numpy.lib import format as npy

from xferlib.errors import AllocationError
from xferlib.files.ahead import FileRange
from xferlib.files.formats import EXTENSIONS, INSTALL, PLAIN, SUFFIXES, VALUES
from xferlib.files.locked_pages import locked_pages
from xferlib.files.names import ALONE
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.foreign import mapped
from xferlib.memory.limits import available_memory
from xferlib.words import in_words

__all__ = ["Reader", "opened", "read_json", "shown"]

T = TypeVar("T")

OF_DAMAGE = (None, errno.EINVAL)
"""Numbers of an `OSError` for which the file's content is to blame: a decoder has none, an impossible seek has this one."""
LARGEST_DEFLATION = 1032
"""Bytes that one byte of a deflated member can stand for at most: https://zlib.net/zlib_tech.html. Other methods know no limit."""
WORTH_ASKING = 64 << 20
"""Bytes: for so much the system is asked how much memory is free."""
LENGTHS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
"""For each version of the `.npy` format, the bytes that have the length of the header."""
LARGEST_HEADER = 10_000
"""Bytes: NumPy reads no longer header unless it is told to trust the file."""
LARGEST_INDEX = 32 << 20
"""Bytes. That of a model with a hundred thousand arrays has a third of it; parsed, it may take twenty times as many."""


class HoldsObjects(Exception):
    """The file is sound, but nobody can transfer what it holds."""


class Tensor(NamedTuple):
    """A tensor of a safetensors file, as its header says."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Header(NamedTuple):
    """What the header of a `.npy` file says. `nbytes`: of the data."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    nbytes: int


class Reader(Protocol):
    """An open file, until the `with` of `opened` ends. One thread.

    Attributes:
        file: What the caller called it.
        names: Of its arrays, in its order.
        in_memory: Whether `array` reads. Otherwise arrays are the file's own pages, and cost no memory.
        stream: The open file itself.
        pinned: Whether its pages are locked, so that there is nothing to be read ahead.
    """

    file: Path
    names: Sequence[str]
    in_memory: bool
    stream: IO[bytes]

    @property
    def pinned(self) -> bool: ...

    def nbytes(self, name: str) -> int:
        """Return the size of an array. Raises as `array`."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of an array. Raises as `array`."""

    def array(self, name: str) -> Array:
        """Return an array, which outlives the reader. Raises `ValueError` where it is damaged, `TypeError` where it is no array
        that NumPy has."""

    def file_range(self, name: str) -> FileRange | None:
        """Return where in the file an array's pages are; None for one that is read from front to back. Raises as `array`."""

    def pages(self) -> Array | None:
        """Return all bytes of the file; None for one that is read from front to back. Raises as `array`."""

    def values(self) -> dict[str, Any]:
        """Return what rode along when the file was saved, by name."""


@contextmanager
def opened(file: Path) -> Iterator[Reader]:
    """Open a file once: another one may take its name meanwhile, as `save` has it.

    Raises `ValueError` for what is damaged or no file of arrays, `OSError` for what cannot be opened.
    """
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{shown(file)}: expected a name that ends in .npy, .npz or .safetensors, which says what is in the file")
    with _opened(file) as stream:
        match suffix:
            case ".npy":
                yield _Npy(file, stream)
            case ".npz":
                with _read(file, lambda: zipfile.ZipFile(stream)) as archive:
                    yield _Npz(file, stream, archive)
            case _:
                yield _Safetensors(file, stream)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `ValueError` for anything else, and for a name that is in it twice; `OSError`."""
    with _opened(file) as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes > LARGEST_INDEX:
            raise ValueError(f"{shown(file)} has {nbytes} bytes, and an index has at most {LARGEST_INDEX}")
        # So much and no more, even if it grows.
        found = _read(file, lambda: json.loads(stream.read(nbytes), object_pairs_hook=_once))
    if not isinstance(found, dict):
        raise ValueError(f"{shown(file)} is damaged, or no {file.suffix} file: expected an object, got {type(found).__name__}")
    return found


def shown(file: Path) -> str:
    """Return a file's name as errors show it."""
    return repr(str(file))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {twice!r} twice")
    return found


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    # Looked at before, since a pipe would wait for whoever writes to it; and afterwards, since it may be another one by then.
    _check_kind(file, file.stat().st_mode)
    with file.open("rb") as stream:
        _check_kind(file, os.fstat(stream.fileno()).st_mode)
        yield stream


def _check_kind(file: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(mode):
        raise ValueError(f"{shown(file)} is no file: a pipe or a device has no end. Write it to a file first")


@final
class _Pages:
    """The pages of a file. The mapping lives as long as arrays over it; the stream is open as long as the reader."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._raw: Array | None = None
        self._address = 0
        self._pinned = False

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], start: int, nbytes: int, order: Literal["C", "F"] = "C") -> Array:
        return self.all()[start : start + nbytes].view(dtype).reshape(shape, order=order)

    def file_range(self, start: int, nbytes: int) -> FileRange:
        self.all()
        return FileRange(self._stream.fileno(), start, nbytes, self._address + start)

    def are_pinned(self) -> bool:
        self.all()
        return self._pinned

    def all(self) -> Array:
        if self._raw is None:
            raw = locked_pages(self._stream)
            self._pinned = raw is not None
            if raw is None:
                raw = mapped(self._stream)
            self._address = address_of(raw)
            self._raw = raw
        return self._raw


@final
class _Npy:
    """See `Reader`. One array without a name, over the pages of the file."""

    in_memory = False

    def __init__(self, file: Path, stream: IO[bytes]) -> None:
        self.file, self.stream = file, stream
        self.names: Sequence[str] = (ALONE,)
        self._pages = _Pages(stream)

        def read() -> tuple[Array, int]:
            shape, dtype, order, nbytes = _header(stream, os.fstat(stream.fileno()).st_size)
            return self._pages.array(shape, dtype, stream.tell(), nbytes, order), stream.tell()

        self._array, self._start = _read(file, read)

    def nbytes(self, name: str) -> int:
        return self._array.nbytes

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._array.dtype

    def array(self, name: str) -> Array:
        return self._array

    def file_range(self, name: str) -> FileRange | None:
        return self._pages.file_range(self._start, self._array.nbytes)

    @property
    def pinned(self) -> bool:
        return self._pages.are_pinned()

    def pages(self) -> Array | None:
        return self._pages.all()

    def values(self) -> dict[str, Any]:
        return {}


@final
class _Npz:
    """See `Reader`. The members of an archive, each read into memory."""

    in_memory = True
    pinned = False

    def __init__(self, file: Path, stream: IO[bytes], archive: zipfile.ZipFile) -> None:
        self.file, self.stream = file, stream
        self._archive = archive
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in self._members:
                raise ValueError(f"{shown(file)} is damaged, or no .npz file: it has two members named {name!r}")
            self._members[name] = member
        self.names: Sequence[str] = tuple(self._members)
        self._headers: dict[str, Header] = {}

    def nbytes(self, name: str) -> int:
        return self._header(name).nbytes

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._header(name).dtype

    def array(self, name: str) -> Array:
        def read(stream: IO[bytes], nbytes: int) -> Array:
            self._check_room(name, _header(stream, nbytes).nbytes)
            stream.seek(0)
            return npy.read_array(stream, allow_pickle=False)

        return self._of_member(name, read)

    def file_range(self, name: str) -> FileRange | None:
        # The system reads ahead by itself.
        return None

    def pages(self) -> Array | None:
        return None

    def values(self) -> dict[str, Any]:
        return {}

    def _header(self, name: str) -> Header:
        if name not in self._headers:
            self._headers[name] = self._of_member(name, _header)
        return self._headers[name]

    def _check_room(self, name: str, nbytes: int) -> None:
        if nbytes > WORTH_ASKING and nbytes > available_memory():
            sizes = f"takes {in_words(nbytes)}, and {in_words(available_memory())} are free"
            raise AllocationError(
                f"{shown(self.file)}: its member {name!r} is unpacked in memory, where it {sizes}. "
                "Unpack the archive, and load its .npy files, or save it as .safetensors"
            )

    def _of_member(self, name: str, read: Callable[[IO[bytes], int], T]) -> T:
        member = self._members[name]

        def within() -> T | None:
            if member.compress_type == zipfile.ZIP_DEFLATED and member.file_size > (member.compress_size + 1) * LARGEST_DEFLATION:
                raise ValueError(f"its {member.compress_size} bytes cannot become {member.file_size}")
            with self._archive.open(member) as stream:
                if stream.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
                    return None
                stream.seek(0)
                return read(stream, member.file_size)

        found = _read(self.file, within, name)
        if found is None:
            raise ValueError(f"{shown(self.file)}: its member {name!r} is damaged, or no array. Leave it out with names=")
        return found


def _header(stream: IO[bytes], total: int) -> Header:
    """Read the header of a `.npy` file of `total` bytes. The stream is behind it then.

    Raises `ValueError` if the header promises more than there is: NumPy would first allocate memory for it. Raises `HoldsObjects`
    where NumPy would ask whether the file may be executed.
    """
    version = npy.read_magic(stream)
    if version not in LENGTHS:
        raise ValueError(f"its version {version} is not known")
    begin = stream.tell()
    length = int.from_bytes(stream.read(LENGTHS[version]), "little")
    if length > LARGEST_HEADER:
        # NumPy would first read all of it, and then say whom to trust.
        raise ValueError(f"its header says that it is {length} bytes long, and those of arrays have at most {LARGEST_HEADER}")
    stream.seek(begin)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        shape, fortran_order, dtype = read(stream)
    except MemoryError as error:
        # So Python's parser calls its own limits.
        raise ValueError("its header is nested too deeply") from error
    if dtype.hasobject:
        raise HoldsObjects(f"Python objects (dtype {dtype}), which cannot be transferred. Save arrays of numbers instead")
    if any(length < 0 for length in shape):
        raise ValueError(f"its header has a negative length in shape {shape!r}")
    promised, there = math.prod(shape) * dtype.itemsize, total - stream.tell()
    if promised > there:
        raise ValueError(f"its header promises {promised} bytes, shape {shape!r} of {dtype!r}, and there are {there}")
    return Header(shape, dtype, "F" if fortran_order else "C", promised)


@final
class _Safetensors:
    """See `Reader`. Tensors over the pages of the file."""

    in_memory = False

    def __init__(self, file: Path, stream: IO[bytes]) -> None:
        self.file, self.stream = file, stream
        self._pages = _Pages(stream)
        self._tensors, self._metadata = _tensors(file, Path(f"/proc/self/fd/{stream.fileno()}"))
        self.names: Sequence[str] = tuple(self._tensors)

    def nbytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def dtype(self, name: str) -> np.dtype[Any]:
        return _dtype(self.file, name, self._tensors[name].kind)

    def array(self, name: str) -> Array:
        kind, shape, start, nbytes = self._tensors[name]
        dtype = _dtype(self.file, name, kind)
        return _read(self.file, lambda: self._pages.array(shape, dtype, start, nbytes))

    def file_range(self, name: str) -> FileRange | None:
        tensor = self._tensors[name]
        return _read(self.file, lambda: self._pages.file_range(tensor.start, tensor.nbytes))

    @property
    def pinned(self) -> bool:
        return _read(self.file, self._pages.are_pinned)

    def pages(self) -> Array | None:
        return _read(self.file, self._pages.all)

    def values(self) -> dict[str, Any]:
        values = _read(self.file, lambda: json.loads(self._metadata.get(VALUES, "{}")))
        if not isinstance(values, dict):
            raise ValueError(f"{shown(self.file)} is damaged: its metadata has no values by name under {VALUES!r}")
        return values


def _tensors(file: Path, opened: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what the header says, in the order of the data, and the metadata."""
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{shown(file)} is read with safetensors. {INSTALL}", name=error.name) from error
    if not hasattr(safe_open, "offset_keys"):
        raise ImportError(f"{shown(file)} is read with a newer safetensors than this one. {INSTALL}", name="safetensors")
    total = opened.stat().st_size

    def describe() -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, str]]:
        # It checks lengths and shapes, and that the tensors fill the file to its end without gap or overlap.
        try:
            with safe_open(opened, framework="numpy") as reader:
                heads = [(name, reader.get_slice(name)) for name in reader.offset_keys()]
                return [(name, head.get_dtype(), tuple(head.get_shape())) for name, head in heads], reader.metadata() or {}
        except FileNotFoundError:
            # It says so whatever keeps it from opening a file, and this one is open: the process may have no more of them.
            try:
                opened.open("rb").close()
            except OSError as refused:
                refused.filename = str(file)
                raise
            raise

    described, metadata = _read(file, describe)
    sizes = [_nbytes(file, kind, shape) for _, kind, shape in described]
    start = total - sum(sizes)
    tensors: dict[str, Tensor] = {}
    for (name, kind, shape), nbytes in zip(described, sizes, strict=True):
        tensors[name] = Tensor(kind, shape, start, nbytes)
        start += nbytes
    return tensors, metadata


def _nbytes(file: Path, kind: str, shape: tuple[int, ...]) -> int:
    bits = re.match(r"[A-Z]+(\d+)", kind.replace("BOOL", "U8"))
    if bits is None:
        raise ValueError(f"{shown(file)} holds a dtype of unknown size, {kind!r}. Read it with safetensors itself")
    count = 1
    for length in shape:
        count *= length
    return count * int(bits[1]) // 8


def _dtype(file: Path, name: str, kind: str) -> np.dtype[Any]:
    if kind in PLAIN:
        return np.dtype(PLAIN[kind])
    if kind not in EXTENSIONS:
        raise TypeError(f"{shown(file)}: {name!r} is of dtype {kind}, whose items are no whole bytes. Leave it out with names=")
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{shown(file)}: {name!r} is of dtype {kind}, of ml_dtypes. {INSTALL}", name="ml_dtypes"
        ) from error
    return np.dtype(getattr(ml_dtypes, EXTENSIONS[kind]))  # type: ignore[no-any-return]  # getattr knows no type


def _read(file: Path, read: Callable[[], T], name: str | None = None) -> T:
    try:
        return read()
    except MemoryError:
        raise
    except HoldsObjects as error:
        if name is None:
            raise TypeError(f"{shown(file)} holds {error}") from None
        raise TypeError(f"{shown(file)}: its member {name!r} holds {error}, or leave it out with names=") from None
    except Exception as error:
        # Whatever it is: parsers and decoders raise nearly everything if the bytes may be anything.
        if isinstance(error, OSError) and error.errno not in OF_DAMAGE:
            if error.filename is None:
                error.filename = str(file)
            raise
        raise ValueError(f"{shown(file)} is damaged, or no {file.suffix} file: {error}") from error
