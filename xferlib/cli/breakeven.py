"""After how many transfers of the same memory it pays to have page-locked it in place, measured on this machine.

A lock costs time once; staging costs time at each transfer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import final

import numpy as np

from xferlib.stager import Stager
from xferlib.words import counted, in_words

__all__ = ["NBYTES", "BreakEven", "break_even", "seconds_of"]

NBYTES = 64 << 20
"""Bytes. Large enough for the full rate either way; all in all it takes some 50 ms on a GPU."""
SAMPLES = 5


@final
@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """Seconds for one array of `nbytes`: to lock and unlock it, to put it staged, and to put it once it is locked."""

    nbytes: int
    lock_seconds: float
    staged_seconds: float
    pinned_seconds: float

    @property
    def transfers(self) -> int | None:
        """The number of transfers from which on locking is faster; None: it never is."""
        gain = self.staged_seconds - self.pinned_seconds
        return math.ceil(self.lock_seconds / gain) if gain > 0 else None

    def __str__(self) -> str:
        size = in_words(self.nbytes)
        figures = (
            f"locking {size} takes {self.lock_seconds * 1e3:.1f} ms, a put {self.pinned_seconds * 1e3:.1f} ms then, "
            f"{self.staged_seconds * 1e3:.1f} ms staged"
        )
        if self.transfers is None:
            return f"pin never pays: {figures}"
        return f"pin pays from {counted(self.transfers, 'transfer')} of the same memory on: {figures}"


def break_even(stager: Stager) -> BreakEven | None:
    """Measure with an open stager; None where nothing is locked, or not in place."""
    capabilities = stager.capabilities
    if not (stager.on_gpu and capabilities.pinned and capabilities.register):
        return None
    # The array is written, so that its pages exist: fetching them is no part of locking.
    array = np.ones(NBYTES, np.uint8)

    def put() -> None:
        stager.put(array, borrow=True).synchronize()

    lock, staged = seconds_of(lambda: stager.pin(array).close()), seconds_of(put)
    with stager.pin(array):
        pinned = seconds_of(put)
    return BreakEven(nbytes=NBYTES, lock_seconds=lock, staged_seconds=staged, pinned_seconds=pinned)


def seconds_of(call: Callable[[], object]) -> float:
    """Return the median of some calls, behind one that is not timed."""
    call()
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return median(samples)
