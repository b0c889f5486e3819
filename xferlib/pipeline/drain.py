"""Results on their way to the host while later ones are computed: `drain` on one thread, `Drain` between two.

The copy of each result is started on the thread that made it, right behind the work, and waited for on the thread that takes it.
Results come out in the order in which they were submitted; what was raised instead of one comes out in its place.

Both sides share state that changes in single steps, and wake each other to look at it: an interrupt leaves no lock held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, NoReturn, final, overload

from xferlib.checks import check_iterable, uncopied, whole_number
from xferlib.d2h import pinned_nbytes
from xferlib.errors import AllocationError, ClosedError, XferError
from xferlib.memory.arrays import Array
from xferlib.pipeline.failed import Failed
from xferlib.pipeline.memory_estimate import Charge, MemoryEstimate, at_a_time, check_room, described, tree_nbytes
from xferlib.pipeline.one_pass import OnePass, capped_depth, known_length, steps, warn_of_ended
from xferlib.pipeline.output_writer import OutputWriter
from xferlib.pipeline.phase_timer import PhaseTimer
from xferlib.pipeline.prefetch import Prefetch
from xferlib.pipeline.report import Report, of_drain, of_stream
from xferlib.pipeline.wakeup import Wakeup
from xferlib.stager import Stager, check_stager
from xferlib.transfer import Transfer
from xferlib.tree import trees_of
from xferlib.typed import HasDtype, KeyT, NamedT, Sequences, TreeT, TreeT_co
from xferlib.words import counted

__all__ = ["Drain", "Drained", "Results", "drain"]


@overload
def drain(
    results: Iterable[NamedT], stager: Stager, depth: int = 2, *, out: None = None, stream: object | None = None
) -> Drained[NamedT]: ...
@overload
def drain(
    results: Iterable[dict[KeyT, Any]], stager: Stager, depth: int = 2, *, out: None = None, stream: object | None = None
) -> Drained[dict[KeyT, Any]]: ...
@overload
def drain(
    results: Iterable[Sequences], stager: Stager, depth: int = 2, *, out: None = None, stream: object | None = None
) -> Drained[Any]: ...
@overload
def drain(
    results: Iterable[HasDtype], stager: Stager, depth: int = 2, *, out: None = None, stream: object | None = None
) -> Drained[Array]: ...
@overload
def drain(
    results: Iterable[TreeT], stager: Stager, depth: int = 2, *, out: None = None, stream: object | None = None
) -> Drained[TreeT]: ...
@overload
def drain(
    results: Iterable[Any], stager: Stager, depth: int = 2, *, out: TreeT, stream: object | None = None
) -> Drained[TreeT]: ...
def drain(
    results: Iterable[Any], stager: Any = None, depth: int = 2, *, out: Any = None, stream: object | None = None
) -> Drained[Any]:
    """Iterate host trees: while the consumer has one, up to `depth` later results are computed and copied.

    `results`: any iterable of trees of device arrays, iterated on the consumer's own thread, so that the copy of each is started
    right behind the work that makes it. `out`: arrays to be filled from the front along the first axis, in memory, mapped from a
    file or shared. Without it, results are in pinned memory, which comes back when the last view of it is gone: `depth` + 2 of
    them, or all, are there at a time, besides those that are kept. If `pinned_limit` has no room for so many like the first, the
    first is refused, and nothing is copied. See `Drain` for both.
    `stream`: the one whose work makes the results. None: the consumer's current one. Results come out typed as by `Stager.get`.
    """
    # As in `prefetch`.
    check_stager(stager, results)
    return Drained(results, stager, depth, out=out, length=known_length(results), stream=stream)


@final
class Drain(Generic[TreeT_co]):
    """Takes results on one side and gives them out on the other, on two threads or on one.

    `submit(tree)` starts the copy to the host and returns; it waits while `depth` results are under way. `results()` iterates them
    as host trees. `end()` says that no more come.

    Without `out` each result is in pinned memory of the stager's pool, which comes back when the last view of it is gone: keep few.
    `depth` then counts results that are submitted and not taken, so somebody must take them: on another thread, or on this one
    before there are more. If `pinned_limit` has no room for `depth` + 2 results like the first, the first one is refused.
    `out`: a tree of arrays that results fill from the front, along the first axis (`numpy.lib.format.open_memmap` makes one of a
    file). Results are then views of it, and `depth` counts results that are not yet copied, so nobody need take them.

    If a result fails, whoever takes it is told, in its place, and those after it follow. A result whose copy could not be started
    takes no rows of `out`; one whose copy failed leaves its rows undefined.

    A context manager; `close()` waits for what is in flight. If `out` was given, the end of a `with` block raises as `synchronize`
    does, since perhaps nobody else is told. One thread submits at a time, any number may take.

    Attributes:
        depth: How many results may be under way.
        bill: What the loop costs in memory, known from the first result on.
    """

    __reduce_ex__ = uncopied("Make another one")

    def __init__(self, stager: Stager, depth: int = 2, *, out: TreeT_co | None = None) -> None:
        check_stager(stager)
        whole_number(depth, "depth", least=1)
        self.depth = depth
        self.bill: MemoryEstimate | None = None
        self._length: int | None = None
        self._stager = stager
        self._writer = None if out is None else OutputWriter(out, trees_of(stager.backend))
        self._changed = Wakeup()
        # Reentrant: a finalizer may take while its thread is in here.
        self._taking = threading.RLock()
        self._pending: deque[Transfer[TreeT_co] | Failed] = deque()
        self._flying: deque[Transfer] = deque()
        self._taken = 0
        self._taker: int | None = None
        self._asked = self._ended = self._closed = self._cut = False

    @property
    def pending(self) -> int:
        """How many results are submitted and not taken."""
        return len(self._pending)

    @property
    def failing(self) -> bool:
        """Whether the newest result that is not taken is one that `fail` was told of."""
        try:
            return isinstance(self._pending[-1], Failed)
        except IndexError:
            return False

    def submit(self, tree: Any, *, stream: object | None = None) -> None:
        """Start copying a tree of device arrays to the host, after what `stream` (None: this thread's current one) has enqueued.

        Waits while `depth` results are under way. Raises `RuntimeError` if the wait could not end, because only this thread takes,
        or nobody; `ValueError` where `out` has no room; else as `Stager.get`.
        """
        self._check_open()
        if self._writer is not None:
            self._land_until(self.depth - 1)
        elif not self._wait_for_taker():
            raise RuntimeError(
                f"not taken yet: {counted(len(self._pending), 'result')}, and nobody else takes: call results() first and "
                "iterate it on another thread, use drain(...), or give out="
            )
        self.start(tree, stream)

    def expect(self, length: int | None) -> None:
        """Say how many results there are to come, where that is known: memory for more is not needed."""
        self._length = length

    def start(self, tree: Any, stream: object | None = None) -> None:
        """Submit without waiting for anything, however many are under way."""
        self._check_open()
        self._estimate(tree)
        if self._writer is None:
            transfer = self._pinned(tree, stream)
        else:
            transfer = self._into_out(self._writer, tree, stream)
            self._flying.append(transfer)
        self._pending.append(transfer)
        self._changed.wake()
        if self._closed:
            # Another thread closed it meanwhile, and may know nothing of this result: nobody may take it after a gap.
            for queue in (self._pending, self._flying):
                with suppress(ValueError):
                    queue.remove(transfer)
            with suppress(XferError):
                transfer.synchronize()
            self._check_open()

    def fail(self, error: BaseException) -> None:
        """Submit that there is no result: whoever takes it gets this error. Waits for nothing."""
        self._check_open()
        self._pending.append(Failed(error))
        self._changed.wake()

    def results(self) -> Results[TreeT_co]:
        """Return an iterator of host trees, which ends after `end()`. Several share the results between them."""
        self._asked = True
        return Results(self)

    def end(self, error: BaseException | None = None) -> None:
        """Say that nothing more will be submitted; `error` is raised behind the last result."""
        if error is not None and not (self._closed or self._ended):
            self._pending.append(Failed(error))
        self._ended = True
        self._changed.wake()

    def synchronize(self) -> None:
        """Wait until everything submitted is on the host. Raises `TransferError` of the first that failed and was not taken."""
        failed: XferError | None = None
        for transfer in self._under_way():
            try:
                transfer.synchronize()
            except XferError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Wait for what is in flight and drop what was not taken; twice is fine. Whoever still takes gets `ClosedError`."""
        if not self._closed:
            self._cut = not self._ended or bool(self._pending)
            self._closed = True
        self._changed.wake()
        for transfer in self._under_way():
            with suppress(XferError):
                transfer.synchronize()
        # Only now: a call that is interrupted in here leaves what is in flight to the next call.
        self._pending.clear()
        self._flying.clear()

    def take(self) -> TreeT_co:
        """Wait for the oldest result and return it, or raise what is in its place. Raises `StopIteration` when there is no more."""
        # One at a time, so that whoever came first gets the oldest.
        with self._taking:
            while True:
                self._taker = threading.get_ident()
                transfer = self._oldest()
                # An interrupt leaves it where it is.
                with suppress(XferError):
                    transfer.synchronize()
                if self._take_out(transfer):
                    break
        return transfer.value

    @property
    def oldest_done(self) -> bool:
        """Whether the oldest result is on the host already."""
        try:
            return self._pending[0].done()
        except (IndexError, XferError):
            return True

    def __enter__(self) -> Drain[TreeT_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None and self._writer is not None and not self._closed:
                self.synchronize()
        finally:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._ended else f"depth {self.depth}"
        try:
            oldest = self._pending[0]
        except IndexError:
            oldest = None
        first = f", the oldest {oldest!r}" if isinstance(oldest, Transfer) else ""
        return f"<Drain, {self._taken} taken, {len(self._pending)} not taken{first}, {state}>"

    def _pinned(self, tree: Any, stream: object | None) -> Transfer:
        try:
            return self._stager.get(tree, stream=stream)
        except AllocationError as error:
            count = at_a_time(self.depth, self._length)
            error.add_note(
                f"depth={self.depth} has up to {count} results in pinned memory at a time, besides those that "
                "the consumer keeps. Use a smaller depth, raise pinned_limit, give out=, or keep fewer"
            )
            raise

    def _into_out(self, writer: OutputWriter, tree: Any, stream: object | None) -> Transfer:
        out, count = writer.next(tree)
        # Before the copy: if it is begun, and an interrupt loses that fact, nothing else may be written to these rows.
        writer.filled += count
        try:
            return self._stager.get(tree, out=out, stream=stream)
        except (XferError, TypeError, ValueError):
            writer.filled -= count
            raise

    def _oldest(self) -> Transfer[TreeT_co] | Failed:
        while True:
            # Asked before the queue: then everything that was submitted before the end is in there.
            ended = self._ended
            if self._closed:
                self._refuse_taking()
            with suppress(IndexError):
                return self._pending[0]
            if ended:
                raise StopIteration
            self._changed.wait(lambda: self._pending or self._ended or self._closed)

    def _take_out(self, transfer: Transfer | Failed) -> bool:
        """Take the oldest out of the queue. Returns False if it is there no more: closed, or taken by a finalizer."""
        if self._closed:
            self._refuse_taking()
        try:
            self._pending.remove(transfer)
        except ValueError:
            return False
        if isinstance(transfer, Transfer):
            with suppress(ValueError):
                self._flying.remove(transfer)
        self._taken += 1
        self._changed.wake()
        return True

    def _refuse_taking(self) -> NoReturn:
        if not self._cut:
            raise StopIteration
        raise ClosedError(
            "this drain was closed before it was ended and everything was taken: call end() when everything is submitted"
        )

    def _wait_for_taker(self) -> bool:
        """Wait until fewer than `depth` results are not taken. Returns False where nobody takes, or only this thread."""
        mine = threading.get_ident()
        self._changed.wait(lambda: self._closed or len(self._pending) < self.depth or not self._asked or self._taker == mine)
        self._check_open()
        return len(self._pending) < self.depth

    def _land_until(self, count: int) -> None:
        """Wait until no more than so many copies are under way."""
        while len(self._flying) > count:
            # Another thread may close meanwhile, and drop them all. Whoever takes the result is told of its failure.
            with suppress(IndexError, ValueError):
                transfer = self._flying[0]
                with suppress(XferError):
                    transfer.synchronize()
                self._flying.remove(transfer)

    def _under_way(self) -> list[Transfer | Failed]:
        return [*self._flying.copy(), *self._pending.copy()]

    def _check_open(self) -> None:
        if self._closed or self._ended:
            raise ClosedError(f"this drain was {'closed' if self._closed else 'ended'}. Make another Drain")

    def _estimate(self, tree: Any) -> None:
        """Say what the loop costs if all results are like this one. Raises `AllocationError` where so much can never be had."""
        if self.bill is not None:
            return
        trees = trees_of(self._stager.backend)
        nbytes = tree_nbytes(tree, trees)
        count = at_a_time(self.depth, self._length)
        device = Charge("device", count, nbytes, "results")
        if self._writer is not None:
            self.bill = MemoryEstimate((device,))
            return
        if self._stager.when_full != "stage":
            limit = self._stager.stats().pinned_limit_nbytes
            # As they lie in the pool.
            check_room("pinned", self.depth, count, pinned_nbytes(described(tree, trees)), limit, "results", "give out=, ")
        self.bill = MemoryEstimate((Charge("pinned", count, nbytes, "results"), device))


@final
class Results(Generic[TreeT_co]):
    """The results of a `Drain`, in order, once: a new `for` after the last one raises `ClosedError`."""

    def __init__(self, drain: Drain[TreeT_co]) -> None:
        self._drain = drain
        self._spent = False

    def __iter__(self) -> Iterator[TreeT_co]:
        if self._spent:
            raise ClosedError("these results are spent: all were taken, and none comes a second time. Make another Drain for more")
        return steps(self)

    def __next__(self) -> TreeT_co:
        try:
            return self._drain.take()
        except StopIteration:
            self._spent = True
            raise


@final
class Drained(OnePass, Generic[TreeT_co]):
    """Host trees whose copies were started ahead, for one pass: `for result in loop`, or `next(loop)`. A context manager.

    Made by `drain` and `stream_map`. What was raised for a result comes out in its place, and only that result is lost: when the
    consumer asks again, the results are asked for the next one, if they can go on. An interrupt of the consumer, such as
    `KeyboardInterrupt`, closes the loop. Whoever asks for more after `close()` gets `ClosedError`; after the last result `next`
    raises `StopIteration`, as iterators do, and a new `for` raises `ClosedError`. With `out=`, `run()` goes on to the end.

    `close()`, the end of a `with` block and the end of the results leave nothing in flight and no thread. After an exception,
    nothing is asked for or started until the consumer asks.
    """

    __reduce_ex__ = uncopied("Begin another with xferlib.drain(...) or xferlib.stream_map(...)")

    def __init__(
        self,
        results: Iterable[Any],
        stager: Stager,
        depth: int,
        *,
        out: TreeT_co | None,
        length: int | None = None,
        stream: object | None = None,
        source: Prefetch[Any] | None = None,
    ) -> None:
        if stream is not None:
            stager.check_stream(stream)
        check_iterable(results, "results")
        warn_of_ended(results, "results")
        self._stream = stream
        self._results = iter(results)
        self._source = source
        whole_number(depth, "depth", least=1)
        self._has_out = out is not None
        self._drain: Drain[TreeT_co] = Drain(stager, capped_depth(depth, length), out=out)
        self._drain.expect(length)
        self._length = length
        self._clock = PhaseTimer()
        self._exhausted = self._spent = self._closed = self._inside = False
        self._taken = self._late = 0
        self._first: tuple[Mapping[str, float], int] | None = None
        """What the first result took, which pays for what is done once, and whether it was late."""

    @property
    def bill(self) -> MemoryEstimate:
        """The memory that the loop needs, as far as it has seen. If there is a prefetch, this waits for its first batch."""
        before = MemoryEstimate() if self._source is None else self._source.bill
        return before + (self._drain.bill or MemoryEstimate())

    def report(self) -> Report:
        """Say who waited for whom since the second result was asked for. Any thread, also after the end."""
        taker, late = self._first or ({}, 0)
        after = of_drain(
            batches=self._taken,
            late=self._late - late,
            taker=self._clock.since(taker),
            first=sum(taker.values()),
        )
        return after if self._source is None else of_stream(self._source.report(), after)

    def close(self) -> None:
        """End the loop. Twice is fine."""
        self._closed = True
        self._clock.stop()
        # Holds functions and frames of the caller's.
        self._results = iter(())
        try:
            self._drain.close()
        finally:
            if self._source is not None:
                self._source.close()

    def __iter__(self) -> Iterator[TreeT_co]:
        """Begin the pass, or go on with it. Raises `ClosedError` where there is nothing to go on with."""
        if self._spent:
            raise ClosedError("this loop is spent: it gives each result once, and all were taken. Make a new one for another pass")
        if self._closed:
            raise ClosedError("this loop is closed. Make another one")
        return steps(self)

    def __next__(self) -> TreeT_co:
        if self._spent:
            raise StopIteration
        if self._first is None and self._taken:
            self._first = (self._clock.read(), self._late)
        try:
            result = self._next()
            self._clock.turn("work")
            return result
        except StopIteration:
            self._spent = True
            self.close()
            raise
        except Exception:
            self._clock.turn(None if self._closed else "work")
            raise
        except BaseException:
            self.close()
            raise

    def run(self) -> Report:
        """Take all results that are left, and return the report: for a loop with `out=`, where they are then.

        Raises what is raised for a result, as `next` does, and may be called again to go on. Raises `ValueError` without `out=`,
        where nobody would have the results.
        """
        if not self._has_out:
            raise ValueError("run() drops the results where no out= keeps them: give out=, or iterate, as in list(loop)")
        for _ in self:
            pass
        return self.report()

    def __repr__(self) -> str:
        state = "spent" if self._spent else "closed" if self._closed else f"{self._drain.pending} ahead of {self._drain.depth}"
        return f"<Drained, {self._taken} taken, {state}>"

    def _next(self) -> TreeT_co:
        self._refuse_closed()
        if self._inside:
            raise RuntimeError("this loop is inside its own next, here or on another thread: it has one consumer. Share a Drain")
        self._inside = True
        try:
            self._clock.turn("launch")
            self._fill()
            self._clock.turn("wait")
            late = not self._drain.oldest_done
            result = self._drain.take()
        except ClosedError:
            # It is that of the drain in here, of which the consumer knows nothing.
            self._refuse_closed()
            raise
        finally:
            self._inside = False
        self._late += late
        self._taken += 1
        return result

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("this loop was closed before its end. Make another one") from None

    def _fill(self) -> None:
        # After a failure nothing new is started until it was told: many consumers go no further. The result that is about to be
        # taken is under way as well.
        while not (self._exhausted or self._drain.failing) and self._drain.pending <= self._drain.depth:
            try:
                self._start_next()
            except Exception as error:
                # It comes out after the results before it.
                self._drain.fail(error)

    def _start_next(self) -> None:
        try:
            result = next(self._results)
        except StopIteration:
            self._exhausted = True
            self._drain.end()
            return
        self._drain.start(result, self._stream)
