"""Many small arrays out of one block: the block is imported whole, once for each dtype, and one compiled function takes it apart.

JAX takes tens of microseconds to import an array, and about two to hand out one of many results. So from a certain number on it is
cheaper to copy small arrays on the device than to import each.

If the compiler knows the places of the slices, each slice becomes a kernel, and five hundred launches take longer than the
transfer. If it knows only how far they are from an argument, it makes one kernel of all slices of the same size, up to eighty. So
places are counted from a zero that is an argument.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, final

import jax
import numpy as np

from xferlib.protocol import Place
from xferlib_jax._arrays import JaxArray

__all__ = ["Wanted", "unpack", "zero"]

WORTH_COMPILING = 16
"""Arrays. For fewer, importing each takes less time, and nothing has to be compiled."""
ALIGNMENT = 256
MOST_RECIPES = 256
"""A program that puts trees of more kinds compiles more than it transfers. Later kinds are imported array by array."""
MOST_FOUND = 512
MOST = np.iinfo(np.int32).max
"""Elements of a whole whose places are counted in 32 bits: JAX has no longer integers unless they are turned on."""

Wanted: TypeAlias = tuple[int, tuple[int, ...], np.dtype[Any]]
"""An offset in a block, a shape and a dtype: what a `Place` is."""
Adopt: TypeAlias = Callable[[Sequence[Wanted]], list[JaxArray]]


@final
class _Recipe:
    """How one block is taken apart."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        self.places = places
        self.dtypes = list(dict.fromkeys(place.dtype for place in places))
        self.nbytes = max(place.offset + _extent(place) for place in places)
        self.apart = jax.jit(self._apart)

    def _apart(self, origin: JaxArray, *wholes: JaxArray) -> list[JaxArray]:
        order = {dtype: number for number, dtype in enumerate(self.dtypes)}
        parts = []
        for offset, shape, dtype in self.places:
            whole, place, size = wholes[order[dtype]], offset // dtype.itemsize, math.prod(shape)
            if whole.size <= MOST:
                part = jax.lax.dynamic_slice(whole, (origin + place,), (size,))
            else:
                part = jax.lax.slice(whole, (place,), (place + size,))
            parts.append(part.reshape(shape))
        return parts


_recipes: dict[tuple[Place, ...], _Recipe] = {}
"""Never given up: JAX unloads a program that nobody refers to. It does so inside the garbage collector, waits for all that runs on
the device, and keeps the interpreter's lock while it waits."""
_found: OrderedDict[int, tuple[tuple[Place, ...], _Recipe | None]] = OrderedDict()
"""By the identity of the places, which are kept alive: hashing hundreds of them takes a quarter of the time of a put."""


def zero(device: Any) -> JaxArray:
    """Return the origin for `unpack` on a device."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.int32(0), device)


def unpack(places: tuple[Place, ...], adopt: Adopt, origin: JaxArray) -> list[JaxArray]:
    """Return the arrays of a block. `adopt(wanted)` imports memory of the block as arrays; `origin` is a `zero`."""
    if len(places) < WORTH_COMPILING:
        return adopt(places)
    _, recipe = _found.get(id(places)) or _look(places)
    if recipe is None:
        return adopt(places)
    wholes = adopt([(0, (recipe.nbytes // dtype.itemsize,), dtype) for dtype in recipe.dtypes])
    arrays: list[JaxArray] = recipe.apart(origin, *wholes)
    # Inside a trace the compiled function becomes part of what is traced, but what was put is no traced value.
    return adopt(places) if isinstance(arrays[0], jax.core.Tracer) else arrays


def _look(places: tuple[Place, ...]) -> tuple[tuple[Place, ...], _Recipe | None]:
    """Find or make the recipe for places; None where there are already so many that another one would not pay."""
    # No lock, since a finalizer that puts could meet it. If two threads make the recipe at once, the second one's is not kept.
    recipe = _recipes.get(places)
    if recipe is None and len(_recipes) < MOST_RECIPES:
        recipe = _recipes.setdefault(places, _Recipe(places))
    found = _found.setdefault(id(places), (places, recipe))
    while len(_found) > MOST_FOUND:
        with suppress(KeyError):
            _found.popitem(last=False)
    return found


def _extent(place: Place) -> int:
    nbytes = math.prod(place.shape) * place.dtype.itemsize
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
