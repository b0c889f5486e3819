"""Copies of arrays on the device, for snapshots.

To have JAX copy arrays one by one takes the host 25 to 50 us each, and a state has thousands. A compiled function copies them all
in one call. Most of what the call takes is for the arrays that it makes, so smaller copies lie one behind the other in a few. But
to compile it takes some 0.7 ms for each. So it is compiled on a thread, beside the program, when arrays of these shapes are first
seen, and until it is there they are copied one by one.
"""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from xferlib.protocol import DeviceRange
from xferlib_jax._arrays import NARROWED, JaxArray
from xferlib_jax._fresh import has_room

__all__ = ["THREAD", "Part", "copies", "located"]

ShapeDtype: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]
Key: TypeAlias = tuple[Any, tuple[ShapeDtype, ...]]
"""The device, and shape and dtype of each array."""
Groups: TypeAlias = list[list[int]]
"""Numbers of arrays whose copies are to lie together. They have one dtype."""

FEWEST = 64
"""Arrays for which a compilation pays."""
INLINE_NBYTES = 64 << 10
"""Bytes of each array, on average. On the CPU a compiled function runs in the call, and JAX copies larger ones beside it."""
MOST = 32
"""Functions that are compiled. They are kept: to give a compiled one back waits for all work on the device."""
THREAD: Final = "xferlib-jax-copies"
"""The name of the threads that compile."""
TOGETHER = 64
"""Copies that lie together, at most."""
TOGETHER_NBYTES = 4 << 20
"""Bytes of an array from which on its copy has memory of its own: to copy it takes longer than to make an array."""


@final
class Part(NamedTuple):
    """A copy that lies in an array with others."""

    array: JaxArray
    offset: int
    nbytes: int


@final
class _Compiled(NamedTuple):
    """What copies arrays into those of groups, and where each then is: the number of its group, offset and bytes."""

    call: Callable[[list[JaxArray]], Sequence[JaxArray]]
    where: list[tuple[int, int, int]]


def copies(arrays: Sequence[JaxArray], device: Any) -> list[JaxArray] | list[Part]:
    """Have JAX copy arrays on the device: it orders the copies behind what produces the arrays, and donations behind the copies.

    Raises `MemoryError` where there is no room.
    """
    described = [(array.shape, array.dtype) for array in arrays]
    nbytes = sum([math.prod(shape) * dtype.itemsize for shape, dtype in described])
    _check_room(nbytes, device)
    key: Key | None = None
    # Inside a function that is being traced it would become a step of that.
    with jax.ensure_compile_time_eval():
        if _pays(len(arrays), nbytes, device):
            key = (device, tuple(described))
            compiled = _of_process.get(key)
            if compiled is not None:
                # It takes arrays in the layout that JAX gives by itself, and no others.
                with suppress(TypeError, ValueError):
                    made = compiled.call(list(arrays))
                    return [Part(made[group], offset, size) for group, offset, size in compiled.where]
        # Not `array.copy()`, which compiles for each new shape, while the caller waits.
        copied = list(jax.device_put(list(arrays), device, may_alias=False))
    if key is not None and key not in _of_process and len(_of_process) < MOST and not _over:
        _start_compiling(key)
    return copied


def located(parts: Sequence[Part], place: Callable[[JaxArray], DeviceRange]) -> list[DeviceRange]:
    """Return the memory of parts. `place` returns that of an array, and is called once for each."""
    whole = {id(part.array): part.array for part in parts}
    found = {number: place(array) for number, array in whole.items()}
    return [DeviceRange(found[id(array)].address + offset, nbytes, found[id(array)].keepalive) for array, offset, nbytes in parts]


def _pays(count: int, nbytes: int, device: Any) -> bool:
    """Tell whether a compiled function is to copy so many arrays."""
    if count < FEWEST or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        # What a state holds is not for a copy to judge.
        return False
    return device.platform != "cpu" or nbytes <= count * INLINE_NBYTES


def _check_room(wanted: int, device: Any) -> None:
    # JAX's allocator would ask for memory that others hold again and again, for ten seconds. Where its memory grows, nobody can say
    # whether there is room; and whoever asked would wait with the interpreter for a lock that is held inside the driver then.
    if not has_room(wanted, device):
        raise MemoryError(f"copies of {wanted} bytes do not fit beside what is in use of JAX's memory")


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
    # The switch is the calling thread's, which may have wide arrays where this thread would not.
    wide = jax.config.jax_enable_x64 or any(dtype in NARROWED for _, dtype in described)
    # Without it, all goes on as before.
    with suppress(Exception), jax.enable_x64(wide):
        shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in described]
        groups = _grouped(described)
        call = jax.jit(partial(_copied, groups)).lower(shapes).compile()
        _of_process[key] = _Compiled(call, _places(groups, described))


def _grouped(described: Sequence[ShapeDtype]) -> Groups:
    """Return which copies are to lie together. Those of one shape follow each other: equal groups are compiled once."""
    groups: Groups = []
    last = None
    for number in sorted(range(len(described)), key=lambda number: (described[number][1].name, described[number][0])):
        shape, dtype = described[number]
        alone = math.prod(shape) * dtype.itemsize >= TOGETHER_NBYTES
        # NumPy takes None for float64 where it compares.
        if alone or last is None or dtype != last or len(groups[-1]) == TOGETHER:
            groups.append([])
        groups[-1].append(number)
        last = None if alone else dtype
    return groups


def _places(groups: Groups, described: Sequence[ShapeDtype]) -> list[tuple[int, int, int]]:
    """Return the number of the group of each array, and where in that it lies."""
    places = [(0, 0, 0)] * len(described)
    for number, group in enumerate(groups):
        end = 0
        for index in group:
            shape, dtype = described[index]
            nbytes = math.prod(shape) * dtype.itemsize
            places[index] = number, end, nbytes
            end += nbytes
    return places


def _copied(groups: Groups, arrays: list[Any]) -> list[Any]:
    def together(group: list[int]) -> Any:
        if len(group) == 1:
            return jnp.copy(arrays[group[0]])
        return jax.lax.concatenate([jax.lax.reshape(_bits(arrays[number]), (arrays[number].size,)) for number in group], 0)

    return [together(group) for group in groups]


def _bits(array: Any) -> Any:
    """Return the bits of small numbers of floating point, as integers: XLA computes with wider ones in their place, and so changes
    those that are none."""
    number = {1: np.uint8, 2: np.uint16, 4: np.uint32}.get(array.dtype.itemsize)
    return jax.lax.bitcast_convert_type(array, number) if number and jnp.issubdtype(array.dtype, jnp.floating) else array


_of_process: dict[Key, _Compiled | None] = {}
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
