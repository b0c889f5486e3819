"""Numba's calls: `to_device`, and `copy_to_device` and `copy_to_host` on its arrays over the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

from benchmarks.computes.numba_steps import load
from benchmarks.steps import Compute, Drain, Feed
from benchmarks.ways import Call, Direction, Kind, Peer, Way

__all__ = ["open_peer"]


def open_peer() -> Peer:
    """Import Numba's CUDA module. Raises what the import raises."""
    return _NumbaCalls(load())


@final
class _NumbaCalls:
    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._stream = cuda.stream()

    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if kind == "new" and direction == "h2d":
            return (self._to_device(),)
        if kind in ("fresh", "untouched", "new"):
            return (self._new(),) if direction == "d2h" else ()
        if kind == "pageable":
            return (self._into(direction, waits=True),)
        return (self._into(direction, waits=False),)

    def feeds(self, kind: Kind, compute: Compute) -> Sequence[Feed]:
        return ()

    def drains(self, kind: Kind, compute: Compute) -> Sequence[Drain]:
        return ()

    def _into(self, direction: Direction, *, waits: bool) -> Way:
        """From and into pageable memory without a stream, as Numba's users do: with a stream it would say done too early."""
        options = {} if waits else {"stream": self._stream}

        def put(source: Any, target: Any) -> Call:
            return partial(self._cuda.as_cuda_array(target).copy_to_device, source, **options)

        def get(source: Any, target: Any) -> Call:
            return partial(self._cuda.as_cuda_array(source).copy_to_host, target, **options)

        return Way(
            name="numba copy_to_device" if direction == "h2d" else "numba copy_to_host",
            direction=direction,
            bind=put if direction == "h2d" else get,
            synchronize=lambda _: self._cuda.synchronize() if waits else self._stream.synchronize(),
            waits=waits,
        )

    def _to_device(self) -> Way:
        return Way(
            name="numba to_device",
            direction="h2d",
            bind=lambda source, _: partial(self._cuda.to_device, source),
            synchronize=lambda _: self._cuda.synchronize(),
            result=lambda array: array,
            keep=None,
            waits=True,
        )

    def _new(self) -> Way:
        return Way(
            name="numba copy_to_host",
            direction="d2h",
            bind=lambda source, _: partial(self._cuda.as_cuda_array(source).copy_to_host),
            synchronize=lambda _: None,
            result=lambda values: values,
            keep=None,
            waits=True,
        )
