"""Files of arrays to the device: what a file holds is mapped into memory, not read, and put as it is.

The file's pages are pageable memory to `put`, so a file of any size passes through as much pinned memory as the stager may have.
Nothing is converted on the way, and nothing in a file is executed.
"""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, overload

import numpy as np
from numpy.lib import format as npy

from xferlib.files.formats import EXTENSIONS, PLAIN, SUFFIXES, VALUES
from xferlib.files.names import ALONE, named
from xferlib.memory.arrays import Array
from xferlib.stager import Stager, check_stager
from xferlib.transfer import Transfer
from xferlib.tree import trees_of, unflatten, with_riders
from xferlib.typed import TreeT

__all__ = ["load"]

T = TypeVar("T")

INSTALL = 'Install it with: pip install "safetensors>=0.8" "ml-dtypes>=0.5"'
OF_DAMAGE = (None, errno.EINVAL)
"""Numbers of an `OSError` for which the file's content is to blame: a decoder has none, an impossible seek has this one."""


class HoldsObjects(Exception):
    """The file is sound, but nobody can transfer what it holds."""


class Tensor(NamedTuple):
    """A tensor of a safetensors file, as its header says."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@overload
def load(path: str | os.PathLike[str], stager: Stager, *, like: TreeT) -> TreeT: ...
@overload
def load(path: str | os.PathLike[str], stager: Stager, *, names: None = None, like: None = None) -> Any: ...
@overload
def load(path: str | os.PathLike[str], stager: Stager, *, names: Iterable[str], like: None = None) -> dict[str, Any]: ...
def load(path: str | os.PathLike[str], stager: Stager, *, names: Iterable[str] | None = None, like: Any = None) -> Any:
    """Put what a file holds, wait until it is on the device, and return it.

    `.npy` gives an array, in C order; `.npz` and `.safetensors` give a dict of arrays by name, in the file's order. With `names` it
    has only these, in their order. Members of an `.npz` pass through host memory one by one; files of the other formats are never
    read as a whole, and must not be changed meanwhile.

    `like`: a tree of arrays, or of whatever has shapes and dtypes, as it was given to `save`: it comes back with what the file
    holds, text and numbers that rode along among it. The file may hold more. Raises `ValueError` where it lacks an array, or has
    another shape or dtype.

    Raises `ValueError` for a file that is damaged or of another format, `TypeError` for dtypes that the backend does not have and
    for Python objects, `ImportError` with what to type where a package is missing or too old, and as `Stager.put` does.
    """
    check_stager(stager, path)
    file = Path(path)
    if like is not None:
        if names is not None:
            raise ValueError("names together with like: like says what to load. Leave one of them out")
        return _load_like(file, stager, like)
    return _load(file, stager, names)


def _load(file: Path, stager: Stager, names: Iterable[str] | None) -> Any:
    if isinstance(names, str):
        raise TypeError(f"names={names!r} is one string. Pass a list of names")
    with _opened(file) as opened:
        return _load_opened(file, opened, stager, None if names is None else list(names))


def _load_opened(file: Path, opened: Path, stager: Stager, wanted: list[str] | None) -> Any:
    match file.suffix.lower():
        case ".npy" if wanted is not None:
            raise ValueError(f"{str(file)!r} holds one array, without a name. Leave names out")
        case ".npy":
            return _put(file, stager, _mapped(file, opened)).result()
        case ".npz":
            return _load_members(file, opened, stager, wanted)
    return _load_tensors(file, opened, stager, wanted)


@contextmanager
def _opened(file: Path) -> Iterator[Path]:
    """Open a file once, and give what all readers open: another one may take its name meanwhile, as `save` has it."""
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{str(file)!r}: expected a name that ends in .npy, .npz or .safetensors, which says what is in the file")
    with file.open("rb") as stream:
        yield Path(f"/proc/self/fd/{stream.fileno()}")


def _load_like(file: Path, stager: Stager, like: Any) -> Any:
    trees = trees_of(stager.backend)
    parts = named(trees, like)
    with _opened(file) as opened:
        if file.suffix.lower() == ".npy":
            if parts.spec is not None:
                raise ValueError(f"{str(file)!r} holds one array, and like is a tree")
            found = {ALONE: _load_opened(file, opened, stager, None)}
        else:
            found = _load_opened(file, opened, stager, parts.names)
        values = _values(file, opened) if parts.riders else {}
    for name, leaf in zip(parts.names, parts.leaves, strict=True):
        expected, got = trees.describe(leaf), trees.describe(found[name])
        if expected is None:
            raise TypeError(f"like: {name!r} is a {type(leaf).__qualname__}: expected something with a shape and a dtype")
        if got != expected:
            (shape, dtype), (other, kind) = expected, got or ((), np.dtype(object))
            raise ValueError(f"{str(file)!r}: {name!r} is of shape {other} and dtype {kind}, and like has {shape} and {dtype}")
    riders = [_as(file, name, values, value) for name, value in parts.riders.items()]
    return unflatten(with_riders(parts.spec, riders), [found[name] for name in parts.names])


def _as(file: Path, name: str, values: dict[str, Any], like: Any) -> Any:
    """Return a value that rode along when the file was saved. Raises `ValueError` for one that is not there, or of another type."""
    if name not in values:
        raise ValueError(f"{str(file)!r} has no value named {name!r}. Leave it out of like, and add it afterwards")
    value = values[name]
    if type(value) is not type(like):
        kinds = type(value).__qualname__, type(like).__qualname__
        raise ValueError(f"{str(file)!r}: {name!r} is a {kinds[0]} there, and a {kinds[1]} in like")
    return value


def _values(file: Path, opened: Path) -> dict[str, Any]:
    """Return what rode along when the file was saved, by name. Nothing is executed: it is JSON."""
    if file.suffix.lower() != ".safetensors":
        return {}
    from safetensors import safe_open

    with safe_open(opened, framework="numpy") as reader:
        text = (reader.metadata() or {}).get(VALUES, "{}")
    values = _read(file, lambda: json.loads(text))
    if not isinstance(values, dict):
        raise ValueError(f"{str(file)!r} is damaged: its metadata has no values by name under {VALUES!r}")
    return values


def _mapped(file: Path, opened: Path) -> Array:
    def read() -> Array:
        with opened.open("rb") as stream:
            _check_header(stream, os.fstat(stream.fileno()).st_size)
        return np.asarray(npy.open_memmap(opened, mode="r"))

    return _read(file, read)


def _load_members(file: Path, opened: Path, stager: Stager, wanted: list[str] | None) -> dict[str, Any]:
    transfers: dict[str, Transfer[Any]] = {}
    last: Transfer | None = None
    with opened.open("rb") as stream:
        archive = _read(file, lambda: zipfile.ZipFile(stream))
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        for name in _chosen(file, list(members), wanted):
            array = _read(file, lambda name=name: _member(archive, members[name]), name)  # type: ignore[misc]  # A default binds it.
            if array is None:
                raise ValueError(f"{str(file)!r}: its member {name!r} is damaged, or no array. Leave it out with names=")
            # The one before was on its way while this one was read. No more than two are in memory.
            if last is not None:
                last.synchronize()
            last = transfers[name] = _put(file, stager, array, name)
    return {name: transfer.result() for name, transfer in transfers.items()}


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array | None:
    with archive.open(member) as stream:
        if stream.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
            return None
        stream.seek(0)
        _check_header(stream, member.file_size)
        stream.seek(0)
        return npy.read_array(stream, allow_pickle=False)


def _check_header(stream: IO[bytes], total: int) -> None:
    """Raise `ValueError` if the header promises more than there is: NumPy would first allocate memory for it.

    Raises `HoldsObjects` where NumPy would ask whether the file may be executed.
    """
    read = npy.read_array_header_1_0 if npy.read_magic(stream) == (1, 0) else npy.read_array_header_2_0
    try:
        shape, _, dtype = read(stream)
    except MemoryError as error:
        # So Python's parser calls its own limits.
        raise ValueError("its header is nested too deeply") from error
    if dtype.hasobject:
        raise HoldsObjects(f"Python objects (dtype {dtype}), which cannot be transferred. Save arrays of numbers instead")
    promised, there = math.prod(shape) * dtype.itemsize, total - stream.tell()
    if promised > there:
        raise ValueError(f"its header promises {promised} bytes, shape {shape!r} of {dtype!r}, and there are {there}")


def _load_tensors(file: Path, opened: Path, stager: Stager, wanted: list[str] | None) -> dict[str, Any]:
    tensors = _tensors(file, opened)
    names = _chosen(file, list(tensors), wanted)
    if not names:
        return {}
    raw = np.asarray(np.memmap(opened, np.uint8, "r"))
    arrays = {name: _array(file, name, tensors[name], raw) for name in names}
    found = _put(file, stager, arrays).result()
    return {name: found[name] for name in names}


def _tensors(file: Path, opened: Path) -> dict[str, Tensor]:
    """Return what the header says, in the order of the data."""
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{str(file)!r} is read with safetensors. {INSTALL}", name=error.name) from error
    if not hasattr(safe_open, "offset_keys"):
        raise ImportError(f"{str(file)!r} is read with a newer safetensors than this one. {INSTALL}", name="safetensors")
    total = opened.stat().st_size

    def describe() -> list[tuple[str, str, tuple[int, ...]]]:
        # It checks lengths and shapes, and that the tensors fill the file to its end without gap or overlap.
        with safe_open(opened, framework="numpy") as reader:
            heads = [(name, reader.get_slice(name)) for name in reader.offset_keys()]
            return [(name, head.get_dtype(), tuple(head.get_shape())) for name, head in heads]

    described = _read(file, describe)
    sizes = [_nbytes(file, kind, shape) for _, kind, shape in described]
    start = total - sum(sizes)
    tensors: dict[str, Tensor] = {}
    for (name, kind, shape), nbytes in zip(described, sizes, strict=True):
        tensors[name] = Tensor(kind, shape, start, nbytes)
        start += nbytes
    return tensors


def _nbytes(file: Path, kind: str, shape: tuple[int, ...]) -> int:
    bits = re.match(r"[A-Z]+(\d+)", kind.replace("BOOL", "U8"))
    if bits is None:
        raise ValueError(f"{str(file)!r} holds a dtype of unknown size, {kind!r}. Read it with safetensors itself")
    count = 1
    for length in shape:
        count *= length
    return count * int(bits[1]) // 8


def _array(file: Path, name: str, tensor: Tensor, raw: Array) -> Array:
    kind = tensor.kind
    if kind in PLAIN:
        dtype = np.dtype(PLAIN[kind])
    elif kind in EXTENSIONS:
        dtype = _extension(file, name, kind)
    else:
        raise TypeError(f"{str(file)!r}: {name!r} is of dtype {kind}, whose items are no whole bytes. Leave it out with names=")
    return raw[tensor.start : tensor.start + tensor.nbytes].view(dtype).reshape(tensor.shape)


def _extension(file: Path, name: str, kind: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{str(file)!r}: {name!r} is of dtype {kind}, of ml_dtypes. {INSTALL}", name="ml_dtypes"
        ) from error
    return np.dtype(getattr(ml_dtypes, EXTENSIONS[kind]))  # type: ignore[no-any-return]  # getattr knows no type


def _chosen(file: Path, found: Sequence[str], wanted: list[str] | None) -> list[str]:
    if wanted is None:
        return list(found)
    for name in wanted:
        if name not in found:
            close = difflib.get_close_matches(str(name), found, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(map(repr, found)) or 'nothing'}"
            raise ValueError(f"{str(file)!r} has no array named {name!r}. {hint}")
    return list(dict.fromkeys(wanted))


def _put(file: Path, stager: Stager, tree: Any, name: str | None = None) -> Transfer:
    try:
        # Nobody else has the memory, so put need not wait until the CPU has read it.
        return stager.put(tree, borrow=True)
    except (TypeError, ValueError) as error:
        error.add_note(f"in {str(file)!r}" if name is None else f"at {name!r} in {str(file)!r}")
        raise


def _read(file: Path, read: Callable[[], T], name: str | None = None) -> T:
    try:
        return read()
    except MemoryError:
        raise
    except HoldsObjects as error:
        if name is None:
            raise TypeError(f"{str(file)!r} holds {error}") from None
        raise TypeError(f"{str(file)!r}: its member {name!r} holds {error}, or leave it out with names=") from None
    except Exception as error:
        # Whatever it is: parsers and decoders raise nearly everything if the bytes may be anything.
        if isinstance(error, OSError) and error.errno not in OF_DAMAGE:
            raise
        raise ValueError(f"{str(file)!r} is damaged, or no {file.suffix} file: {error}") from error
