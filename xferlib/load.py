"""Files of arrays to the device: what a file holds is mapped into memory, not read, and put as it is.

The file's pages are ordinary memory to `put`, so a file of any size passes through as much pinned memory as the stager may have.
Nothing is converted on the way, and nothing in a file is executed.
"""

from __future__ import annotations

import difflib
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from xferlib.memory.arrays import Array
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["load"]

T = TypeVar("T")

PLAIN = {
    "BOOL": "bool",
    **{f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "C64": "complex64",
}
"""What NumPy calls the dtypes of safetensors files that it has."""
EXTENSIONS = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""What ml_dtypes calls those that it adds."""
INSTALL = 'Install it with: pip install "xferlib[files]"'
DAMAGE: tuple[type[Exception], ...] = (ValueError, EOFError, zipfile.BadZipFile, zlib.error)


class Tensor(NamedTuple):
    """A tensor of a safetensors file, as its header says."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def load(path: str | os.PathLike[str], stager: Stager, *, names: Iterable[str] | None = None) -> Any:
    """Put what a file holds and return it on the device, when it is there.

    `.npy` gives an array, in C order; `.npz` and `.safetensors` give a dict of arrays by name, in the file's order, or of those
    that `names` says, in its order. Members of an `.npz` pass through host memory one by one; files of the other formats are never
    read as a whole, and must not be changed meanwhile.

    Raises `ValueError` for a file that is damaged or of another format, `TypeError` for dtypes that the backend does not have,
    `ImportError` with what to type where a package is missing or too old, and as `Stager.put` does.
    """
    file = Path(path)
    if isinstance(names, str):
        raise TypeError(f"names={names!r} is one string. Pass a list of names")
    wanted = None if names is None else list(names)
    match file.suffix.lower():
        case ".npy" if wanted is not None:
            raise ValueError(f"{str(file)!r} holds one array, without a name. Leave names out")
        case ".npy":
            return _put(file, stager, _mapped(file)).result()
        case ".npz":
            return _load_members(file, stager, wanted)
        case ".safetensors":
            return _load_tensors(file, stager, wanted)
    raise ValueError(f"{str(file)!r}: expected a name that ends in .npy, .npz or .safetensors, which says what is in the file")


def _mapped(file: Path) -> Array:
    array = _read(file, lambda: np.load(file, mmap_mode="r", allow_pickle=False))
    if not isinstance(array, np.ndarray):
        array.close()
        raise _damaged(file, "it holds an archive")
    return np.asarray(array)


def _load_members(file: Path, stager: Stager, wanted: list[str] | None) -> dict[str, Any]:
    transfers: dict[str, Transfer] = {}
    last: Transfer | None = None
    # Opened here, since NumPy leaves a file open that turns out to be no archive.
    with file.open("rb") as stream:
        archive = _read(file, lambda: np.load(stream, allow_pickle=False))
        if isinstance(archive, np.ndarray):
            raise _damaged(file, "it holds one array")
        for name in _chosen(file, archive.files, wanted):
            array = _read(file, lambda name=name: archive[name])  # type: ignore[misc]  # A default binds the loop's variable.
            # The one before was on its way meanwhile. No more than two are in memory.
            if last is not None:
                last.synchronize()
            last = transfers[name] = _put(file, stager, array, name)
    return {name: transfer.result() for name, transfer in transfers.items()}


def _load_tensors(file: Path, stager: Stager, wanted: list[str] | None) -> dict[str, Any]:
    tensors = _tensors(file)
    names = _chosen(file, list(tensors), wanted)
    if not names:
        return {}
    raw = np.asarray(np.memmap(file, np.uint8, "r"))
    arrays = {name: _array(file, name, tensors[name], raw) for name in names}
    found = _put(file, stager, arrays).result()
    return {name: found[name] for name in names}


def _tensors(file: Path) -> dict[str, Tensor]:
    """Return what the header says, in the order of the data."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{str(file)!r} is read with safetensors. {INSTALL}", name=error.name) from error
    if not hasattr(safe_open, "offset_keys"):
        raise ImportError(f"{str(file)!r} is read with a newer safetensors than this one. {INSTALL}", name="safetensors")
    total = file.stat().st_size
    # It checks lengths and shapes, and that the tensors fill the file to its end without gap or overlap.
    with _read(file, lambda: safe_open(file, framework="numpy"), (*DAMAGE, SafetensorError)) as reader:
        heads = [(name, reader.get_slice(name)) for name in reader.offset_keys()]
        described = [(name, head.get_dtype(), tuple(head.get_shape())) for name, head in heads]
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
        # Nobody else has the memory, so put need not wait for the CPU to have read it.
        return stager.put(tree, borrow=True)
    except (TypeError, ValueError) as error:
        error.add_note(f"in {str(file)!r}" if name is None else f"at {name!r} in {str(file)!r}")
        raise


def _read(file: Path, read: Callable[[], T], damage: tuple[type[Exception], ...] = DAMAGE) -> T:
    try:
        return read()
    except damage as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, reason: object) -> ValueError:
    return ValueError(f"{str(file)!r} is damaged, or no {file.suffix} file: {reason}")
