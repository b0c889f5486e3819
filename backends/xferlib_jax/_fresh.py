"""JAX arrays whose memory nobody has written to, for those who write to it themselves.

JAX makes them in a compiled function that allocates and does nothing else. No kernel is loaded, which would wait for whatever the
device computes. Compiling takes as long as to send some arrays from the host, so that comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, final

import jax
import numpy as np

from xferlib_jax._probe import memory_grows

__all__ = ["FreshArrays", "fresh_arrays", "has_room"]

WORTH_COMPILING_NBYTES = 32 << 20
"""Of one size. On an H200 machine it took 16 ms to compile a function, and 64 arrays of 128 MiB then 2 ms; to send one such array
took 16 ms, and to send 64 3,031 ms."""
MOST = 256
"""Functions of one device. Blocks come in eight sizes for each power of two."""
TARGET = "AllocateBuffer"
"""What XLA calls it, and has it for GPUs alone."""

JaxArray: TypeAlias = Any


@final
class FreshArrays:
    """Makes them on one device. There is one for each: `fresh_arrays`. Any thread: two may compile the same function."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._sent: dict[int, int] = {}
        """Bytes that were sent, by the size of the array."""
        self._functions: dict[int, Callable[[], JaxArray] | None] = {}
        """By the size; None: JAX has no such function."""

    def make(self, nbytes: int) -> JaxArray:
        """Return an array of bytes. Raises `JaxRuntimeError` where there is no room."""
        function = self._function(nbytes)
        # At once, since inside a function that is being traced it would become a step of that.
        with jax.ensure_compile_time_eval():
            # A function would ask for ten seconds for memory that is not there, and one that is compiled is refused without jit.
            if function is not None and has_room(nbytes, self._device) and not jax.config.jax_disable_jit:
                return function()
            self._sent[nbytes] = self._sent.get(nbytes, 0) + nbytes
            return jax.device_put(np.empty(nbytes, np.uint8), self._device)

    def _function(self, nbytes: int) -> Callable[[], JaxArray] | None:
        if nbytes not in self._functions:
            if self._sent.get(nbytes, 0) + nbytes < WORTH_COMPILING_NBYTES or len(self._functions) >= MOST:
                return None
            self._sent[nbytes] = 0
            try:
                self._functions[nbytes] = self._compiled(nbytes)
            except ValueError:
                # By the calling thread's settings of JAX, such as a mesh of other devices: it is tried again.
                return None
            except Exception:
                # Without it, all goes on as before.
                self._functions[nbytes] = None
        return self._functions[nbytes]

    def _compiled(self, nbytes: int) -> Callable[[], JaxArray] | None:
        place = jax.sharding.SingleDeviceSharding(self._device)
        lowered = jax.jit(partial(jax.lax.empty, (nbytes,), np.uint8), out_shardings=place).lower()
        if TARGET not in lowered.as_text():
            return None
        compiled: Callable[[], JaxArray] = lowered.compile()
        return compiled


def has_room(nbytes: int, device: Any) -> bool:
    """Tell whether JAX's memory has as much left. Where it grows, or has no limit, nobody can say, and it is taken to have."""
    figures = (None if memory_grows() else device.memory_stats()) or {}
    # Not every allocator of JAX's has a limit.
    return not figures.get("bytes_limit") or figures["bytes_in_use"] + nbytes <= figures["bytes_limit"]


@functools.cache
def fresh_arrays(device: Any) -> FreshArrays:
    """Return this process's for a device."""
    return FreshArrays(device)
