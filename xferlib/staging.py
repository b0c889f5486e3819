"""Pageable memory, by way of pinned blocks: what no copy engine can read or write directly.

H2D: the bytes are in pinned memory when `stage` returns, so the caller's memory is free. D2H: a worker thread copies them out of
pinned memory once they have landed, so that a transfer gets done without anyone waiting for it.
Large arrays pass in pieces, so any size fits under the pinned limit.

Each piece counts as in flight from the moment it has its block: a thread that waits for room may wait for it, and finds the block
idle when it is done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from xferlib.inflight import Traffic
from xferlib.landing import Landing
from xferlib.memory.arrays import Array, pieces
from xferlib.memory.pool import PAGE, HostBlock, PinnedPool
from xferlib.protocol import Event, HostStager

__all__ = ["Staging"]

PIECE = 8 << 20
"""Bytes. Large enough for the link's full rate, small enough that the CPU copy of one piece overlaps the DMA of the one before."""


@dataclass(slots=True)
class _Piece:
    """One CPU copy to be made when `event` is done."""

    block: HostBlock | None
    """None once it was given back, whoever still holds the piece then."""
    out: Array
    landed: Landing
    """Reached when the block is idle again."""
    whole: Landing
    """The transfer's."""
    event: Event = field(init=False)


@final
class Staging:
    """The pinned bounce of one stager. Any thread."""

    def __init__(self, backend: HostStager[Any], pool: PinnedPool, traffic: Traffic) -> None:
        self._backend = backend
        self._pool = pool
        self._traffic = traffic
        self.leaves = 0
        # Reentrant: a finalizer may stage while its thread is in here.
        self._starting = threading.RLock()
        self._waiting: queue.SimpleQueue[_Piece | Landing | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        # Two pieces at a time, or nothing would overlap; and what is cut to pages wastes nothing.
        self._piece = min(PIECE, max(PAGE, pool.limit // 2 // PAGE * PAGE))

    def stage(self, source: Array, dst: int) -> None:
        """Start the copy of a pageable array to a device address; its memory is free on return."""
        self._count(1)
        for piece in pieces(source, self._piece):
            self._stage(piece, dst)
            dst += piece.nbytes

    def land(self, transfers: Sequence[tuple[int, Array]]) -> Landing:
        """Start copies from device addresses into C-contiguous pageable arrays.

        The landing is reached when these and all copies to the host that were started before are done.
        """
        self._count(len(transfers))
        whole = Landing()
        try:
            for src, out in transfers:
                for piece in pieces(out, self._piece):
                    self._start(src, piece, whole)
                    src += piece.nbytes
        except BaseException:
            # The caller's memory must be at rest before he hears of the failure.
            self._submit(whole)
            whole.wait()
            raise
        self._submit(whole)
        return whole

    def close(self) -> None:
        """End the worker when everything has landed."""
        with self._starting:
            worker, self._worker = self._worker, None
        if worker is not None:
            self._waiting.put(None)
            if worker is not threading.current_thread():
                worker.join()

    def _count(self, leaves: int) -> None:
        with self._starting:
            self.leaves += leaves

    def _stage(self, piece: Array, dst: int) -> None:
        block, filled = self._take(piece.nbytes)
        try:
            np.copyto(_over(block, piece), piece)
            self._backend.copy_h2d(dst, block.address, piece.nbytes)
            self._traffic.h2d.add(piece.nbytes, block)
        except BaseException:
            self._traffic.h2d.settle(block)
            raise
        finally:
            # Before anyone is told: who waits for room must find it, and this frame may live on for a while.
            del block
            filled.reach()

    def _start(self, src: int, out: Array, whole: Landing) -> None:
        block, landed = self._take(out.nbytes)
        address, work = block.address, _Piece(block, out, landed, whole)
        # From here on only the piece holds it, and lets go of it before anyone is told.
        del block
        try:
            self._backend.copy_d2h(address, src, out.nbytes)
            work.event = self._traffic.d2h.add(out.nbytes, work.block)
            landed.owner = None
            self._submit(work)
        except BaseException:
            self._traffic.d2h.settle(work.block)
            work.block = None
            landed.reach()
            raise

    def _take(self, nbytes: int) -> tuple[HostBlock, Landing]:
        """Take a block that counts as in flight before another thread finds neither room nor anything to wait for."""
        point = Landing(threading.get_ident())
        try:
            return self._pool.take(nbytes, lambda: self._traffic.landings.add(point)), point
        except BaseException:
            point.reach()
            raise

    def _submit(self, work: _Piece | Landing) -> None:
        with self._starting:
            if self._worker is None:
                self._start_worker()
            self._waiting.put(work)

    def _start_worker(self) -> None:
        worker = threading.Thread(target=_work, args=(self._waiting,), name="xferlib-landing", daemon=True)
        if self._worker is not None:
            # A finalizer has come here first, while the thread was made.
            return
        self._worker = worker
        try:
            worker.start()
        except BaseException:
            self._worker = None
            raise


def _work(waiting: queue.SimpleQueue[_Piece | Landing | None]) -> None:
    while (work := waiting.get()) is not None:
        if isinstance(work, Landing):
            work.reach()
            continue
        try:
            if work.block is not None and not work.whole.failed:
                work.event.synchronize()
                np.copyto(work.out, _over(work.block, work.out))
        except Exception as error:
            work.whole.fail(error)
        # The block is given back before anyone is told: who waited for room finds it.
        work.block = None
        work.landed.reach()
        # While it waits for the next one it holds nothing of the caller's.
        del work


def _over(block: HostBlock, like: Array) -> Array:
    return np.ndarray(like.shape, like.dtype, buffer=np.asarray(block))
