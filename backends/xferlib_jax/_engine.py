"""The copy engine of one direction where the device is the CPU: a thread that runs copies and events in order of their start.

Invariant: an event is reached without an error only if two kinds of copies were made: every copy that the same caller started since
its previous event, and every other earlier copy except those of arrays that could not be computed. An engine that failed stays
failed, as a CUDA context does after an illegal access. An array that could not be computed is no failure of the engine: one caller
starts the copies of one transfer, or of one chunk of it, and then asks for their event. That event fails; the events of other
callers do not.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple, TypeAlias, cast, final

from xferlib import protocol
from xferlib.errors import CapabilityError, ClosedError
from xferlib.latch import note_copy_thread
from xferlib.tickets import Alive, ticket
from xferlib.tracing.events import CPU
from xferlib.tracing.events import Event as Traced
from xferlib.tracing.log import LOG
from xferlib.uninterrupted import collects, uninterrupted
from xferlib_jax._promise import ComputeError, Promise, Promises

__all__ = ["CopyError", "CpuEvent", "Engine"]

Job: TypeAlias = Callable[[], Any]
Caller: TypeAlias = tuple[int, bool]
"""A thread, and whether it is a finalizer that the collector runs there, between two steps of the thread's own."""

EXIT_SECONDS = 2.0
FIRST_NUMBER = 1 << 32
"""Of an engine in traces. Streams of other backends on the CPU have smaller ones."""


class CopyError(Exception):
    """Raised by events that cover a copy that failed, or one that came after it and was never made."""


@final
class _Failure(NamedTuple):
    """Why an event failed. `lasting`: all events behind it fail, too."""

    cause: BaseException
    lasting: bool


@final
class CpuEvent:
    """A point among the copies of one direction. Any thread may call any method; it needs neither the engine nor the stager."""

    __slots__ = ("_failure", "_gate", "_is_reached", "caller")

    def __init__(self) -> None:
        self.caller = _caller()
        self._is_reached = False
        self._failure: _Failure | None = None
        # A waiter takes it and gives it back at once, in steps between which neither an interrupt nor a finalizer can come.
        self._gate = threading.Lock()
        self._gate.acquire()

    def reach(self, failure: _Failure | None) -> None:
        """Mark the point as reached, or as failed. Called once, by the engine."""
        self._failure = failure
        self._is_reached = True
        self._gate.release()

    def done(self) -> bool:
        if not self._is_reached:
            return False
        self._raise_if_failed()
        return True

    def synchronize(self) -> None:
        """Block until the point is reached. Raises `CapabilityError` on a thread that copies, where only a finalizer can ask."""
        if not self._is_reached and threading.get_ident() in _threads:
            raise CapabilityError(
                "a finalizer that the garbage collector runs on a thread that copies cannot wait for copies there. Let it start "
                "them and not wait, or leave waiting to ordinary code"
            )
        self.wait()

    def wait(self) -> None:
        """As `synchronize`, also on another engine's thread."""
        if not self._is_reached:
            with self._gate:
                pass
        self._raise_if_failed()

    def stream_wait(self, stream: object | None = None) -> protocol.Stream | None:
        """Block until the point is reached: JAX on the CPU cannot be made to wait for an event of ours."""
        if stream is not None:
            raise CapabilityError(f"JAX has no streams, so none can wait: got {stream!r}. Leave stream out")
        self.synchronize()
        return None

    def _raise_if_failed(self) -> None:
        failure = self._failure
        if failure is None:
            return
        # A new exception each time: the traceback of a single one would grow each time it is raised.
        if failure.lasting:
            raise CopyError(
                f"a copy failed and later ones in that direction were not made: {failure.cause!r}. Open a new stager"
            ) from failure.cause
        raise CopyError(f"the array to be copied could not be computed: {failure.cause!r}") from failure.cause


