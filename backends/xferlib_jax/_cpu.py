"""The backend where JAX computes on the CPU: threads are the copy engines, and arrays lie over memory that these have filled.

JAX on the CPU cannot wait for our events, so an array is handed out only when its copy is done: `Event.stream_wait` waits. And JAX
takes aligned NumPy memory as its own, so the caller's memory is never given to it: the bytes are copied into blocks of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast, final

import jax
import numpy as np

from xferlib import protocol
from xferlib.errors import CapabilityError
from xferlib_jax._arrays import FINALIZERS, NO_FINALIZERS, NOT_MAPPED, ArrayCheck, JaxArray, check_dtype, nbytes_of
from xferlib_jax._capsule import capsules
from xferlib_jax._copies import Part, copies, located
from xferlib_jax._engine import CopyError, CpuEvent, Engine
from xferlib_jax._exports import address_in_order, exported, exporter, found_together
from xferlib_jax._imports import Imports
from xferlib_jax._memory import Block, Memory, MemoryCallError
from xferlib_jax._promise import Promises
from xferlib_jax._reading import readings
from xferlib_jax._trees import put_together, take_apart

__all__ = ["CpuStager"]

DLPACK_CPU = (1, 0)
TRIAL_NBYTES = 256


@final
class CpuStager:
    """A `HostStager` over JAX on the CPU.

    `h2d`, `d2h` and `memory` are for tests of programs: hold or break a direction with `Engine.submit`, count with `Memory.calls`.
    """

    name: Final = "jax"
    on_gpu: Final = False
    pci_bus_id: Final = None
    fallback: Final = False
    capabilities: Final = protocol.Capabilities(register=True, finalizers=FINALIZERS)
    refusals: Final = {
        "mapped": NOT_MAPPED,
        "finalizers": NO_FINALIZERS,
        "write_combined": "page-locks nothing where JAX computes on the CPU, which reads what it wrote. Leave write_combined out",
    }
    failures: Final[tuple[type[Exception], ...]] = (CopyError, MemoryCallError, jax.errors.JaxRuntimeError)

    take_apart = staticmethod(take_apart)
    put_together = staticmethod(put_together)

    def __init__(self, device: Any) -> None:
        cores = len(os.sched_getaffinity(0))
        self.device: Final = f"the CPU ({cores} core{'s' if cores > 1 else ''})"
        self.jax_device: Final = device
        self.memory: Final = Memory()
        self._check_array = ArrayCheck(device)
        self._export = exporter(device)
        self._readings = readings()
        self._promises = Promises(self._readings)
        self._capsules = capsules()
        self._imports = Imports(device, DLPACK_CPU, self._capsules, None)
        trial = self.memory.alloc_device(TRIAL_NBYTES)
        self._imports.try_private_call(trial.address)
        self.memory.free_device(trial.address)
        self.h2d: Final = Engine("xferlib-jax-h2d", self._promises, "h2d")
        self.d2h: Final = Engine("xferlib-jax-d2h", self._promises, "d2h")

    def alloc_pinned(self, nbytes: int) -> int:
        return self.memory.alloc_pinned(nbytes)

    def free_pinned(self, address: int) -> None:
        self.memory.free_pinned(address)
        # As it closes, the core gives back pinned memory and then device memory; nobody has asked JAX about the latter since.
        self.sweep()

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

    def record_h2d(self) -> CpuEvent:
        return self.h2d.record()

    def record_d2h(self) -> CpuEvent:
        return self.d2h.record()

    def order_h2d(self, after: protocol.Event) -> None:
        self.h2d.wait(after)

    def order_d2h(self, after: protocol.Event) -> None:
        self.d2h.wait(after)

    def check_stream(self, stream: object) -> None:
        raise CapabilityError(f"JAX has no streams: got {stream!r}. Leave stream out")

    def check_dtype(self, dtype: np.dtype[Any]) -> bool:
        return check_dtype(dtype)

    def alloc_device(self, nbytes: int) -> Block:
        return self.memory.alloc_device(nbytes)

    def free_device(self, block: protocol.DeviceBlock) -> None:
        self.memory.free_device(block.address)

    def as_array(
        self,
        block: protocol.DeviceBlock,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        after: protocol.Event,
        lease: object,
    ) -> JaxArray:
        return self._imports.adopt(block.address + offset, shape, dtype, order=None, lease=lease)

    def as_arrays(
        self, block: protocol.DeviceBlock, places: tuple[protocol.Place, ...], *, after: protocol.Event, lease: object
    ) -> list[JaxArray]:
        return self._imports.adopt_all(block.address, places, order=None, lease=lease)

    def as_source(self, array: JaxArray, stream: object | None = None) -> protocol.DeviceRange:
        return self.place(array, stream)

    def place(self, array: JaxArray | Part, stream: object | None = None) -> protocol.DeviceRange:
        if type(array) is Part:
            return located([array], self.place)[0]
        array = self._check_array(array)
        if stream is not None:
            self.check_stream(stream)
        capsule = None
        if _is_ready(array):
            capsule = self._export(array, stream=None)
            address = address_in_order(capsule, array.shape)
            if address is None and exported(capsule).strides is None:
                address = exported(capsule).address
            if address is not None:
                return protocol.DeviceRange(address, nbytes_of(array), self._readings.make(array, capsule))
        promise = self._promises.make(array, capsule)
        return protocol.DeviceRange(promise.start, nbytes_of(array), promise)

    def places(self, arrays: Sequence[JaxArray | Part], stream: object | None = None) -> list[protocol.DeviceRange] | None:
        if type(arrays[0]) is Part:
            return located(cast("Sequence[Part]", arrays), self.place)
        if stream is not None or not self._check_array.accepts(arrays):
            return None
        if not all(map(_is_ready, arrays)):
            return None
        return found_together(arrays, self._export, None, self._readings)

    def mark(self, stream: object | None = None) -> None:
        """Return None: the copying thread waits for an array at its first copy, when it meets the address that it was given."""
        if stream is not None:
            self.check_stream(stream)

    def copied(self, arrays: Sequence[JaxArray], stream: object | None = None) -> list[JaxArray] | list[Part]:
        if not self._check_array.accepts(arrays):
            arrays = [self._check_array(array) for array in arrays]
        if stream is not None:
            self.check_stream(stream)
        return copies(arrays, self.jax_device)

    def can_be_found(self, arrays: Sequence[JaxArray | Part], stream: object | None = None) -> bool:
        return stream is None and (type(arrays[0]) is Part or self._check_array.accepts(arrays))

    def as_target(self, array: JaxArray, stream: object | None = None) -> protocol.DeviceRange:
        raise CapabilityError("JAX arrays never change. Put into a new array")

    def sweep(self) -> None:
        self._readings.let_go()
        self._capsules.sweep()

    def retire(self, streams: Iterable[protocol.Stream]) -> None:
        """Return None: JAX on the CPU lets a buffer go only when the computations that read it have ended."""

    def lost(self, block: protocol.DeviceBlock) -> bool:
        """Return False: blocks are not arrays of JAX's, so nobody can delete them."""
        return False

    def close(self) -> None:
        self.h2d.close()
        self.d2h.close()


def _is_ready(array: JaxArray) -> bool:
    # Not the array itself: another thread may delete it at any time, and then JAX 0.10.2 would end the process.
    return bool(array.addressable_data(0).is_ready())
