"""CuPy's own calls: `ndarray.set`, `ndarray.get`, `asarray`, `asnumpy`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import cupy

from benchmarks.ways import Direction, Kind, Peer, Way

__all__ = ["open_peer"]


def open_peer() -> Peer:
    """Return the peer, with a stream per direction."""
    return _CupyCalls()


@final
class _CupyCalls:
    def __init__(self) -> None:
        self._puts = cupy.cuda.Stream(non_blocking=True)
        self._gets = cupy.cuda.Stream(non_blocking=True)

    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if kind == "fresh":
            return (_asarray(),)
        if kind == "pinned":
            return (self._set() if direction == "h2d" else self._get(),)
        return (self._set(), _asarray()) if direction == "h2d" else (self._get(), _asnumpy())

    def _set(self) -> Way:
        stream = self._puts
        return Way(
            name="cupy set",
            direction="h2d",
            bind=lambda source, target: partial(target.set, source, stream),
            synchronize=lambda _: stream.synchronize(),
        )

    def _get(self) -> Way:
        stream = self._gets
        return Way(
            name="cupy get(out=)",
            direction="d2h",
            bind=lambda source, target: partial(source.get, stream=stream, out=target, blocking=False),
            synchronize=lambda _: stream.synchronize(),
        )


def _asarray() -> Way:
    return Way(
        name="cupy asarray",
        direction="h2d",
        bind=lambda source, _: partial(cupy.asarray, source),
        synchronize=lambda _: cupy.cuda.get_current_stream().synchronize(),
        result=_itself,
        keep=None,
    )


def _asnumpy() -> Way:
    return Way(
        name="cupy asnumpy",
        direction="d2h",
        bind=lambda source, _: partial(cupy.asnumpy, source),
        synchronize=lambda _: None,
        result=_itself,
        keep=None,
    )


def _itself(array: Any) -> Any:
    return array
