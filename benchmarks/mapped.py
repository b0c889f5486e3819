"""Batches that other processes read in place: anonymous memory, which they map by the path of this process' descriptor.

Nothing has a name that could outlive this process, and no size of a file system is a limit.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.steps import Bytes

__all__ = ["Mapped", "mapped"]


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """So many batches one after another. Any process of this user may get the object by pickle, while the batches are kept."""

    path: str
    nbytes: int
    """Of a batch."""
    count: int

    def batch(self, index: int) -> Bytes:
        """Return a view. The first call in a process maps all batches."""
        return _map(self.path, self.count * self.nbytes)[index * self.nbytes :][: self.nbytes]

    def fill(self, index: int, slot: Bytes) -> None:
        """Copy a batch."""
        np.copyto(slot, self.batch(index))


@contextmanager
def mapped(batches: Sequence[Bytes]) -> Iterator[Mapped]:
    """Keep a copy of the batches, all of one size, for other processes."""
    nbytes = batches[0].nbytes
    descriptor = os.memfd_create("benchmark-batches")
    try:
        os.ftruncate(descriptor, len(batches) * nbytes)
        everything = np.frombuffer(mmap.mmap(descriptor, len(batches) * nbytes), np.uint8)
        for index, batch in enumerate(batches):
            np.copyto(everything[index * nbytes :][:nbytes], batch)
        yield Mapped(path=f"/proc/{os.getpid()}/fd/{descriptor}", nbytes=nbytes, count=len(batches))
    finally:
        os.close(descriptor)


@cache
def _map(path: str, nbytes: int) -> Bytes:
    """Map it with its page tables filled: otherwise page faults would cost the first rounds time."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        # Writable, though nobody writes: PyTorch warns of arrays that are not.
        pages = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    return np.frombuffer(pages, np.uint8)
