"""To the host on the caller's thread: what is small, while nothing stands before it.

To wake another thread, and to be woken by it, takes several times as long as such a copy. So a get into small pageable arrays does
not return before they are filled, where they are in microseconds; anything that takes longer is left to the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import memmove
from typing import Any, Final, final

from xferlib.engine.jobs import refuse_stream_wait
from xferlib.errors import AllocationError
from xferlib.in_flight import Fill, Ledger
from xferlib.latch import is_copy_thread
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.blocks import HostBlock, round_up
from xferlib.memory.pinned_pool import ALIGNMENT, PinnedPool
from xferlib.protocol import Event, HostStager, Source, Stream

__all__ = ["FILLED", "SmallGets"]

MANY = 16
"""Arrays. Each is a copy of its own, and the driver takes microseconds for it."""
PRODUCER_SECONDS = 10e-6
"""How long is looked whether the arrays are computed: the device needs some of it to see that nothing stands before the event."""
COPY_SECONDS = 200e-6
"""How long is waited for the copies, which take a tenth of it unless others use the link."""
SHARE = 16
"""So many of its blocks the pool's limit must have room for."""


@final
class _Filled:
    """The event of gets that had filled their arrays when they returned. Any thread."""

    def done(self) -> bool:
        """See `Event.done`."""
        return True

    def synchronize(self) -> None:
        """See `Event.synchronize`."""

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """Refuse, as every other get into pageable memory: a program must not depend on how fast one was."""
        refuse_stream_wait()


FILLED: Final = _Filled()


@final
class SmallGets:
    """One stager's. Any thread."""

    def __init__(self, backend: HostStager[Any], pool: PinnedPool, ledger: Ledger, nbytes: int) -> None:
        """`nbytes`: what one get may have at most."""
        self._nbytes = nbytes if pool.limit >= SHARE * nbytes else 0
        self._failures = backend.failures
        self._on_gpu = backend.on_gpu
        self._copy_d2h = backend.copy_d2h
        self._pool = pool
        self._d2h = ledger.d2h
        self._jobs = ledger.jobs
        # Changed in single steps: a finalizer may get while its thread is in here.
        self._idle: deque[HostBlock] = deque()

    def fill(self, transfers: Sequence[tuple[int, Array]], sources: Sequence[Source], after: Event | None) -> bool:
        """Copy from device addresses into C-contiguous arrays, once `after` is reached. False: not now, and nothing was written.

        No earlier get writes these arrays, or has yet to start copies of this direction.
        """
        sizes = [round_up(array.nbytes, ALIGNMENT) for _, array in transfers]
        # On a thread that makes the copies a finalizer would wait for itself.
        if sum(sizes) > self._nbytes or len(sizes) > MANY or is_copy_thread():
            return False
        if self._d2h.busy:
            self._d2h.reap()
        if self._d2h.busy or not self._comes(after, PRODUCER_SECONDS):
            return False
        fill = Fill()
        try:
            # Counts as in flight before another thread finds neither room nor anything to wait for.
            self._jobs.add(fill)
            block = self._take()
            if block is None or not self._comes(self._start(block, transfers, sizes, sources), COPY_SECONDS):
                # What may still be written is held by what is in flight.
                return False
            start = block.address
            for (_, array), size in zip(transfers, sizes, strict=True):
                memmove(address_of(array), start, array.nbytes)
                start += size
            self._idle.append(block)
            return True
        finally:
            block = None
            fill.over = True
            self._jobs.remove(fill)

    def release(self) -> bool:
        """Give idle memory back to the pool, and tell whether there was any."""
        found = bool(self._idle)
        self._idle.clear()
        return found

    def _start(
        self, block: HostBlock, transfers: Sequence[tuple[int, Array]], sizes: Sequence[int], sources: Sequence[Source]
    ) -> Event:
        start = block.address
        try:
            for (address, array), size in zip(transfers, sizes, strict=True):
                self._copy_d2h(start, address, array.nbytes)
                start += size
            return self._d2h.add(0, (), sources, block, looked=True)
        except BaseException:
            self._d2h.settle((block, sources))
            raise
        finally:
            # Of a copy that fails, the frame lives as long as what is raised.
            del block

    def _take(self) -> HostBlock | None:
        try:
            return self._idle.pop()
        except IndexError:
            pass
        with suppress(AllocationError):
            return self._pool.try_take(self._nbytes)
        return None

    def _comes(self, event: Event | None, seconds: float) -> bool:
        """Tell whether an event is reached within so long. One that failed is not: whoever waits for it is told."""
        until = time.perf_counter() + seconds
        with suppress(*self._failures):
            while event is not None and not event.done():
                if time.perf_counter() > until:
                    return False
                if not self._on_gpu:
                    # The thread that copies is Python's, and has to come to it.
                    time.sleep(0)
            return True
        return False
