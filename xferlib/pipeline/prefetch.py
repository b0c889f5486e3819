"""Batches on their way to the device while earlier ones are computed on.

The source is iterated, and transfers are started, on a thread of their own; `Transfer.value` is asked for on the consumer's thread,
whose current stream is the one that will use the arrays, if no other is named.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, final, overload

import numpy as np

from xferlib.callers import user_line
from xferlib.checks import check_iterable, flag, uncopied, whole_number
from xferlib.errors import AllocationError, ClosedError, XferError
from xferlib.latch import is_over
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.idle_blocks import size_class
from xferlib.packing import Packing
from xferlib.pipeline.background import BackgroundIterator
from xferlib.pipeline.completion import Completion, completion_of
from xferlib.pipeline.failed import STAGER_CLOSED
from xferlib.pipeline.memory_estimate import Charge, MemoryEstimate, at_a_time, check_room, described, tree_nbytes
from xferlib.pipeline.one_pass import OnePass, capped_depth, known_length, steps, warn_of_ended, warning_if_empty
from xferlib.pipeline.phase_timer import PhaseTimer
from xferlib.pipeline.report import Report, of_prefetch
from xferlib.pipeline.ring import Slot
from xferlib.pipeline.unshared import is_unshared
from xferlib.stager import Stager, check_stager
from xferlib.transfer import Transfer
from xferlib.tree import trees_of
from xferlib.typed import KeyT, NamedT, TreeT, TreeT_co, Unnamed

__all__ = ["BatchPuts", "Prefetch", "prefetch"]


@overload
def prefetch(
    batches: Iterable[Slot[TreeT]], stager: Stager, depth: int = 2, *, rewrites: bool | None = None, stream: object | None = None
) -> Prefetch[TreeT]: ...
@overload
def prefetch(
    batches: Iterable[NamedT], stager: Stager, depth: int = 2, *, rewrites: bool | None = None, stream: object | None = None
) -> Prefetch[NamedT]: ...
@overload
def prefetch(
    batches: Iterable[dict[KeyT, Any]],
    stager: Stager,
    depth: int = 2,
    *,
    rewrites: bool | None = None,
    stream: object | None = None,
) -> Prefetch[dict[KeyT, Any]]: ...
@overload
def prefetch(
    batches: Iterable[Unnamed], stager: Stager, depth: int = 2, *, rewrites: bool | None = None, stream: object | None = None
) -> Prefetch[Any]: ...
@overload
def prefetch(
    batches: Iterable[TreeT], stager: Stager, depth: int = 2, *, rewrites: bool | None = None, stream: object | None = None
) -> Prefetch[TreeT]: ...
def prefetch(
    batches: Iterable[Any], stager: Any = None, depth: int = 2, *, rewrites: bool | None = None, stream: object | None = None
) -> Prefetch[Any]:
    """Iterate device trees: up to `depth` batches are being copied, or are there, while the consumer works on an earlier one.

    `batches`: any iterable of trees of NumPy arrays, or of slots of a `Ring` of this stager. It is iterated on a thread of its
    own, and pageable memory is borrowed by the copies. `rewrites`: whether the source may write to the arrays of a batch after it
    has given it. If so, it is asked for the next one only when that is safe: for pageable memory when the CPU has copied it
    (`Transfer.wait_staged`), for pinned memory when its copy is done. If not, it is asked at once. None: as the source's attribute
    `rewrites` says, else true. Slots come back to their ring when their copy is done, either way.

    If nothing else refers to a batch, the source is asked for the next one at once, whatever `rewrites` says, since nobody can
    write to that batch. Such a batch has arrays that own their memory (or are the only view of one that does, or of `bytes`), in
    dicts, lists and tuples to which the source keeps no reference, either. A generator that says `batch = ...` and then
    `yield batch` keeps one, `yield ...` does not.

    `depth`: no more than there are batches, if `len()` of the source says how many; a `RuntimeWarning` tells if it said too few.
    The loop needs device memory for `depth` + 2 batches, or for all there are. If `device_limit` has no room for so many like the
    first, that is refused, and nothing is put.

    `stream`: the one whose work will use the batches. None: the consumer's current one. If a framework knows no current stream,
    its default stream is meant, so there a consumer with streams of its own must name the one it uses.

    See `Prefetch` for the iterator. Batches come out typed as by `Stager.put`; those of slots as their `Ring` is.
    Raises `TypeError` and `ValueError`; `CapabilityError` for a stream where none can be named. Its `next` raises
    `AllocationError`. A generator that has ended, and another iterator that gives nothing, is told of by a `RuntimeWarning`.
    """
    # It has a default only so that this says where one comes from, and Python does not.
    check_stager(stager, batches)
    if stream is not None:
        stager.check_stream(stream)
    if rewrites is None:
        rewrites = getattr(batches, "rewrites", True)
    return Prefetch(batches, _StagerPuts(stager, rewrites=rewrites, stream=stream), depth)


class BatchPuts(Protocol):
    """How a prefetch puts batches. Called on its thread, except `take` and `device_waits`."""

    @property
    def rewrites(self) -> bool:
        """Whether the source may write to the arrays of a batch after it has given it."""

    def put(self, batch: Any, *, unshared: bool) -> Completion:
        """Start the copies of a batch, and return without waiting for them.

        `unshared`: nothing but the loop refers to it, so nobody writes to it before they are done.
        """

    def in_place(self, batch: Any) -> bool:
        """Tell, of a batch that others refer to, whether the source may be asked for the next one only when its copies are done.

        Otherwise it may be when the batch is staged, or at once if the source never `rewrites` what it has given.
        """

    def nbytes(self, batch: Any) -> int:
        """Return the bytes of a batch's arrays, for the bill."""

    def check_room(self, batch: Any, depth: int, count: int) -> None:
        """Raise `AllocationError` if the device has no room for `count` batches like this one, the first, at a time."""

    def take(self, started: Any) -> Any:
        """Return the batch on the device. On the consumer's thread."""

    def device_waits(self) -> int:
        """Return how many puts have waited on the device for work that still read an older batch, since whenever. Any thread."""


