"""The backend on NVIDIA GPUs: copies on two streams of our own, arrays over blocks of JAX's own memory.

JAX's transfers wait for every computation already launched, and so does memory that its pool has just handed out. So copies go into
blocks that were taken earlier, and JAX imports the result. JAX's streams wait on the GPU for our event, and our stream to the host
waits on the GPU for what produces an array. The host waits for neither.

Only a stream can wait for what produces an array, and only at once. The engine needs the wait later, directly before a get's first
copy. So a stream on which nothing else happens waits at once, and the engine is given an event behind that wait.

Invariant: nothing but copies and waits enters the two copy streams, and none of ours stops for the legacy default stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import c_void_p
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast, final

import jax
import numpy as np

from xferlib.cuda.driver import EngineCalls
from xferlib.errors import CapabilityError
from xferlib.protocol import Capabilities, DeviceBlock, DeviceRange, Event, Place, Stream
from xferlib_jax import _arrays
from xferlib_jax._arrays import FINALIZERS, NO_FINALIZERS, NOT_MAPPED, ArrayCheck, JaxArray, nbytes_of
from xferlib_jax._blocks import Block, BlockMaker, PoolError
from xferlib_jax._capsule import capsules
from xferlib_jax._copies import Part, copies, located
from xferlib_jax._driver import CudaError, Driver
from xferlib_jax._events import CudaEvent, event_pool
from xferlib_jax._exports import address_in_order, exported, exporter, found_together
from xferlib_jax._fence import Fences
from xferlib_jax._imports import Imports
from xferlib_jax._layouts import laid_out
from xferlib_jax._pinning import PinnedMemory
from xferlib_jax._reading import readings
from xferlib_jax._trees import put_together, take_apart
from xferlib_jax._unpack import Wanted, unpack, zero

__all__ = ["CudaStager"]

CUDA = 2
TRIAL_NBYTES = 256
HOST_KINDS = ("pinned_host", "unpinned_host")

Copy: TypeAlias = Callable[[int, int, int, int], None]


@final
class CudaStager:
    """A `HostStager` over JAX on CUDA. `h2d` and `d2h` are the handles of the copy streams, for tests that hold them."""

    name = "jax"
    on_gpu = True
    fallback = False
    capabilities = Capabilities(pinned=True, register=True, write_combined=True, finalizers=FINALIZERS)
    refusals: ClassVar[dict[str, str]] = {"mapped": NOT_MAPPED, "finalizers": NO_FINALIZERS}
    failures: ClassVar[tuple[type[Exception], ...]] = (CudaError, PoolError, jax.errors.JaxRuntimeError)

    take_apart = staticmethod(take_apart)
    put_together = staticmethod(put_together)

    def __init__(self, device: Any, driver: Driver) -> None:
        self.jax_device = device
        self.device = f"{device.device_kind} (cuda:{driver.ordinal})"
        self.pci_bus_id = driver.pci_bus_id()
        self.copies: tuple[Copy, Copy] = (driver.copy_h2d, driver.copy_d2h)
        self._driver = driver
        self._events = event_pool(driver)
        self._pinned = PinnedMemory(driver)
        self._capsules = capsules()
        self._imports = Imports(device, (CUDA, driver.ordinal), self._capsules, driver)
        self._check_array = ArrayCheck(device, HOST_KINDS)
        self._export = exporter(device)
        self._readings = readings()
        self._origin = zero(device)
        self._streams: list[c_void_p] = []
        try:
            # Producers have a stream of their own. Fresh memory and fences, on the stream aside, wait for all compute there is, and
            # a get of what is already there would wait with them.
            self.h2d, self.d2h, aside, self._producers = (self._add_stream() for _ in range(4))
            self.driver_calls = EngineCalls(
                driver.context,
                (self.h2d, self.d2h),
                new_event=self._events.new_event,
                failure=partial(driver.failure, "a copy by the engine"),
            )
            self._blocks = BlockMaker(device, aside, self._events, self._export)
            self._fences = self._tried(aside)
        except BaseException:
            self.close()
            raise

    @property
    def blocks_made(self) -> int:
        """How many blocks were taken out of JAX's pool."""
        return self._blocks.made

    @property
    def blocks_freed(self) -> int:
        """How many of them were given back."""
        return self._blocks.freed

    def alloc_pinned(self, nbytes: int) -> int:
        return self._pinned.alloc(nbytes)

    def alloc_write_combined(self, nbytes: int) -> int:
        return self._pinned.alloc_write_combined(nbytes)

    def free_pinned(self, address: int) -> None:
        self._pinned.free(address)
        # As it closes, the core gives back pinned memory and then device memory; nobody has asked JAX about the latter since.
        self.sweep()

    def pin(self, address: int, nbytes: int) -> None:
        self._pinned.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        self._pinned.unpin(address)
        # As above: the core also uses `pin` to lock what it gives out.
        self.sweep()

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return self._pinned.is_pinned(address, nbytes)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.copies[0](dst, src, nbytes, self.h2d)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.copies[1](dst, src, nbytes, self.d2h)

    def record_h2d(self) -> Event:
        return self._events.record(self.h2d)

    def record_d2h(self) -> Event:
        return self._events.record(self.d2h)

    def order_h2d(self, after: Event) -> None:
        cast("CudaEvent", after).hold_back(self.h2d)

    def order_d2h(self, after: Event) -> None:
        cast("CudaEvent", after).hold_back(self.d2h)

    def check_stream(self, stream: object) -> None:
        raise CapabilityError(f"JAX has no streams: got {stream!r}. Leave stream out")

    def check_dtype(self, dtype: np.dtype[Any]) -> bool:
        return _arrays.check_dtype(dtype)

    def alloc_device(self, nbytes: int) -> DeviceBlock:
        return self._blocks.make(nbytes)

    def free_device(self, block: DeviceBlock) -> None:
        self._blocks.free(cast("Block", block))

    def as_array(
        self, block: DeviceBlock, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, after: Event, lease: object
    ) -> JaxArray:
        order = cast("CudaEvent", after).hold_back
        return self._imports.adopt(block.address + offset, shape, dtype, order=order, lease=lease)

    def as_arrays(self, block: DeviceBlock, places: tuple[Place, ...], *, after: Event, lease: object) -> list[JaxArray]:
        order = cast("CudaEvent", after).hold_back

        def adopt(wanted: Sequence[Wanted]) -> list[JaxArray]:
            return self._imports.adopt_all(block.address, wanted, order=order, lease=lease)

        return unpack(places, adopt, self._origin)

    def as_source(self, array: JaxArray, stream: object | None = None) -> DeviceRange:
        return self._source(array, stream, self.d2h)

    def place(self, array: JaxArray | Part, stream: object | None = None) -> DeviceRange:
        if type(array) is Part:
            return located([array], self.place)[0]
        return self._source(array, stream, self._producers)

    def places(self, arrays: Sequence[JaxArray | Part], stream: object | None = None) -> list[DeviceRange] | None:
        if type(arrays[0]) is Part:
            return located(cast("Sequence[Part]", arrays), self.place)
        if stream is not None or not self._check_array.accepts(arrays):
            return None
        return found_together(arrays, self._export, self._producers, self._readings)

    def mark(self, stream: object | None = None) -> Event:
        """Return an event behind the producers of all arrays that were placed, including those that the calling thread placed."""
        if stream is not None:
            self.check_stream(stream)
        return self._events.record(self._producers)

    def copied(self, arrays: Sequence[JaxArray], stream: object | None = None) -> list[JaxArray] | list[Part]:
        if not self._check_array.accepts(arrays):
            arrays = [self._check_array(array) for array in arrays]
        if stream is not None:
            self.check_stream(stream)
        return copies(arrays, self.jax_device)

    def can_be_found(self, arrays: Sequence[JaxArray | Part], stream: object | None = None) -> bool:
        return stream is None and (type(arrays[0]) is Part or self._check_array.accepts(arrays))

    def as_target(self, array: JaxArray, stream: object | None = None) -> DeviceRange:
        raise CapabilityError("JAX arrays never change. Put into a new array")

    def sweep(self) -> None:
        self._readings.let_go()
        self._capsules.sweep()

    def retire(self, streams: Iterable[Stream]) -> Event | None:
        return None if self._fences is None else self._fences.make()

    def lost(self, block: DeviceBlock) -> bool:
        return self._blocks.lost(cast("Block", block))

    def close(self) -> None:
        while self._streams:
            stream = self._streams.pop().value
            if stream is not None:
                self._driver.destroy_stream(stream)

    def _source(self, array: JaxArray, stream: object | None, waiting: int) -> DeviceRange:
        """Make one of our streams wait for what produces the array, and return its memory in C order."""
        array = self._check_array(array)
        if stream is not None:
            self.check_stream(stream)
        capsule = self._export(array, stream=waiting)
        address = address_in_order(capsule, array.shape)
        if address is None:
            address, strides = exported(capsule)
            if strides is not None:
                array = laid_out(array)
                capsule = self._export(array, stream=waiting)
                address = exported(capsule).address
        return DeviceRange(address, nbytes_of(array), self._readings.make(array, capsule))

    def _add_stream(self) -> int:
        # Noted before it exists: an interrupt would lose what a call returns.
        handle = c_void_p()
        self._streams.append(handle)
        self._driver.create_stream(handle)
        assert handle.value is not None
        return handle.value

    def _tried(self, aside: int) -> Fences | None:
        """Find out, in a block of its own, how arrays are imported and when their memory may be written again."""
        trial = self._blocks.make(TRIAL_NBYTES)
        try:
            trial.ready.synchronize()
            self._imports.try_private_call(trial.address)
            fences = Fences(self.jax_device, aside, self._events, self._export)
            return fences if fences.are_needed(self._driver, trial, self._imports, self._capsules) else None
        finally:
            self._blocks.free(trial)
