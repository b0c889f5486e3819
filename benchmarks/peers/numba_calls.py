"""Numba's calls: `copy_to_device` and `copy_to_host` on its arrays over the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, final

from benchmarks.ways import Call, Direction, Kind, Peer, Way

__all__ = ["open_peer"]


def open_peer() -> Peer:
    """Import Numba's CUDA module, the newer package first. Raises what the import raises."""
    try:
        cuda = import_module("numba_cuda_mlir.cuda")
    except ModuleNotFoundError:
        cuda = import_module("numba.cuda")
    return _NumbaCalls(cuda)


@final
class _NumbaCalls:
    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._stream = cuda.stream()

    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if kind != "pinned":
            return ()
        return (
            Way(
                name="numba copy_to_device" if direction == "h2d" else "numba copy_to_host",
                direction=direction,
                bind=self._put if direction == "h2d" else self._get,
                synchronize=lambda _: self._stream.synchronize(),
            ),
        )

    def _put(self, source: Any, target: Any) -> Call:
        return partial(self._cuda.as_cuda_array(target).copy_to_device, source, stream=self._stream)

    def _get(self, source: Any, target: Any) -> Call:
        return partial(self._cuda.as_cuda_array(source).copy_to_host, target, stream=self._stream)
