"""NumPy beside the backends without a GPU: what a program without a device would write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np

from benchmarks.steps import Bytes, Compute, Drain, Feed
from benchmarks.ways import Call, Direction, Kind, Peer, Way

__all__ = ["open_peer"]


def open_peer() -> Peer:
    """Return the peer."""
    return _NumpyCalls()


@final
class _NumpyCalls:
    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if kind in ("fresh", "untouched", "new"):
            return (
                Way(
                    name="ndarray.copy",
                    direction=direction,
                    bind=lambda source, _: partial(np.array, source),
                    synchronize=lambda _: None,
                    result=lambda array: array,
                    keep=None,
                ),
            )
        return (Way(name="ndarray[...] =", direction=direction, bind=_assign, synchronize=lambda _: None),)

    def feeds(self, kind: Kind, compute: Compute) -> Sequence[Feed]:
        return (Feed(name="ndarray.copy", start=lambda batch: batch.copy(), use=lambda array: array),)

    def drains(self, kind: Kind, compute: Compute) -> Sequence[Drain]:
        if kind == "new":
            return (Drain(name="ndarray.copy", start=lambda output, _: output.copy(), finish=lambda values: values),)

        def start(output: Any, target: Bytes) -> Bytes:
            np.copyto(target, output)
            return target

        return (Drain(name="numpy.copyto", start=start, finish=lambda values: values),)


def _assign(source: Any, target: Any) -> Call:
    return partial(np.copyto, target, source)
