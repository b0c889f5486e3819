"""Python's garbage collector, which looks at all objects again and again while hundreds of thousands are made: here it waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection"]


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the collector from running in the block, on all threads; what is no longer referred to goes all the same.

    Where it is off already, it stays off. If two threads are inside, it may run again when the first leaves.
    """
    runs = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if runs:
            gc.enable()
