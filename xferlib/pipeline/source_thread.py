"""The thread of a `BackgroundIterator`: its work, and its state, which it shares with whoever takes from it.

The thread refers to no `BackgroundIterator`. What is in here changes in single steps, and each side wakes the other to look at it.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter_ns
from types import GeneratorType
from typing import Any, Generic, TypeAlias, TypeVar, final

from xferlib.errors import XferError
from xferlib.forks import forget_in_child
from xferlib.latch import Latch
from xferlib.pipeline.failed import Failed
from xferlib.pipeline.phase_timer import PhaseTimer
from xferlib.resources import before_closing
from xferlib.tickets import Alive
from xferlib.tracing.log import LOG
from xferlib.uninterrupted import ends_program

__all__ = ["SourceThread", "Start", "live", "run"]

T = TypeVar("T")
Start: TypeAlias = "Callable[[list[Any], PhaseTimer], T]"
Work: TypeAlias = "tuple[Iterable[Any], Start[T], Callable[[PhaseTimer], None]]"

EXECUTING = "generator already executing"
"""What Python says where two threads ask one generator."""
NO_LOOP = (
    "the program ends, and Python starts no threads any more, without which no source can be iterated ahead. Run the loop before "
    "the end; a handler of atexit may put its batches one by one, with stager.put"
)
LET_GO_SECONDS = 1.0
"""How long whoever closes a stager waits for an iterator that was dropped while it started an item."""


class _Stopped(Exception):
    """Raised on the thread where there is nothing more to do."""


@final
class SourceThread(Generic[T]):
    """What the thread and the iterator both hold. Its methods are the thread's, except those that say otherwise."""

    thread: threading.Thread
    owner: weakref.ref[Any]

    def __init__(self, depth: int, work: Work[T], *, begun_at: str) -> None:
        """`begun_at`: see `call_site` in `debug`."""
        self.work: Work[T] | None = work
        self.begun_at = begun_at
        self.clock = PhaseTimer()
        self.depth = depth
        self.running = self.begun = self.ended = self.closed = self.starting = self.forked = False
        self.paused = False
        """Whether the thread goes on only when a taker waits."""
        self._begin()
        forget_in_child(self)

    def _begin(self) -> None:
        self.items: deque[T | Failed] = deque()
        self.inbox: SimpleQueue[object] = SimpleQueue()
        """Wakes the thread."""
        self.changed = Latch()
        """Wakes takers."""
        self.takers: dict[object, int] = {}
        """One for each that waits: since when, by the clock of traces."""

    @property
    def stopping(self) -> bool:
        """Whether the thread is to begin nothing new: the iterator was closed or dropped."""
        return self.closed or self.owner() is None

    @property
    def starving(self) -> bool:
        """Whether somebody waits for an item and there is none."""
        return bool(self.takers) and not self.items

    def may_take(self) -> bool:
        """Tell whether a taker has something to take, or to be told."""
        return bool(self.items) or self.ended or self.closed or self.forked

    def stop(self) -> None:
        """Let the thread begin nothing new, and tell takers. Takes no lock."""
        self.closed = True
        self.inbox.put(None)
        self.changed.wake()

    def forget(self) -> None:
        """See `ForkSafe`."""
        self.forked = True
        # The child has no thread, and these may be in the middle of a change that nobody will finish.
        self._begin()

    def sleep(self, seconds: float | None = None) -> bool:
        """Wait, as a taker, until there may be something to take, or for so many seconds; return whether there may be."""
        # Not the thread's number: a finalizer may take on this very thread, meanwhile.
        taker = object()
        try:
            self.takers[taker] = perf_counter_ns()
            if self.paused:
                # The thread is woken only where it is paused: otherwise it does not wait for takers, and a wake-up costs both
                # threads the interpreter. It looks for takers once more after it was paused.
                self.inbox.put(None)
            return self.changed.wait_for(self.may_take, seconds)
        finally:
            self.takers.pop(taker, None)

    def give(self, entry: T | Failed) -> None:
        """Have an entry taken after the others."""
        self.items.append(entry)
        self.begun = True
        self.changed.wake()

    def wait(self, reached: Callable[[], bool]) -> None:
        """Wait, on the thread, until `reached()` is true. Raises `_Stopped`."""
        while True:
            # The inbox is emptied before the look: what is told after the look stays in it.
            while not self.inbox.empty():
                self.inbox.get()
            if self.stopping:
                raise _Stopped
            if reached():
                return
            self.inbox.get()

    def wait_for_room(self) -> None:
        """Wait until another item may be asked for. Raises `_Stopped`."""
        self.clock.turn("place")
        self.wait(lambda: self.going() and len(self.items) < self.depth)

    def going(self) -> bool:
        """Tell whether the thread need not wait for a taker; if one waits, it need not any more."""
        if self.paused and self.starving:
            self.paused = False
        return not self.paused

    def give_started(self, start: Start[T], box: list[Any]) -> None:
        """Start an item, and have it taken; if the iterator is paused, only when a taker waits for it. Raises `_Stopped`."""
        while True:
            # First the mark, then the question: whoever pauses, closes or drops the iterator asks in the opposite order.
            self.starting = True
            if self.going() and not self.stopping:
                break
            self.starting = False
            self.changed.wake()
            self.clock.turn("place")
            self.wait(self.going)
        try:
            self.clock.turn("start")
            self.items.append(start(box, self.clock))
            self.begun = True
        finally:
            self.starting = False
            # Once for both: a taker that is woken too early has taken the interpreter for nothing.
            self.changed.wake()

    def note_source(self, asked: int) -> None:
        """Tell the trace of the time since `asked` in which the source was awaited by a taker that has nothing else to take."""
        waiting = list(self.takers.values())
        if waiting and not self.items:
            LOG.call("source", "next batch of the source", max(asked, min(waiting)))

    def refused(self, error: BaseException) -> None:
        """Tell takers that there is no thread. Any thread."""
        work, self.work = self.work, None
        if work is None:
            # There is: it has begun.
            return
        told = error
        if ends_program(error):
            told = XferError(NO_LOOP)
            told.__cause__ = error
        self.give(Failed(told))
        self.ended = True
        self.changed.wake()


