"""JAX: arrays move between NumPy and JAX while the device computes, on NVIDIA GPUs and on the CPU.

`open_stager` is what the entry point names. This file imports without JAX; what needs it is imported when a stager is opened.
"""

from __future__ import annotations

from typing import Any

from xferlib.protocol import HostStager

__all__ = ["open_stager"]


def open_stager(*, device: int = 0) -> HostStager[Any]:
    """Open the backend on one of JAX's local devices, as JAX counts them. Raises `BackendUnavailableError` with what to do."""
    from xferlib_jax._probe import open_backend

    return open_backend(device)
