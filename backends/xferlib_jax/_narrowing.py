"""64-bit arrays as JAX has them while its 64-bit types are off.

A transfer changes no value, so it refuses such arrays. Whoever wants what `jax.device_put` does asks for it by name, and is told of
integers that it would cut off.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from xferlib.typed import TreeT
from xferlib_jax._arrays import NARROWED
from xferlib_jax._trees import with_records, without_records

__all__ = ["narrowed"]


def narrowed(tree: TreeT) -> TreeT:
    """Return a tree with its 64-bit NumPy arrays as JAX would have them, `int64` as `int32` and `float64` as `float32`.

    For the batches of a loader: `prefetch(map(narrowed, loader), ...)`. All else stays as it is, and so does everything while the
    calling thread's JAX has 64-bit types. Floats are rounded. Raises `ValueError` for integers that 32 bits do not hold.
    """
    if jax.config.jax_enable_x64:
        return tree
    recorded = with_records(tree)
    found, structure = jax.tree.flatten_with_path(recorded)
    if not any(_is_wide(leaf) for _, leaf in found):
        return tree
    whole: TreeT = structure.unflatten([_narrow(leaf, place) if _is_wide(leaf) else leaf for place, leaf in found])
    return whole if recorded is tree else without_records(whole)


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype in NARROWED


def _narrow(array: Any, place: Any) -> Any:
    dtype = NARROWED[array.dtype]
    if dtype.kind in "iu" and array.size:
        least, most, held = array.min(), array.max(), np.iinfo(dtype)
        if least < held.min or most > held.max:
            raise ValueError(
                f"tree{jax.tree_util.keystr(place)} has integers from {least} to {most}, and {dtype} holds those from {held.min} "
                f'to {held.max}. Turn on 64-bit types with jax.config.update("jax_enable_x64", True), or take smaller integers'
            )
    return array.astype(dtype)
