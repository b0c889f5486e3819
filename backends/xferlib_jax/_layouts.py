"""Device arrays that do not lie in C order, laid out anew by JAX, on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

__all__ = ["laid_out"]

KEPT = 256


def laid_out(array: Any) -> Any:
    """Return a copy in C order. The host does not wait for it, except for the compilation for the first of a shape and dtype."""
    # Computed at once, even inside a function that is being traced: the array is none of its values.
    with jax.ensure_compile_time_eval():
        return _copier(array.sharding, array.ndim)(array)


@functools.lru_cache(KEPT)
def _copier(sharding: Any, axes: int) -> Callable[[Any], Any]:
    plain = Format(Layout(major_to_minor=tuple(range(axes))), sharding)
    copier: Callable[[Any], Any] = jax.jit(_same, out_shardings=plain)
    return copier


def _same(array: Any) -> Any:
    return array
