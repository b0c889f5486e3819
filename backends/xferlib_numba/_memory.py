"""Device blocks and page-locked memory: raw addresses, allocated and freed by the driver at once.

Numba's own memory is freed late: pinned memory waits, counted as zero bytes, until the eleventh free flushes them all. Every call
here may wait for the GPU, so none is made in steady state. This file does not decide who uses the memory, or when.
"""

from __future__ import annotations

from typing import NamedTuple, final

from xferlib.errors import CapabilityError
from xferlib.memory.proc_maps import is_write_protected
from xferlib_numba._device import Device

__all__ = ["Block", "PinnedMemory", "alloc", "free"]

ALIGNMENT = 256
PORTABLE = 1
WRITE_COMBINED = 4
READ_ONLY = 8
HOST = 1
INVALID_VALUE = 1
OUT_OF_MEMORY = 2


class Block(NamedTuple):
    """Device memory, which is freed by `free` and by nothing else."""

    address: int
    nbytes: int
    ready: None = None


def alloc(device: Device, nbytes: int) -> Block:
    return Block(device.here(_alloc, device, nbytes), nbytes)


def free(device: Device, block: Block) -> None:
    """Free what `alloc` returned. Waits for whatever runs on the device."""
    device.here(device.raw("cuMemFree"), block.address)


@final
class PinnedMemory:
    """Page-locks and unlocks host memory, for every device (portable)."""

    __slots__ = ("_device", "_inside")

    def __init__(self, device: Device) -> None:
        self._device = device
        # Address given out -> address to free, for the few where they differ.
        self._inside: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int:
        return self._alloc(nbytes, PORTABLE)

    def alloc_write_combined(self, nbytes: int) -> int:
        """Allocate by the driver itself: Numba's own calls take the flag and forget it."""
        return self._alloc(nbytes, PORTABLE | WRITE_COMBINED)

    def device_address(self, address: int) -> int:
        """Return the address by which the device knows page-locked memory. Raises `CapabilityError` if it knows none."""
        binding = self._device.numba.driver.binding
        attribute = binding.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        status, found = self._device.here(binding.cuPointerGetAttribute, attribute, address)
        if status or not int(found):
            raise CapabilityError(f"{self._device.words} has no address for host memory at {address:#x}. Copy it with put")
        return int(found)

    def free(self, address: int) -> None:
        address = self._inside.pop(address, address)
        self._device.here(self._device.raw("cuMemFreeHost"), address)

    def pin(self, address: int, nbytes: int) -> None:
        self._device.here(_register, self._device, address, nbytes)

    def unpin(self, address: int) -> None:
        self._device.here(self._device.raw("cuMemHostUnregister"), address)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return self._device.here(self._is_host, address) and self._device.here(self._is_host, address + nbytes - 1)

    def _alloc(self, nbytes: int, flags: int) -> int:
        here, alloc = self._device.here, self._device.raw("cuMemHostAlloc")
        address = int(here(alloc, nbytes, flags))
        if address % ALIGNMENT == 0:
            return address
        # Drivers align better than that, but do not promise it.
        here(self._device.raw("cuMemFreeHost"), address)
        address = int(here(alloc, nbytes + ALIGNMENT, flags))
        aligned = -(-address // ALIGNMENT) * ALIGNMENT
        self._inside[aligned] = address
        return aligned

    def _is_host(self, address: int) -> bool:
        binding = self._device.numba.driver.binding
        status, kind = binding.cuPointerGetAttribute(binding.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        if status == INVALID_VALUE:
            # Memory that the driver does not know.
            return False
        if status:
            raise self._device.failed("cuPointerGetAttribute", status)
        return int(kind) == HOST


def _alloc(device: Device, nbytes: int) -> int:
    alloc = device.raw("cuMemAlloc")
    try:
        return int(alloc(nbytes))
    except device.error as error:
        if error.code != OUT_OF_MEMORY:
            raise
    # Numba keeps what its arrays gave back; before it gives up, it frees that in the same way. Other memory managers have no queue.
    queue = getattr(device.numba_context.memory_manager, "deallocations", None)
    if queue is not None:
        queue.clear()
    return int(alloc(nbytes))


def _register(device: Device, address: int, nbytes: int) -> None:
    register = device.raw("cuMemHostRegister")
    try:
        register(address, nbytes, PORTABLE)
    except device.error:
        # Pages that may not be written cannot be locked for writing. Only those are locked as read-only: a copy to such memory
        # would be an error that nothing recovers from.
        if not is_write_protected(address, nbytes):
            raise
        register(address, nbytes, PORTABLE | READ_ONLY)
