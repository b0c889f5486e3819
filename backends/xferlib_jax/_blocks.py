"""Device memory out of JAX's own pool: blocks are ordinary JAX arrays that nobody else sees, so JAX counts them as its own.

Invariant: a block is owned by its array, never by a capsule alone: a user who deletes every array of `jax.live_arrays()` then takes
the memory of blocks that are idle, and nothing crashes; `lost` says so.
"""

from __future__ import annotations

from typing import Any, final

import jax
import numpy as np

from xferlib.protocol import Event
from xferlib_jax._capsule import exported
from xferlib_jax._events import EventPool

__all__ = ["Block", "BlockMaker", "PoolError"]


class PoolError(RuntimeError):
    """Raised when JAX's pool has no room for a block."""


@final
class Block:
    """Memory of an array that is never given out. It goes back to JAX's pool with the last reference."""

    __slots__ = ("__weakref__", "_freed", "address", "nbytes", "ready", "store")

    def __init__(self, store: Any, address: int, ready: Event, freed: list[None]) -> None:
        self.store = store
        self.address = address
        self.nbytes: int = store.nbytes
        self.ready = ready
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(None)


@final
class BlockMaker:
    """Takes blocks on one device. `stream` is one of our own, which learns there when the memory may be written."""

    def __init__(self, device: Any, stream: int, events: EventPool) -> None:
        self._device = device
        self._stream = stream
        self._events = events
        self.made = 0
        self.freed: list[None] = []

    def make(self, nbytes: int) -> Block:
        """Return a block. Raises `PoolError`, saying what to set."""
        try:
            # Not `jax.numpy.zeros`: compiling a kernel for a new size waits for whatever the device computes. Evaluated, since
            # inside a function that is being traced it would be a step of the function.
            with jax.ensure_compile_time_eval():
                store = jax.device_put(np.empty(nbytes, np.uint8), self._device)
            # JAX may be reading this memory still: our stream waits until it has not only taken it, but written to it.
            capsule = store.__dlpack__(stream=self._stream)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise PoolError(self._full(nbytes)) from error
        address, _ = exported(capsule)
        ready = self._events.record(self._stream)
        self.made += 1
        return Block(store, address, ready, self.freed)

    def _full(self, nbytes: int) -> str:
        found = self._device.memory_stats() or {}
        return (
            f"JAX's memory pool on {self._device} has no {nbytes} bytes left: {found.get('bytes_in_use')} of "
            f"{found.get('bytes_limit')} are in use. Drop arrays, or let JAX take more of the device when it starts: set "
            "XLA_CLIENT_MEM_FRACTION (XLA_PYTHON_CLIENT_MEM_FRACTION in older versions) to 0.9, or "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false"
        )
