"""To the device: a thread fills a chunk and starts its copy, again and again."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from xferlib.inflight import Traffic
from xferlib.protocol import HostStager
from xferlib.staging.chunks import H2D, Chunks
from xferlib.staging.job import Job, Loop
from xferlib.staging.parts import lay

__all__ = ["filling"]


def filling(backend: HostStager[Any], chunks: Chunks, traffic: Traffic) -> Loop:
    """Return the loop of one stager."""
    failures = backend.failures

    def loop(job: Job, leading: bool) -> None:
        copy, record = backend.copy_h2d, backend.record_h2d
        while (chunk := chunks.take(H2D, wait=leading)) is not None:
            try:
                part = job.claim()
                if part is None:
                    return
                if chunk.busy is not None:
                    # If it failed, the transfer that it belongs to says so.
                    with suppress(*failures):
                        # To wait gives up the interpreter, and who wants it back stands in line with the other threads.
                        if not chunk.busy.done():
                            chunk.busy.synchronize()
                nbytes = part.nbytes
                lay(part, chunk.view(nbytes))
                try:
                    copy(part.address, chunk.address, nbytes)
                    chunk.busy = record()
                except BaseException:
                    traffic.h2d.settle(None)
                    raise
            finally:
                chunks.give(H2D, chunk)

    return loop
