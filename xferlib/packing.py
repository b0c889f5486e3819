"""Where the arrays of a put lie on the device: small ones share a block, each large one has its own.

Planned once for each list of shapes and dtypes, and kept: a training loop puts the same tree every step.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np

from xferlib.memory.host import HostLeaf
from xferlib.memory.pinned_pool import ALIGNMENT
from xferlib.protocol import Place
from xferlib.tree import Alike

__all__ = ["Packing", "Packings"]

PACK_UP_TO = 64 << 10
"""Bytes. Leaves of one put up to this size share a device block; larger ones have their own, so keeping one keeps no other."""
KEPT = 64
"""Packings. A program has a few; one that makes new shapes for ever must not fill memory with them."""

Signature: TypeAlias = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, np.dtype[Any]], ...]]
"""Every shape, and for each run of equal dtypes the first leaf's index and the dtype: hashing a dtype takes longer than all else
here."""


@final
class Packing:
    """For each block: its size, the indices of the leaves in it, and their places."""

    def __init__(self, leaves: Sequence[Alike]) -> None:
        self.count = len(leaves)
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
            if nbytes > PACK_UP_TO:
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
    """The packings used last. Any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Signature, Packing] = OrderedDict()
        self._lock = threading.RLock()

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
            with self._lock:
                self._kept[signature] = packing
                self._forget_oldest()
        return packing

    def _forget_oldest(self) -> None:
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
