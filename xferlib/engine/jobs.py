"""Jobs: transfers that the engine works on, as the core sees them.

Whoever submits a job first chooses its id and enters it, with all that must stay alive, before the engine hears of it. An interrupt
may lose what a native call returns, but the job is in the table all the same. A forked child has an engine of its own. It never
calls its parent's engine, whose threads it does not have.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from xferlib.engine.native import BUSY, FAILED, FINISHED, ISSUED, NOT_YET, OK, STAGED, STOPPED, UNKNOWN, gil_library, library
from xferlib.errors import CapabilityError, TransferError, XferError
from xferlib.forks import unavailable_in_child
from xferlib.latch import is_over
from xferlib.memory.foreign import MappedFile
from xferlib.protocol import DeviceRange, Event, Stream

__all__ = ["Job", "next_id", "refuse_parents", "refuse_stream_wait"]

WAIT_MICROSECONDS = 50_000
"""How long one wait is: until a native call returns, Python runs no signal handler."""
FINISHED_AT_ONCE = 64

next_id: Callable[[], int] = itertools.count(1).__next__
"""Numbers the work of the engine, or of callers, for the whole process, in the order in which it began."""
_first = 0
"""From this number on they are this process's own."""
_lost: list[object] = []
"""What copies may use for ever, because nobody can know when they end."""


def _note_fork() -> None:
    global _first
    _first = next_id()


os.register_at_fork(after_in_child=_note_fork)


def refuse_parents(number: int) -> None:
    """Raise `BackendUnavailableError` for what was numbered before this process was forked: it stayed with the parent."""
    if number < _first:
        raise unavailable_in_child("memory cannot be transferred", "the stager was opened")


def refuse_stream_wait() -> NoReturn:
    """Raise `CapabilityError` for a get into pageable memory of the caller's."""
    raise CapabilityError(
        "no stream can wait for this get: its last step is a copy by the CPU into pageable memory. "
        "Omit out=, pass out=stager.empty_pinned(...), or wait on the host with synchronize()"
    )


