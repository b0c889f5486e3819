"""CuPy: arrays move between NumPy and CuPy while the GPU computes.

`open_stager` is what the entry point names. This file imports without CuPy; what needs it is imported when a stager is opened.
"""

from __future__ import annotations

from typing import Any

from xferlib.protocol import HostStager

__all__ = ["open_stager"]


def open_stager(*, device: int = 0) -> HostStager[Any]:
    """Open the backend on a CUDA device, counted as CuPy counts. Raises `BackendUnavailableError` with what to do about it."""
    from xferlib_cupy._probe import open_device

    opened = open_device(device)

    from xferlib_cupy._stager import CupyStager

    return CupyStager(opened)
