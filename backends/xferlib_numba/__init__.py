"""Numba: arrays move between NumPy and Numba's CUDA arrays while the GPU computes.

`open_stager` is what the entry point names. This file imports without Numba; what needs it is imported when a stager is opened.
"""

from __future__ import annotations

from typing import Any

from xferlib.protocol import HostStager

__all__ = ["open_stager"]


def open_stager(*, device: int = 0) -> HostStager[Any]:
    """Open the backend on a CUDA device, counted as Numba counts. Raises `BackendUnavailableError` with what to do about it."""
    from xferlib_numba._probe import open_device

    opened = open_device(device)

    from xferlib_numba._stager import NumbaStager

    return NumbaStager(opened)
