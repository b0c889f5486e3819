"""Many small arrays out of one block: imported whole, once for each dtype, and taken apart by one compiled function.

JAX takes tens of microseconds to import an array, and about two to hand out one of many results. So from some number on it is
cheaper to copy small arrays on the device than to import each.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias, final

import jax
import numpy as np

from xferlib.protocol import Place
from xferlib_jax._arrays import JaxArray

__all__ = ["unpack"]

WORTH_COMPILING = 16
"""Arrays. Below, importing each takes less, and nothing need be compiled."""
ALIGNMENT = 256
KEPT = 64

Adopt: TypeAlias = Callable[[int, tuple[int, ...], np.dtype[Any]], JaxArray]


@final
class _Recipe:
    """How one block is taken apart."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        self.places = places
        self.dtypes = list(dict.fromkeys(place.dtype for place in places))
        self.nbytes = max(place.offset + _extent(place) for place in places)
        self.apart = jax.jit(self._apart)

    def _apart(self, *wholes: JaxArray) -> list[JaxArray]:
        order = {dtype: number for number, dtype in enumerate(self.dtypes)}
        parts = []
        for offset, shape, dtype in self.places:
            start = offset // dtype.itemsize
            parts.append(jax.lax.slice(wholes[order[dtype]], (start,), (start + math.prod(shape),)).reshape(shape))
        return parts


_recipes: OrderedDict[int, _Recipe] = OrderedDict()
"""By the identity of their places, which they keep alive: hashing hundreds of them takes a quarter of the time of a put."""
_making = threading.Lock()


def unpack(places: tuple[Place, ...], adopt: Adopt) -> list[JaxArray]:
    """Return the arrays of a block. `adopt(offset, shape, dtype)` imports memory of the block as one array."""
    if len(places) < WORTH_COMPILING:
        return [adopt(*place) for place in places]
    recipe = _recipes.get(id(places)) or _made(places)
    arrays: list[JaxArray] = recipe.apart(*(adopt(0, (recipe.nbytes // dtype.itemsize,), dtype) for dtype in recipe.dtypes))
    # Inside a trace the compiled function becomes part of what is traced; what was put is no traced value.
    return [adopt(*place) for place in places] if isinstance(arrays[0], jax.core.Tracer) else arrays


def _made(places: tuple[Place, ...]) -> _Recipe:
    with _making:
        recipe = _recipes[id(places)] = _Recipe(places)
        while len(_recipes) > KEPT:
            _recipes.popitem(last=False)
    return recipe


def _extent(place: Place) -> int:
    nbytes = math.prod(place.shape) * place.dtype.itemsize
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
