"""Which host memory the copy engines can use as it is, and which dtypes may be transferred at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np

from xferlib.memory.arrays import ADDRESS, BYTE, Array, address_of, check_dtype, host_array
from xferlib.memory.foreign import file_of
from xferlib.memory.pinned_pool import PinnedPool, pool_pending
from xferlib.memory.registered import splits
from xferlib.protocol import HostStager

__all__ = ["ASSUMED_OF_FEW_NBYTES", "FEW_LEAVES", "HostLeaf", "HostMemory", "mappable"]

HostLeaf: TypeAlias = tuple[Array, int | None]
"""A host array, and its address: None if its memory must be staged, 0 if it has no bytes."""


TREES = "put takes an array, or a tree of them: dict, list, tuple, named tuple or dataclass"
ASSUMED_UP_TO_NBYTES = 64 << 10
"""Of many leaves, those up to this size are taken to be like the first of them: to ask the driver about each would take longer than
to copy it. If one is page-locked all the same, it is staged, which is correct, though a detour."""
FEW_LEAVES, ASSUMED_OF_FEW_NBYTES = 16, 16 << 10
"""Of fewer than so many, those up to this size: the CPU copies one in about the time in which the driver answers."""


@final
class HostMemory:
    """Says of host arrays whether one backend's copy engines use them as they are, and at which address. Any thread."""

    def __init__(self, backend: HostStager[Any], pool: PinnedPool) -> None:
        self.dtypes: set[np.dtype[Any]] = set()
        """Those that `check_dtype` has let pass."""
        self._is_pinned = backend.is_pinned
        self._check_dtype = backend.check_dtype
        self._pool = pool
        self._in_pool = pool.contains

    def leaf(self, leaf: Any) -> HostLeaf:
        """Check a leaf of a put. Raises `TypeError`."""
        array = leaf if type(leaf) is np.ndarray else host_array(leaf, advice=TREES)
        if array.dtype not in self.dtypes:
            self.check_dtype(array.dtype)
        return array, self.address(array)

    def leaves(self, leaves: Sequence[Any]) -> list[HostLeaf] | None:
        """Check leaves in less time. None: look at each by `leaf`. Small ones outside the pool: see `ASSUMED_UP_TO_NBYTES`."""
        assumed = ASSUMED_UP_TO_NBYTES if len(leaves) >= FEW_LEAVES else ASSUMED_OF_FEW_NBYTES
        found: list[HostLeaf] = []
        dtypes, in_pool, asked = self.dtypes, self._in_pool, False
        some_in_pool = self._pool.has_arrays
        known = outside = None
        for leaf in leaves:
            if type(leaf) is not np.ndarray:
                return None
            if leaf.dtype is not known:
                # Hashing a dtype takes longer than the rest of a turn.
                known = leaf.dtype
                if known not in dtypes:
                    return None
            nbytes = leaf.nbytes
            if nbytes > assumed:
                found.append((leaf, self.address(leaf)))
                continue
            base = leaf.base
            # Memory that NumPy itself has allocated is not the pool's.
            if asked and nbytes and (not some_in_pool or base is None or base is outside):
                found.append((leaf, None))
                continue
            try:
                address = ADDRESS(BYTE(leaf))
            except (TypeError, ValueError, BufferError):
                found.append((leaf, self.address(leaf)))
                continue
            if in_pool(address, nbytes):
                found.append((leaf, address))
                continue
            if not asked:
                asked = True
                if self._is_pinned(address, nbytes):
                    return None
            if type(base) is np.ndarray and base.base is None:
                outside = base
            found.append((leaf, None))
        return found

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise `TypeError` for a dtype that cannot be transferred, or that the backend cannot hold."""
        if dtype in self.dtypes:
            return
        check_dtype(dtype)
        if not self._check_dtype(dtype):
            self.dtypes.add(dtype)

    def address(self, array: Array) -> int | None:
        """Return the array's address if a copy engine can use it directly; see `HostLeaf`."""
        nbytes = array.nbytes
        try:
            # Does what `address_of` does, without the call. Memory that is read-only, empty or not contiguous is refused.
            address = ADDRESS(BYTE(array))
        except (TypeError, ValueError, BufferError):
            if nbytes == 0:
                return 0
            if not array.flags.c_contiguous:
                return None
            address = address_of(array)
        if self._in_pool(address, nbytes):
            return address
        # What a load has mapped for itself nobody else has locked, and a model has thousands of arrays.
        if array.base is not None and file_of(array) is not None:
            return None
        # Drivers are asked about both ends. Between two pins there may be memory that no copy engine can use.
        return address if self._is_pinned(address, nbytes) and not splits(address, nbytes) else None

    def addresses(self, arrays: Sequence[Array]) -> list[int | None]:
        """Return what `address` returns for each, in less time, as `leaves` does."""
        found = self.leaves(arrays)
        return list(map(self.address, arrays)) if found is None else [address for _, address in found]

    def locked_address(self, array: Array) -> int | None:
        """Return the same, but first block until memory that is about to be page-locked is locked."""
        pool = pool_pending(address_of(array), array.nbytes)
        if pool is not None:
            pool.idle()
        return self.address(array)


def mappable(array: object, host: HostMemory) -> tuple[Array, int]:
    """Return the array and its address. Raises `TypeError` or `ValueError` where the device can have no view of it."""
    plain = host_array(array)
    host.check_dtype(plain.dtype)
    if plain.nbytes == 0:
        raise ValueError("an empty array has no memory to view. Put it")
    if not plain.flags.c_contiguous:
        raise ValueError("the array is not contiguous in C order. Map the array that it is a view of, and cut the view")
    if not plain.flags.writeable:
        raise ValueError("the array is read-only, and the device could write to it. Map an array that may be written")
    address = host.locked_address(plain)
    if address is None:
        raise ValueError(
            "the array is not in pinned memory, and the device reaches no other. Fill one from stager.empty_pinned(...), or put it"
        )
    return plain, address
