"""The backend itself: the methods of the protocol, made of NumPy arrays, streams, copy engines and tables of memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast, final

import numpy as np
import numpy.typing as npt
from numpy.ma import MaskedArray

from xferlib import protocol
from xferlib_host._engine import Engine
from xferlib_host._memory import Block, Memory, MemoryCallError, array_over
from xferlib_host._stream import AllEvents, CopyError, Event, Stream, handles, resolve

__all__ = ["NumpyStager"]


@final
class NumpyStager:
    """Copies between NumPy arrays, with one engine per direction. Methods do what `xferlib.protocol.HostStager` says.

    `h2d`, `d2h` and `memory` are for tests of programs: hold or break a direction with `Engine.submit`, count with `Memory.calls`.
    """

    name: Final = "host"
    on_gpu: Final = False
    pci_bus_id: Final = None
    fallback: Final = True
    capabilities: Final = protocol.Capabilities(register=True, streams=True, put_into=True, mapped=True)
    failures: Final[tuple[type[Exception], ...]] = (CopyError, MemoryCallError)
    refusals: Final = {"write_combined": "page-locks nothing, and its CPU reads what it wrote. Leave write_combined out"}

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self.device: Final = f"the CPU ({cores} core{'s' if cores > 1 else ''})"
        self.h2d: Final = Engine("h2d", next(handles))
        self.d2h: Final = Engine("d2h", next(handles))
        self.memory: Final = Memory()

    def alloc_pinned(self, nbytes: int) -> int:
        return self.memory.alloc_pinned(nbytes)

    def free_pinned(self, address: int) -> None:
        self.memory.free_pinned(address)

    def pin(self, address: int, nbytes: int) -> None:
        self.memory.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        self.memory.unpin(address)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Tell whether both ends are in the table: nothing is locked here, but the engines read any memory directly."""
        return self.memory.is_pinned(address, nbytes)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.h2d.copy(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.d2h.copy(dst, src, nbytes)

    def record_h2d(self) -> Event:
        return self.h2d.record()

    def record_d2h(self) -> Event:
        return self.d2h.record()

    def order_h2d(self, after: protocol.Event) -> None:
        self.h2d.wait(after)

    def order_d2h(self, after: protocol.Event) -> None:
        self.d2h.wait(after)

    def check_stream(self, stream: object) -> None:
        resolve(stream)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Accept numbers, bools, dates and time spans, those of extension packages (bfloat16, float8) included."""
        # isbuiltin is 2 for a dtype that a package registered; its kind may be "V", like that of a structure.
        if dtype.hasobject or not (dtype.kind in "biufcmM" or dtype.isbuiltin == 2):
            raise TypeError(f"backend 'host' moves numbers, bools and dates, not dtype {dtype}. Convert the array first")

    def alloc_device(self, nbytes: int) -> Block:
        return self.memory.alloc_device(nbytes)

    def free_device(self, block: protocol.DeviceBlock) -> None:
        self.memory.free_device(block)

    def as_array(
        self,
        block: protocol.DeviceBlock,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        after: protocol.Event,
        lease: object,
    ) -> npt.NDArray[Any]:
        return array_over(block.address + offset, shape, dtype, lease=lease)

    def as_mapped(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, stream: object | None, lease: object
    ) -> tuple[npt.NDArray[Any], protocol.Stream | None]:
        on = resolve(stream)
        found = None if on is None else protocol.Stream(on.handle, on)
        return array_over(address, shape, dtype, lease=lease), found

    def as_source(self, array: npt.NDArray[Any], stream: object | None = None) -> protocol.DeviceRange:
        source = self.place(array, stream)
        after = self.mark(stream)
        if after is not None:
            self.d2h.wait(after)
        return source

    def place(self, array: npt.NDArray[Any], stream: object | None = None) -> protocol.DeviceRange:
        if isinstance(array, np.generic):
            # What NumPy gives for a sum; in other libraries that is an array, too.
            array = np.asarray(array)
        self._check_array(array)
        on = resolve(stream)
        packed = array if array.flags.c_contiguous else _packed(array, on)
        return _source(array) if packed is array else protocol.DeviceRange(*_source(packed)[:2], (packed, array), _reach(array))

    def mark(self, stream: object | None = None) -> Event | None:
        on = resolve(stream)
        return None if on is None else on.record()

    def copied(self, arrays: Sequence[npt.NDArray[Any]], stream: object | None = None) -> list[npt.NDArray[Any]]:
        on = resolve(stream)
        found = [np.asarray(array) if isinstance(array, np.generic) else array for array in arrays]
        for array in found:
            self._check_array(array)
        return [_packed(array, on) for array in found]

    def as_target(self, array: npt.NDArray[Any], stream: object | None = None) -> protocol.DeviceRange:
        self._check_array(array)
        if not array.flags.c_contiguous:
            raise ValueError(f"the target has strides {array.strides!r}, not C order. Put into a contiguous array, then assign")
        if not array.flags.writeable:
            raise ValueError("the target is read-only. Put into an array that may be written")
        on = resolve(stream)
        if on is not None:
            self.h2d.wait(on.record())
        return _source(array)

    def sweep(self) -> None:
        """Do nothing: a lease ends by itself when the last array over it goes."""

    def retire(self, streams: Iterable[protocol.Stream]) -> protocol.Event | None:
        # A resolved stream is one that `stream_wait` made.
        events = [cast("Stream", stream.keepalive).record() for stream in streams]
        if len(events) > 1:
            return AllEvents(events)
        return events[0] if events else None

    def lost(self, block: protocol.DeviceBlock) -> bool:
        return False

    def close(self) -> None:
        self.h2d.close()
        self.d2h.close()

    def _check_array(self, array: object) -> None:
        if not isinstance(array, np.ndarray) or isinstance(array, MaskedArray):
            raise TypeError(
                f"the device arrays of backend 'host' are NumPy arrays without a mask, not {type(array)!r}. Convert it with "
                + ("array.filled()" if isinstance(array, MaskedArray) else "numpy.asarray")
            )
        self.check_dtype(array.dtype)


def _packed(array: npt.NDArray[Any], on: Stream | None) -> npt.NDArray[Any]:
    """Return a copy in C order. It is complete when the stream has made it, or at once if the calling thread is the stream."""
    if on is None:
        return array.copy("C")
    packed = np.empty(array.shape, array.dtype)
    on.submit(np.copyto, packed, array)
    return packed


def _reach(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Return where an array's elements lie, from the first byte to the last."""
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)] if array.size else []
    start: int = array.__array_interface__["data"][0]
    return start + sum(step for step in steps if step < 0), sum(map(abs, steps)) + array.itemsize


def _source(array: npt.NDArray[Any]) -> protocol.DeviceRange:
    return protocol.DeviceRange(array.__array_interface__["data"][0], array.nbytes, array)
