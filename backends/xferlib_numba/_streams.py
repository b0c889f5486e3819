"""What `stream=` may be, and what may be done with it: users' streams, checked before CUDA is asked to use them.

Numba has no current stream: work that names none goes to the default stream, and so `None` is that one here.
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias, final

from xferlib.cuda.streams import CAPTURE_IMPLICIT, LEGACY, PER_THREAD, captured, handle_of, of_another_device
from xferlib.protocol import Stream
from xferlib_numba._device import Device

__all__ = ["Handle", "Streams"]

OWN, DEFAULT = "a stream of Numba's", "cuda.default_stream()"
"""What errors advise to pass."""
PER_THREAD_SWITCH = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
"""Decides for the driver bindings, and so for Numba, what the handle 0 means. Read by them once."""

Handle: TypeAlias = Any
"""The bindings' `CUstream`: a call with it takes half the time of a call with an int. `int(handle)` tells streams apart."""


@final
class Streams:
    """Finds users' streams for one device. Any thread."""

    __slots__ = ("_current", "_device", "_handle", "_stream", "default", "numba_default")

    def __init__(self, device: Device) -> None:
        driver = device.numba.driver
        self._device = device
        self._handle = driver.binding.CUstream
        self._stream = driver.Stream
        self.default: Handle = self._handle(PER_THREAD if os.environ.get(PER_THREAD_SWITCH, "0") not in ("", "0") else LEGACY)
        self.numba_default = self._stream(self.default)
        self._current = Stream(int(self.default), self.numba_default)

    def find(self, stream: object | None) -> Stream:
        """Return handle and keepalive. Raises as `handle` does."""
        handle = self.handle(stream)
        if stream is None:
            return self._current
        # Numba does not own an external stream, and nobody owns a bare handle.
        borrowed = isinstance(stream, int) or getattr(stream, "external", False)
        return Stream(int(handle), None if borrowed else stream)

    def handle(self, stream: object | None) -> Handle:
        """Return the handle of a stream on which events may be recorded.

        Raises `TypeError` for what is no stream, `ValueError` for one of another device, and `CapabilityError` for one that is
        being captured.
        """
        if stream is None:
            handle = self.default
        elif isinstance(stream, self._stream):
            # Numba's default stream has the number 0.
            handle = stream.handle if int(stream.handle) else self.default
        else:
            number = handle_of(stream, OWN, DEFAULT)
            handle = self._handle(number) if number else self.default
        if self.is_capturing(handle):
            raise captured(int(handle))
        device = self._device
        if device.several and int(handle) > PER_THREAD and not device.owns(handle):
            raise of_another_device(int(handle), device.ordinal)
        return handle

    def is_capturing(self, handle: Handle | int) -> bool:
        """Tell whether nothing may be recorded on the stream now because of a capture, even one that was invalidated."""
        try:
            return bool(self._device.is_capturing(handle))
        except self._device.error as error:
            # The legacy default stream cannot be used while a stream that synchronises with it is being captured.
            if error.code == CAPTURE_IMPLICIT:
                return True
            raise
