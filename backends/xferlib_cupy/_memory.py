"""Device blocks and page-locked memory: raw addresses, none of CuPy's pools in between.

Both of CuPy's pools hand memory out again as soon as it is dropped, while copies on other streams may still be under way.
Every call here may wait for the GPU, so none is made in steady state. This file does not decide who uses the memory, or when.
"""

from __future__ import annotations

from typing import NamedTuple, final

import cupy
from cupy.cuda import runtime

from xferlib.errors import CapabilityError
from xferlib.memory.proc_maps import is_write_protected
from xferlib_cupy._device import Device

__all__ = ["Block", "PinnedMemory", "alloc", "free"]

PORTABLE = 1
WRITE_COMBINED = 4
READ_ONLY = 8
HOST = 1
OUT_OF_MEMORY = 2


class Block(NamedTuple):
    """Device memory, which is freed by `free` and by nothing else."""

    address: int
    nbytes: int
    ready: None = None


def alloc(device: Device, nbytes: int) -> Block:
    return Block(device.here(_malloc, nbytes), nbytes)


def free(device: Device, block: Block) -> None:
    """Free what `alloc` returned. Waits for whatever runs on the device."""
    device.here(runtime.free, block.address)


@final
class PinnedMemory:
    """Page-locks and unlocks host memory, for every device (portable)."""

    __slots__ = ("_device",)

    def __init__(self, device: Device) -> None:
        self._device = device

    def alloc(self, nbytes: int) -> int:
        return int(self._device.here(runtime.hostAlloc, nbytes, PORTABLE))

    def alloc_write_combined(self, nbytes: int) -> int:
        return int(self._device.here(runtime.hostAlloc, nbytes, PORTABLE | WRITE_COMBINED))

    def device_address(self, address: int) -> int:
        """Return the address by which the device knows page-locked memory. Raises `CapabilityError` if it knows none."""
        found = int(self._device.here(runtime.pointerGetAttributes, address).devicePointer)
        if not found:
            raise CapabilityError(f"{self._device.words} has no address for host memory at {address:#x}. Copy it with put")
        return found

    def free(self, address: int) -> None:
        self._device.here(runtime.freeHost, address)

    def pin(self, address: int, nbytes: int) -> None:
        self._device.here(_register, address, nbytes)

    def unpin(self, address: int) -> None:
        self._device.here(runtime.hostUnregister, address)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        relaxed, memory_type = self._device.capture_mode.relaxed, self._device.memory_type
        return bool(relaxed(memory_type, address) == HOST and relaxed(memory_type, address + nbytes - 1) == HOST)


def _malloc(nbytes: int) -> int:
    try:
        return int(runtime.malloc(nbytes))
    except runtime.CUDARuntimeError as error:
        if error.status != OUT_OF_MEMORY:
            raise
    # CuPy keeps what its arrays gave back; before it gives up, it frees that for itself in the same way.
    cupy.get_default_memory_pool().free_all_blocks()
    return int(runtime.malloc(nbytes))


def _register(address: int, nbytes: int) -> None:
    try:
        runtime.hostRegister(address, nbytes, PORTABLE)
    except runtime.CUDARuntimeError:
        # Pages that may not be written cannot be locked for writing. Only those are locked as read-only: a copy to such memory
        # would be an error that nothing recovers from.
        if not is_write_protected(address, nbytes):
            raise
        runtime.hostRegister(address, nbytes, PORTABLE | READ_ONLY)
