"""The backend: copies by Numba's driver bindings on two streams of its own, Numba's arrays over blocks of its own.

Invariant: nothing but copies and waits enters the two copy streams, and all of ours are non-blocking: those that `cuda.stream()`
makes stop for whatever anybody enqueues on the legacy default stream, where Numba works unless told otherwise. Nothing is compiled
here.

The third stream is for gets that the engine makes. If the work before their copies is on more than one stream, it is joined on the
third, and the copy stream waits for one event of that; the engine says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, cast, final

import numpy as np

from xferlib.cuda.driver import EngineCalls
from xferlib.cuda.fences import Recorded, StreamFences
from xferlib.protocol import Capabilities, DeviceBlock, DeviceRange, Event, Stream
from xferlib_numba import _arrays, _memory
from xferlib_numba._arrays import Lay, NumbaArray
from xferlib_numba._device import Device
from xferlib_numba._events import NumbaEvent, events_of
from xferlib_numba._gather import Gathering, plan
from xferlib_numba._memory import Block, PinnedMemory
from xferlib_numba._streams import Handle

__all__ = ["NumbaStager"]

NON_BLOCKING = 1

_NEW = tuple.__new__
"""It takes a third of the time of a named tuple's constructor."""


@final
class NumbaStager:
    """A `HostStager` over Numba. `h2d` and `d2h` are the handles of the copy streams, for tests that hold them."""

    name = "numba"
    on_gpu = True
    fallback = False
    capabilities = Capabilities(pinned=True, register=True, streams=True, put_into=True, mapped=True, write_combined=True)

    def __init__(self, device: Device) -> None:
        self.device = device.words
        self.ordinal = device.ordinal
        # What Numba raises when a driver call fails is one of these.
        self.failures: tuple[type[Exception], ...] = (device.numba.driver.CudaDriverError,)
        self._device = device
        self._events = events_of(device)
        self._streams = self._events.streams
        self._pinned = PinnedMemory(device)
        self._gathering = Gathering(device)
        # A second one, for the other stream: neither may use memory again that the other still writes.
        self._gathering_aside = Gathering(device)
        # Set for good. If `mark` cleared it, the `mark` of another thread or of a finalizer could clear it between a `place` and
        # its own `mark`, and a wait would be lost. Programs whose arrays name no stream and lie in one piece keep the short way. In
        # others a get may wait for what earlier gets wait for; their copies in the one stream would make it wait anyway.
        self._is_aside_used = False
        # On the path of every small transfer, so each is an attribute of this object and not a chain of attributes.
        self._copy_h2d = device.copy_h2d
        self._copy_d2h = device.copy_d2h
        self._record = self._events.record
        self._order = self._events.order
        self._wait = self._events.device.wait
        self._handle = self._streams.handle
        self._default = self._streams.default
        self._array = device.numba.array
        self._several = device.several
        # No method, so that there is no further call on the path of a small put.
        self.retire = StreamFences(
            record=self._record,
            is_capturing=self._streams.is_capturing,
            find=self._streams.find,
            wait=self._wait,
            failure=device.failure,
        ).retire
        binding = device.numba.driver.binding
        self._destroy = binding.cuStreamDestroy
        self._own: list[tuple[Any, Handle]] = []
        """What the driver returned for each stream: the status, and the handle."""
        try:
            # Made and kept in one call, which no interrupt cuts.
            device.here(self._own.extend, map(binding.cuStreamCreate, (NON_BLOCKING,) * 3))
            self.h2d, self.d2h, self._aside = [self._made(*made) for made in self._own]
            self.driver_calls = EngineCalls(
                device.context,
                (int(self.h2d), int(self.d2h)),
                new_event=self._events.new_event,
                failure=partial(device.failure, "the driver by the engine"),
            )
        except BaseException:
            self._close_streams()
            raise

    @property
    def pci_bus_id(self) -> str:
        return self._device.pci_bus_id

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
        self._copy_h2d(dst, src, nbytes, self.h2d)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self._copy_d2h(dst, src, nbytes, self.d2h)

    def record_h2d(self) -> Event:
        return self._record(self.h2d)

    def record_d2h(self) -> Event:
        return self._record(self.d2h)

    def order_h2d(self, after: Event) -> None:
        cast("Recorded", after).enqueue_wait(self._wait, self.h2d)

    def order_d2h(self, after: Event) -> None:
        cast("Recorded", after).enqueue_wait(self._wait, self.d2h)

    def check_stream(self, stream: object) -> None:
        self._handle(stream)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        _arrays.check_dtype(dtype, self._device.numba)

    def alloc_device(self, nbytes: int) -> DeviceBlock:
        return _memory.alloc(self._device, nbytes)

    def free_device(self, block: DeviceBlock) -> None:
        _memory.free(self._device, cast("Block", block))

    def as_array(
        self, block: DeviceBlock, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, after: Event, lease: object
    ) -> NumbaArray:
        stream = after.stream_of_arrays() if isinstance(after, NumbaEvent) else self._streams.numba_default
        return _arrays.as_array(self._device, block.address + offset, shape, dtype, stream=stream, lease=lease)

    def as_mapped(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, stream: object | None, lease: object
    ) -> tuple[NumbaArray, Stream | None]:
        found = self._streams.find(stream)
        there = self._pinned.device_address(address)
        # Copies that Numba is asked to make between the view and its own arrays go where the kernels go.
        named = stream if isinstance(stream, type(self._streams.numba_default)) else self._streams.numba_default
        return _arrays.as_array(self._device, there, shape, dtype, stream=named, lease=lease), found

    def as_source(self, array: NumbaArray, stream: object | None = None) -> DeviceRange:
        if array.__class__ is self._array and array.is_c_contiguous() and not self._several:
            address, nbytes = array.gpu_data.device_pointer_value or 0, array.nbytes
            self._order_after(self.d2h, stream, array.stream)
            return _NEW(DeviceRange, (address, nbytes, array, None))
        lay = self._look(array)
        # Refused, if at all, before anything has to wait.
        runs = None if lay.strides is None else plan(lay.shape, lay.strides, lay.itemsize)
        self._order_after(self.d2h, stream, lay.stream)
        if runs is None:
            return DeviceRange(lay.address, lay.nbytes, array)
        address, ticket = self._gathering.copy(lay.address, lay.nbytes, runs, self.d2h)
        return DeviceRange(address, lay.nbytes, (ticket, array), _arrays.reach(lay))

    def place(self, array: NumbaArray, stream: object | None = None) -> DeviceRange:
        lay = self._look(array)
        # Refused, if at all, before anything has to wait.
        runs = None if lay.strides is None else plan(lay.shape, lay.strides, lay.itemsize)
        if runs is None and self._other(stream, lay.stream, self._handle(stream)) is None:
            return DeviceRange(lay.address, lay.nbytes, array)
        self._is_aside_used = True
        self._order_after(self._aside, stream, lay.stream)
        if runs is None:
            return DeviceRange(lay.address, lay.nbytes, array)
        address, ticket = self._gathering_aside.copy(lay.address, lay.nbytes, runs, self._aside)
        return DeviceRange(address, lay.nbytes, (ticket, array), _arrays.reach(lay))

    def mark(self, stream: object | None = None) -> Event:
        handle = self._handle(stream)
        if not self._is_aside_used:
            return self._record(handle)
        self._order(self._aside, handle)
        return self._record(self._aside)

    def as_sources(self, arrays: Sequence[NumbaArray], stream: object | None = None) -> list[DeviceRange] | None:
        if self._several:
            return None
        for array in arrays:
            if array.__class__ is not self._array or not array.is_c_contiguous():
                return None
            if stream is None and array.stream and getattr(array.stream, "handle", None) is not self._default:
                # That stream must be waited for, too.
                return None
        # Once for all arrays: this is most of the driver's part in a get of many small arrays.
        self._order(self.d2h, self._handle(stream))
        return [_NEW(DeviceRange, (array.gpu_data.device_pointer_value or 0, array.nbytes, array, None)) for array in arrays]

    def as_target(self, array: NumbaArray, stream: object | None = None) -> DeviceRange:
        if array.__class__ is self._array and array.is_c_contiguous() and not self._several:
            address, nbytes = array.gpu_data.device_pointer_value or 0, array.nbytes
            self._order_after(self.h2d, stream, array.stream)
            return _NEW(DeviceRange, (address, nbytes, array, None))
        lay = self._look(array)
        if lay.strides is not None:
            raise ValueError("the array is not contiguous in C order. Put into a new array, and assign it on the device")
        if lay.read_only:
            raise ValueError("the array is read-only. Put into one that may be written, or into a new one")
        self._order_after(self.h2d, stream, lay.stream)
        return DeviceRange(lay.address, lay.nbytes, array)

    def sweep(self) -> None:
        """Do nothing: Numba's arrays drop their lease when they die."""

    def lost(self, block: DeviceBlock) -> bool:
        return False

    def close(self) -> None:
        """See `HostStager`. Nothing else destroys the streams; at interpreter exit they go with the process."""
        self._gathering.close()
        self._gathering_aside.close()
        self._close_streams()

    def _made(self, status: Any, handle: Handle) -> Handle:
        if status:
            raise self._device.failed("cuStreamCreate", status)
        return handle

    def _close_streams(self) -> None:
        for _ in range(len(self._own)):
            # Likewise taken and destroyed in one call. A stream that was not made has no handle.
            handles = filter(None, map(itemgetter(1), iter(self._own.pop, None)))
            with suppress(IndexError):
                self._device.give_back(next, map(self._destroy, handles))

    def _look(self, array: object) -> Lay:
        lay = _arrays.look(array, self._device.numba)
        if self._several and lay.nbytes:
            _arrays.check_device(lay.address, self._device)
        return lay

    def _order_after(self, own: Handle, stream: object | None, named: Any) -> None:
        """Make a stream of ours wait for the stream given, else for the default stream and the one that the array names.

        Both, since Numba's kernels run on the default stream whatever an array names.
        """
        handle = self._handle(stream)
        other = self._other(stream, named, handle)
        if other is not None:
            self._order(own, other)
        self._order(own, handle)

    def _other(self, stream: object | None, named: Any, handle: Handle) -> Handle | None:
        """Return the stream that an array names, if it counts and is not this one."""
        # Arrays of ours name the default stream by the very same object; Numba's name none by 0.
        if stream is not None or not named or getattr(named, "handle", None) is self._default:
            return None
        other = self._handle(named)
        return None if int(other) == int(handle) else other
