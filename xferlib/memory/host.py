"""Which host memory the copy engines can use as it is, and which dtypes may be transferred at all."""

from __future__ import annotations

from typing import Any, TypeAlias, final

import numpy as np

from xferlib.memory.arrays import ADDRESS, BYTE, Array, address_of, check_dtype, host_array
from xferlib.memory.pool import PinnedPool
from xferlib.protocol import HostStager

__all__ = ["HostLeaf", "HostMemory"]

HostLeaf: TypeAlias = tuple[Array, int | None]
"""A host array, and its address: None if its memory must be staged, 0 if it has no bytes."""


@final
class HostMemory:
    """Host memory as one backend sees it. Any thread."""

    def __init__(self, backend: HostStager[Any], pool: PinnedPool) -> None:
        self.dtypes: set[np.dtype[Any]] = set()
        """Those that `check_dtype` has let pass."""
        self._is_pinned = backend.is_pinned
        self._check_dtype = backend.check_dtype
        self._in_pool = pool.contains

    def leaf(self, leaf: Any) -> HostLeaf:
        """Check a leaf of a put. Raises `TypeError`."""
        array = leaf if type(leaf) is np.ndarray else host_array(leaf)
        if array.dtype not in self.dtypes:
            self.check_dtype(array.dtype)
        return array, self.address(array)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise `TypeError` for a dtype that cannot be transferred, or that the backend cannot hold."""
        if dtype in self.dtypes:
            return
        check_dtype(dtype)
        self._check_dtype(dtype)
        self.dtypes.add(dtype)

    def address(self, array: Array) -> int | None:
        """Return the array's address if a copy engine can use it directly; see `HostLeaf`."""
        nbytes = array.nbytes
        try:
            # As `address_of`, without the call. Refuses what is not contiguous, read-only or empty.
            address = ADDRESS(BYTE(array))
        except (TypeError, ValueError, BufferError):
            if nbytes == 0:
                return 0
            if not array.flags.c_contiguous:
                return None
            address = address_of(array)
        if self._in_pool(address, nbytes) or self._is_pinned(address, nbytes):
            return address
        return None
