"""To the device: a thread fills a chunk and starts its copy, again and again."""

from __future__ import annotations

from contextlib import suppress
from time import sleep
from typing import Any, Final

from xferlib.inflight import Traffic
from xferlib.protocol import Event, HostStager
from xferlib.staging.chunks import H2D, Chunks
from xferlib.staging.job import Job, Loop
from xferlib.staging.parts import lay

__all__ = ["filling"]

PAUSE_SECONDS: Final = 50e-6
"""About what the link takes for a chunk. The system makes it twice as long."""


def filling(backend: HostStager[Any], chunks: Chunks, traffic: Traffic) -> Loop:
    """Return the loop of one stager."""
    failures = backend.failures

    def loop(job: Job, leading: bool) -> None:
        with chunks.in_use():
            fill(job, leading)

    def fill(job: Job, leading: bool) -> None:
        copy, record = backend.copy_h2d, backend.record_h2d
        while (chunk := chunks.take(H2D, wait=leading)) is not None:
            at_rest = True
            try:
                part = job.claim()
                if part is None:
                    return
                if chunk.busy is not None:
                    # If it failed, the transfer that it belongs to says so.
                    with suppress(*failures):
                        _wait(chunk.busy)
                nbytes = part.nbytes
                lay(part, chunk.view(nbytes))
                try:
                    copy(part.address, chunk.address, nbytes)
                    chunk.busy = record()
                except BaseException:
                    at_rest = traffic.h2d.settle(chunk)
                    raise
            finally:
                if at_rest:
                    chunks.give(H2D, chunk)
                else:
                    chunks.lose(H2D, chunk)

    return loop


def _wait(event: Event) -> None:
    while not event.done():
        # Drivers wait by spinning, on cores that the program would use. Other chunks are under way meanwhile.
        sleep(PAUSE_SECONDS)
