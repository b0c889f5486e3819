"""Anonymous memory that processes share by descriptor.

Invariant: it has no name, so nobody can find it, and it is gone with the last process that maps it, however that one ended.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from typing import Any, final

import numpy as np

from xferlib.errors import AllocationError
from xferlib.pipeline.workers.layout import Bytes
from xferlib.words import in_words

__all__ = ["Descriptor", "SharedMemory", "map_shared"]

POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14. Page-locking pages that are there takes a tenth of the time. If there are none, this says
so, instead of a bus error at the first write."""
STEP = 64 << 20
"""Bytes touched in one call. It holds the GIL."""


@final
class SharedMemory:
    """New memory, all zero, mapped in this process. `raw` stays valid until the last array over it goes. To be closed."""

    def __init__(self, nbytes: int) -> None:
        self.descriptor = Descriptor(-1)
        try:
            self.descriptor = Descriptor(os.memfd_create("xferlib", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(self.descriptor.number, nbytes)
            # If a worker cut the memory off, touching the mapping beyond its end would be the end of this process.
            fcntl.fcntl(self.descriptor.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.raw = map_shared(self.descriptor, nbytes)
        except OSError as error:
            self.close()
            words = f"{in_words(nbytes)} of shared memory could not be had: {error}"
            raise AllocationError(f"{words}. Use fewer or smaller slots") from error

    def close(self) -> None:
        """Forget the descriptor, so that no further process can be given the memory. Twice is fine."""
        self.descriptor.close()


@final
class Descriptor:
    """A file descriptor that a spawned process receives by pickle, as a number of its own. To be closed by its owner."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        """Close it. Twice is fine."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __reduce__(self) -> tuple[Callable[[Any], Descriptor], tuple[Any]]:
        return _received, (reduction.DupFd(self.number),)


def map_shared(descriptor: Descriptor, nbytes: int) -> Bytes:
    """Map the memory into this process. It stays mapped until the last array over it goes."""
    pages = mmap.mmap(descriptor.number, nbytes)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    try:
        for start in range(0, nbytes, STEP):
            pages.madvise(POPULATE_WRITE, start, min(STEP, nbytes - start))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An older kernel.
        os.posix_fallocate(descriptor.number, 0, nbytes)
    return np.frombuffer(pages, np.uint8)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())
