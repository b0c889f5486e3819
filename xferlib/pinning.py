"""Page-locking memory that the caller owns, in place."""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_right
from collections import deque
from contextlib import ExitStack
from types import TracebackType
from typing import Any, final

from xferlib.checks import translated, uncopied
from xferlib.debug import verify_done
from xferlib.errors import AllocationError
from xferlib.forks import forget_in_child
from xferlib.inflight import Traffic
from xferlib.memory.arrays import Array, address_of, host_array
from xferlib.memory.mappings import why_unlockable
from xferlib.protocol import HostStager

__all__ = ["Pin", "Pins"]


@final
class Pin:
    """Memory of the caller's that is page-locked until `close()`; it holds the array meanwhile.

    A context manager that gives the array. Closing waits for the transfers in flight, since one of them may use the memory.
    """

    __reduce_ex__ = uncopied("Threads may share it; another process pins its memory itself")

    def __init__(self, pins: Pins, array: Array, address: int) -> None:
        self.array = array
        self._pins = pins
        self._address: int | None = address

    def close(self) -> None:
        """Unlock the memory. Twice is fine."""
        if self._address is not None:
            # Interrupted here, or refused, it may be called again.
            self._pins.remove(self._address)
            self._address = None

    def __enter__(self) -> Array:
        return self.array

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        address = getattr(self, "_address", None)
        if address is None or not self._pins.holds(address):
            return
        # Unlocking waits for transfers, and a finalizer may run anywhere: the next call that pins or trims does it.
        self._address = None
        self._pins.dropped.append((address, self.array))
        warnings.warn(f"pin of {self.array.nbytes} bytes was never closed. Use it as a context manager", ResourceWarning, 2)


@final
class Pins:
    """The ranges that one stager has page-locked for callers. Any thread."""

    def __init__(self, backend: HostStager[Any], traffic: Traffic) -> None:
        self.dropped: deque[tuple[int, Array]] = deque()
        self._backend = backend
        self._traffic = traffic
        # Reentrant: a finalizer may pin while its thread is in here.
        self._lock = threading.RLock()
        self._ranges: dict[int, int] = {}
        """By start, sizes. They are apart."""
        self._starts: tuple[int, ...] = ()
        """In order; replaced as a whole, so that it can be read without the lock."""
        forget_in_child(self)

    def add(self, array: object) -> Pin:
        """Page-lock an array's memory. Raises `ValueError` for memory that cannot be locked, or is locked already."""
        self.sweep()
        array = host_array(array)
        if array.nbytes == 0:
            raise ValueError("an empty array has no memory to pin")
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            raise ValueError("the array is not contiguous: pin the array that it is a view of")
        address = address_of(array)
        with self._lock:
            if self._meets(address, array.nbytes):
                raise ValueError("this memory is pinned already. Keep the first pin open for as long as any part is needed")
            starts = tuple(sorted((*self._starts, address)))
            # Nothing is called in between: an interrupt leaves both or none.
            self._ranges[address] = array.nbytes
            self._starts = starts
        try:
            self._lock_pages(address, array.nbytes)
        except BaseException:
            with self._lock:
                self._drop(address)
            raise
        return Pin(self, array, address)

    def _lock_pages(self, address: int, nbytes: int) -> None:
        reason = why_unlockable(address, nbytes)
        if reason is not None:
            raise ValueError(f"this memory cannot be page-locked: {reason}")
        try:
            self._backend.pin(address, nbytes)
        except self._backend.failures as error:
            # Asked only now: a neighbour on the same page would look the same, and can be locked.
            if any(self._backend.is_pinned(end, 1) for end in (address, address + nbytes - 1)):
                raise ValueError(
                    "this memory is pinned already, all or part of it: by the pool of this stager, by another stager or another "
                    "library. It is transferred as it is. Leave pin out"
                ) from error
            raise AllocationError(
                f"{nbytes} bytes could not be page-locked: {error}. Transfer them as they are, which stages them, or copy them "
                "into stager.empty_pinned(...)"
            ) from error

    def remove(self, address: int) -> None:
        """Unlock a range once nothing is in flight."""
        if address not in self._ranges:
            return
        self._traffic.wait_all()
        verify_done()
        with self._lock:
            if address in self._ranges:
                with translated(self._backend.failures, "memory could not be unlocked"):
                    self._backend.unpin(address)
                self._drop(address)

    def holds(self, address: int) -> bool:
        """Tell whether a range that starts here is locked. Takes no lock."""
        return address in self._ranges

    def splits(self, address: int, nbytes: int) -> bool:
        """Tell whether a range that is locked begins or ends inside this memory. Takes no lock."""
        return bool(self._starts) and self._meets(address, nbytes, but_around=True)

    def _meets(self, address: int, nbytes: int, *, but_around: bool = False) -> bool:
        """Tell whether a range has bytes of this memory. `but_around`: one that has all of them does not count."""
        starts, end = self._starts, address + nbytes
        after = bisect_right(starts, address)
        if after:
            start = starts[after - 1]
            # It may have been unlocked beside this call.
            reaches = start + self._ranges.get(start, 0)
            if reaches > address:
                return not (but_around and reaches >= end)
        return after < len(starts) and starts[after] < end

    def _drop(self, address: int) -> None:
        starts = tuple([start for start in self._starts if start != address])
        del self._ranges[address]
        self._starts = starts

    def sweep(self) -> None:
        """Unlock what was dropped without being closed."""
        while self.dropped:
            pin = self.dropped.popleft()
            try:
                self.remove(pin[0])
            except BaseException:
                # Still locked, so its array must be held: the next call tries again.
                self.dropped.append(pin)
                raise

    def close(self) -> None:
        """Unlock everything, each range whatever the others raise; nothing is in flight."""
        with ExitStack() as steps:
            # Last: the backend is closed next, and what it refused to unlock it is not asked for again.
            steps.callback(self._clear)
            for address in list(self._ranges):
                steps.callback(self.remove, address)

    def forget(self) -> None:
        """See `Forgetful`."""
        self._clear()
        self._lock = threading.RLock()

    def _clear(self) -> None:
        self._ranges.clear()
        self._starts = ()
        self.dropped.clear()

    @property
    def nbytes(self) -> int:
        """The bytes locked now."""
        return sum(self._ranges.copy().values())
