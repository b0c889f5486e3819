"""Copies to the device on the caller's thread: small arrays pass through pinned memory of their own size.

Most of them are very small, such as labels beside images. Those go through buffers, many to a block of the pool: taking a block
from the pool costs more than the copy. A block goes back to the pool when none of its buffers is in flight or free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias, final

import numpy as np

from xferlib.engine.native import OK, gil_library, library
from xferlib.errors import AllocationError, TransferError
from xferlib.ledger import Ledger
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.foreign import copy_foreign, is_foreign
from xferlib.memory.pinned_pool import KEPT_SHARE, PinnedPool
from xferlib.pending import Fill
from xferlib.protocol import DeviceRange, Event, HostStager
from xferlib.staging.coalesce import CoalescedCopy, copy_in

__all__ = ["LARGEST_BUFFER_NBYTES", "BounceBuffers"]

Buffer: TypeAlias = tuple[int, Array, int, bool]
"""An address; the bytes there, which hold their block; the number of the entry with the copy out of it, behind which it may be
filled again; and whether it is kept for that."""
NEVER_USED = -1
"""No entry has this number."""
BUFFERS = {16 << 10: 16, 64 << 10: 16, 256 << 10: 4, 512 << 10: 4}
"""Bytes of a buffer, the smaller first, and how many make a block: buffers are used in turn, and a megabyte stays in a core's
cache.

