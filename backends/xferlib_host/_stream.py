"""Streams that run callables in order, and the events that order them among each other and against the copy engines.

Invariant: an event is reached only after everything enqueued before it, where it was recorded, has ended.
A thread without a current stream counts as a stream itself: what it does has ended before it goes on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from types import TracebackType
from typing import Any, final

from xferlib import protocol
from xferlib.errors import ClosedError
from xferlib.latch import Latch
from xferlib.tracing.events import CPU
from xferlib.tracing.events import Event as Traced
from xferlib.tracing.log import LOG
from xferlib_host._worker import Job, Worker

__all__ = ["AllEvents", "CopyError", "Event", "Stream", "handles", "resolve"]


class CopyError(Exception):
    """Raised by events that cover a copy that failed, or one that came after it and was never run."""


@final
class Event:
    """A point in a stream or in a copy engine. Any thread may call any method; it needs neither the stream nor the stager."""

    __slots__ = ("_cause", "_reached")

    def __init__(self) -> None:
        self._reached = Latch()
        self._cause: BaseException | None = None

    def reach(self, cause: BaseException | None = None) -> None:
        """Mark the point as reached, or as failed for this cause. Called once, by the thread that runs the stream or engine."""
        self._cause = cause
        self._reached.open()

    def done(self) -> bool:
        """Tell whether the point is reached. Raises `CopyError` if a copy before it failed."""
        if not self._reached.is_open():
            return False
        self._raise_if_failed()
        return True

    def synchronize(self) -> None:
        """Block the calling thread, without the GIL, until the point is reached. Raises as `done` does."""
        self._reached.wait()
        self._raise_if_failed()

    def stream_wait(self, stream: object | None = None) -> protocol.Stream | None:
        """Make later work on `stream` wait. On a thread without a current stream, None blocks until the point is reached.

        Raises as `done` does if a copy has failed already. If one fails later, the stream's `synchronize` raises.
        """
        resolved = resolve(stream)
        if resolved is None:
            self.synchronize()
            return None
        resolved.wait(self)
        return protocol.Stream(resolved.handle, resolved)

    def _raise_if_failed(self) -> None:
        if self._cause is not None:
            # A new exception each time: the traceback of a single one would grow each time it is raised.
            raise CopyError(
                f"a copy failed and later ones in that direction were not run: {self._cause!r}. Open a new stager"
            ) from self._cause


@final
class AllEvents:
    """The point at which several events are reached. Raises what any of them raises."""

    __slots__ = ("_events",)

    def __init__(self, events: Sequence[protocol.Event]) -> None:
        self._events = tuple(events)

    def done(self) -> bool:
        return all(event.done() for event in self._events)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()

    def stream_wait(self, stream: object | None = None) -> protocol.Stream | None:
        resolved = resolve(stream)
        for event in self._events:
            event.stream_wait(resolved)
        return None if resolved is None else protocol.Stream(resolved.handle, resolved)


@final
class Stream:
    """A compute stream of the host: callables run one after the other, in order of `submit`, on a thread of their own.

    `stream=` of `put`, `get` and `stream_wait` takes it. Inside `with stream:` it is the calling thread's current stream, which is
    what None means there; leaving the block does not close it. Callables do not depend on each other: if one raises, those behind
    it run all the same, and events recorded behind it are reached.
    """

    def __init__(self) -> None:
        self._handle = next(handles)
        self._worker = Worker(f"xferlib-host-stream-{self._handle}")
        self._end = Event()
        self._failed: list[BaseException] = []  # At most one: the first since the last `synchronize`.

    @property
    def handle(self) -> int:
        """Unique in the process, never 0."""
        return self._handle

    @property
    def closed(self) -> bool:
        return not self._worker.open

    def submit(self, fn: Callable[..., Any], *args: Any) -> None:
        """Run `fn(*args)` when all that was enqueued before has ended. Its result is dropped.

        It may wait for anything but work enqueued behind it.
        """
        run: Job = partial(self._run, fn, *args)
        if LOG.on:
            run = partial(self._traced, run, getattr(fn, "__qualname__", type(fn).__qualname__), perf_counter_ns(), LOG.site())
        self._worker.put(run)

    def _traced(self, run: Job, name: str, issued: int, site: str) -> None:
        start = perf_counter_ns()
        run()
        event = Traced("kernel", name, start, perf_counter_ns(), CPU, self._handle, site=site, issued=issued)
        LOG.work(event, f"host stream {self._handle}", "the CPU (host backend)")

    def record(self) -> Event:
        """Return an event that is reached when all that was enqueued so far has ended, with or without an exception."""
        event = Event()
        try:
            self._worker.put(event.reach)
        except ClosedError:
            return self._end  # It may not be reached yet: another thread may be closing.
        return event

    def wait(self, event: protocol.Event) -> None:
        """Let work that is enqueued later start only after the event. The calling thread does not wait.

        Raises as `event.done` does if it has failed already; if it fails later, `synchronize` raises.
        """
        if not event.done():
            self._worker.put(partial(self._run, event.synchronize))

    def synchronize(self) -> None:
        """Wait for what was enqueued so far; raise the first exception since the last call, if there was one."""
        started = perf_counter_ns() if LOG.on else 0
        self.record().synchronize()
        if started:
            LOG.call("wait", "Stream.synchronize", started)
        self._raise_if_failed()

    def close(self) -> None:
        """Wait for what was enqueued and end the thread; raise as `synchronize` does. Twice is fine."""
        self._worker.close(self._end.reach)
        self._raise_if_failed()

    def __enter__(self) -> Stream:
        _entered().append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        _entered().pop()

    def __repr__(self) -> str:
        return f"<xferlib_host.Stream {self._handle}{' closed' if self.closed else ''}>"

    def _run(self, fn: Callable[..., Any], *args: Any) -> None:
        try:
            fn(*args)
        except BaseException as error:  # Any error: a worker that died would leave everybody waiting.
            if not self._failed:
                self._failed.append(error)

    def _raise_if_failed(self) -> None:
        try:
            error = self._failed.pop()
        except IndexError:
            return
        raise error


handles = itertools.count(1)
_LOCAL = threading.local()


def _entered() -> list[Stream]:
    """Return the calling thread's stack of entered streams."""
    try:
        stack: list[Stream] = _LOCAL.entered
    except AttributeError:
        stack = _LOCAL.entered = []
    return stack


def resolve(stream: object | None) -> Stream | None:
    """Return the stream that `stream=` names; for None the calling thread's current one, or None where there is none."""
    if stream is None:
        stack = _entered()
        if not stack:
            return None
        stream = stack[-1]
    if not isinstance(stream, Stream):
        raise TypeError(
            f"stream= of backend 'host' takes an xferlib_host.Stream, or None for the current one, not {stream!r}. "
            "Make one with xferlib_host.Stream()"
        )
    if stream.closed:
        raise ClosedError(f"{stream!r} runs nothing any more. Make a new one with xferlib_host.Stream()")
    return stream
