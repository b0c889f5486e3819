"""A source that is iterated on a thread of its own, a bounded number of items ahead of whoever takes them.

Invariants: the thread refers to no `Feed`, so that dropping the feed ends it; whatever the source or the start of an item raises
comes out in the place of that item, and nothing is asked for or started until a taker comes for what is behind it; at most
`depth` items are started and not taken. What an item is, and what starting one means, is the caller's business.

The two sides share state that changes in single steps, and wake each other to look at it: there is no lock in here that an
interrupt could leave held, or that a finalizer could meet.
"""

from __future__ import annotations

import _thread
import atexit
import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from types import GeneratorType
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar, final

from xferlib.errors import AllocationError, BackendUnavailableError, ClosedError
from xferlib.forks import forget_in_child
from xferlib.pipeline.clock import Clock
from xferlib.pipeline.failed import Failed
from xferlib.pipeline.wakeup import Wakeup
from xferlib.stager import before_closing

__all__ = ["Feed"]

T = TypeVar("T")
Work: TypeAlias = "tuple[Iterable[Any], Callable[[Any, Clock], T], Callable[[Clock], None]]"

CLOSE_SECONDS = 2.0
"""How long `close()` waits for a source that is inside its own `next`: nothing can interrupt it there."""
LET_GO_SECONDS = 1.0
"""How long whoever closes a stager waits for a feed that was dropped while it started an item."""


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
        self._shared: _Shared[T] = _Shared(depth, (source, start, before_next))
        # The finalizer is the queue's own `put`: it tells the thread, and does nothing else.
        self._shared.owner = weakref.ref(self, self._shared.inbox.put)
        self._spent = False
        name = f"{name}-{next(_numbers)}"
        self._shared.thread = self._thread = threading.Thread(target=_run, args=(self._shared,), name=name, daemon=True)
        _live.add(self._shared)
        # By a thread of its own: `Thread.start` waits, and an interrupt there leaves a lock held that the new thread needs.
        _thread.start_new_thread(_begin, (self._shared,))
        self._shared.changed.wait(lambda: self._shared.running or self._shared.ended)

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
        """Whether `take` would return, or raise, at once."""
        return self._shared.may_take()

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
        """Block until the source has given its first item, or has ended."""
        shared = self._shared
        shared.changed.wait(lambda: shared.begun or shared.ended or shared.closed or shared.forked)

    def take(self) -> T:
        """Return the next item. Raises what the source or the start of the item raised, in its place.

        `StopIteration` when there is no more; `ClosedError` when the feed was closed before that, by whatever thread.
        """
        shared = self._shared
        while True:
            if self._spent:
                raise StopIteration
            if shared.forked:
                raise BackendUnavailableError(
                    "this pipeline cannot go on here: the process was forked after it had begun. Begin it in the child"
                )
            # Asked before the queue is: what came before the end is in there then.
            ended = shared.ended
            try:
                entry = shared.items.popleft()
            except IndexError:
                self._refuse_closed()
                if ended:
                    self._end()
                shared.sleep()
                continue
            # By another thread, perhaps, which has dropped items before this one.
            self._refuse_closed()
            shared.inbox.put(None)
            return entry.value if isinstance(entry, Failed) else entry

    def pause(self) -> None:
        """Return when no item is being started; the next is when somebody waits for it in `take`."""
        shared = self._shared
        shared.paused = True
        shared.changed.wait(lambda: not shared.starting or shared.forked)

    def close(self) -> None:
        """End the thread and drop what was started and not taken. Twice is fine; any thread.

        A source inside its own `next` cannot be interrupted: after two seconds it is left to a thread that ends when it comes back,
        with a `ResourceWarning`.
        """
        shared = self._shared
        shared.stop()
        if not self._join() and shared.clock.part == "source":
            warnings.warn(
                f"the source of {self._thread.name!r} did not come back within {CLOSE_SECONDS} seconds. "
                "Its thread ends when it does",
                ResourceWarning,
                stacklevel=2,
            )
        shared.items.clear()

    def _refuse_closed(self) -> None:
        if self._shared.closed:
            raise ClosedError("this pipeline was closed before its end. Make another one")

    def _end(self) -> NoReturn:
        """Remember that a taker is told of the end, and wait for the thread."""
        self._spent = True
        self._join()
        raise StopIteration

    def _join(self) -> bool:
        """Wait for the thread, if this is another one, and not for ever. Returns whether it has ended."""
        shared, mine = self._shared, threading.current_thread() is self._thread
        if mine or shared.forked:
            return True
        # Not by `Thread.join` alone: an interrupt there has a thread taken for ended that is not.
        if not shared.changed.wait(lambda: shared.ended, CLOSE_SECONDS):
            return False
        self._thread.join(CLOSE_SECONDS)
        return True


class _Stopped(Exception):
    """Raised on the thread where there is nothing more to do."""


