"""The backend: copies by CuPy's runtime calls on two streams of its own, arrays over blocks of its own.

Invariant: nothing but copies and waits enters the two copy streams, and both are non-blocking: a plain stream would stop for
whatever anybody enqueues on the legacy default stream, which is where CuPy works unless told otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, cast, final

import cupy
import numpy as np
from cupy.cuda import runtime

from xferlib.cuda.driver import EngineCalls
from xferlib.cuda.fences import Recorded, StreamFences
from xferlib.protocol import Capabilities, DeviceBlock, DeviceRange, Event, Place, Stream
from xferlib_cupy import _arrays, _memory
from xferlib_cupy._arrays import CupyArray
from xferlib_cupy._device import Device
from xferlib_cupy._driver import failure
from xferlib_cupy._events import events_of
from xferlib_cupy._memory import Block, PinnedMemory

__all__ = ["CupyStager"]

NON_BLOCKING = 1
H2D = 1
D2H = 2

_NDARRAY = cupy.ndarray
_MEMORY, _POINTER = cupy.cuda.UnownedMemory, cupy.cuda.MemoryPointer
_NEW = tuple.__new__
"""It takes a third of the time of a named tuple's constructor."""


@final
class CupyStager:
    """A `HostStager` over CuPy. `h2d` and `d2h` are the handles of the copy streams, for tests that hold them."""

    name = "cupy"
    on_gpu = True
    fallback = False
    capabilities = Capabilities(pinned=True, register=True, streams=True, put_into=True, mapped=True, write_combined=True)
    failures: ClassVar[tuple[type[Exception], ...]] = (
        runtime.CUDARuntimeError,
        # Kernel launches, and with them copies of what is not contiguous, go through the driver.
        cupy.cuda.driver.CUDADriverError,
        cupy.cuda.memory.OutOfMemoryError,
    )

    def __init__(self, device: Device) -> None:
        self.device = device.words
        self.ordinal = device.ordinal
        self._device = device
        self._events = events_of(device)
        self._streams = self._events.streams
        self._pinned = PinnedMemory(device)
        # On the path of every small transfer, so each is an attribute of this object and not a chain of attributes.
        self._copy = device.copy
        self._record = device.record
        self._record_event = self._events.record
        self._order = self._events.order
        self._handle = self._streams.handle
        # No method, so that there is no further call on the path of a small put.
        self.retire = StreamFences(
            record=self._events.record_users,
            is_capturing=self._streams.is_capturing,
            find=self._streams.find,
            wait=device.wait_users,
            failure=failure,
        ).retire
        self._own: list[int] = []
        try:
            # Made and kept in one call, which no interrupt cuts.
            device.here(self._own.extend, map(runtime.streamCreateWithFlags, (NON_BLOCKING, NON_BLOCKING)))
            self.h2d, self.d2h = self._own
            self.driver_calls = EngineCalls(
                device.context,
                (self.h2d, self.d2h),
                new_event=self._events.new_event,
                failure=partial(failure, "a copy by the engine"),
            )
        except BaseException:
            self.close()
            raise

    @property
    def pci_bus_id(self) -> str:
        return str(runtime.deviceGetPCIBusId(self.ordinal))

    def alloc_pinned(self, nbytes: int) -> int:
        return self._pinned.alloc(nbytes)

    def alloc_write_combined(self, nbytes: int) -> int:
        return self._pinned.alloc_write_combined(nbytes)

    def free_pinned(self, address: int) -> None:
        self._pinned.free(address)

    def pin(self, address: int, nbytes: int) -> None:
        self._pinned.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        self._pinned.unpin(address)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return self._pinned.is_pinned(address, nbytes)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self._copy(dst, src, nbytes, H2D, self.h2d)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self._copy(dst, src, nbytes, D2H, self.d2h)

    def record_h2d(self) -> Event:
        return self._record_event(self._record, self.h2d)

    def record_d2h(self) -> Event:
        return self._record_event(self._record, self.d2h)

    def order_h2d(self, after: Event) -> None:
        cast("Recorded", after).enqueue_wait(self._device.wait, self.h2d)

    def order_d2h(self, after: Event) -> None:
        cast("Recorded", after).enqueue_wait(self._device.wait, self.d2h)

    def check_stream(self, stream: object) -> None:
        self._handle(stream)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        _arrays.check_dtype(dtype, self.ordinal)

    def alloc_device(self, nbytes: int) -> DeviceBlock:
        return _memory.alloc(self._device, nbytes)

    def free_device(self, block: DeviceBlock) -> None:
        _memory.free(self._device, cast("Block", block))

    def as_array(
        self, block: DeviceBlock, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, after: Event, lease: object
    ) -> CupyArray:
        # With the device given, CuPy does not ask CUDA.
        memory = _MEMORY(block.address, block.nbytes, lease, self.ordinal)
        return _NDARRAY(shape, dtype, _POINTER(memory, offset))

    def as_arrays(self, block: DeviceBlock, places: tuple[Place, ...], *, after: Event, lease: object) -> list[CupyArray]:
        memory = _MEMORY(block.address, block.nbytes, lease, self.ordinal)
        arrays: list[CupyArray] = []
        known = kind = None
        for offset, shape, dtype in places:
            if dtype is not known:
                # CuPy finds its own dtypes by their letters in less time, and the time of a tree of many leaves is spent here.
                known, kind = dtype, dtype.char if dtype.isbuiltin == _arrays.OF_NUMPY else dtype
            arrays.append(_NDARRAY(shape, kind, _POINTER(memory, offset)))
        return arrays

    def convert(self, array: CupyArray, dtype: np.dtype[Any]) -> CupyArray:
        # CuPy computes on the current device, which may be another one.
        with cupy.cuda.Device(self.ordinal):
            return array.astype(dtype)

    def as_mapped(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, stream: object | None, lease: object
    ) -> tuple[CupyArray, Stream | None]:
        found = self._streams.find(stream)
        nbytes = math.prod(shape) * dtype.itemsize
        memory = _MEMORY(self._pinned.device_address(address), nbytes, lease, self.ordinal)
        return _NDARRAY(shape, dtype, _POINTER(memory, 0)), found

    def as_source(self, array: CupyArray, stream: object | None = None) -> DeviceRange:
        # As `place`, without the call, and with the stream found only once: this is the path of every small get.
        if array.__class__ is not _NDARRAY or array.data.device_id != self.ordinal:
            _arrays.check_array(array, self.ordinal)
        handle = self._handle(stream)
        known = array.data.ptr, array.nbytes, array, None
        source: DeviceRange = _NEW(DeviceRange, known) if array._c_contiguous else self._gathered(array, stream)
        self._order(self.d2h, handle)
        return source

    def place(self, array: CupyArray | DeviceRange, stream: object | None = None) -> DeviceRange:
        if isinstance(array, DeviceRange):
            # A copy that `copied` made.
            return array
        if array.__class__ is not _NDARRAY or array.data.device_id != self.ordinal:
            _arrays.check_array(array, self.ordinal)
        # Refuses a stream that is being captured.
        self._handle(stream)
        return DeviceRange(array.data.ptr, array.nbytes, array) if array._c_contiguous else self._gathered(array, stream)

    def mark(self, stream: object | None = None) -> Event:
        return self._events.record_users(self._handle(stream))

    def as_sources(self, arrays: Sequence[CupyArray], stream: object | None = None) -> list[DeviceRange] | None:
        sources = self._in_place(arrays)
        if sources is not None:
            # Once for all arrays: this is most of the driver's part in a get of many small arrays.
            self._order(self.d2h, self._handle(stream))
        return sources

    def places(self, arrays: Sequence[CupyArray | DeviceRange], stream: object | None = None) -> list[DeviceRange] | None:
        # As `place`.
        if isinstance(arrays[0], DeviceRange):
            return list(arrays)
        self._handle(stream)
        return self._in_place(arrays)

    def _in_place(self, arrays: Sequence[CupyArray]) -> list[DeviceRange] | None:
        """Return the memory of arrays. None: one of them is not in C order, or not of this device, or no array."""
        sources: list[DeviceRange] = []
        for array in arrays:
            if array.__class__ is not _NDARRAY or not array._c_contiguous:
                return None
            data = array.data
            if data.device_id != self.ordinal:
                return None
            sources.append(_NEW(DeviceRange, (data.ptr, array.nbytes, array, None)))
        return sources

    def copied(self, arrays: Sequence[CupyArray], stream: object | None = None) -> list[DeviceRange]:
        for array in arrays:
            if array.__class__ is not _NDARRAY or array.data.device_id != self.ordinal:
                _arrays.check_array(array, self.ordinal)
        # Refuses a stream that is being captured.
        handle = self._handle(stream)
        return self._device.here(_arrays.copies, arrays, self._streams.current_as(stream), handle)

    def as_target(self, array: CupyArray, stream: object | None = None) -> DeviceRange:
        if array.__class__ is not _NDARRAY or array.data.device_id != self.ordinal:
            _arrays.check_array(array, self.ordinal)
        handle = self._handle(stream)
        # `array.flags` says the same, and takes ten times as long to build.
        if not array._c_contiguous:
            raise ValueError("the array is not contiguous in C order. Put into a new array, and assign it on the device")
        self._order(self.h2d, handle)
        return _NEW(DeviceRange, (array.data.ptr, array.nbytes, array, None))

    def sweep(self) -> None:
        """Do nothing: CuPy's arrays drop their lease when they die."""

    def lost(self, block: DeviceBlock) -> bool:
        return False

    def close(self) -> None:
        """See `HostStager`. Nothing else destroys the streams; at interpreter exit they go with the process."""
        for _ in range(len(self._own)):
            # Likewise taken and destroyed in one call.
            self._device.give_back(next, map(runtime.streamDestroy, iter(self._own.pop, None)))

    def _gathered(self, array: CupyArray, stream: object | None) -> DeviceRange:
        packed = _arrays.contiguous(array, stream, self._streams, self._device)
        memory = array.data.mem
        return DeviceRange(packed.data.ptr, packed.nbytes, (packed, array), (memory.ptr, memory.size))
