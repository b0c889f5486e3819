"""The copy engine of one direction: copies, events and waits, run strictly in order of start on a thread of its own.

Invariant: an event that is recorded here is reached without an error only if every copy before it was run.
An engine that failed stays failed, as a CUDA context does after an illegal access: it runs nothing more, and every event that is
recorded behind the failure raises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal, final

from xferlib import protocol
from xferlib.latch import note_copy_thread
from xferlib.tracing.events import CPU
from xferlib.tracing.events import Event as Traced
from xferlib.tracing.log import LOG
from xferlib_host._stream import Event
from xferlib_host._worker import Job, Worker

__all__ = ["Engine"]


@final
class Engine:
    """One direction. Any thread may call any method but `close`, and none of them waits for what is queued."""

    def __init__(self, kind: Literal["h2d", "d2h"], number: int) -> None:
        """`number`: that of its stream in traces."""
        self._kind: Literal["h2d", "d2h"] = kind
        self._number = number
        self._name = f"xferlib-host-{kind}"
        self._worker = Worker(self._name)
        self._worker.put(note_copy_thread)
        self._cause: BaseException | None = None

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy when all that was started before has ended. `memmove` of ctypes runs without the GIL."""
        copy = partial(self._run, ctypes.memmove, dst, src, nbytes)
        if LOG.on:
            address = dst if self._kind == "h2d" else src
            copy = partial(self._traced, copy, nbytes, perf_counter_ns(), LOG.site(), address)
        self._worker.put(copy)

    def _traced(self, copy: Job, nbytes: int, issued: int, site: str, address: int) -> None:
        start = perf_counter_ns()
        copy()
        event = Traced(self._kind, "memmove", start, perf_counter_ns(), CPU, self._number, nbytes, "", site, issued)
        LOG.copy(event, self._name, "the CPU (host backend)", address)

    def submit(self, job: Job) -> None:
        """Run any job in the place of a copy, for tests of programs.

        A job that waits on a gate holds the direction: what is started behind it cannot complete until the gate opens.
        A job that raises breaks the direction for good. Events recorded before are not touched by either.
        """
        self._worker.put(partial(self._run, job))

    def wait(self, event: protocol.Event) -> None:
        """Let later copies start only after the event; only this direction waits. If the event fails, so does the engine."""
        self.submit(event.synchronize)

    def record(self) -> Event:
        """Return an event that covers every copy whose start returned before this call, whichever thread made it."""
        event = Event()
        self._worker.put(partial(self._reach, event))
        return event

    def close(self) -> None:
        """End the thread when all that was started has ended."""
        self._worker.close()

    def _run(self, fn: Callable[..., Any], *args: Any) -> None:
        if self._cause is not None:
            return
        try:
            fn(*args)
        except BaseException as error:  # Any error: a worker that died would leave everybody waiting.
            self._cause = error

    def _reach(self, event: Event) -> None:
        event.reach(self._cause)
