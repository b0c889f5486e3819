"""Where the arrays of a put lie on the device: small ones share a block, each large one has its own.

Planned once for each list of shapes and dtypes, and kept: a training loop puts the same tree every step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from xferlib.memory.arrays import Array
from xferlib.memory.blocks import ALIGNMENT
from xferlib.memory.host import HostLeaf
from xferlib.protocol import Place
from xferlib.tree import ShapeDtype

__all__ = ["PackedBlock", "Packing", "Packings"]

PACK_UP_TO_NBYTES = 64 << 10
"""Leaves of one put up to this size share a device block; larger ones have their own, so keeping one keeps no other."""
KEPT_PACKINGS = 64
"""Packings. A program has a few; one that makes new shapes for ever must not fill memory with them."""

Signature: TypeAlias = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, np.dtype[Any]], ...]]
"""Every shape, and for each run of equal dtypes the first leaf's index and the dtype: hashing a dtype takes longer than all else
here."""


class PackedBlock(NamedTuple):
    """Small leaves one after the other in one block, from its start, each at the next multiple of 256: one copy takes them all."""

    nbytes: int
    """Of the leaves."""
    extent: int
    """Bytes from the first to the last, with what lies between the leaves."""
    largest: int
    """Bytes of the largest leaf."""
    dtype: np.dtype[Any] | None
    """None: they have several."""
    pads: Sequence[Array] | None
    """For each leaf, zeros of that dtype (bytes, where they have several) for what lies behind it; None: nothing lies there."""
    pieces: np.ndarray[Any, np.dtype[np.uint64]]
    """For each leaf: 0, its offset, its bytes, 0. See `Lane.submit`."""


@final
class Packing:
    """For each block: its size, the indices of the leaves in it, and their places."""

    def __init__(self, leaves: Sequence[ShapeDtype]) -> None:
        self.count = len(leaves)
        self.dtypes = {dtype for _, dtype in leaves}
        self.sizes: list[int] = []
        self.indices: list[list[int]] = []
        self.places: list[tuple[Place, ...]] = []
        self.numbers: list[int] = []
        """For each leaf, the number of its block."""
        self._offsets: list[int] = []
        shared: list[Place] = []
        shared_at = -1
        for index, (shape, dtype) in enumerate(leaves):
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes > PACK_UP_TO_NBYTES:
                self._add(nbytes, [index])
                self.places[-1] = (Place(0, shape, dtype),)
                self.numbers.append(len(self.sizes) - 1)
                self._offsets.append(0)
                continue
            if shared_at < 0:
                shared_at = self._add(0, [])
            self.indices[shared_at].append(index)
            self.numbers.append(shared_at)
            self._offsets.append(self.sizes[shared_at])
            shared.append(Place(self.sizes[shared_at], shape, dtype))
            self.sizes[shared_at] += max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        if shared_at >= 0:
            self.places[shared_at] = tuple(shared)
        # Now: what is made when it is first asked for is made under a lock in Python 3.11, which a fork would leave held.
        self.packed = self._packed(leaves)
        """All leaves, if they share one block and none of them is empty."""

    def _packed(self, leaves: Sequence[ShapeDtype]) -> PackedBlock | None:
        if len(self.sizes) != 1:
            return None
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in leaves]
        if not all(sizes) or max(sizes) > PACK_UP_TO_NBYTES:
            return None
        # Items of other packages' dtypes are copied one by one where they are not taken as bytes.
        (only,) = self.dtypes if len(self.dtypes) == 1 else (None,)
        dtype = only if only is not None and only.isbuiltin == 1 and ALIGNMENT % only.itemsize == 0 else None
        item = np.dtype(np.uint8) if dtype is None else dtype
        gaps = [-nbytes % ALIGNMENT for nbytes in sizes[:-1]] + [0]
        kinds = {gap: np.zeros(gap // item.itemsize, item) for gap in set(gaps)}
        pieces = np.zeros((self.count, 4), np.uint64)
        pieces[:, 1], pieces[:, 2] = self._offsets, sizes
        extent = self._offsets[-1] + sizes[-1]
        return PackedBlock(sum(sizes), extent, max(sizes), dtype, [kinds[gap] for gap in gaps] if any(gaps) else None, pieces)

    def addresses(self, blocks: Sequence[int]) -> list[int]:
        """Return each leaf's address, given the blocks'."""
        return [blocks[number] + offset for number, offset in zip(self.numbers, self._offsets, strict=True)]

    def _add(self, nbytes: int, indices: list[int]) -> int:
        self.sizes.append(nbytes)
        self.indices.append(indices)
        self.places.append(())
        return len(self.sizes) - 1


@final
class Packings:
    """The packings of the puts before, by shapes and dtypes: a loop puts the same tree again and again. Any thread."""

    def __init__(self) -> None:
        # Changed in single steps: threads that meet in here make a packing twice, or keep one less.
        self._kept: OrderedDict[Signature, Packing] = OrderedDict()
        self._last: tuple[list[tuple[int, ...]], list[np.dtype[Any]], Packing] = ([], [], Packing([]))

    def of_arrays(self, arrays: Sequence[Array]) -> Packing:
        """Return the packing for these arrays. A tree like the last one is found without a look into the table."""
        shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
        last = self._last
        if shapes == last[0] and dtypes == last[1]:
            return last[2]
        packing = self.of([(array, None) for array in arrays])
        self._last = shapes, dtypes, packing
        return packing

    def of(self, sources: Sequence[HostLeaf]) -> Packing:
        """Return the packing for these leaves."""
        runs: list[tuple[int, np.dtype[Any]]] = []
        last = None
        for index, (array, _) in enumerate(sources):
            if array.dtype is not last:
                last = array.dtype
                runs.append((index, last))
        signature = tuple([array.shape for array, _ in sources]), tuple(runs)
        packing = self._kept.get(signature)
        if packing is None:
            packing = Packing([(array.shape, array.dtype) for array, _ in sources])
            self._kept[signature] = packing
            while len(self._kept) > KEPT_PACKINGS:
                self._kept.popitem(last=False)
        return packing
