"""The thread that calls the device for the engine, for backends that have no addresses of functions to hand over.

It takes requests in batches and asks the events of what is under way; it waits for no event, so that no lane holds up another.
A request counts as failed until its method has returned. What a method raises is kept by the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, final

from xferlib.daemon import Daemon
from xferlib.engine.jobs import Job
from xferlib.engine.native import FINISHED, H2D, MOST_PIECES, Request, gil_library, library
from xferlib.errors import XferError, said
from xferlib.latch import note_copy_thread
from xferlib.protocol import Event, HostStager

__all__ = ["DISPATCHER", "Served"]

BATCH = 2 * MOST_PIECES
FIRST_PAUSE, LONGEST_PAUSE = 20, 1000
"""Microseconds between two looks at what is under way, which grow while nothing ends."""


@final
class Served:
    """A lane whose calls are made here."""

    def __init__(self, number: int, backend: HostStager[Any], direction: int, jobs: dict[int, Job]) -> None:
        self.number = number
        self.jobs = jobs
        self.under_way: deque[tuple[int, Event, Job]] = deque()
        """Chunks whose copies are started, in their order."""
        to_device = direction == H2D
        self.order: Callable[[Event], None] = backend.order_h2d if to_device else backend.order_d2h
        self.record: Callable[[], Event] = backend.record_h2d if to_device else backend.record_d2h
        self._copy = backend.copy_h2d if to_device else backend.copy_d2h
        self._to_device = to_device
        self._failed = False

    def serve(self, request: Request) -> None:
        """Make the calls for one request; answer when it is the last of its chunk."""
        job = self.jobs[request.id]
        try:
            if not self._failed:
                if request.first and job.after is not None:
                    self.order(job.after)
                if self._to_device:
                    self._copy(request.device, request.memory, request.nbytes)
                else:
                    self._copy(request.memory, request.device, request.nbytes)
        except BaseException as error:  # Whatever it is: without this thread everybody would wait.
            self._fail(job, error)
        if request.record:
            self._answer(request, job)

    def _answer(self, request: Request, job: Job) -> None:
        event = None
        try:
            # Also after a copy that failed: others of the chunk may be under way.
            event = self.record()
        except BaseException as error:  # As above.
            self._fail(job, error)
        if request.last and not self._failed:
            job.event = event
        failed, self._failed = self._failed, False
        if event is not None:
            self.under_way.append((request.chunk, event, job))
        gil_library().xe_answer(self.number, request.chunk, int(failed), int(event is not None))

    def _fail(self, job: Job, error: BaseException) -> None:
        self._failed = True
        _note(job, error)

    def look(self) -> bool:
        """Tell the engine which copies are done, and return whether any was."""
        found = False
        while self.under_way:
            chunk, event, job = self.under_way[0]
            failed = False
            try:
                if not event.done():
                    break
            except BaseException as error:  # As above.
                failed = True
                _note(job, error)
            self.under_way.popleft()
            gil_library().xe_reached(self.number, chunk, int(failed))
            found = True
        for job in list(self.jobs.values()):
            # Whoever holds the transfer may never ask. When the job goes, what it keeps goes, too.
            found = job.has_reached(FINISHED) or found
        return found


def _note(job: Job, error: BaseException) -> None:
    """Keep why a job failed, the first time."""
    if job.cause is not None:
        return
    if not isinstance(error, Exception):
        error = XferError(f"a call of the backend ended by {said(error)}")
    # Without its traceback, whose frames lead back here. By no method of its class, which may be anybody's.
    job.cause = Exception.with_traceback(error, None)


@final
class Dispatcher:
    """The one such thread of the process. It sleeps while no such lane has a job, and ends with the process."""

    def __init__(self) -> None:
        self._lanes: dict[int, Served] = {}
        self._daemon: Daemon[None] = Daemon("xferlib-dispatcher", self._run, self._lanes.clear)

    def start(self) -> None:
        """Start the thread, if it does not run. See `Daemon`."""
        if self._daemon.over:
            # At exit, and behind `end_daemons`: a stager that is opened there transfers as ever.
            self._daemon = Daemon("xferlib-dispatcher", self._run, self._lanes.clear)
        self._daemon.start()

    def work(self, lane: Served) -> None:
        """Serve a lane, which has a job now."""
        self._lanes[lane.number] = lane
        self._daemon.inbox.put(None)

    def leave(self, lane: Served) -> None:
        """Serve a lane no more; it has no job."""
        self._lanes.pop(lane.number, None)

    def _run(self) -> None:
        note_copy_thread()
        # Another one's, once this one is over.
        daemon = self._daemon
        requests = (Request * BATCH)()
        pause = FIRST_PAUSE
        while not daemon.over:
            busy = [lane for lane in list(self._lanes.values()) if lane.jobs]
            if not busy:
                daemon.inbox.get()
                continue
            count = library().xe_requests(requests, BATCH, pause)
            for request in requests[:count]:
                self._lanes[request.lane].serve(request)
            found = [lane.look() for lane in busy]
            pause = FIRST_PAUSE if count or any(found) else min(2 * pause, LONGEST_PAUSE)


DISPATCHER: Final = Dispatcher()