@final
class Prefetch(OnePass, Generic[TreeT_co]):
    """Device trees that are put ahead of time, on a thread, for one pass: `for batch in loop`, or `next(loop)`. Made by `prefetch`.

    Batches may be kept for as long as wanted; a consumer that never waits for its own work on the device runs ahead of it, and
    `device_limit` of the stager then bounds the memory.

    Exceptions of source, put and copy come out where their batch would have, with their traceback; those of source and put with a
    note that says the number of the batch. That batch is the only one lost: the source is asked for the next one, if it can go on,
    when the consumer asks again. An interrupt of the consumer, such as `KeyboardInterrupt`, closes the loop. Whoever asks for more
    after `close()` gets `ClosedError`; after the end of the source `next` raises `StopIteration`, as iterators do, and a new `for`
    raises `ClosedError`: each epoch needs a prefetch of its own.

    `close()`, the end of a `with` block and the end of the source leave no thread and nothing in flight; an exception leaves a
    thread that starts nothing until it is asked. An iterator that is dropped ends its thread soon after, unless its source refers
    to it, as in `self.loop = prefetch(self.batches(), stager)`: the thread runs the source, so close such a loop. What is in
    flight when it is dropped ends by itself. A source that is inside its own `next` cannot be interrupted: after two seconds
    `close` leaves it to a thread that ends when it comes back, with a `ResourceWarning`.
    """

    __reduce_ex__ = uncopied("Begin another with xferlib.prefetch(...)")

    def __init__(self, batches: Iterable[Any], puts: BatchPuts, depth: int = 2) -> None:
        if isinstance(batches, Mapping):
            raise TypeError(
                f"batches is a {type(batches).__qualname__}, of which only the keys would be iterated: expected an iterable of "
                "batches. Pass [batch] for a single one"
            )
        check_iterable(batches, "batches")
        warn_of_ended(batches, "batches")
        if not hasattr(puts, "take"):
            raise TypeError(
                f"got {reprlib.repr(puts)}. A Prefetch is what prefetch returns: call xferlib.prefetch(batches, stager)"
            )
        flag(puts.rewrites, "rewrites")
        self._asked = whole_number(depth, "depth", least=1)
        self._length = length = known_length(batches)
        depth = capped_depth(self._asked, length)
        self._begun_at = user_line()
        self._if_empty = warning_if_empty(batches, "batches")
        self._puts = puts
        self._clock = PhaseTimer()
        self._taken = self._late = 0
        self._first: _ReportStart | None = None
        """What the first batch took, which pays for what is done once."""
        self._starter = starter = _Starter(puts, depth, at_a_time(depth, length))
        self._background: BackgroundIterator[Completion] = BackgroundIterator(
            batches, starter.start, depth=depth, before_next=starter.before_next, name="xferlib-prefetch"
        )

    @property
    def bill(self) -> MemoryEstimate:
        """The memory that the loop needs. Waits for the source's first batch, from which it is known; empty if there is none."""
        self._background.seen()
        return self._starter.bill

    def report(self) -> Report:
        """Say who waited for whom since the second batch was asked for. Any thread, also after the end."""
        first = self._first or _ReportStart({}, {}, 0, 0)
        return of_prefetch(
            batches=self._taken,
            late=self._late - first.late,
            taker=self._clock.since(first.taker),
            thread=self._background.clock.since(first.thread),
            first=sum(first.taker.values()),
            reader_waits=self._puts.device_waits() - first.device_waits,
        )

    def close(self) -> None:
        """End the loop: nothing is in flight and no thread is left. Twice is fine; any thread."""
        self._clock.stop()
        self._background.close()
        if not self._background.forked:
            self._starter.settle()

    def __iter__(self) -> Iterator[TreeT_co]:
        """Begin the pass, or go on with it. Raises `ClosedError` where there is nothing to go on with."""
        if self._background.spent:
            raise ClosedError(
                "this prefetch is spent: it goes over its source once, and all batches were taken. Make a new one for each epoch, "
                "inside the loop over epochs"
            )
        if self._background.closed:
            raise ClosedError("this prefetch is closed. Make another one")
        return steps(self)

    def __next__(self) -> TreeT_co:
        if self._first is None and self._taken:
            self._first = _ReportStart(self._clock.read(), self._background.clock.read(), self._late, self._puts.device_waits())
        self._clock.turn("wait")
        try:
            value = self._next()
            self._clock.turn("work")
            return value
        except StopIteration:
            warn, self._if_empty = self._if_empty, None
            self.close()
            if warn is not None and not self._background.begun:
                warn()
            raise
        except Exception:
            self._clock.turn(None if self._background.closed else "work")
            raise
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        thread = self._background
        state = "spent" if thread.spent else "closed" if thread.closed else f"{thread.ahead} ahead of {thread.depth}"
        return f"<Prefetch, {self._taken} taken, {state}>"

    def _next(self) -> TreeT_co:
        waiting = self._background.ready
        transfer = self._background.take()
        try:
            late = waiting and not transfer.done()
            value: TreeT_co = self._puts.take(transfer)
        except Exception:
            # Many consumers go no further, and close the stager: then nobody may be inside one of its puts.
            self._background.pause()
            raise
        self._late += late
        self._taken += 1
        if self._taken - 1 == self._length and self._background.depth < self._asked:
            self._begun_at.warn(
                f"len() of the source said {self._length}, and it gives more batches: the loop is {self._background.depth} ahead, "
                f"not {self._asked}. Correct its __len__, or pass iter(source)"
            )
        return value


