"""The device of the host backend: NumPy arrays. There is no link here, so the limit is one copy in the calling thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, final

import numpy as np

from benchmarks import memory
from benchmarks.computes.numpy_steps import NumpySteps
from benchmarks.peers import OPENERS
from benchmarks.steps import Bytes, Compute
from benchmarks.ways import Call, Device, Direction, Opener, Shards, Way

__all__ = ["open_device"]


def open_device() -> Device:
    """Return the device."""
    return _HostMemory()


@final
class _HostMemory:
    name: Final = "host"
    peers: Final[Mapping[str, Opener]] = {"numpy": OPENERS["numpy"]}
    in_place: Final = True
    streams: Final[Sequence[str]] = ("in order",)

    def machine(self) -> dict[str, str]:
        return {"gpu": "none"}

    def versions(self) -> dict[str, str]:
        return {}

    def empty(self, nbytes: int) -> Any:
        return memory.empty_pageable(nbytes)

    def upload(self, values: Bytes) -> Any:
        return values.copy()

    def invert(self, source: Any, out: Any) -> None:
        memory.invert(source, out)

    def inverted(self, source: Any) -> Any:
        return ~source

    def cut(self, array: Any, ends: tuple[int, ...]) -> Sequence[Any]:
        return memory.pieces(array, ends)

    def equal(self, left: Any, right: Any) -> bool:
        return memory.equal(left, right)

    def synchronize(self) -> None:
        """Do nothing: what is not a transfer of the stager's is done when it returns."""

    def wait(self, arrays: Sequence[Any]) -> None:
        """Do nothing, as above."""

    def raw(self, direction: Direction) -> Way:
        return Way(
            name="numpy.copyto",
            direction=direction,
            bind=lambda source, target: partial(np.copyto, target, source),
            synchronize=lambda _: None,
        )

    def floors(self, direction: Direction) -> Sequence[Way]:
        return ()

    def shards(self) -> Sequence[Shards]:
        return ()

    def busy(self) -> AbstractContextManager[Call] | None:
        return None

    def compute(self, nbytes: int, stream: str) -> Compute:
        return NumpySteps(nbytes)
