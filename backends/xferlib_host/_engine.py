"""The copy engine of one direction: copies, events and waits, run strictly in order of start on a thread of its own.

Invariant: an event that is recorded here is reached without an error only if every copy before it was run.
An engine that failed stays failed, as a CUDA context does after an illegal access: it runs nothing more, and every event that is
recorded behind the failure raises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, final

from xferlib import protocol
from xferlib.latch import note_copy_thread
from xferlib_host._stream import Event
from xferlib_host._worker import Job, Worker

__all__ = ["Engine"]


@final
class Engine:
    """One direction. Any thread may call any method but `close`, and none of them waits for what is queued."""

    def __init__(self, name: str) -> None:
        self._worker = Worker(name)
        self._worker.put(note_copy_thread)
        self._cause: BaseException | None = None

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy when all that was started before has ended. `memmove` of ctypes runs without the GIL."""
        self._worker.put(partial(self._run, ctypes.memmove, dst, src, nbytes))

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
