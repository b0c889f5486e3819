"""A source that is iterated on a thread of its own, a bounded number of items ahead of whoever takes them.

Invariants: the thread refers to no `Feed`, so that dropping the feed ends it; whatever the source or the start of an item raises
comes out behind the items before it, once; at most `depth` items are started and not taken. What an item is, and what starting one
means, is the caller's business.

The two sides talk by queues that may be written to anywhere, also inside the garbage collector: there is no lock in here.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from queue import SimpleQueue
from types import GeneratorType
from typing import Any, Generic, TypeVar, final

from xferlib.debug import act_for, caller
from xferlib.errors import AllocationError, BackendUnavailableError
from xferlib.forks import forget_in_child
from xferlib.pipeline.clock import Clock

__all__ = ["Feed"]

T = TypeVar("T")

CLOSE_SECONDS = 2.0
"""How long `close()` waits for a source that is inside its own `next`: nothing can interrupt it there."""
LET_GO_SECONDS = 1.0
"""How long a feed that was dropped waits for an item that is being started at this moment."""


@final
class Feed(Generic[T]):
    """Iterates `source` on a thread of its own, and calls `start(item, clock)` there for each item.

    `take()` gives what `start` returned, in order. At most `depth` items are started and not taken: the source is asked for the
    next one when there is a place for it. If `start` raises `AllocationError`, it is tried again when items have been taken, and
    the feed goes on with fewer ahead; with none ahead and the taker waiting, the error comes out.

    `before_next(clock)` is called on the thread before the source is asked for the next item, when there is a place for it.
    Both may turn the clock to parts of their own; "source", "start" and "place" (no place: the taker is behind) are the feed's.
    A generator is closed, on the thread, when the feed ends before it does; other iterators are only let go of.
    """

    def __init__(
        self,
        source: Iterable[Any],
        start: Callable[[Any, Clock], T],
        *,
        depth: int,
        before_next: Callable[[Clock], None] = lambda clock: None,
        name: str = "xferlib-feed",
    ) -> None:
        if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
            raise TypeError(f"expected something to iterate, got {source!r}")
        if depth < 1:
            raise ValueError(f"depth={depth!r}: expected 1 or more")
        self._shared: _Shared[T] = _Shared(depth)
        self._over = False
        name = f"{name}-{next(_numbers)}"
        self._thread = threading.Thread(
            target=_run, args=(self._shared, source, start, before_next, caller()), name=name, daemon=True
        )
        _live.add(self._shared)
        self._shared.thread = self._thread
        self._thread.start()
        weakref.finalize(self, _let_go, self._shared).atexit = False

    @property
    def clock(self) -> Clock:
        """The thread's."""
        return self._shared.clock

    @property
    def depth(self) -> int:
        """How many items may be ahead now: fewer than asked where there was no memory for so many."""
        return self._shared.depth

    @property
    def lowered(self) -> AllocationError | None:
        """Why there are fewer ahead than asked."""
        return self._shared.lowered

    @property
    def ready(self) -> bool:
        """Whether `take` would return at once."""
        return not self._shared.items.empty()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, where there is no thread."""
        return self._shared.forked

    def seen(self) -> None:
        """Block until the source has given its first item, or has ended."""
        self._shared.seen.wait()

    def take(self) -> T:
        """Return the next item. Raises what the source raised, in its place, and `StopIteration` when there is no more."""
        if self._over:
            raise StopIteration
        entry = self._next()
        if isinstance(entry, _End):
            self._over = True
            # For other takers; what was raised is raised once.
            self._shared.items.put(_End(None))
            if threading.current_thread() is not self._thread:
                self._thread.join(CLOSE_SECONDS)
            if entry.error is None:
                raise StopIteration
            try:
                raise entry.error
            finally:
                del entry
        if self._shared.stopping:
            # Another thread closes, and has dropped items before this one, perhaps.
            raise StopIteration
        self._shared.tokens.put(_Token.PLACE)
        return entry

    def close(self) -> list[T]:
        """End the thread and return what was started and not taken. Twice is fine; any thread.

        A source inside its own `next` cannot be interrupted: after two seconds it is left to a thread that ends when it comes back,
        with a `ResourceWarning`.
        """
        shared = self._shared
        shared.stop()
        self._over = True
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive() and shared.clock.part == "source":
                warnings.warn(
                    f"the source of {self._thread.name!r} did not come back within {CLOSE_SECONDS} seconds. "
                    "Its thread ends when it does",
                    ResourceWarning,
                    stacklevel=2,
                )
        left = []
        while not shared.items.empty():
            entry = shared.items.get()
            if not isinstance(entry, _End):
                left.append(entry)
        shared.items.put(_End(None))
        return left

    def _next(self) -> T | _End:
        shared = self._shared
        try:
            return shared.items.get_nowait()
        except queue.Empty:
            pass
        shared.hungry = True
        shared.tokens.put(_Token.HUNGRY)
        try:
            return shared.items.get()
        finally:
            shared.hungry = False


class _Token(Enum):
    """What the taker tells the thread."""

    PLACE = 1
    HUNGRY = 2
    """It waits, and may have let go of something."""
    STOP = 3


@final
class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Stopped(Exception):
    """Raised on the thread where there is nothing more to do."""


@final
class _Shared(Generic[T]):
    """What the thread and the feed both hold."""

    thread: threading.Thread

    def __init__(self, depth: int) -> None:
        self.clock = Clock()
        self.depth = depth
        self.lowered: AllocationError | None = None
        self.items: SimpleQueue[T | _End] = SimpleQueue()
        self.tokens: SimpleQueue[_Token] = SimpleQueue()
        self.seen = threading.Event()
        self.hungry = self.stopping = self.starting = self.forked = False
        for _ in range(depth):
            self.tokens.put(_Token.PLACE)
        forget_in_child(self)

    def stop(self) -> None:
        """Let the thread begin nothing new. Takes no lock: finalizers call it."""
        self.stopping = True
        self.tokens.put(_Token.STOP)

    def forget(self) -> None:
        """See `Forgetful`."""
        self.forked = True
        # The child has no thread, and these may be in the middle of a change that nobody will finish.
        self.items, self.tokens, self.seen = SimpleQueue(), SimpleQueue(), threading.Event()
        self.seen.set()
        self.items.put(
            _End(
                BackendUnavailableError(
                    "this pipeline cannot go on here: the process was forked after it had begun. Begin it in the child"
                )
            )
        )

    def place(self) -> None:
        """Wait for a place. Raises `_Stopped`."""
        self.clock.turn("place")
        while True:
            token = self.tokens.get()
            if token is _Token.STOP or self.stopping:
                raise _Stopped
            if token is _Token.PLACE:
                return

    def started(self, start: Callable[[Any, Clock], T], item: Any) -> T:
        """Start an item; where there is no memory for it, after others have been taken."""
        fits = max(1, self.items.qsize())
        given = 0
        token = None
        while True:
            try:
                started = self._start(start, item)
                break
            except AllocationError as error:
                if token is _Token.HUNGRY:
                    raise
                self.lowered = error.with_traceback(None)
            token = self._relief()
            given += token is _Token.PLACE
        if token is not None:
            self._lower(min(fits, self.depth), given)
        return started

    def _lower(self, depth: int, given: int) -> None:
        """Go on with fewer places. `given`: how many were given up on the way, as many at least."""
        for _ in range(given - (self.depth - depth)):
            self.tokens.put(_Token.PLACE)
        self.depth = depth

    def _start(self, start: Callable[[Any, Clock], T], item: Any) -> T:
        # First the mark, then the question: a feed that is let go of asks in the opposite order.
        self.starting = True
        try:
            if self.stopping:
                raise _Stopped
            self.clock.turn("start")
            return start(item, self.clock)
        finally:
            self.starting = False

    def _relief(self) -> _Token:
        """Wait until an item was taken, or the taker waits and there is none."""
        self.clock.turn("place")
        while True:
            token = self.tokens.get()
            if token is _Token.STOP or self.stopping:
                raise _Stopped
            if token is _Token.PLACE or (self.hungry and self.items.empty()):
                return token


def _run(
    shared: _Shared[T], source: Iterable[Any], start: Callable[[Any, Clock], T], before_next: Callable[[Clock], None], begun_at: str
) -> None:
    act_for(begun_at)
    end = _End(None)
    try:
        _work(shared, source, start, before_next)
    except _Stopped:
        pass
    except BaseException as error:  # Whatever it is, the taker must not wait for ever.
        end.error = error
    shared.clock.stop()
    shared.seen.set()
    shared.items.put(end)
    # Its traceback leads back to this frame.
    del end


def _work(
    shared: _Shared[T], source: Iterable[Any], start: Callable[[Any, Clock], T], before_next: Callable[[Clock], None]
) -> None:
    iterator: Iterator[Any] = iter(source)
    del source
    try:
        while True:
            shared.place()
            before_next(shared.clock)
            shared.clock.turn("source")
            try:
                item = next(iterator)
            except StopIteration:
                return
            shared.items.put(shared.started(start, item))
            shared.seen.set()
            del item
    finally:
        if isinstance(iterator, GeneratorType):
            iterator.close()


def _let_go(shared: _Shared[Any]) -> None:
    """End the thread of a feed that nobody holds any more. A finalizer, on any thread: waits for nothing that could wait for it."""
    shared.stop()
    if shared.starting and threading.current_thread() is not shared.thread:
        # Its owner may be about to close what the item is started on. Bounded, because the collector may have run inside a call
        # that the start waits for.
        shared.thread.join(LET_GO_SECONDS)


def _stop_all() -> None:
    """At interpreter exit, before what is below is taken apart."""
    for shared in list(_live):
        shared.stop()
    for shared in list(_live):
        _let_go(shared)


_numbers = itertools.count(1)
_live: weakref.WeakSet[_Shared[Any]] = weakref.WeakSet()
atexit.register(_stop_all)
