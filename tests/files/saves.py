"""What the tests of saves share: arrays of every dtype, comparisons, and gates before files and writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from xferlib.files.temporary import TemporaryFile
from xferlib.stager import Stager

MIB = 1 << 20
RANDOM = np.random.default_rng(11)
DTYPES = [
    *(np.dtype(kind) for kind in ("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "complex64")),
    *(np.dtype(getattr(ml_dtypes, kind)) for kind in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")),
]


def there(stager: Stager, tree: Any) -> Any:
    return stager.put(tree, borrow=True).result()


def bits(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = RANDOM.integers(0, 2 if dtype.kind == "b" else 256, count, np.uint8)
    return raw.view(dtype).reshape(shape)


def same(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def at_rest(stager: Stager) -> None:
    stager.idle()
    assert not stager._ledger.busy


def only(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


@contextmanager
def held_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no file be begun before the gate is open."""
    gate, begin = threading.Event(), TemporaryFile.__init__

    def hold(self: TemporaryFile, target: Path) -> None:
        gate.wait(20)
        begin(self, target)

    monkeypatch.setattr(TemporaryFile, "__init__", hold)
    try:
        yield gate
    finally:
        gate.set()


@contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let nothing be written before the gate is open."""
    gate, write = threading.Event(), TemporaryFile.write

    def hold(self: TemporaryFile, data: memoryview, offset: int) -> None:
        if offset:
            gate.wait(20)
        write(self, data, offset)

    monkeypatch.setattr(TemporaryFile, "write", hold)
    try:
        yield gate
    finally:
        gate.set()
