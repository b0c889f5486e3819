"""Copies of arrays on the device, for snapshots.

To have JAX copy arrays one by one takes the host 25 to 50 us each, and a state has thousands. A compiled function copies them all
in one call, at a tenth of that; but to compile it takes some 0.3 ms for each. So it is compiled on a thread, beside the program,
when arrays of these shapes are first seen, and until it is there they are copied one by one.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp

from xferlib_jax._arrays import JaxArray, nbytes_of
from xferlib_jax._probe import memory_grows

__all__ = ["THREAD", "copies"]

Key: TypeAlias = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]
"""The device, and shape and dtype of each array."""

FEWEST = 64
"""Arrays for which a compilation pays."""
INLINE_NBYTES = 64 << 10
"""Bytes of each array, on average. On the CPU a compiled function runs in the call, and JAX copies larger ones beside it."""
MOST = 32
"""Functions that are compiled. They are kept: to give a compiled one back waits for all work on the device."""
THREAD: Final = "xferlib-jax-copies"
"""The name of the threads that compile."""


def copies(arrays: Sequence[JaxArray], device: Any) -> list[JaxArray]:
    """Have JAX copy arrays on the device: it orders the copies behind what produces the arrays, and donations behind the copies.

    Raises `MemoryError` where there is no room.
    """
    _check_room(arrays, device)
    key: Key | None = None
    # Inside a function that is being traced it would become a step of that.
    with jax.ensure_compile_time_eval():
        if _pays(arrays, device):
            key = (device, tuple([(array.shape, array.dtype) for array in arrays]))
            compiled = _of_process.get(key)
            if compiled is not None:
                # It takes arrays in the layout that JAX gives by itself, and no others.
                with suppress(TypeError, ValueError):
                    return list(compiled(list(arrays)))
        # Not `array.copy()`, which compiles for each new shape, while the caller waits.
        copied = list(jax.device_put(list(arrays), device, may_alias=False))
    if key is not None and key not in _of_process and len(_of_process) < MOST and not _over:
        _start_compiling(key)
    return copied


def _pays(arrays: Sequence[JaxArray], device: Any) -> bool:
    """Tell whether a compiled function is to copy them."""
    if len(arrays) < FEWEST or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        # What a state holds is not for a copy to judge.
        return False
    return device.platform != "cpu" or sum(map(nbytes_of, arrays)) <= len(arrays) * INLINE_NBYTES


def _check_room(arrays: Sequence[JaxArray], device: Any) -> None:
    # JAX's allocator would ask for memory that others hold again and again, for ten seconds. Where its memory grows, nobody can say
    # whether there is room; and whoever asked would wait with the interpreter for a lock that is held inside the driver then.
    figures = (None if memory_grows() else device.memory_stats()) or {}
    wanted = sum(map(nbytes_of, arrays))
    # Not every allocator of JAX's has a limit.
    if figures.get("bytes_limit") and figures["bytes_in_use"] + wanted > figures["bytes_limit"]:
        raise MemoryError(f"copies of {wanted} bytes do not fit beside the {figures['bytes_in_use']} of JAX's that are in use")


def _start_compiling(key: Key) -> None:
    _of_process[key] = None
    # No daemon: a thread that is inside JAX does not survive the end of the interpreter. A program that ends is given no more.
    thread = threading.Thread(target=_compile, args=(key,), name=THREAD, daemon=False)
    with suppress(RuntimeError):
        thread.start()
        _threads.append(thread)


def _compile(key: Key) -> None:
    device, described = key
    place = jax.sharding.SingleDeviceSharding(device)
    # Without it, all goes on as before.
    with suppress(Exception):
        shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in described]
        _of_process[key] = jax.jit(_copied).lower(shapes).compile()


def _copied(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) for array in arrays]


_of_process: dict[Key, Any] = {}
"""The functions of this process, by what they copy; None: not compiled yet, or it failed."""
_threads: list[threading.Thread] = []
"""At most `MOST`."""
_over: list[None] = []
"""Not empty: the interpreter ends, and waits for no more threads."""


def _wait_for_all() -> None:
    """Those that are started in handlers of `atexit` the interpreter does not wait for."""
    _over.append(None)
    for thread in _threads:
        thread.join()


atexit.register(_wait_for_all)
