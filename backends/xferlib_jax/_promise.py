"""Memory of arrays that a copy engine must wait for, or lay out in C order: addresses stand for it until the engine gets there.

If JAX on the CPU has yet to compute an array, to ask where it lies waits for the computation. `unsafe_buffer_pointer()` even waits
with the GIL held, which stops every Python thread. And memory that does not lie in C order must be copied once more; the caller of
a get does not wait for that either. A promise gives out addresses that no process can have. The engine, which may wait, finds out
what they mean.

Invariant: no two living promises have an address in common. The addresses of one that is gone are given out again only millions
later, so a copy that comes too late gets an error, and reads nothing of another's.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import Any, final

import numpy as np

from xferlib.tickets import Returns
from xferlib_jax._exports import Tensor, exported
from xferlib_jax._reading import Reading, Readings

__all__ = ["ComputeError", "Promise", "Promises"]

FIRST = 1 << 62
"""Above what any processor of 64 bits lets a process have."""
STEP = 1 << 40
"""More than any array has bytes."""
MOST = 1 << 22
"""Promises at a time. The engine has addresses of 64 bits, and would cut off higher ones."""


@final
class ComputeError(Exception):
    """Raised when what a promise stands for could not be computed."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


@final
class Promise:
    """An array, and the addresses that stand for its memory in C order while this object lives."""

    __slots__ = ("__weakref__", "_laid_out", "_reading", "_ticket", "start")

    def __init__(self, reading: Reading, start: int, ticket: object) -> None:
        self.start = start
        self._reading = reading
        self._laid_out: np.ndarray[Any, Any] | None = None
        self._ticket = ticket

    def wait(self) -> int:
        """Block until the array is computed and return its address. Called by one thread. Raises `ComputeError`."""
        if self._laid_out is not None:
            return self._laid_out.ctypes.data
        reading = self._reading
        try:
            if reading.capsule is None:
                reading.array.block_until_ready()
                reading.capsule = reading.array.__dlpack__()
        except Exception as error:  # The computation may be a Python function's.
            raise ComputeError(error) from error
        tensor = exported(reading.capsule)
        if tensor.strides is None:
            return tensor.address
        self._laid_out = np.ascontiguousarray(_seen(reading.array, tensor, tensor.strides))
        return self._laid_out.ctypes.data


@final
class Promises:
    """The promises of one stager. Any thread."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._numbers = itertools.count()
        self._returns = Returns()
        self._live: dict[int, weakref.ref[Promise]] = {}

    def make(self, array: Any, capsule: Any = None) -> Promise:
        """Promise the memory of an array. `capsule`: one of its memory, where it is computed already."""
        for number in self._returns.unsettled():
            self._live.pop(number, None)
            self._returns.settled(number)
        number = next(self._numbers) % MOST
        while number in self._live:
            number = next(self._numbers) % MOST
        ticket = self._returns.ticket(number)
        promise = Promise(self._readings.make(array, capsule), FIRST + number * STEP, ticket)
        self._live[number] = weakref.ref(promise)
        return promise

    def find(self, address: int) -> tuple[Promise | None, int]:
        """Return the promise that an address stands for and the offset there, or None and the address itself.

        Called by the thread that starts a copy, which holds the source. Hold the promise until the copy is made.
        """
        if address < FIRST:
            return None, address
        number, offset = divmod(address - FIRST, STEP)
        found = self._live.get(number)
        promise = None if found is None else found()
        if promise is None:
            raise LookupError(
                f"nobody holds the source at {address:#x} any more. Hold what as_source returned until the copy is done"
            )
        return promise, offset


def _seen(array: Any, tensor: Tensor, strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a view of memory as it lies. NumPy's own protocols would keep a copy in the array, or do not know the dtype."""
    dtype = np.dtype(array.dtype)
    nbytes = dtype.itemsize + sum((length - 1) * step for length, step in zip(array.shape, strides, strict=True))
    memory = (ctypes.c_uint8 * nbytes).from_address(tensor.address)
    return np.ndarray(array.shape, dtype, memory, strides=strides)
