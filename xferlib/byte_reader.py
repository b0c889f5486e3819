"""Reading device arrays piece by piece, for whoever writes more than fits into pinned memory: to files, to sockets.

The order is a get's: what is read is what the arrays held when the reader was made. But the copies are started one by one, later,
and not by the engine: so until the reader is closed, the arrays count as being read.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from xferlib.checks import positive_nbytes, translated, uncopied
from xferlib.engine.native import D2H, library
from xferlib.errors import AllocationError, ClosedError, XferError
from xferlib.latch import Turn
from xferlib.ledger import Ledger
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.pinned_pool import PinnedPool
from xferlib.pending import Reading
from xferlib.protocol import DeviceRange, DriverCalls, Event, HostStager
from xferlib.tickets import ticket
from xferlib.transfer import Transfer
from xferlib.tree import ShapeDtype, Spec

__all__ = ["ByteReader", "Span"]

FOUND_AT_ONCE = 4
"""Arrays that are found before it is looked whether other threads are to have their turn: a framework may take ten microseconds for
each."""
CLOSED = "this reader is closed. Make another one with stager.reader(...)"


Numbers: TypeAlias = npt.NDArray[np.int64]
Find: TypeAlias = Callable[[list[Any]], tuple[list[DeviceRange], Event | None]]
"""Returns where arrays lie, and what is behind their producers, as `place` and `mark` of a backend do."""


class Span(NamedTuple):
    """Bytes of one array, in C order."""

    array: int
    """The number of the array among those of the tree."""
    start: int
    nbytes: int


@final
class ByteReader:
    """Reads the arrays of a tree as bytes. `Stager.reader` makes one.

    The thread that made it reads, and nobody waits for it there: `put(into=)` of these arrays is refused on this thread until the
    reader is closed, and the stager's `close` closes it. On other threads both wait until it is closed. Do not overwrite the arrays
    by work of your own, nor donate or delete them, before that and before the last transfer of `read` is done. A context manager.

    Attributes:
        described: Shape and dtype of each array.
        sizes: Bytes of each array.
        spec: The shape of the tree, for `xferlib.tree`.
        snapshot: Whether it reads copies of the arrays: then nothing of the above is asked of the arrays themselves, once what
            overwrites them is ordered behind what `stream` had enqueued when the reader was made.
    """

    __reduce_ex__ = uncopied("Make another one")

    def __init__(
        self,
        backend: HostStager[Any],
        pool: PinnedPool,
        ledger: Ledger,
        described: Sequence[ShapeDtype],
        spec: Spec,
        sources: Sequence[DeviceRange | None],
        after: Event | None,
        copied: Sequence[Any] | None = None,
        later: tuple[Find, Sequence[Any]] | None = None,
    ) -> None:
        """`after`: behind what produces the arrays; None: they are there. `copied`: arrays of which these are copies.

        `later`: what finds arrays when they are read, and all arrays. Nobody overwrites such, so nobody asks whether they are read.
        """
        self.described = list(described)
        self.sizes = _sizes(self.described)
        self._nbytes: Numbers = np.array(self.sizes, np.int64)
        self._unread = self._nbytes.copy()
        """Of each array, by `read_row`."""
        self.spec = spec
        self.snapshot = copied is not None
        self._copied = copied
        self._failures = backend.failures
        self._copy_d2h = backend.copy_d2h
        self._driver: DriverCalls | None = getattr(backend, "driver_calls", None)
        self._sweep = backend.sweep
        self._pool = pool
        self._d2h = ledger.d2h
        self._jobs = ledger.jobs
        self._sources = list(sources)
        self._after = after
        self._later = None if later is None else (later[0], list(later[1]))
        self._reading = Reading([source for source in sources if source is not None], finds_later=later is not None)
        # First: whatever happens from here on, nobody waits for one that is gone.
        self._ticket = ticket(self._reading.drop, None)
        self._jobs.readings[self._reading.id] = self._reading

    def empty(self, nbytes: int, *, wait: bool = True) -> Array:
        """Return so many bytes of pinned memory to read into, from the stager's pool, contents undefined.

        They go back when the last view of them is gone. Where the limit has no room this waits for transfers that will make some,
        if there are any; `wait=False` waits for none. Raises `AllocationError`.
        """
        nbytes = positive_nbytes(nbytes, "nbytes")
        block = self._pool.take(nbytes) if wait else self._pool.try_take(nbytes)
        if block is None:
            raise AllocationError(f"there is no pinned memory for {nbytes} bytes more now")
        return np.asarray(block)[:nbytes]

    def wait(self) -> None:
        """Block until what produces the arrays is done. Raises `XferError` if it failed."""
        if not self._reading.is_closed:
            with translated(self._failures, "the arrays cannot be read"):
                self._found(range(len(self.described)))

    def read(self, spans: Sequence[Span], out: Array) -> Transfer[Array]:
        """Start copying spans, one behind the other, to the front of `out`, which `empty` returned. Return the bytes' transfer.

        Blocks until what produces the arrays is done, the first time. One thread at a time. Raises as `wait`; `ClosedError`;
        `ValueError` for a span that is not in its array, and for memory that is too small or not of `empty`.
        """
        if self._reading.is_closed:
            raise ClosedError(CLOSED)
        total, spans = self._checked(spans)
        address = self._address(out, total)
        starts, sizes = np.array([(start, nbytes) for _, start, nbytes in spans], np.int64).reshape(-1, 2).T
        return self._start([array for array, _, _ in spans], starts, np.ascontiguousarray(sizes), address, total, out)

    def read_row(self, arrays: Numbers, skipped: int, nbytes: int, out: Array) -> Transfer[Array]:
        """Start copying arrays by number, one behind the other, from some bytes into the first on, and so many bytes in all.

        As `read`, in a fraction of the time for many small arrays, and for threads of ours, which ask for what is there. Each byte
        is read once: an array that nobody overwrites is let go of with its last.
        """
        self._address(out, nbytes)
        sizes = self._nbytes[arrays]
        starts = np.zeros_like(sizes)
        starts[:1] += skipped
        sizes[:1] -= skipped
        sizes[-1:] -= sizes.sum() - nbytes
        return self.read_each(arrays, starts, sizes, out[:nbytes])

    def read_each(self, arrays: Numbers, starts: Numbers, sizes: Numbers, out: Array) -> Transfer[Array]:
        """Start copying some bytes of each of several arrays, each array once, one behind the other. `out` has their size.

        As `read_row`, and `out` may also be memory that another stager has pinned for the copies of this one.
        """
        transfer = self._start(arrays.tolist(), starts, sizes, address_of(out), out.nbytes, out)
        # Rows may be read in any order.
        self._unread[arrays] -= sizes
        later = self._later
        if later is not None:
            for number in arrays[self._unread[arrays] == 0].tolist():
                self._sources[number] = later[1][number] = None
        return transfer

    def _start(self, numbers: list[int], starts: Numbers, sizes: Numbers, address: int, total: int, out: Array) -> Transfer[Array]:
        """Start copying so many bytes of each array, `total` in all, to an address in `out`."""
        with translated(self._failures, "the arrays cannot be read"):
            sources = self._found(numbers)
        with translated(self._failures, "the copy to the host could not be started"):
            try:
                self._copy(address, sources, starts, sizes)
                event = self._d2h.add(total, (out,), sources).event
            except BaseException:
                self._d2h.quiesce((sources, out), (out,), sources)
                raise
        return Transfer(out[:total], event, self._failures, True)

    def _copy(self, address: int, sources: list[DeviceRange], starts: Numbers, sizes: Numbers) -> None:
        """Start the copies."""
        driver = self._driver
        if driver is not None and len(sources) > 1:
            # Otherwise this thread would have the interpreter most of the time, and a thread that launches work would wait for it.
            addresses = np.array([source.address for source in sources], np.uint64)
            addresses += starts.astype(np.uint64)
            stream = driver.streams[D2H]
            status = library().xe_copies_d2h(driver.calls, stream, address, address_of(addresses), address_of(sizes), len(sources))
            if status:
                raise driver.failure(status)
            return
        copy = self._copy_d2h
        for source, start, nbytes in zip(sources, starts.tolist(), sizes.tolist(), strict=True):
            if nbytes:
                copy(address, source.address + start, nbytes)
            address += nbytes

    def _found(self, numbers: Sequence[int]) -> list[DeviceRange]:
        """Return where arrays lie, once what produces them is done. Those that are to be found later are found now."""
        sources, later = self._sources, self._later
        if self._reading.is_closed:
            # Looked at behind them, since another thread may close it, which says so first and then lets go of them.
            raise ClosedError(CLOSED)
        if later is None:
            self._wait(self._after)
            self._after = None
        else:
            find, arrays = later
            missing = [number for number in dict.fromkeys(numbers) if sources[number] is None]
            # Where threads of ours read, others launch work.
            gives_way = self._reading.maker is None
            step = FOUND_AT_ONCE if gives_way else max(1, len(missing))
            turn = Turn()
            for first in range(0, len(missing), step):
                some = missing[first : first + step]
                try:
                    found, after = find([arrays[number] for number in some])
                except self._failures:
                    raise
                except (TypeError, ValueError, RuntimeError) as error:
                    raise XferError(
                        f"arrays were deleted or donated before they were read: {error}. A save reads them until its wait_read() "
                        "has returned, or copies of them with snapshot=True"
                    ) from error
                self._wait(after)
                for number, source in zip(some, found, strict=True):
                    sources[number] = source
                if gives_way:
                    turn.end_if_long()
        # What they are copies of may go.
        self._copied = None
        return [sources[number] for number in numbers]  # type: ignore[misc]  # None was looked for.

    def _wait(self, after: Event | None) -> None:
        if after is not None:
            with translated(self._failures, "the arrays could not be computed"):
                after.synchronize()

    def _checked(self, spans: Sequence[Span]) -> tuple[int, Sequence[Span]]:
        """Return the bytes of spans, and these with Python's integers: NumPy's would overflow. Raises as `read`."""
        # Mostly they are, and to convert each takes as long as all the rest.
        if set(map(type, chain.from_iterable(spans))) - {int}:
            spans = [Span(*map(operator.index, span)) for span in spans]
        sizes = self.sizes
        total = 0
        for array, start, nbytes in spans:
            if not 0 <= array < len(sizes):
                raise ValueError(f"there is no array number {array}: there are {len(sizes)}, counted from 0")
            if start < 0 or nbytes < 0 or start + nbytes > sizes[array]:
                raise ValueError(f"array {array} has {sizes[array]} bytes, and {nbytes} from {start} on are asked")
            total += nbytes
        return total, spans

    def _address(self, out: Array, nbytes: int) -> int:
        if not isinstance(out, np.ndarray) or out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous:
            raise ValueError("out: expected the bytes that reader.empty(nbytes) returns, or some of them in a row")
        if nbytes > out.nbytes:
            raise ValueError(f"out has {out.nbytes} bytes, and the spans have {nbytes}")
        address = address_of(out)
        if nbytes and not self._pool.contains(address, nbytes):
            raise ValueError("out is not of this stager's pinned memory. Take it from reader.empty(nbytes)")
        return address

    def hand_over(self) -> None:
        """Note that threads of ours are to read, each from `join` to `leave`. The thread that made it waits as others do now."""
        self._reading.maker = None

    def join(self) -> None:
        """Note that the calling thread reads: a finalizer that would wait for it here is refused, or waits elsewhere."""
        self._reading.threads[threading.get_ident()] = None

    def leave(self) -> None:
        """Note that it does not any more: another thread may have its number next."""
        self._reading.threads.pop(threading.get_ident(), None)

    def let_go(self) -> None:
        """Let go of arrays whose copies are done, and have the framework do so. Waits for none."""
        self._d2h.reap()
        # Otherwise some keep the memory until they are called for something else.
        self._sweep()

    def close(self) -> None:
        """Read no more. What was started goes on. Twice is fine; any thread."""
        self._reading.closing = threading.get_ident()
        self._sources = []
        self._copied = self._later = None
        # Only now: who has waited for this looks for the memory of the arrays next.
        self._reading.end()
        self._jobs.readings.pop(self._reading.id, None)

    def __enter__(self) -> ByteReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _sizes(described: Sequence[ShapeDtype]) -> list[int]:
    # There are thousands of arrays, and a few dtypes and shapes. By the dtypes' identity, since hashing one takes longer than this.
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    sizes: list[int] = []
    for shape, dtype in described:
        key = id(dtype), shape
        nbytes = known.get(key)
        if nbytes is None:
            nbytes = known[key] = math.prod(shape) * dtype.itemsize
        sizes.append(nbytes)
    return sizes
