"""What stands before the bytes of arrays in a file, and the names of dtypes there."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy

from xferlib.latch import Turn
from xferlib.tree import ShapeDtype

__all__ = [
    "EXTENSIONS",
    "INSTALL",
    "PLAIN",
    "SUFFIXES",
    "VALUES",
    "check_npy",
    "check_saved_as_safetensors",
    "npy_header",
    "safetensors_layout",
]

INSTALL = 'Install it with: pip install "safetensors>=0.8" "ml-dtypes>=0.5"'
SUFFIXES = (".npy", ".npz", ".safetensors")
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
KINDS = {name: kind for kind, name in (PLAIN | EXTENSIONS).items()}
VALUES = "xferlib.values"
"""The entry of a safetensors file's metadata that has what rides along in the tree, as JSON."""
METADATA = "__metadata__"
STEP = 64
"""Bytes. The arrays begin at a multiple of it, so that each lies as its dtype wants."""
LARGEST_HEADER = 100_000_000
"""Bytes: readers of the format take no larger one."""
ESCAPED = 6
"""Bytes that JSON takes for one byte of text, at most."""
ENTRY = 2048
"""Bytes that JSON takes for an array beside its name, at most: NumPy has 64 dimensions at most, of 20 digits each."""


def check_saved_as_safetensors(names: Sequence[str], described: Sequence[ShapeDtype], metadata: Mapping[str, str]) -> None:
    """Raise `TypeError` for a dtype that the format lacks, `ValueError` for a name, and for more than a header may have.

    In a fraction of the time that the layout takes.
    """
    if METADATA in names:
        raise ValueError(f"an array cannot be called {METADATA!r} in a safetensors file. Rename it")
    seen: set[np.dtype[Any]] = set()
    for name, (_, dtype) in zip(names, described, strict=True):
        if dtype not in seen:
            _kind(name, dtype)
            seen.add(dtype)
    # Text that has no bytes in UTF-8 is refused here, too.
    text = len("".join([*names, *metadata, *metadata.values()]).encode())
    if ESCAPED * text + ENTRY * (len(names) + len(metadata)) > LARGEST_HEADER:
        safetensors_layout(names, described, metadata)


def safetensors_layout(
    names: Sequence[str], described: Sequence[ShapeDtype], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Lay arrays out one behind the other: return the file's header, and the arrays' numbers in the order of the file, where each
    begins at the end of the one before. Raises `ValueError` where their names take more bytes than a header may have.

    The format: 8 bytes with the length of the JSON that follows, little-endian, the JSON, and the arrays without a gap, as
    https://github.com/huggingface/safetensors#format says. JSON may end with spaces.
    """
    order = _widest_first(described)
    parts = [json.dumps({METADATA: dict(metadata)}, separators=(",", ":"), ensure_ascii=False)[1:-1]] if metadata else []
    # There are thousands of arrays, and a few dtypes and shapes, of which JSON takes longer than all else. By the dtypes' identity:
    # hashing one takes longer, too.
    heads: dict[tuple[int, tuple[int, ...]], tuple[str, int]] = {}
    quoted = json.JSONEncoder(ensure_ascii=False).encode
    end = 0
    turn = Turn()
    for index in order:
        shape, dtype = described[index]
        known = heads.get((id(dtype), shape))
        if known is None:
            lengths = ",".join(map(str, shape))
            head = f'{{"dtype":"{_kind(names[index], dtype)}","shape":[{lengths}],"data_offsets":'
            known = heads[id(dtype), shape] = head, math.prod(shape) * dtype.itemsize
        start, end = end, end + known[1]
        parts.append(f"{quoted(names[index])}:{known[0]}[{start},{end}]}}")
        turn.end_if_long()
    text = f"{{{','.join(parts)}}}".encode()
    text += b" " * (-(8 + len(text)) % STEP)
    if len(text) > LARGEST_HEADER:
        raise ValueError(f"the names of {len(names)} arrays take {len(text)} bytes, more than a safetensors file may have for them")
    return len(text).to_bytes(8, "little") + text, order


def _widest_first(described: Sequence[ShapeDtype]) -> list[int]:
    """Return the arrays' numbers in the order in which the format's own writer has them: then each lies as its dtype wants."""
    # NumPy takes a while to say how wide a dtype is.
    widths: dict[int, int] = {}
    of_width: dict[int, list[int]] = {}
    turn = Turn()
    for index, (_, dtype) in enumerate(described):
        width = widths.get(id(dtype))
        if width is None:
            width = widths[id(dtype)] = dtype.itemsize
        of_width.setdefault(width, []).append(index)
        turn.end_if_long()
    return [index for width in sorted(of_width, reverse=True) for index in of_width[width]]


def _kind(name: str, dtype: np.dtype[Any]) -> str:
    kind = KINDS.get(dtype.name)
    if kind is None:
        raise TypeError(f"{name!r} is of dtype {dtype}, which a safetensors file cannot have. {_advice(_is_numpys(dtype), '.npy')}")
    return kind


def check_npy(names: Sequence[str], described: Sequence[ShapeDtype]) -> None:
    """Raise `TypeError` for a dtype that would come back from a `.npy` file as another one."""
    seen: set[np.dtype[Any]] = set()
    for name, (_, dtype) in zip(names, described, strict=True):
        if dtype in seen:
            continue
        if not _is_numpys(dtype):
            advice = _advice(dtype.name in KINDS, ".safetensors")
            raise TypeError(f"{name!r} is of dtype {dtype}, which .npy and .npz files cannot have. {advice}")
        seen.add(dtype)


def _is_numpys(dtype: np.dtype[Any]) -> bool:
    """Tell whether NumPy's files give this dtype back: those of packages come back as bytes without a name."""
    return bool(npy.descr_to_dtype(npy.dtype_to_descr(dtype)) == dtype)


def _advice(has_it: bool, other: str) -> str:
    """Say what to do about a dtype that a file cannot have; `has_it`: whether the other kind of file can."""
    return f"Save it as {other}, or convert it" if has_it else "No other file here can, either: convert it"


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return what stands before an array in a `.npy` file."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    return header.getvalue()
