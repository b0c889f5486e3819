"""Results drained as they are computed, on one thread; and with a prefetch before it, all three at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, final

from xferlib.checks import uncopied
from xferlib.errors import AllocationError
from xferlib.pipeline.bill import Bill
from xferlib.pipeline.clock import Clock
from xferlib.pipeline.drain import Drain
from xferlib.pipeline.prefetch import Prefetch, prefetch
from xferlib.pipeline.report import Report, of_drain, of_stream
from xferlib.stager import Stager, check_stager

__all__ = ["Drained", "drain", "stream_map"]


def drain(results: Iterable[Any], stager: Stager, depth: int = 2, *, out: Any = None, stream: object | None = None) -> Drained:
    """Iterate host trees: while the consumer has one, up to `depth` later results are computed and copied.

    `results`: any iterable of trees of device arrays, iterated on the consumer's own thread, so that the copy of each is started
    right behind the work that makes it. `out`: arrays to be filled from the front along the first axis, in memory, mapped from a
    file or shared; else results are in pinned memory, which comes back when the last view of it is gone. See `Drain` for both.
    `stream`: the one whose work makes the results. None: the consumer's current one.
    """
    check_stager(stager, results)
    return Drained(results, stager, depth, out=out, stream=stream)


def stream_map(
    fn: Callable[[Any], Any],
    batches: Iterable[Any],
    stager: Stager,
    depth: int = 2,
    *,
    out: Any = None,
    rewrites: bool | None = None,
    stream: object | None = None,
) -> Drained:
    """Iterate `fn` of every batch as host trees, in order: the copies to the device, `fn` and the copies back run all at once.

    For data of any size: only some batches are on the device at a time, as `bill` says. `fn` takes a device tree and returns one;
    it runs on the consumer's thread and should not wait. An exception of the source, of `fn` or of a copy comes out where its
    result would have. `batches` and `rewrites` are those of `prefetch`, `out` that of `drain`, `stream` that of both.
    """
    source = prefetch(batches, stager, depth, rewrites=rewrites, stream=stream)
    try:
        # `map` keeps no batch between two steps.
        return Drained(map(fn, source), stager, depth, out=out, stream=stream, source=source)
    except BaseException:
        source.close()
        raise


@final
class Drained:
    """An iterator of host trees whose copies were started ahead. Made by `drain` and `stream_map`; a context manager.

    `close()`, the end of a `with` block, an exception and the end of the results leave nothing in flight and no thread.
    """

    __reduce_ex__ = uncopied("Begin another with xferlib.drain(...) or xferlib.stream_map(...)")

    def __init__(
        self,
        results: Iterable[Any],
        stager: Stager,
        depth: int,
        *,
        out: Any,
        stream: object | None = None,
        source: Prefetch | None = None,
    ) -> None:
        if stream is not None:
            stager.check_stream(stream)
        self._stream = stream
        self._results = iter(results)
        self._source = source
        if depth < 1:
            raise ValueError(f"depth={depth!r}: expected 1 or more")
        # The one to be taken is under way as well.
        self._drain = Drain(stager, depth + 1, out=out)
        self._clock = Clock()
        self._waiting: Any = None
        """A result for which there was no memory yet."""
        self._exhausted = self._over = False
        self._taken = self._late = 0

    @property
    def bill(self) -> Bill:
        """The memory that the loop needs; for what it has seen so far. Waits for the first batch where there is a prefetch."""
        before = Bill() if self._source is None else self._source.bill
        return before + (self._drain.bill or Bill())

    def report(self) -> Report:
        """Say who waited for whom so far. Any thread, also after the end."""
        notes = () if self._drain.lowered is None else (self._drain.lowered,)
        after = of_drain(batches=self._taken, late=self._late, taker=self._clock.read(), notes=notes)
        return after if self._source is None else of_stream(self._source.report(), after)

    def close(self) -> None:
        """End the loop. Twice is fine."""
        self._over = True
        self._clock.stop()
        self._waiting = None
        # Holds functions and frames of the caller's.
        self._results = iter(())
        try:
            self._drain.close()
        finally:
            if self._source is not None:
                self._source.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            self._clock.turn("launch")
            self._fill()
            self._clock.turn("wait")
            self._late += not self._drain.oldest_done
            result = self._drain.take()
        except BaseException:
            self.close()
            raise
        self._taken += 1
        self._clock.turn("work")
        return result

    def __enter__(self) -> Drained:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fill(self) -> None:
        while not self._exhausted and self._drain.pending < self._drain.depth:
            try:
                self._start_next()
            except StopIteration:
                self._finish(None)
            except AllocationError as error:
                if self._waiting is None or not self._drain.pending:
                    self._finish(error)
                return
            except Exception as error:
                # Behind the results before it.
                self._finish(error)

    def _start_next(self) -> None:
        # By a name of its own: `close` on another thread lets go of the other.
        waiting = self._waiting
        if waiting is None:
            waiting = self._waiting = next(self._results)
        self._drain.start(waiting, self._stream)
        self._waiting = None

    def _finish(self, error: Exception | None) -> None:
        self._exhausted = True
        self._waiting = None
        self._drain.end(error)
