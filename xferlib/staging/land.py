"""To the host: a thread has the device fill chunks ahead, and copies each out when it is full."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, final

from xferlib.inflight import Traffic
from xferlib.protocol import HostStager
from xferlib.staging.chunks import D2H, Chunk, Chunks
from xferlib.staging.job import Job, Started
from xferlib.staging.parts import Part, pick_up

__all__ = ["Lander"]

AHEAD = 2
"""Chunks that a thread has under way: one to copy out, one that the device fills meanwhile."""


@final
class Lander:
    """The loop of one stager, and its first step, which callers take themselves."""

    def __init__(self, backend: HostStager[Any], chunks: Chunks, traffic: Traffic) -> None:
        self._backend = backend
        self._failures = backend.failures
        self._chunks = chunks
        self._traffic = traffic

    def begin(self, job: Job, *, wait: bool) -> bool:
        """Start the next part, and leave it to whoever comes. False: there is none left, or no chunk now."""
        return self._claim(job, job.started, wait=wait)

    def start(self, chunk: Chunk, part: Part, started: deque[Started]) -> None:
        """Start one part into a chunk that is at rest."""
        try:
            self._backend.copy_d2h(chunk.address, part.address, part.nbytes)
            started.append((chunk, self._backend.record_d2h(), part))
        except BaseException:
            if self._traffic.d2h.settle(chunk):
                self._chunks.give(D2H, chunk)
            else:
                self._chunks.lose(D2H, chunk)
            raise

    def land(self, job: Job) -> None:
        """Copy out what was started, on the calling thread."""
        while job.started:
            self._finish(job, job.started)

    def abandon(self, job: Job) -> None:
        """Wait for what was started, and let it go."""
        self._settle(job.started)

    def __call__(self, job: Job, leading: bool) -> None:
        """Copy parts until none is left: see `Loop`."""
        flying: deque[Started] = deque()
        with self._chunks.in_use():
            try:
                self._land_all(job, flying, wait=leading)
            finally:
                self._settle(flying)

    def _land_all(self, job: Job, flying: deque[Started], *, wait: bool) -> None:
        while True:
            while len(flying) < AHEAD and self._next(job, flying, wait=wait and not flying):
                pass
            if not flying:
                return
            self._finish(job, flying)

    def _next(self, job: Job, flying: deque[Started], *, wait: bool) -> bool:
        try:
            flying.append(job.started.popleft())
        except IndexError:
            return self._claim(job, flying, wait=wait)
        return True

    def _claim(self, job: Job, started: deque[Started], *, wait: bool) -> bool:
        if job.issued.is_open():
            return False
        chunk = self._chunks.take(D2H, wait=wait)
        if chunk is None:
            return False
        part = job.claim()
        if part is None:
            self._chunks.give(D2H, chunk)
            return False
        if chunk.busy is not None:
            # If it failed, the transfer that it belongs to says so.
            with suppress(*self._failures):
                chunk.busy.synchronize()
            chunk.busy = None
        self.start(chunk, part, started)
        job.begun()
        return True

    def _finish(self, job: Job, flying: deque[Started]) -> None:
        chunk, event, part = flying[0]
        event.synchronize()
        if job.error is None:
            pick_up(chunk.view(part.nbytes), part)
        flying.popleft()
        self._chunks.give(D2H, chunk)

    def _settle(self, started: deque[Started]) -> None:
        while started:
            chunk, event, _ = started.popleft()
            with suppress(*self._failures):
                event.synchronize()
            self._chunks.give(D2H, chunk)