@final
class _ReportStart(NamedTuple):
    """What clocks and counters said when the first batch was taken: a report begins there."""

    taker: Mapping[str, float]
    thread: Mapping[str, float]
    late: int
    device_waits: int


@final
class _Starter:
    """Starts the items of one prefetch, on its thread: no more than `depth` copies are under way."""

    def __init__(self, puts: BatchPuts, depth: int, count: int) -> None:
        """`count`: how many batches there are at a time."""
        self.bill = MemoryEstimate()
        self._puts = puts
        self._read: tuple[Callable[[], None], Any] | None = None
        """A function that waits until the last batch may be written to again, and that batch, which is kept alive until then."""
        self._depth = depth
        self._count = count
        self._fits = False
        self._recent: deque[Completion] = deque()

    def start(self, box: list[Any], clock: PhaseTimer) -> Completion:
        """Put a batch. The clock is with the source's thread."""
        # Before it has a name here.
        unshared = is_unshared(box)
        (batch,) = box
        if isinstance(batch, Slot):
            clock.move(batch.waited_here(), "source", "slot")
        try:
            if not self._fits:
                self._estimate(batch)
            while len(self._recent) >= self._depth:
                # Otherwise a consumer that takes batches as fast as they come would have them all under way.
                oldest = self._recent[0]
                if not is_over(oldest.done, XferError):
                    clock.turn("copy")
                    _wait_for(oldest.synchronize)
                    clock.turn("start")
                self._recent.popleft()
            started = self._puts.put(batch, unshared=unshared)
        except Exception as error:
            if isinstance(batch, Slot):
                # Whoever keeps the error would keep the slot from its ring.
                batch.release()
            if isinstance(error, ClosedError):
                error.add_note(STAGER_CLOSED)
            if isinstance(error, AllocationError) and self._fits:
                error.add_note(
                    f"depth={self._depth} has up to {self._count} batches on the device at a time, besides those "
                    "that the consumer keeps. Use a smaller depth, make smaller batches, or keep fewer"
                )
            raise
        completion = completion_of(started)
        self._recent.append(completion)
        if not unshared:
            self._note_read(batch, started, completion)
        return started

    def _note_read(self, batch: Any, started: Completion, completion: Completion) -> None:
        """Note what the source is to wait for before it may write to a batch."""
        slot = isinstance(batch, Slot)
        if isinstance(started, Transfer) and not slot:
            # It knows, and the driver need not be asked a second time.
            if not self._puts.rewrites:
                return
            in_place, staged = started._in_place, started._staged
        else:
            in_place, staged = self._puts.in_place(batch), slot or not self._puts.rewrites
        if in_place:
            self._read = completion.synchronize, batch
        elif not staged:
            self._read = completion.wait_staged, batch

    def before_next(self, clock: PhaseTimer) -> None:
        """Wait until the source may be asked for another batch."""
        if self._read is not None:
            wait, _ = self._read
            clock.turn("read")
            _wait_for(wait)
            self._read = None

    def settle(self) -> None:
        """Wait for what was started."""
        for completion in self._recent.copy():
            _wait_for(completion.synchronize)

    def _estimate(self, batch: Any) -> None:
        """Say what the loop costs if all batches are like this one. Raises `AllocationError` where so much can never be had."""
        slot = isinstance(batch, Slot)
        tree = batch.tree if slot else batch
        nbytes = self._puts.nbytes(tree)
        device = Charge("device", self._count, nbytes, "batches")
        if slot:
            self.bill = batch.ring.bill + MemoryEstimate((device,))
        elif self._puts.in_place(batch):
            self.bill = MemoryEstimate(
                (Charge("pinned", min(self._depth + 1, self._count), nbytes, "batches of the source's own"), device)
            )
        else:
            self.bill = MemoryEstimate((device,))
        self._puts.check_room(tree, self._depth, self._count)
        self._fits = True


