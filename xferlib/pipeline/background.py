"""A source that is iterated on a thread of its own, a bounded number of items ahead of whoever takes them.

Invariants: the thread refers to no `BackgroundIterator`, so that dropping the iterator ends the thread. Whatever the source or the
start of an item raises comes out in place of that item, and then nothing is asked for or started until a taker comes for the next
one. At most `depth` items are started and not taken. What an item is, and what starting one means, is the caller's business.

The two sides share state that changes in single steps, and wake each other to look at it: there is no lock in here that an
interrupt could leave held, or that a finalizer could meet.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, NoReturn, TypeVar, final

from xferlib.callers import user_line
from xferlib.checks import whole_number
from xferlib.debug import call_site
from xferlib.errors import ClosedError, XferError
from xferlib.forks import unavailable_in_child
from xferlib.pipeline.failed import Failed
from xferlib.pipeline.phase_timer import PhaseTimer
from xferlib.pipeline.source_thread import SourceThread, Start, live, run
from xferlib.uninterrupted import finalizer_timeout, start_thread

__all__ = ["BackgroundIterator"]

T = TypeVar("T")

CLOSE_SECONDS = 2.0
"""How long `close()` waits for a source that is inside its own `next`: nothing can interrupt it there."""
_NOTHING: Any = object()
"""Stands for an item where there is none."""


@final
class BackgroundIterator(Generic[T]):
    """Iterates `source` on a thread of its own, and calls `start(box, clock)` there for each item. `box` is a list of that item
    alone; the thread refers to the item by this list, and by nothing else.

    `take()` gives what `start` returned, in order. At most `depth` items are started and not taken: the source is asked for the
    next one when there is a place for it.

    `before_next(clock)` is called on the thread before the source is asked for the next item, when there is a place for it.
    Both may turn the clock to phases of their own; "source", "start" and "place" (no place: the taker is behind) are ours.
    A generator is closed, on the thread, when the iterator ends before it does; other iterators are only let go of.
    """

    def __init__(
        self,
        source: Iterable[Any],
        start: Start[T],
        *,
        depth: int,
        before_next: Callable[[PhaseTimer], None] = lambda clock: None,
        name: str = "xferlib-background",
    ) -> None:
        whole_number(depth, "depth", least=1)
        self._shared: SourceThread[T] = SourceThread(depth, (source, start, before_next), begun_at=call_site())
        # The finalizer is the queue's own `put`: it tells the thread, and does nothing else.
        self._shared.owner = weakref.ref(self, self._shared.inbox.put)
        self._spent = self._left = False
        name = f"{name}-{next(_numbers)}"
        self._shared.thread = self._thread = threading.Thread(target=run, args=(self._shared,), name=name, daemon=True)
        live.add(self._shared)
        start_thread(self._thread, self._shared.refused)
        self._shared.changed.wait_for(lambda: self._shared.running or self._shared.ended)

    @property
    def clock(self) -> PhaseTimer:
        """The thread's clock."""
        return self._shared.clock

    @property
    def depth(self) -> int:
        """How many items may be ahead."""
        return self._shared.depth

    @property
    def ahead(self) -> int:
        """How many items are started and not taken."""
        return len(self._shared.items)

    @property
    def ready(self) -> bool:
        """Whether `take` would return, or raise, at once."""
        return self._shared.may_take()

    @property
    def begun(self) -> bool:
        """Whether the source has given anything, or has raised."""
        return self._shared.begun

    @property
    def spent(self) -> bool:
        """Whether a taker was told that there is no more."""
        return self._spent

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._shared.closed

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, where there is no thread."""
        return self._shared.forked

    def seen(self) -> None:
        """Block until the source has given its first item, or has ended. Raises `XferError` as `take`."""
        shared = self._shared
        if not (shared.begun or shared.ended):
            came = shared.changed.wait_for(lambda: shared.begun or shared.ended or shared.closed or shared.forked, self._timeout())
            self._refuse_finalizers(came)

    def take(self) -> T:
        """Return the next item. Raises what the source or the start of the item raised, in its place.

        `StopIteration` when there is no more; `ClosedError` when the iterator was closed before that, by whatever thread;
        `XferError` where the iterator's own thread would wait for itself, and where a finalizer has waited for long.
        """
        shared = self._shared
        while True:
            if self._spent:
                raise StopIteration
            if shared.forked:
                raise unavailable_in_child("this pipeline cannot go on", "it had begun", "Begin it in the child")
            # Asked before the queue: then everything that came before the end is in there.
            ended = shared.ended
            entry: T | Failed = _first(shared.items)
            if entry is _NOTHING:
                # Not where the lack was caught: an interrupt of the wait would be told as a consequence of that.
                self._refuse_closed()
                if ended:
                    self._finish()
                self._refuse_finalizers(shared.sleep(self._timeout()))
                continue
            # Perhaps another thread has closed it, and has dropped items before this one.
            self._refuse_closed()
            shared.inbox.put(None)
            return entry.value if isinstance(entry, Failed) else entry

    def pause(self) -> None:
        """Return when no item is being started. The next one is started when somebody waits for it in `take`."""
        shared = self._shared
        shared.paused = True
        shared.changed.wait_for(lambda: not shared.starting or shared.forked)

    def close(self) -> None:
        """End the thread and drop what was started and not taken. Twice is fine; any thread.

        A source inside its own `next` cannot be interrupted: after two seconds it is left to a thread that ends when it comes back,
        with a `ResourceWarning`. Whoever closes it again meanwhile waits no more.
        """
        shared = self._shared
        shared.stop()
        if not (self._left and shared.clock.phase == "source") and not self._join():
            self._left = True
            if shared.clock.phase == "source":
                user_line().warn(
                    f"the source of {self._thread.name!r} did not come back within {CLOSE_SECONDS} seconds. "
                    "Its thread ends when it does",
                    ResourceWarning,
                )
        shared.items.clear()

    def _refuse_closed(self) -> None:
        if self._shared.closed:
            raise ClosedError("this pipeline was closed before its end. Make another one")

    def _timeout(self) -> float | None:
        """Return how long to wait for the thread. Raises `XferError` on that thread."""
        if threading.current_thread() is self._thread:
            raise XferError(
                "a source asks its own loop for what it is to give itself, and would wait for ever. "
                "Take batches outside of the source"
            )
        return finalizer_timeout()

    def _refuse_finalizers(self, came: bool) -> None:
        if not came:
            raise XferError(
                "a finalizer that the garbage collector runs has waited long for a loop, whose thread may wait for what the "
                "collector has stopped here. Take batches in ordinary code"
            )

    def _finish(self) -> NoReturn:
        """Remember that a taker is told of the end, and wait for the thread."""
        self._spent = True
        self._join()
        raise StopIteration

    def _join(self) -> bool:
        """Wait for the thread, if this is another one, and not for ever. Returns whether it has ended."""
        shared, mine = self._shared, threading.current_thread() is self._thread
        if mine or shared.forked:
            return True
        # Not by `Thread.join` alone: after an interrupt there, a thread that still runs is taken for ended.
        if not shared.changed.wait_for(lambda: shared.ended, CLOSE_SECONDS):
            return False
        if shared.running:
            self._thread.join(CLOSE_SECONDS)
        return True


_numbers = itertools.count(1)


def _first(items: deque[Any]) -> Any:
    """Take the first item, or `_NOTHING`. Another thread may take it first."""
    try:
        return items.popleft()
    except IndexError:
        return _NOTHING
