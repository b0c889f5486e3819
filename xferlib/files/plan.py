"""How a file of arrays is to look: what is refused of it at once, and its pieces, which are made when they are wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from xferlib.byte_reader import Numbers
from xferlib.files.formats import VALUES, check_npy, check_saved_as_safetensors, npy_header, safetensors_layout
from xferlib.files.names import names_of
from xferlib.latch import Turn
from xferlib.tree import ShapeDtype, Spec

__all__ = ["MOST_ARRAYS", "FilePiece", "Layout", "Plan", "planned"]

MOST_ARRAYS = 64
"""Arrays of a piece. Who lets go of them has the interpreter for about a microsecond for each."""
LONGEST_MEMBER = 60_000
"""Bytes of the name of an archive's member: the format has two bytes for their number."""
JSON = (str, int, float)
"""What rides along and is the same when JSON has had it; a bool is an int."""


class FilePiece(NamedTuple):
    """Part of a file: bytes of arrays, one behind the other. `skipped`: of the first array so many stand in the piece before."""

    offset: int
    nbytes: int
    arrays: Numbers
    skipped: int


@final
class Plan(NamedTuple):
    """A file that can be written. `sizes`: bytes of each array; `nbytes`: of all."""

    kind: str
    names: Sequence[str]
    described: Sequence[ShapeDtype]
    texts: Mapping[str, str]
    sizes: list[int]
    nbytes: int

    @property
    def is_archive(self) -> bool:
        """Whether the file is written from front to back, by one thread."""
        return self.kind == ".npz"

    def laid_out(self) -> Layout:
        """Return where everything is to be. It takes a while with thousands of arrays."""
        sizes = self.sizes
        match self.kind:
            case ".safetensors":
                header, order = safetensors_layout(self.names, self.described, self.texts)
                return Layout([header], order, sizes, [])
            case ".npy":
                return Layout([npy_header(*self.described[0])], [0], sizes, [])
        members = [f"{name}.npy" for name in self.names]
        headers: list[bytes] = []
        turn = Turn()
        for alike in self.described:
            headers.append(npy_header(*alike))
            turn.end_if_long()
        return Layout(headers, list(range(len(sizes))), sizes, members)


@final
class Layout(NamedTuple):
    """`headers`: what stands before the arrays: before all of them, or in an archive before each. `order`: the arrays' numbers."""

    headers: list[bytes]
    order: list[int]
    sizes: list[int]
    members: list[str]
    """Of an archive; else empty."""

    def pieces(self, nbytes: int, border: int = 1) -> Iterator[FilePiece]:
        """Iterate the pieces of a file that is no archive, of at most so many bytes, and of not too many arrays.

        A piece that ends inside of an array ends at a multiple of `border` in the file.
        """
        order = np.array(self.order, np.int64)
        sizes = np.array(self.sizes, np.int64)[order]
        order, sizes = order[sizes > 0], sizes[sizes > 0]
        # Where each array ends in the file.
        ends = np.cumsum(sizes) + len(self.headers[0])
        offset, first = len(self.headers[0]), 0
        while first < len(order):
            last = min(first + MOST_ARRAYS, len(order)) - 1
            end, most = int(ends[last]), offset + nbytes
            if end > most:
                end = most - most % border
                last = int(np.searchsorted(ends, end))
            yield FilePiece(offset, end - offset, order[first : last + 1], offset - int(ends[first] - sizes[first]))
            offset, first = end, last + (end == ends[last])

    def by_member(self, nbytes: int) -> Iterator[list[FilePiece]]:
        """Iterate the pieces of each member of an archive. The writer knows where they belong."""
        for index, size in enumerate(self.sizes):
            starts = range(0, size, nbytes)
            yield [FilePiece(0, min(nbytes, size - start), np.array([index]), start) for start in starts]


def planned(file: Path, spec: Spec, described: Sequence[ShapeDtype], sizes: list[int], metadata: Mapping[str, str] | None) -> Plan:
    """Check all that can be refused of a file, and lay nothing out yet. `sizes`: see `Plan`. Raises `TypeError`, `ValueError`."""
    names, riders = names_of(spec)
    kind = file.suffix.lower()
    texts = _texts(file, kind, spec, riders, metadata)
    if kind == ".safetensors":
        check_saved_as_safetensors(names, described, texts)
    else:
        check_npy(names, described)
    if kind == ".npz":
        for name in names:
            _check_member(name)
    return Plan(kind, names, described, texts, sizes, sum(sizes))


def _check_member(name: str) -> None:
    """Raise `ValueError` for a name that an archive would not give back."""
    if not name.isprintable() or len(name.encode()) > LONGEST_MEMBER:
        raise ValueError(f"{name[:80]!r} is no name for an array in an archive: it is too long, or has unprintable characters")


def _texts(file: Path, kind: str, spec: Spec, riders: dict[str, Any], metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return what goes into the file's metadata. Raises `TypeError` and `ValueError` for what has no place there."""
    texts = dict(metadata or {})
    if kind == ".npy" and spec is not None:
        raise ValueError(f"{str(file)!r}: a .npy file holds one array, and this is a tree. Save it as .safetensors or .npz")
    if kind != ".safetensors" and (texts or riders):
        found = "metadata" if texts else f"{next(iter(riders))!r}, which is no array"
        raise ValueError(f"{str(file)!r}: a {kind} file has no place for {found}. Save it as .safetensors, or leave it out")
    for key, text in texts.items():
        if not (isinstance(key, str) and isinstance(text, str)) or key == VALUES:
            raise TypeError(f"metadata: {key!r}: {text!r}: expected text for both, and a key other than {VALUES!r}")
    for name, value in riders.items():
        # Of a class that is also a number or text, JSON keeps the number.
        if type(value) not in (*JSON, bool):
            raise TypeError(
                f"{name!r} is a {type(value).__qualname__}, and a file has a place for arrays, text and numbers. Leave it out"
            )
    if riders:
        texts[VALUES] = json.dumps(riders)
    return texts
