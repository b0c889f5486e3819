"""The copy engine of one direction where the device is the CPU: a thread that runs copies and events in order of their start.

Invariant: an event is reached without an error only if every copy that its thread started before it was made.
An engine that failed stays failed, as a CUDA context does after an illegal access. An array that could not be computed is no
failure of the engine: the events of the thread that asked for it fail until somebody was told.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, final

from xferlib import protocol
from xferlib.errors import CapabilityError, ClosedError
from xferlib_jax._promise import ComputeError, Promises

__all__ = ["CopyError", "CpuEvent", "Engine"]

Job: TypeAlias = Callable[[], Any]

EXIT_SECONDS = 2.0


class CopyError(Exception):
    """Raised by events that cover a copy that failed, or one that came after it and was never made."""


@final
class _Failure:
    """Why events fail: all from here on, or those of one thread until somebody was told."""

    __slots__ = ("cause", "thread", "told")

    def __init__(self, cause: BaseException, thread: int | None) -> None:
        self.cause = cause
        self.thread = thread
        self.told = False


@final
class CpuEvent:
    """A point among the copies of one direction. Any thread may call any method; it needs neither the engine nor the stager."""

    __slots__ = ("_failure", "_reached", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._reached = threading.Event()
        self._failure: _Failure | None = None

    def reach(self, failure: _Failure | None) -> None:
        """Mark the point as reached, or as failed. Once, by the engine."""
        self._failure = failure
        self._reached.set()

    def done(self) -> bool:
        if not self._reached.is_set():
            return False
        self._raise_if_failed()
        return True

    def synchronize(self) -> None:
        if not self._reached.is_set():
            self._reached.wait()
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
        failure.told = True
        # A new exception each time: raised again and again, one and the same would grow its traceback.
        if failure.thread is None:
            raise CopyError(
                f"a copy failed and later ones in that direction were not made: {failure.cause!r}. Open a new stager"
            ) from failure.cause
        raise CopyError(f"the array to be copied could not be computed: {failure.cause!r}") from failure.cause


@final
class Engine:
    """One direction. Any thread may call any method but `close`, and none of them waits for what is queued."""

    def __init__(self, name: str, promises: Promises) -> None:
        self._name = name
        self._promises = promises
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        # Reentrant: the garbage collector may run a finalizer that starts a copy while this thread is inside `_put`.
        self._lock = threading.RLock()
        self._open = True
        self._pid = os.getpid()
        self._broken: _Failure | None = None
        self._unmade: list[_Failure] = []
        # The thread is given the queue and not the engine, which it would keep alive.
        self._thread = threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        _ENGINES.add(self)

    def __del__(self) -> None:
        self._queue.put(None)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy when all that was started before has ended."""
        self._put(partial(self._copy, dst, src, nbytes))

    def submit(self, job: Job) -> None:
        """Run anything in the place of a copy: for tests of programs.

        A job that waits on a gate holds the direction: what is started behind it cannot complete until the gate opens. One that
        raises breaks the direction for good.
        """
        self._put(partial(self._make, job))

    def wait(self, event: protocol.Event) -> None:
        """Let later copies start only after the event; only this direction waits. If the event fails, so does the engine."""
        self.submit(event.synchronize)

    def record(self) -> CpuEvent:
        """Return an event that covers every copy whose start returned before this call."""
        event = CpuEvent()
        self._put(partial(self._reach, event))
        return event

    def close(self) -> None:
        """End the thread when all that was started has ended."""
        if os.getpid() != self._pid:
            return  # A forked child has no thread, and its copy of the lock may be held by one that it does not have.
        with self._lock:
            self._open = False
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def drain(self, seconds: float) -> None:
        """Wait until what was started has ended, but no longer than this."""
        if self._thread.is_alive():
            ended = threading.Event()
            self._queue.put(ended.set)
            ended.wait(seconds)

    def _put(self, job: Job) -> None:
        # Without the lock a job could land behind the mark that ends the thread, and whoever waits for it would hang.
        with self._lock:
            if not self._open:
                raise ClosedError(f"{self._name!r} is closed and copies nothing any more. Open a new stager")
            self._queue.put(job)

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        self._make(lambda: ctypes.memmove(dst, self._promises.resolve(src), nbytes))

    def _make(self, job: Job) -> None:
        if self._broken is not None:
            return
        try:
            job()
        except ComputeError as error:
            self._unmade.append(_Failure(error.cause, error.thread))
        except BaseException as error:  # Whatever it is: a thread that died would leave everybody waiting.
            self._broken = _Failure(error, None)

    def _reach(self, event: CpuEvent) -> None:
        if self._unmade:
            self._unmade = [failure for failure in self._unmade if not failure.told]
        mine = (failure for failure in self._unmade if failure.thread == event.thread)
        event.reach(self._broken or next(mine, None))


def _run(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # What the job refers to must not live on until the next one comes.


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _drain_all() -> None:
    """Let copies end before the interpreter frees the memory under them; what waits for ever is left behind."""
    deadline = time.monotonic() + EXIT_SECONDS
    for engine in list(_ENGINES):
        engine.drain(max(0.0, deadline - time.monotonic()))


atexit.register(_drain_all)
