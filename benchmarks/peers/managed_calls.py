"""Unified memory by CuPy, in a single row: by page faults the device fetches the pages that it reads and the host has written.

Only one row, far below the device's free memory: beyond that, pages are evicted to the host again and the figure means nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import cupy
import numpy as np

from benchmarks import memory
from benchmarks.ways import Bytes, Call, Device, Way

__all__ = ["managed_read"]


def managed_read(device: Device) -> Way:
    """Return a kernel that reads unified memory which the host wrote last."""

    def bind(source: Bytes, target: Any) -> Call:
        block = cupy.cuda.malloc_managed(source.nbytes)
        array = cupy.ndarray(source.shape, np.uint8, block)
        there = np.frombuffer(memoryview((ctypes.c_uint8 * source.nbytes).from_address(block.ptr)).cast("B"), np.uint8)
        # The kernel inverts, so that it is no copy that an engine could make.
        memory.invert(source, there)
        return lambda: device.invert(array, target)

    return Way(name="unified", direction="h2d", bind=bind, synchronize=lambda _: device.synchronize(), keep=None, once=True)