def _wait_for(wait: Callable[[], None]) -> None:
    try:
        wait()
    except XferError:
        # Whoever takes the batch is told of its failure.
        return


@final
class _StagerPuts:
    """Puts by one stager: see `BatchPuts`. Batches are used on `stream`; None: on the consumer's current one."""

    def __init__(self, stager: Stager, *, rewrites: bool, stream: object | None) -> None:
        self.rewrites = rewrites
        self._stager = stager
        self._stream = stream

    def put(self, batch: Any, *, unshared: bool) -> Transfer:
        """See `BatchPuts`."""
        transfer: Transfer[Any]
        if isinstance(batch, Slot):
            if batch.ring.stager is not self._stager:
                raise ValueError(
                    f"the source gave a slot of a ring of another stager, {batch.ring.stager!r}: expected one of the very stager "
                    "that prefetch was given. Make the ring with that"
                )
            transfer = batch.put()
        else:
            transfer = self._stager.put(batch, borrow="staged" if self.rewrites and not unshared else True)
        transfer._make_ahead()
        return transfer

    def nbytes(self, batch: Any) -> int:
        """See `BatchPuts`."""
        return tree_nbytes(batch, trees_of(self._stager.backend))

    def check_room(self, batch: Any, depth: int, count: int) -> None:
        """See `BatchPuts`. The room is what `device_limit` leaves."""
        limit = self._stager.stats().device_limit_nbytes
        if limit is None:
            return
        # As they are allocated: an eighth larger at most.
        sizes = Packing(described(batch, trees_of(self._stager.backend))).sizes
        check_room("device", depth, count, sum(map(size_class, sizes)), limit, "batches")

    def in_place(self, batch: Any) -> bool:
        """See `BatchPuts`. So it is for pinned memory, which copies read where it is."""
        if not self.rewrites or isinstance(batch, Slot):
            return False
        leaves, _ = trees_of(self._stager.backend).flatten(batch)
        return any(self._is_pinned(leaf) for leaf in leaves if isinstance(leaf, np.ndarray))

    def take(self, started: Transfer) -> Any:
        """See `BatchPuts`."""
        return started.value if self._stream is None else started.value_on(self._stream)

    def device_waits(self) -> int:
        """See `BatchPuts`."""
        return self._stager.stats().device_waits

    def _is_pinned(self, array: Array) -> bool:
        return array.nbytes > 0 and self._stager.backend.is_pinned(address_of(array), array.nbytes)
