"""A loop over results that are on their way to the host while later ones are computed, on the consumer's own thread.

`Drain` has what is under way; here is who asks the source for the next, and what the loop's consumer is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, final, overload

from xferlib.checks import check_iterable, uncopied, whole_number
from xferlib.errors import ClosedError
from xferlib.memory.arrays import Array
from xferlib.pipeline.drain import Drain
from xferlib.pipeline.memory_estimate import MemoryEstimate
from xferlib.pipeline.one_pass import OnePass, capped_depth, known_length, steps, warn_of_ended, warning_if_empty
from xferlib.pipeline.phase_timer import PhaseTimer
from xferlib.pipeline.prefetch import Prefetch
from xferlib.pipeline.report import Report, of_drain, of_stream
from xferlib.stager import Stager, check_stager
from xferlib.typed import HasDtype, KeyT, NamedT, Sequences, TreeT, TreeT_co

__all__ = ["Drained", "drain"]


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
    A generator that has ended, and another iterator that gives nothing, is told of by a `RuntimeWarning`.
    """
    # As in `prefetch`.
    check_stager(stager, results)
    return Drained(results, stager, depth, out=out, length=known_length(results), stream=stream)


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
        prefetched: Prefetch[Any] | None = None,
    ) -> None:
        if stream is not None:
            stager.check_stream(stream)
        check_iterable(results, "results")
        warn_of_ended(results, "results")
        # A prefetch tells of its own.
        self._if_empty = warning_if_empty(results, "results") if prefetched is None else None
        self._stream = stream
        self._results = iter(results)
        self._prefetched = prefetched
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
        before = MemoryEstimate() if self._prefetched is None else self._prefetched.bill
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
        return after if self._prefetched is None else of_stream(self._prefetched.report(), after)

    def close(self) -> None:
        """End the loop. Twice is fine."""
        self._closed = True
        self._clock.stop()
        # Holds functions and frames of the caller's.
        self._results = iter(())
        try:
            self._drain.close()
        finally:
            if self._prefetched is not None:
                self._prefetched.close()

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
            if self._if_empty is not None and not self._drain.taken:
                self._if_empty()
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
