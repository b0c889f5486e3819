"""Where drained results land: one after the other along the first axis of arrays that the caller gave."""

from __future__ import annotations

from typing import Any, final

from xferlib.memory.arrays import Array
from xferlib.tree import Spec, Trees, check_structure, path, unflatten
from xferlib.words import counted

__all__ = ["OutputWriter"]


@final
class OutputWriter:
    """A tree of arrays that results fill from the front. In memory, mapped from a file, or shared: any NumPy arrays.

    A result with as many axes as its array takes as many rows as it has; one with an axis less takes one row. Where something rides
    along in results, `out` has something that is no array at the same place, which stays as it is.
    """

    def __init__(self, out: Any, trees: Trees) -> None:
        self.filled = 0
        self._trees = trees
        leaves, self._spec = trees.arrays(out)
        if not leaves:
            raise ValueError(f"out: there is no array in {out!r}")
        for index, leaf in enumerate(leaves):
            if not getattr(leaf, "shape", ()):
                raise ValueError(f"out: {path(self._spec, index)} has no rows: expected an array with a first axis, got {leaf!r}")
        self._arrays: list[Array] = leaves
        self.rows = min(len(leaf) for leaf in leaves)

    def next(self, result: Any) -> tuple[Any, int]:
        """Return the views that this result is to be copied to, and how many rows they are. Raises `ValueError`."""
        shapes, spec = self._like(result)
        counts = {self._count(array, shape, index) for index, (array, shape) in enumerate(zip(self._arrays, shapes, strict=True))}
        if len(counts) > 1:
            raise ValueError(f"the arrays of one result have different numbers of rows: {sorted(counts)}")
        (count,) = counts
        end = self.filled + count
        if end > self.rows:
            raise ValueError(
                f"out is full: it has {counted(self.rows, 'row')}, and {end} in all were to be written. Give arrays "
                "with as many as come"
            )
        views = [
            array[self.filled : end] if array.ndim == len(shape) else array[self.filled, ...]
            for array, shape in zip(self._arrays, shapes, strict=True)
        ]
        # With what rides along in the result.
        return unflatten(spec, views), count

    def _count(self, array: Array, shape: tuple[int, ...], index: int) -> int:
        axes = len(shape)
        if axes not in (array.ndim, array.ndim - 1):
            raise ValueError(
                f"out: {path(self._spec, index)} has shape {array.shape}, the result {shape}: expected as many axes, "
                "or one less for a single row"
            )
        return shape[0] if axes == array.ndim else 1

    def _like(self, result: Any) -> tuple[list[tuple[int, ...]], Spec]:
        leaves, spec = self._trees.arrays(result)
        check_structure(self._spec, spec, name="a result (compared with out)")
        shapes = []
        for leaf in leaves:
            described = self._trees.describe(leaf)
            if described is None:
                raise TypeError(f"expected a device array, got {type(leaf).__module__}.{type(leaf).__qualname__}")
            shapes.append(described[0])
        return shapes, spec