@final
class Job:
    """One transfer. Any thread. The event of a get that ends with a copy by the CPU. Made by `Lane.job`.

    Attributes:
        owner: The thread that is starting it, which must not wait for it. None: the engine has all that it needs.
        holds: Whether pinned memory comes back when it has finished.
        most_chunks: How many chunks it can use at once.
        host_ranges: The ranges of the caller's host memory that are used until it has finished.
        device_ranges: The device memory of the caller's that it reads.
        kept: Held until it has finished.
        sources: Arrays that it reads, held until they are staged.
        file: Where sources lie in the mapping of this file, the engine reads them from the file itself.
        after: An event that its lane waits for before its first copy.
        beside: An event that must be reached, too, before it is done.
        event: The event behind its last copy, once that is issued.
        ours: Whether its result is in memory of ours.
    """

    __slots__ = (
        "_device_failure",
        "_error",
        "_let_go_of_lost",
        "_over",
        "abandoned",
        "after",
        "beside",
        "cause",
        "device_ranges",
        "event",
        "file",
        "holds",
        "host_ranges",
        "id",
        "jobs",
        "kept",
        "most_chunks",
        "ours",
        "owner",
        "sources",
        "submitted",
    )

    def __init__(
        self,
        jobs: dict[int, Job],
        failure: Callable[[int, str], Exception],
        let_go_of_lost: Callable[[], object],
        *,
        owner: int | None = None,
    ) -> None:
        """`jobs`: by id, all of its lane that have not finished. The other two are the lane's."""
        self.id = next_id()
        self.jobs = jobs
        self._device_failure = failure
        self._let_go_of_lost = let_go_of_lost
        self.owner = owner
        self.holds = False
        self.most_chunks = 1
        self.host_ranges: Sequence[tuple[int, int]] = ()
        self.device_ranges: Sequence[DeviceRange] = ()
        self.after: Event | None = None
        self.beside: Event | None = None
        self.event: Event | None = None
        self.ours = False
        self.file: MappedFile | None = None
        self.kept: Any = None
        self.sources: Any = None
        self.cause: Exception | None = None
        """What a call of the backend raised, where Python makes them."""
        self.submitted = False
        """Whether the engine has it."""
        self.abandoned = False
        """Set by whoever may be interrupted on the way to `abandon`, as it or submitting failed: an assignment is not."""
        self._error: Exception | None = None
        self._over = False

    def has_reached(self, stage: int) -> bool:
        """Tell whether the job has come so far, failed or not. Never blocks."""
        if self._over or not (self.submitted or self.abandoned):
            return self._over
        refuse_parents(self.id)
        if self.abandoned:
            # Perhaps the engine has not heard of that yet.
            gil_library().xe_abandon(self.id)
        status = gil_library().xe_wait(self.id, stage, 0)
        if status in (NOT_YET, STOPPED):
            return False
        if status == FAILED:
            self._note_failure()
        # Unknown: another thread has seen its end meanwhile, or the engine never had it.
        if stage == FINISHED or status == UNKNOWN:
            self._forget()
        return True

    def wait_for(self, stage: int) -> None:
        """Block, without the GIL, until the job has come so far, failed or not."""
        while not self.has_reached(stage):
            if library().xe_wait(self.id, stage, WAIT_MICROSECONDS) == STOPPED:
                raise XferError("the interpreter ends, and nothing is transferred any more")

    def raise_failure(self) -> None:
        """Raise why the job failed, if it has."""
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Have nothing more of it started, and block until no thread touches the caller's memory."""
        refuse_parents(self.id)
        if gil_library().xe_abandon(self.id) == OK:
            self.submitted = True
            self.wait_for(STAGED)
        else:
            # It never came there, or is forgotten already.
            self._forget()
        self.owner = None

    def enqueued(self) -> Event:
        """Block until every copy is in the stream, and return the event behind them. Raises why that failed."""
        self.wait_for(ISSUED)
        self.raise_failure()
        assert self.event is not None
        return self.event

    def is_copied(self) -> bool:
        """Tell whether the device has made every copy."""
        return self.has_reached(ISSUED) and self.event is not None and is_over(self.event.done)

    def reached(self) -> bool:
        """Tell whether nothing of the job is under way any more, failed or not. Never blocks."""
        return self.has_reached(FINISHED)

    def wait(self) -> None:
        """Block until `reached` is true."""
        self.wait_for(FINISHED)

    def done(self) -> bool:
        """See `Event.done`."""
        if not self.has_reached(FINISHED):
            return False
        self.raise_failure()
        return self.beside is None or self.beside.done()

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self.wait_for(FINISHED)
        self.raise_failure()
        if self.beside is not None:
            self.beside.synchronize()

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """Refuse: the CPU writes the caller's memory. For memory of ours the host waits. See `Event.stream_wait`."""
        if self.ours:
            # Mostly that is pinned, and nobody can know that it was not pinned yet.
            self.synchronize()
            return None
        refuse_stream_wait()

    def _note_failure(self) -> None:
        status, at, lost = ctypes.c_int32(), ctypes.c_char_p(), ctypes.c_int()
        if gil_library().xe_error(self.id, ctypes.byref(status), ctypes.byref(at), ctypes.byref(lost)) != OK:
            return
        if self._error is None:
            if lost.value:
                _lost.append(self.kept)
                self._let_go_of_lost()
            self._error = self._failure(status.value, (at.value or b"").decode())

    def _failure(self, status: int, at: str) -> Exception:
        if self.cause is not None:
            return self.cause
        if status == errno.ECANCELED:
            return TransferError("the transfer was given up before its end")
        if at in _OWN:
            return TransferError(f"{_OWN[at]} ({os.strerror(status) if at.startswith('every') else 'SIGBUS'})")
        return self._device_failure(status, at)

    def _forget(self) -> None:
        """Forget the job: it has finished. Twice is fine. If an interrupt cuts this short, the next look does it again."""
        self.sources = self.kept = self.after = self.file = None
        self.host_ranges = self.device_ranges = ()
        # The engine forgets only what it has told of.
        while gil_library().xe_forget(self.id) == BUSY:
            gil_library().xe_finished((ctypes.c_uint64 * FINISHED_AT_ONCE)(), FINISHED_AT_ONCE)
        self.jobs.pop(self.id, None)
        self._over = True


_OWN = {
    "reading the source": "the memory of a source is not there any more: its file was cut off",
    "writing the destination": "the memory of a destination is not there any more: its file was cut off",
    "every chunk of the lane is lost": "nobody can know when the device is done with earlier copies",
}
"""Failures in the engine itself, by where they happen."""
