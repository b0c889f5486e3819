"""Memory of arrays that JAX on the CPU has yet to compute: addresses that stand for it until a copy engine gets there.

Asking such an array where it lies waits for its computation, in `unsafe_buffer_pointer()` even with the GIL held, which stops every
thread of Python. A promise gives out addresses that no process can have, and the engine, which may wait, finds out what they mean.

Invariant: the addresses of a promise are never given out again.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, final

from xferlib_jax._capsule import exported
from xferlib_jax._reading import Reading, Readings

__all__ = ["ComputeError", "Promise", "Promises"]

FIRST = 1 << 62
"""Above what any processor of 64 bits lets a process have."""
STEP = 1 << 40
"""More than any array has bytes."""


@final
class ComputeError(Exception):
    """Raised when what a promise stands for could not be computed."""

    def __init__(self, cause: BaseException, thread: int) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.thread = thread


@final
class Promise:
    """An array that is not computed yet, and the addresses that stand for its memory while this object lives."""

    __slots__ = ("__weakref__", "_reading", "start", "thread")

    def __init__(self, reading: Reading, start: int) -> None:
        self.start = start
        self.thread = threading.get_ident()
        self._reading = reading

    def wait(self) -> int:
        """Block until the array is computed and return its address. Raises `ComputeError`."""
        reading = self._reading
        try:
            if reading.capsule is None:
                reading.array.block_until_ready()
                reading.capsule = reading.array.__dlpack__()
        except Exception as error:  # The computation may be a Python function's.
            raise ComputeError(error, self.thread) from error
        return exported(reading.capsule)[0]


@final
class Promises:
    """The promises of one stager. Any thread."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._numbers = itertools.count()
        self._live: weakref.WeakValueDictionary[int, Promise] = weakref.WeakValueDictionary()

    def make(self, array: Any) -> Promise:
        number = next(self._numbers)
        promise = Promise(self._readings.make(array, None), FIRST + number * STEP)
        self._live[number] = promise
        return promise

    def resolve(self, address: int) -> int:
        """Return the address itself, or what it stands for, waiting for it. Raises `ComputeError`."""
        if address < FIRST:
            return address
        number, offset = divmod(address - FIRST, STEP)
        return self._live[number].wait() + offset