def run(shared: SourceThread[Any]) -> None:
    LOG.act_for(shared.begun_at)
    shared.running = True
    shared.changed.wake()
    try:
        _work(shared)
    except _Stopped:
        pass
    except BaseException as error:  # Whatever it is, the taker must not wait for ever.
        shared.give(Failed(error))
    shared.clock.stop()
    shared.ended = True
    if shared.stopping:
        shared.items.clear()
    shared.changed.wake()
    LOG.act_for(None)


def _work(shared: SourceThread[Any]) -> None:
    work, shared.work = shared.work, None
    if work is None:
        return
    source, start, before_next = work
    iterator: Iterator[Any] = iter(source)
    del source, work
    try:
        _give_all(shared, iterator, start, before_next)
    finally:
        # When the iterator ends, the memory of what it gave last may go.
        before_next(shared.clock)
        if isinstance(iterator, GeneratorType):
            iterator.close()


def _give_all(
    shared: SourceThread[Any],
    iterator: Iterator[Any],
    start: Start[Any],
    before_next: Callable[[PhaseTimer], None],
) -> None:
    for number in itertools.count():
        if _finished(iterator):
            return
        shared.wait_for_room()
        try:
            before_next(shared.clock)
            if shared.stopping:
                # It was stopped meanwhile.
                return
            shared.clock.turn("source")
            asked = perf_counter_ns() if LOG.on else 0
            try:
                # Into the box at once, without a name: whoever starts the item may ask who else refers to it.
                box = [next(iterator)]
            except StopIteration:
                return
            finally:
                if asked:
                    shared.note_source(asked)
            shared.give_started(start, box)
        except _Stopped:
            raise
        except BaseException as error:
            # An error that has notes of its own kind is told without this one.
            with suppress(Exception):
                error.add_note(f"in batch {number} of the source, counted from 0")
                if isinstance(error, ValueError) and str(error) == EXECUTING:
                    error.add_note(
                        "Another loop takes from this generator as well, and each gets a part of it: make one for each loop"
                    )
            # Nothing new until somebody wants the next item: many takers go no further.
            shared.paused = True
            shared.give(Failed(error))
        box = []


def _finished(iterator: Iterator[Any]) -> bool:
    """Tell whether it is certain that the iterator has no more to give: it is a generator that raised."""
    return isinstance(iterator, GeneratorType) and iterator.gi_frame is None


def _wait_for_dropped() -> None:
    """Wait until no iterator that was dropped is starting an item: whoever dropped one may close what items are started on."""
    for shared in live:
        if shared.stopping and threading.current_thread() is not shared.thread:
            # Bounded, because the start may be waiting for whoever closes.
            shared.changed.wait_for(lambda shared=shared: not shared.starting or shared.forked, LET_GO_SECONDS)  # type: ignore[misc]


def _stop_all() -> None:
    """At interpreter exit, before what is below is taken apart."""
    for shared in live:
        shared.stop()
    _wait_for_dropped()


live: Alive[SourceThread[Any]] = Alive()
atexit.register(_stop_all)
before_closing.append(_wait_for_dropped)