@final
class Engine:
    """One direction. Any thread may call any method but `close`, and none of them waits for what is queued.

    Its thread ends at `close()` or, when nobody can start a copy any more, after the last one: an interrupt while a stager is
    opened may lose it.
    """

    def __init__(self, name: str, promises: Promises, kind: Literal["h2d", "d2h"] = "h2d") -> None:
        self._name = name
        self._promises = promises
        self._kind: Literal["h2d", "d2h"] = kind
        self._number = next(_numbers)
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        # No finalizer: those of others in the same reference cycle may still start copies, and wait for them.
        self._end: object = ticket(self._queue.put, None)
        self._open = True
        self._pid = os.getpid()
        self._broken: _Failure | None = None
        self._unmade: dict[Caller, _Failure] = {}
        """Why copies were not made, until their event comes. For the engine's thread alone."""
        # The thread is given the queue and not the engine, which it would keep alive.
        self._thread = threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True)
        # `Thread.start` cut off by an interrupt leaves a lock held, or an error in its place.
        uninterrupted(self._thread.start)
        _engines.add(self)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy when all that was started before has ended."""
        move: Callable[[int, int, int], Any] = ctypes.memmove
        if LOG.on:
            move = partial(self._traced, perf_counter_ns(), LOG.site(), dst if self._kind == "h2d" else src)
        promise, src = self._promises.find(src)
        if promise is None:
            self._put(partial(self._make, partial(move, dst, src, nbytes)))
        else:
            self._put(partial(self._make, partial(_copy_promised, move, dst, promise, src, nbytes), _caller()))

    def _traced(self, issued: int, site: str, address: int, dst: int, src: int, nbytes: int) -> None:
        start = perf_counter_ns()
        ctypes.memmove(dst, src, nbytes)
        event = Traced(self._kind, "memmove", start, perf_counter_ns(), CPU, self._number, nbytes, "", site, issued)
        LOG.copy(event, self._name, "the CPU (JAX)", address)

    def submit(self, job: Job) -> None:
        """Run any job in the place of a copy, for tests of programs.

        A job that waits on a gate holds the direction: what is started behind it cannot complete until the gate opens. One that
        raises breaks the direction for good.
        """
        self._put(partial(self._make, job))

    def wait(self, event: protocol.Event) -> None:
        """Let later copies start only after the event; only this direction waits. If the event fails, so does the engine."""
        self.submit(cast("CpuEvent", event).wait)

    def record(self) -> CpuEvent:
        """Return an event that covers every copy whose start returned before this call."""
        event = CpuEvent()
        self._put(partial(self._reach, event))
        return event

    def close(self) -> None:
        """End the thread when all that was started has ended."""
        if os.getpid() != self._pid:
            return  # A forked child has no thread.
        self._open = False
        # This posts the mark that ends the thread. A ticket that was kept would keep the queue, and a job that came too late and
        # refers to this: the collector does not see what is in a ticket.
        self._end = None
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def drain(self, seconds: float) -> None:
        """Wait until what was started has ended, but no longer than this."""
        if self._thread.is_alive():
            ended = threading.Event()
            self._queue.put(ended.set)
            ended.wait(seconds)

    def _put(self, job: Job) -> None:
        if self._open:
            self._queue.put(job)
            if self._open:
                return
            # Closed meanwhile, perhaps by a finalizer: the job may lie behind the mark that ends the thread, so nobody may wait for
            # it.
        raise ClosedError(f"{self._name!r} is closed and copies nothing any more. Open a new stager")

    def _make(self, job: Job, caller: Caller | None = None) -> None:
        """`caller`: the one that is told of an array that could not be computed."""
        if self._broken is not None:
            return
        try:
            job()
        except BaseException as error:  # Any error: a thread that died would leave everybody waiting.
            if caller is not None and isinstance(error, ComputeError):
                self._unmade.setdefault(caller, _Failure(error.cause, lasting=False))
            else:
                self._broken = _Failure(error, lasting=True)

    def _reach(self, event: CpuEvent) -> None:
        unmade = self._unmade.pop(event.caller, None)
        event.reach(self._broken or unmade)


def _caller() -> Caller:
    return threading.get_ident(), collects()


def _copy_promised(move: Callable[[int, int, int], Any], dst: int, promise: Promise, offset: int, nbytes: int) -> None:
    move(dst, promise.wait() + offset, nbytes)


def _run(queue: SimpleQueue[Job | None]) -> None:
    me = threading.get_ident()
    _threads[me] = None
    note_copy_thread()
    while (job := queue.get()) is not None:
        job()
        del job  # What the job refers to must not live on until the next one comes.
    # Numbers of threads are used again.
    _threads.pop(me, None)


_numbers = itertools.count(FIRST_NUMBER)
_threads: dict[int, None] = {}
"""Those of engines, by number."""
_engines: Alive[Engine] = Alive()


def _drain_all() -> None:
    """Let copies end before the interpreter frees the memory under them. Copies that wait for ever are left behind."""
    deadline = time.monotonic() + EXIT_SECONDS
    for engine in _engines:
        engine.drain(max(0.0, deadline - time.monotonic()))


def _forget() -> None:
    """In a forked child: the threads are the parent's."""
    _threads.clear()
    _engines.clear()


atexit.register(_drain_all)
os.register_at_fork(after_in_child=_forget)
