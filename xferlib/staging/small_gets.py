"""Small gets from a GPU on the caller's thread, while nothing stands before them.

Waking another thread, and being woken by it, takes several times as long as such a copy. So a get into small pageable arrays does
not return before they are filled, if the device fills them in microseconds. If it does not, the copy is given up: it is left to
come when it comes, and the engine makes another one.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, final

from xferlib.engine.jobs import refuse_stream_wait
from xferlib.engine.native import OK, library
from xferlib.errors import AllocationError
from xferlib.in_flight import let_go
from xferlib.latch import is_copy_thread
from xferlib.ledger import Ledger
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.blocks import ALIGNMENT, HostBlock, round_up
from xferlib.memory.pinned_pool import KEPT_SHARE, PinnedPool
from xferlib.pending import Fill
from xferlib.protocol import DeviceRange, Event, HostStager, Stream

__all__ = ["FILLED", "SmallGets"]

FEWER_NBYTES = 256 << 10
"""What one get may have where the pool's limit has no room for more. Where it has no room even for this, the engine makes all
gets."""
MOST_ARRAYS = 16
"""Each is a copy of its own, and the driver takes microseconds for it."""
PRODUCER_SECONDS = 10e-6
"""How long the caller looks whether the arrays are computed: the device needs some of it to see that the event has no work before
it."""
COPY_SECONDS = 200e-6
"""How long the caller waits for the copies. They take a tenth of that unless others use the link."""
ASK_AGAIN_AFTER_GETS = 256
"""If there is no memory for small gets, the engine makes so many before the pool is asked for it again. By then they have taken as
long as page-locking it takes, and mostly nobody else needs it any more."""


@final
class _FilledEvent:
    """The event of gets that had filled their arrays when they returned. Any thread."""

    def done(self) -> bool:
        """See `Event.done`."""
        return True

    def synchronize(self) -> None:
        """See `Event.synchronize`."""

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """Refuse, as every other get into pageable memory: a program must not depend on how fast one was."""
        refuse_stream_wait()


FILLED: Final = _FilledEvent()


@final
class SmallGets:
    """Fills small pageable arrays from a GPU for one stager, by `fill`. Any thread. Keeps one block until `release`."""

    def __init__(self, backend: HostStager[Any], pool: PinnedPool, ledger: Ledger, nbytes: int) -> None:
        """`nbytes`: what one get may have, where the pool's limit has room."""
        if pool.limit < KEPT_SHARE * nbytes:
            nbytes = min(nbytes, FEWER_NBYTES)
        # A backend of the CPU makes its copies on threads, too, and cannot always tell what an array waits for.
        self._nbytes = nbytes if backend.on_gpu and pool.limit >= KEPT_SHARE * nbytes else 0
        self._copy_d2h = backend.copy_d2h
        self._pool = pool
        self._d2h = ledger.d2h
        self._jobs = ledger.jobs
        # Changed in single steps: a finalizer may get while its thread is in here.
        self._idle: deque[tuple[HostBlock, Event | None]] = deque()
        """One block, with the event of a copy that was given up, after which it may be used again; or none, while it is in use."""
        self._block: weakref.ref[HostBlock] | None = None
        """Returns the block while anybody has it; None: there was none yet, or it was given back."""
        self._missed = 0
        """Gets since then that it would have served."""

    @property
    def is_missed(self) -> bool:
        """Whether to `prepare` again: an interrupt, or a copy that could not be started, has cost the memory; or it went to others,
        long ago."""
        return self._missed >= ASK_AGAIN_AFTER_GETS if self._block is None else not self._is_there

    @property
    def _is_there(self) -> bool:
        return self._block is not None and self._block() is not None

    def takes(self, transfers: Sequence[tuple[int, Array]]) -> bool:
        """Tell whether a get is small, and comes from a thread that may wait: a finalizer on one that makes copies may not."""
        nbytes = sum([round_up(array.nbytes, ALIGNMENT) for _, array in transfers])
        return nbytes <= self._nbytes and len(transfers) <= MOST_ARRAYS and not is_copy_thread()

    def prepare(self) -> None:
        """Have the memory that small gets pass through, if there is room. They are to page-lock nothing themselves."""
        if self._idle or self._is_there or not self._nbytes:
            return
        self._missed = 0
        fill = Fill()
        try:
            # Counts as in flight before another thread finds neither room nor anything to wait for.
            with suppress(AllocationError):
                block = self._pool.try_take(self._nbytes, lambda: self._jobs.add(fill))
                # Another thread may have prepared it meanwhile. One block is enough.
                if block is not None and not self._is_there:
                    self._block = weakref.ref(block)
                    self._idle.append((block, None))
        finally:
            fill.over = True
            self._jobs.remove(fill)

    def fill(self, transfers: Sequence[tuple[int, Array]], sources: Sequence[DeviceRange], after: Event | None) -> bool:
        """Copy from device addresses into C-contiguous arrays, once `after` is reached. False: the engine must do it.

        No earlier get writes these arrays, or still has copies of this direction to start. The engine has a chunk: it must not need
        the memory of a copy that is given up here, which may come back only when compute has ended.
        """
        if self._d2h.busy:
            self._d2h.reap()
        if self._d2h.busy or not _comes(after, PRODUCER_SECONDS):
            return False
        fill = Fill()
        try:
            # As in `prepare`.
            self._jobs.add(fill)
            try:
                block, event = self._idle.pop()
            except IndexError:
                # Another thread has it, or it went back to the pool.
                if self._block is None:
                    self._missed += 1
                return False
            if not _comes(event, 0.0):
                self._idle.append((block, event))
                return False
            # A copy that cannot be started keeps the block, because perhaps nobody knows when it is at rest.
            event = self._start(block, transfers, sources)
            came = _comes(event, COPY_SECONDS)
            if came:
                # Let nothing refer to the arrays that were read any more: nobody else asks before the stager's next transfer.
                let_go(self._d2h.table, event)
                came, event = _copied(block, transfers), None
            self._idle.append((block, event))
            return came
        finally:
            # If the copy fails, this frame lives as long as the exception.
            block = event = None  # type: ignore[assignment]  # Nobody uses them after this.
            fill.over = True
            self._jobs.remove(fill)

    def release(self) -> bool:
        """Give idle memory back to the pool, and tell whether there was any."""
        found = bool(self._idle)
        if found:
            self._block = None
        self._idle.clear()
        return found

    def _start(self, block: HostBlock, transfers: Sequence[tuple[int, Array]], sources: Sequence[DeviceRange]) -> Event:
        start = block.address
        try:
            for address, array in transfers:
                self._copy_d2h(start, address, array.nbytes)
                start += round_up(array.nbytes, ALIGNMENT)
            return self._d2h.add(0, (), sources, block, reaped=True).event
        except BaseException:
            self._d2h.quiesce((block, sources), (), sources)
            raise
        finally:
            del block


def _comes(event: Event | None, seconds: float) -> bool:
    """Tell whether an event is reached within so long. A failed one is not: the engine meets the failure, too, and tells whoever
    waits."""
    try:
        return event is None or _reached(event, time.perf_counter() + seconds)
    except Exception:
        return False


def _reached(event: Event, until: float) -> bool:
    while not event.done():
        if time.perf_counter() > until:
            return False
    return True


def _copied(block: HostBlock, transfers: Sequence[tuple[int, Array]]) -> bool:
    """Copy on the CPU. False: the memory is that of a file that was cut off."""
    copy, start = library().xe_copy, block.address
    for _, array in transfers:
        # Without the GIL: a page may have to be read from a disk.
        if copy(address_of(array), start, array.nbytes, 0) != OK:
            return False
        start += round_up(array.nbytes, ALIGNMENT)
    return True
