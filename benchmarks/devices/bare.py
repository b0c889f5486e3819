"""Bare copies between addresses, without a framework: of the CUDA driver on streams of their own, or of the C library on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, final

import numpy as np

from benchmarks.devices.link import link
from benchmarks.ways import Call, Direction, Way

__all__ = ["Bare", "CpuCopies", "CudaCopies", "way"]

Start: TypeAlias = Callable[[Direction, int, int, int], Call]
"""Takes a direction, a target, a source and a number of bytes."""


class Bare(Protocol):
    """The copies of one device."""

    @property
    def name(self) -> str:
        """What is called."""

    @property
    def device_name(self) -> str: ...

    def machine(self) -> dict[str, str]: ...

    def versions(self) -> dict[str, str]: ...

    def copy(self, direction: Direction, target: int, source: int, nbytes: int) -> Call:
        """Return the call that starts a copy."""

    def synchronize(self, direction: Direction) -> None:
        """Block until the copies of a direction are done."""

    def synchronize_all(self) -> None:
        """Block until the device has nothing to do."""

    def host_alloc(self, nbytes: int) -> Call:
        """Allocate memory that copies are fastest from, and return the call that frees it."""


def way(
    bare: Bare, direction: Direction, address: Callable[[Any], int], *, name: str | None = None, copy: Start | None = None
) -> Way:
    """Return the way of a copy; `address` finds the memory of a device array, which is ready. The caller keeps the arrays."""
    start: Start = bare.copy if copy is None else copy

    def bind(source: Any, target: Any) -> Call:
        if direction == "h2d":
            return start(direction, address(target), source.ctypes.data, source.nbytes)
        return start(direction, target.ctypes.data, address(source), source.nbytes)

    return Way(name=name or bare.name, direction=direction, bind=bind, synchronize=lambda _: bare.synchronize(direction))


@final
class CudaCopies:
    """By `cuda-bindings`, in the primary context of a device, which becomes the calling thread's."""

    name: Final = "cuMemcpyAsync"

    def __init__(self, ordinal: int = 0) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self._call(driver.cuInit(0))
        self._device = self._call(driver.cuDeviceGet(ordinal))
        self._call(driver.cuCtxSetCurrent(self._call(driver.cuDevicePrimaryCtxRetain(self._device))))
        self._streams: dict[Direction, Any] = {"h2d": self.stream(), "d2h": self.stream()}
        self._event = self._call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self.device_name: Final[str] = self._call(driver.cuDeviceGetName(128, self._device)).split(b"\0")[0].decode()

    def stream(self) -> Any:
        """Return a new stream that does not stop for the default one. It lives as long as the process."""
        return self._call(self.driver.cuStreamCreate(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def machine(self) -> dict[str, str]:
        bus = self._call(self.driver.cuDeviceGetPCIBusId(16, self._device)).split(b"\0")[0].decode()
        return {"gpu": self.device_name, "link": link(bus)}

    def versions(self) -> dict[str, str]:
        number = self._call(self.driver.cuDriverGetVersion())
        return {"cuda driver": f"{number // 1000}.{number % 1000 // 10}"}

    def copy(self, direction: Direction, target: int, source: int, nbytes: int) -> Call:
        driver = self.driver
        start = driver.cuMemcpyHtoDAsync if direction == "h2d" else driver.cuMemcpyDtoHAsync
        return partial(start, target, source, nbytes, self._streams[direction])

    def copy_and_mark(self, direction: Direction, target: int, source: int, nbytes: int) -> Call:
        """Return a call that records an event as well."""
        copy = self.copy(direction, target, source, nbytes)
        record = partial(self.driver.cuEventRecord, self._event, self._streams[direction])

        def call() -> None:
            copy()
            record()

        return call

    def synchronize(self, direction: Direction) -> None:
        self._call(self.driver.cuStreamSynchronize(self._streams[direction]))

    def synchronize_all(self) -> None:
        self._call(self.driver.cuCtxSynchronize())

    def host_alloc(self, nbytes: int) -> Call:
        address = self._call(self.driver.cuMemHostAlloc(nbytes, self.driver.CU_MEMHOSTALLOC_PORTABLE))
        return lambda: self._call(self.driver.cuMemFreeHost(address))

    def _call(self, answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a call of the CUDA driver failed: {status!r}")
        return values[0] if values else None


@final
class CpuCopies:
    """One copy after the other, in the calling thread."""

    name: Final = "memmove"
    device_name: Final = "host"

    def machine(self) -> dict[str, str]:
        return {"gpu": "none"}

    def versions(self) -> dict[str, str]:
        return {}

    def copy(self, direction: Direction, target: int, source: int, nbytes: int) -> Call:
        return partial(ctypes.memmove, target, source, nbytes)

    def synchronize(self, direction: Direction) -> None:
        """Do nothing: a copy is done when it returns."""

    def synchronize_all(self) -> None:
        """Do nothing."""

    def host_alloc(self, nbytes: int) -> Call:
        memory = [np.ones(nbytes, np.uint8)]
        return memory.clear