@final
class _Shared(Generic[T]):
    """What the thread and the feed both hold."""

    thread: threading.Thread
    owner: weakref.ref[Feed[T]]

    def __init__(self, depth: int, work: Work[T]) -> None:
        self.work: Work[T] | None = work
        self.clock = Clock()
        self.depth = depth
        self.lowered: AllocationError | None = None
        self.running = self.begun = self.ended = self.closed = self.starting = self.forked = False
        self.paused = False
        """Whether the thread waits for a taker to wait before it goes on."""
        self._begin()
        forget_in_child(self)

    def _begin(self) -> None:
        self.items: deque[T | Failed] = deque()
        self.inbox: SimpleQueue[object] = SimpleQueue()
        """Wakes the thread."""
        self.changed = Wakeup()
        """Wakes takers."""
        self.takers: dict[object, None] = {}
        """One for each that waits."""

    @property
    def stopping(self) -> bool:
        """Whether the thread is to begin nothing new: the feed was closed or dropped."""
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
        """See `Forgetful`."""
        self.forked = True
        # The child has no thread, and these may be in the middle of a change that nobody will finish.
        self._begin()

    def sleep(self) -> None:
        """Wait, as a taker, until there may be something to take."""
        # Not the thread's number: a finalizer may take on this very thread, meanwhile.
        taker = object()
        try:
            self.takers[taker] = None
            self.inbox.put(None)
            self.changed.wait(self.may_take)
        finally:
            self.takers.pop(taker, None)

    def give(self, entry: T | Failed) -> None:
        """Have an entry taken behind the others."""
        self.items.append(entry)
        self.begun = True
        self.changed.wake()

    def wait(self, reached: Callable[[], bool]) -> None:
        """Wait, on the thread, until something is so. Raises `_Stopped`."""
        while True:
            # All before the look: what is told after it comes behind.
            while not self.inbox.empty():
                self.inbox.get()
            if self.stopping:
                raise _Stopped
            if reached():
                return
            self.inbox.get()

    def place(self) -> None:
        """Wait until another item may be asked for. Raises `_Stopped`."""
        self.clock.turn("place")
        self.wait(lambda: self.going() and len(self.items) < self.depth)

    def going(self) -> bool:
        """Tell whether the thread need not wait for a taker; if one waits, it need not any more."""
        if self.paused and self.starving:
            self.paused = False
        return not self.paused

    def started(self, start: Callable[[Any, Clock], T], item: Any) -> T:
        """Start an item; where there is no memory for it, after others have been taken."""
        fits = max(1, len(self.items))
        lower = False
        while True:
            # Before the try: whoever waits has let go of all that it will.
            starving = self.starving
            try:
                started = self._start(start, item)
                break
            except AllocationError as error:
                if starving:
                    raise
                self.lowered = error.with_traceback(None)
                lower = True
            ahead = len(self.items)
            self.clock.turn("place")
            self.wait(lambda ahead=ahead: len(self.items) < ahead or self.starving)  # type: ignore[misc]
        if lower:
            self.depth = min(fits, self.depth)
        return started

    def _start(self, start: Callable[[Any, Clock], T], item: Any) -> T:
        while True:
            # First the mark, then the question: whoever pauses, closes or drops the feed asks in the opposite order.
            self.starting = True
            if self.going() and not self.stopping:
                break
            self.starting = False
            self.changed.wake()
            self.wait(self.going)
        try:
            self.clock.turn("start")
            return start(item, self.clock)
        finally:
            self.starting = False
            self.changed.wake()


def _begin(shared: _Shared[Any]) -> None:
    """Start the thread, on another one."""
    try:
        shared.thread.start()
    except RuntimeError as error:
        # There are too many.
        shared.give(Failed(error))
        shared.ended = True
        shared.changed.wake()


def _run(shared: _Shared[Any]) -> None:
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


def _work(shared: _Shared[Any]) -> None:
    work, shared.work = shared.work, None
    if work is None:
        return
    source, start, before_next = work
    iterator: Iterator[Any] = iter(source)
    del source, work
    try:
        while not _finished(iterator):
            shared.place()
            try:
                before_next(shared.clock)
                shared.clock.turn("source")
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                shared.give(shared.started(start, item))
            except _Stopped:
                raise
            except BaseException as error:
                # Nothing new until somebody wants what is behind it: many a taker goes no further.
                shared.paused = True
                shared.give(Failed(error))
            item = None
    finally:
        if isinstance(iterator, GeneratorType):
            iterator.close()


def _finished(iterator: Iterator[Any]) -> bool:
    """Tell whether the iterator has no more to give for sure: a generator that raised."""
    return isinstance(iterator, GeneratorType) and iterator.gi_frame is None


def _wait_for_dropped() -> None:
    """Wait until no feed that was dropped is starting an item: who dropped one may close what items are started on."""
    for shared in list(_live):
        if shared.stopping and threading.current_thread() is not shared.thread:
            # Bounded: whoever closes may be somebody that the start waits for.
            shared.changed.wait(lambda shared=shared: not shared.starting or shared.forked, LET_GO_SECONDS)  # type: ignore[misc]


def _stop_all() -> None:
    """At interpreter exit, before what is below is taken apart."""
    for shared in list(_live):
        shared.stop()
    _wait_for_dropped()


_numbers = itertools.count(1)
_live: weakref.WeakSet[_Shared[Any]] = weakref.WeakSet()
atexit.register(_stop_all)
before_closing.append(_wait_for_dropped)
