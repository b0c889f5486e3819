"""Pageable memory, by way of pinned blocks: what no copy engine can read or write directly.

H2D: the bytes are in pinned memory when `stage` returns, so the caller's memory is free. D2H: a worker thread copies them out of
pinned memory once they have landed, so that a transfer gets done without anyone waiting for it.
Large arrays pass in pieces, so any size fits under the pinned limit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from xferlib.inflight import Traffic
from xferlib.landing import Landing
from xferlib.memory.arrays import Array, pieces
from xferlib.memory.pool import HostBlock, PinnedPool
from xferlib.protocol import Event, HostStager

__all__ = ["Staging"]

PIECE = 8 << 20
"""Bytes. Large enough for the link's full rate, small enough that the CPU copy of one piece overlaps the DMA of the one before."""


class _Piece(NamedTuple):
    """One CPU copy to be made when `event` is done; without `event`, the end of a transfer whose start failed half way."""

    landing: Landing
    last: bool
    event: Event | None = None
    block: HostBlock | None = None
    out: Array | None = None


@final
class Staging:
    """The pinned bounce of one stager. Any thread."""

    def __init__(self, backend: HostStager[Any], pool: PinnedPool, traffic: Traffic) -> None:
        self._backend = backend
        self._pool = pool
        self._traffic = traffic
        self._lock = threading.Lock()
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def stage(self, source: Array, dst: int) -> None:
        """Start the copy of a pageable array to a device address; its memory is free on return."""
        for piece in pieces(source, PIECE):
            block = self._pool.take(piece.nbytes)
            np.copyto(_over(block, piece), piece)
            self._backend.copy_h2d(dst, block.address, piece.nbytes)
            # Each piece is in flight by itself: the pool may have to wait for the first before there is room for the last.
            self._traffic.h2d.add(piece.nbytes, block)
            dst += piece.nbytes

    def land(self, transfers: Sequence[tuple[int, Array]]) -> Landing:
        """Start copies from device addresses into C-contiguous pageable arrays.

        The landing is reached when these and all copies to the host that were started before are done.
        """
        landing = Landing()
        self._traffic.landings.add(landing)
        try:
            self._start(landing, transfers)
        except BaseException:
            # The caller's memory must be at rest before he hears of the failure.
            self._submit(_Piece(landing, last=True))
            landing.wait()
            raise
        return landing

    def close(self) -> None:
        """End the worker when everything has landed."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            self._pieces.put(None)
            worker.join()

    def _start(self, landing: Landing, transfers: Sequence[tuple[int, Array]]) -> None:
        parts = [(src, piece) for src, out in transfers for src, piece in _addressed(src, out)]
        for index, (src, out) in enumerate(parts):
            block = self._pool.take(out.nbytes)
            self._backend.copy_d2h(block.address, src, out.nbytes)
            event = self._traffic.d2h.add(out.nbytes, block)
            self._submit(_Piece(landing, index == len(parts) - 1, event, block, out))

    def _submit(self, piece: _Piece) -> None:
        with self._lock:
            if self._worker is None:
                self._worker = threading.Thread(target=_work, args=(self._pieces,), name="xferlib-landing", daemon=True)
                self._worker.start()
            self._pieces.put(piece)


def _work(waiting: queue.SimpleQueue[_Piece | None]) -> None:
    while (piece := waiting.get()) is not None:
        landing, last = piece.landing, piece.last
        try:
            if not landing.failed and piece.event is not None:
                _copy_out(piece)
        except Exception as error:
            landing.fail(error)
        # The block is given back before anyone is told: who waited for room finds it.
        del piece
        if last:
            landing.reach()
        del landing


def _copy_out(piece: _Piece) -> None:
    assert piece.event is not None
    assert piece.block is not None
    assert piece.out is not None
    piece.event.synchronize()
    np.copyto(piece.out, _over(piece.block, piece.out))


def _addressed(address: int, array: Array) -> list[tuple[int, Array]]:
    addressed = []
    for piece in pieces(array, PIECE):
        addressed.append((address, piece))
        address += piece.nbytes
    return addressed


def _over(block: HostBlock, like: Array) -> Array:
    return np.ndarray(like.shape, like.dtype, buffer=np.asarray(block))
