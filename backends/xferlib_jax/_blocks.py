"""Device memory out of JAX's own pool: blocks are ordinary JAX arrays that nobody else sees, so JAX counts them as its own.

Invariants: a block's array is in the table until `free`, and nowhere else. It is an array and never only a capsule: if a user
deletes every array of `jax.live_arrays()`, the memory of idle blocks goes too, but nothing crashes, and `lost` says so.
"""

from __future__ import annotations

import itertools
from typing import Any, final

import jax

from xferlib.protocol import Event
from xferlib_jax._events import EventPool
from xferlib_jax._exports import Export, exported
from xferlib_jax._fresh import fresh_arrays

__all__ = ["Block", "BlockMaker", "PoolError"]


class PoolError(RuntimeError):
    """Raised when JAX's pool has no room for a block."""


@final
class Block:
    """Memory of an array that is never given out. `number` is that of its row, since addresses are used again."""

    __slots__ = ("__weakref__", "address", "nbytes", "number", "ready")

    def __init__(self, number: int, address: int, nbytes: int, ready: Event) -> None:
        self.number = number
        self.address = address
        self.nbytes = nbytes
        self.ready = ready


@final
class BlockMaker:
    """Takes blocks on one device. `stream`, one of our own, is made to wait until the memory may be written. Any thread."""

    def __init__(self, device: Any, stream: int, events: EventPool, export: Export) -> None:
        self._device = device
        self._export = export
        self._stream = stream
        self._events = events
        self._fresh = fresh_arrays(device)
        self._numbers = itertools.count()
        self._stores: dict[int, Any] = {}
        self._made: list[None] = []  # One for each row that ever was: appending is a single step, adding to a number is not.

    @property
    def made(self) -> int:
        """How many blocks were taken out of JAX's pool."""
        return len(self._made)

    @property
    def freed(self) -> int:
        """How many of them were given back."""
        return len(self._made) - len(self._stores)

    def free(self, block: Block) -> None:
        """Give a block back to JAX's pool, which orders the next use of its memory behind what was launched. `PoolError` twice."""
        try:
            del self._stores[block.number]
        except KeyError:
            raise PoolError(f"the block at {block.address:#x} was freed already. Free what alloc_device returned, once") from None

    def lost(self, block: Block) -> bool:
        """Tell whether the memory was given back, by us or by somebody who deleted every array there is."""
        store = self._stores.get(block.number)
        return store is None or bool(store.is_deleted())

    def make(self, nbytes: int) -> Block:
        """Return a block. Raises `PoolError`, saying what to set."""
        try:
            store = self._fresh.make(nbytes)
            # JAX may still read this memory, or write to it: our stream waits until it has done what was launched before.
            capsule = self._export(store, stream=self._stream)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise PoolError(self._full(nbytes)) from error
        ready = self._events.record(self._stream)
        block = Block(next(self._numbers), exported(capsule).address, nbytes, ready)
        self._stores[block.number] = store
        self._made.append(None)
        return block

    def _full(self, nbytes: int) -> str:
        found = self._device.memory_stats() or {}
        return (
            f"JAX's memory pool on {self._device} has no {nbytes} bytes left: {found.get('bytes_in_use')} of "
            f"{found.get('bytes_limit')} are in use. Drop arrays, or let JAX take more of the device when it starts: set "
            "XLA_CLIENT_MEM_FRACTION (XLA_PYTHON_CLIENT_MEM_FRACTION in older versions) to 0.9, or "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false"
        )
