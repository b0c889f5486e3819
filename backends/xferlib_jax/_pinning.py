"""Page-locked host memory on CUDA: mapped by the system, locked by the driver.

JAX's client (`dma_map`) is not used: it keeps the interpreter's lock while it locks and unlocks. Unlocking waits for what runs on
the device, and would stop every thread for that long. JAX asks the driver what is locked, so its own transfers are direct all the
same (from 0.11 on).
Invariant: memory is unlocked before it is unmapped: a lock on pages that are gone cannot be undone.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import final

from xferlib.memory.proc_maps import is_write_protected
from xferlib_jax._driver import OUT_OF_MEMORY, CudaError, Driver

__all__ = ["PinnedMemory"]

ALIGNMENT = 256


@final
class PinnedMemory:
    """The tables of one stager. They outlive `close()`. Any thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pages: dict[int, mmap.mmap] = {}
        # Address given out -> address to free, of what the driver allocated.
        self._allocated: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int:
        # Shared, so that after a fork the process still writes to the pages that are locked. Pages that are there already are
        # locked in a tenth of the time.
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        except OSError as error:
            raise CudaError("mmap", OUT_OF_MEMORY, str(error)) from error
        # The export ends with this line: pages with an exported buffer could not be unmapped later.
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        # Entered before they are locked: they must not be unmapped while locked.
        self._pages[address] = pages
        try:
            self.pin(address, nbytes)
        except Exception:
            del self._pages[address]
            raise
        return address

    def alloc_write_combined(self, nbytes: int) -> int:
        start = self._driver.alloc_write_combined(nbytes)
        if start % ALIGNMENT:
            # Small requests are cut out of a larger piece.
            self._driver.free_host(start)
            start = self._driver.alloc_write_combined(nbytes + ALIGNMENT)
        address = -(-start // ALIGNMENT) * ALIGNMENT
        self._allocated[address] = start
        return address

    def free(self, address: int) -> None:
        if address in self._allocated:
            self._driver.free_host(self._allocated.pop(address))
            return
        pages = self._pages[address]
        self.unpin(address)
        del self._pages[address]
        pages.close()

    def pin(self, address: int, nbytes: int) -> None:
        # Read-only for such memory alone: a copy to memory that was locked as read-only would be an error that nothing recovers
        # from.
        self._driver.register(address, nbytes, read_only=is_write_protected(address, nbytes))

    def unpin(self, address: int) -> None:
        self._driver.unregister(address)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        ask = self._driver.is_page_locked
        return ask(address) and ask(address + nbytes - 1)
