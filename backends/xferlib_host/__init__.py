"""The host backend: the reference that others are measured by, and the fake that programs are tested with, both verified.

NumPy arrays play the device arrays, and one worker thread per direction plays the copy engine, so that "in flight", "held" and
"overlap" are real on a machine without a GPU. Nothing is page-locked here (`Capabilities.pinned` is off).
"""

from __future__ import annotations

from xferlib.errors import BackendUnavailableError
from xferlib_host._stager import NumpyStager
from xferlib_host._stream import Stream

__all__ = ["Stream", "open_stager"]


def open_stager(*, device: int = 0) -> NumpyStager:
    """Start the two copy engines. Host memory is device 0, the only one; several stagers may be open at once."""
    if device != 0:
        raise BackendUnavailableError(
            f"backend 'host' cannot run here: there is no device {device!r}, host memory is device 0. Use device=0"
        )
    return NumpyStager()
