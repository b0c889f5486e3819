"""NumPy beside the host backend: what a program without a device would write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

from benchmarks.ways import Call, Direction, Kind, Peer, Way

__all__ = ["open_peer"]


def open_peer() -> Peer:
    """Return the peer."""
    return _NumpyCalls()


@final
class _NumpyCalls:
    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if kind == "fresh":
            return (
                Way(
                    name="ndarray.copy",
                    direction=direction,
                    bind=lambda source, _: partial(source.copy),
                    synchronize=lambda _: None,
                    result=lambda array: array,
                    keep=None,
                ),
            )
        return (Way(name="ndarray[...] =", direction=direction, bind=_assign, synchronize=lambda _: None),)


def _assign(source: Any, target: Any) -> Call:
    return partial(target.__setitem__, ..., source)
