"""The bare blocking copy, as a program without streams calls it, from and into pageable memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

from benchmarks.steps import Compute, Drain, Feed
from benchmarks.ways import Call, Direction, Kind, Peer, Way

__all__ = ["open_peer"]


def open_peer() -> Peer:
    """Import the bindings of the driver; its context is current already. Raises `ModuleNotFoundError` without them."""
    from cuda.bindings import driver

    return _CudaCalls(driver)


@final
class _CudaCalls:
    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if kind != "pageable":
            return ()
        bind = self._put if direction == "h2d" else self._get
        return (Way(name="cuMemcpy", direction=direction, bind=bind, synchronize=self._synchronize, waits=True),)

    def feeds(self, kind: Kind, compute: Compute) -> Sequence[Feed]:
        return ()

    def drains(self, kind: Kind, compute: Compute) -> Sequence[Drain]:
        return ()

    def _put(self, source: Any, target: Any) -> Call:
        return partial(self._driver.cuMemcpyHtoD, _address(target), source.ctypes.data, source.nbytes)

    def _get(self, source: Any, target: Any) -> Call:
        return partial(self._driver.cuMemcpyDtoH, target.ctypes.data, _address(source), source.nbytes)

    def _synchronize(self, _: Sequence[object]) -> None:
        # The last bytes may still be on their way from the driver's own buffer.
        self._driver.cuCtxSynchronize()


def _address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])