A put takes the smallest buffer that it fits into, so that few bytes do not hold many.
"""
LARGEST_BUFFER_NBYTES = max(BUFFERS)
AT_ONCE_NBYTES = 64 << 10
"""So much is copied without giving up the interpreter: to get it back would take longer. Only out of memory of NumPy's own:
other memory may have to be read from a disk."""
COPY_STEP_NBYTES = 256 << 10
"""So much of one large array is copied at a time: the device copies them while the CPU copies the next."""


@final
class BounceBuffers:
    """Copies small pageable arrays to the device for one stager, by calls. Any thread. Keeps buffers until `release`."""

    def __init__(self, backend: HostStager[Any], pool: PinnedPool, ledger: Ledger) -> None:
        self._copy_h2d = backend.copy_h2d
        self._pool = pool
        self._h2d = ledger.h2d
        self._table = ledger.h2d.table
        self._copy_at_once, self._copy = gil_library().xe_copy, library().xe_copy
        self._jobs = ledger.jobs
        self._reap = ledger.reap
        # Of the others each put takes what it needs and no more.
        self._sizes = [size for size, count in BUFFERS.items() if pool.limit >= KEPT_SHARE * count * size]
        # Changed in single steps: a finalizer may put while its thread is in here.
        self._buffers: dict[int, deque[Buffer]] = {size: deque() for size in self._sizes}
        """Those that are free, or soon will be, in the order in which they were used. A rush of puts needs more blocks: their
        buffers are used once, and do not come back here as long as there are others."""

    def __call__(
        self,
        coalesced: CoalescedCopy,
        nbytes: int = 0,
        overwritten: Sequence[DeviceRange] = (),
        target: object = None,
        pinned: Sequence[Array] = (),
    ) -> Event:
        """Start a coalesced copy, and enter it as in flight; its arrays are free on return.

        - `nbytes`: so many are counted; none if the caller counts them.
        - `overwritten`: see `Entry.device_ranges`.
        - `target`: kept, too, if nobody can say when the copy ends.
        - `pinned`: arrays whose copies were started before, and are in flight until this one is done.
        """
        fills: list[Fill] = []
        try:
            size, (address, memory, _, kept) = self._take(coalesced.nbytes, fills)
            self._start(coalesced, address, memory)
            # Whoever finds no buffer asks which copies are done with theirs.
            number, event = self._h2d.add(nbytes, pinned, overwritten, memory, reaped=not pinned)[:2]
            if kept:
                self._buffers[size].append((address, memory, number, True))
        except BaseException:
            self._h2d.quiesce((target, pinned, fills[-1].memory if fills else None), pinned, overwritten)
            raise
        finally:
            # If the copy fails, this frame lives as long as the exception.
            memory = None  # type: ignore[assignment]  # Nobody uses it after this.
            if fills:
                fill = fills[-1]
                # In this order: whoever waits for room must find it.
                fill.memory, fill.over = None, True
                self._jobs.remove(fill)
        return event

    def release(self) -> bool:
        """Give idle buffers back to the pool, and tell whether there were any."""
        found = any(self._buffers.values())
        for buffers in self._buffers.values():
            # What is in flight holds its own until it is done.
            buffers.clear()
        return found

    def _start(self, coalesced: CoalescedCopy, address: int, memory: Array) -> None:
        """Copy the arrays into pinned memory, and start the copy from there to the device."""
        nbytes, arrays = coalesced.nbytes, coalesced.arrays
        try:
            if len(arrays) > 1 or not arrays[0].flags.c_contiguous:
                if coalesced.foreign or (len(arrays) == 1 and is_foreign(arrays[0])):
                    self._copy_each(arrays, memory)
                else:
                    copy_in(coalesced, memory[:nbytes])
                self._copy_h2d(coalesced.address, address, nbytes)
                return
            start = address_of(arrays[0])
            copy = self._copy_at_once if nbytes <= AT_ONCE_NBYTES and arrays[0].base is None else self._copy
            for at in range(0, nbytes, COPY_STEP_NBYTES):
                step = min(COPY_STEP_NBYTES, nbytes - at)
                if copy(address + at, start + at, step, 0) != OK:
                    raise _cut_off()
                self._copy_h2d(coalesced.address + at, address + at, step)
        finally:
            # As in `__call__`.
            del memory

    def _copy_each(self, arrays: Sequence[Array], memory: Array) -> None:
        """Copy arrays one behind the other, each in C order. Some may be a file's, which may be shorter by now."""
        address, end = address_of(memory), 0
        try:
            for array in arrays:
                if not copy_foreign(array, address + end):
                    raise _cut_off()
                end += array.nbytes
        finally:
            # As in `__call__`.
            del memory

    def _take(self, nbytes: int, fills: list[Fill]) -> tuple[int, Buffer]:
        """Take memory, and enter a fill that holds it. Return the size of its buffer, 0 if it is none, and the buffer."""
        index = bisect_left(self._sizes, nbytes)
        size = self._sizes[index] if index < len(self._sizes) else 0
        while size:
            fill = Fill()
            fills.append(fill)
            # Counts as in flight before another thread finds neither room nor anything to wait for.
            self._jobs.add(fill)
            buffers = self._buffers[size]
            try:
                buffer = buffers.popleft()
                fill.memory = buffer[1]
                if buffer[2] in self._table:
                    # One question, or two, for all buffers: the others are mostly free behind it.
                    self._h2d.reap()
                if buffer[2] not in self._table:
                    return size, buffer
                # Those behind it are still in use, too.
                buffers.appendleft(buffer)
            except IndexError:
                pass
            # This one may have to wait for room now, so nobody may wait for it.
            fill.memory, fill.over = None, True
            self._jobs.remove(fill)
            if not self._add_buffers(size):
                break
        fill = Fill()
        fills.append(fill)
        block = self._pool.take(nbytes, lambda: self._jobs.add(fill))
        memory = fill.memory = np.asarray(block)
        return 0, (block.address, memory, NEVER_USED, False)

    def _add_buffers(self, size: int) -> bool:
        """Take a block of buffers, if the pool has one for which nobody must wait."""
        # Copies that are done may hold an earlier block. Otherwise the pool would grow for this, again and again, now and then.
        self._reap()
        nbytes = BUFFERS[size] * size
        fill = Fill()
        try:
            # If the driver refuses, that does not matter as long as the put's own bytes fit into what is there.
            with suppress(AllocationError):
                block = self._pool.try_take(nbytes, lambda: self._jobs.add(fill))
                if block is not None:
                    memory = np.asarray(block)
                    # Those of an earlier block may be gone: what fails does not bring its buffer back.
                    kept = not any(buffer[3] for buffer in self._buffers[size].copy())
                    # Before those that are in use.
                    self._buffers[size].extendleft(
                        [(block.address + at, memory[at : at + size], NEVER_USED, kept) for at in range(nbytes - size, -1, -size)]
                    )
                    return True
            return False
        finally:
            fill.over = True
            self._jobs.remove(fill)


def _cut_off() -> TransferError:
    return TransferError("the memory of a source is not there any more: its file was cut off")
