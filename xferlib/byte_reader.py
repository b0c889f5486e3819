"""Reading device arrays piece by piece, for whoever writes more than fits into pinned memory: to files, to sockets.

The order is a get's: what is read is what the arrays held when the reader was made. But the copies are started one by one, later,
and not by the engine: so until the reader is closed, the arrays count as being read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, final

import numpy as np

from xferlib.checks import translated, uncopied
from xferlib.errors import AllocationError, ClosedError
from xferlib.in_flight import Ledger, Reading
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.pinned_pool import PinnedPool
from xferlib.protocol import Event, HostStager, Source
from xferlib.transfer import Transfer
from xferlib.tree import Alike

__all__ = ["ByteReader", "Span"]


class Span(NamedTuple):
    """Bytes of one array, in C order."""

    array: int
    """The number of the array among those of the tree."""
    start: int
    nbytes: int


@final
class ByteReader:
    """Reads the arrays of a tree as bytes. `Stager.reader` makes one; one thread at a time reads.

    `put(into=)` of these arrays waits until it is closed. Do not overwrite them by work of your own, nor donate or delete them,
    before that and before the last transfer of `read` is done. A context manager; the stager's `close` waits until it is closed,
    so close it on a thread that does not wait for that.

    Attributes:
        described: Shape and dtype of each array.
    """

    __reduce_ex__ = uncopied("Make another one")

    def __init__(
        self,
        backend: HostStager[Any],
        pool: PinnedPool,
        ledger: Ledger,
        described: Sequence[Alike],
        sources: Sequence[Source],
        after: Event | None,
    ) -> None:
        """`after`: behind what produces the arrays; None: they are there."""
        self.described = list(described)
        self._failures = backend.failures
        self._copy_d2h = backend.copy_d2h
        self._pool = pool
        self._d2h = ledger.d2h
        self._jobs = ledger.jobs
        self._sources = list(sources)
        self._after = after
        self._reading = Reading(self._sources)
        self._jobs.readings[self._reading.row] = self._reading

    def empty(self, nbytes: int, *, wait: bool = True) -> Array:
        """Return so many bytes of pinned memory to read into, from the stager's pool, contents undefined.

        They go back when the last view of them is gone. Where the limit has no room this waits for transfers that will make some,
        if there are any; `wait=False` waits for none. Raises `AllocationError`.
        """
        block = self._pool.take(nbytes) if wait else self._pool.try_take(nbytes)
        if block is None:
            raise AllocationError(f"there is no pinned memory for {nbytes} bytes more now")
        return np.asarray(block)[:nbytes]

    def wait(self) -> None:
        """Block until what produces the arrays is done. Raises `XferError` if it failed."""
        if self._after is not None:
            with translated(self._failures, "the arrays could not be computed"):
                self._after.synchronize()
            self._after = None

    def claim(self) -> None:
        """Note that this thread reads now: a finalizer that would wait here until the reader is closed is refused, and not hung."""
        self._reading.owner = threading.get_ident()

    def read(self, spans: Sequence[Span], out: Array) -> Transfer[Array]:
        """Start copying spans, one behind the other, to the front of `out`, which `empty` returned. Return the bytes' transfer.

        Blocks until what produces the arrays is done, the first time. Raises as `wait`, and `ClosedError`.
        """
        if self._reading.reached():
            raise ClosedError("this reader is closed. Make another one with stager.reader(...)")
        self.claim()
        self.wait()
        end = 0
        sources = [self._sources[span.array] for span in spans]
        with translated(self._failures, "the copy to the host could not be started"):
            try:
                address = address_of(out)
                for source, span in zip(sources, spans, strict=True):
                    self._copy_d2h(address + end, source.address + span.start, span.nbytes)
                    end += span.nbytes
                event = self._d2h.add(end, (out,), sources)
            except BaseException:
                self._d2h.settle((sources, out))
                raise
        return Transfer(out[:end], event, self._failures, True)

    def close(self) -> None:
        """Read no more. What was started goes on. Twice is fine; any thread."""
        self._reading.end()
        self._jobs.readings.pop(self._reading.row, None)
        self._sources = []

    def __enter__(self) -> ByteReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # Of a constructor that was cut off there may be none. Assignments and calls of C alone: any thread, inside anything.
        reading = self.__dict__.get("_reading")
        if reading is not None:
            reading.end()
