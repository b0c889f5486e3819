"""What `stream=` may be, and what may be done with it: handles of users' streams, checked before CUDA is asked to use them."""

from __future__ import annotations

from typing import Any, final

import cupy
from cupy.cuda import runtime

from xferlib.cuda.streams import CAPTURE_IMPLICIT, PER_THREAD, captured, handle_of, of_another_device
from xferlib.protocol import Stream
from xferlib_cupy._device import Device

__all__ = ["Streams"]

OWN, DEFAULT = "a cupy.cuda.Stream", "cupy.cuda.Stream.null"
"""What errors advise to pass."""

_NEW = tuple.__new__
"""It takes a third of the time of a named tuple's constructor."""


@final
class Streams:
    """Finds users' streams for one device. Any thread."""

    __slots__ = ("_cupys", "_current", "_device")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._current = cupy.cuda.get_current_stream
        self._cupys = (cupy.cuda.Stream, cupy.cuda.ExternalStream)

    def find(self, stream: object | None) -> Stream:
        """Return handle and keepalive. Raises `CapabilityError` if the stream is being captured, else as `handle`."""
        if stream is None:
            stream = self._current(self._device.ordinal)
        found: Stream = _NEW(Stream, (self.handle(stream), None if isinstance(stream, int) else stream))
        return found

    def handle(self, stream: object | None) -> int:
        """Return the handle; None is the calling thread's current stream of this device.

        Raises `TypeError` for what is no stream, `ValueError` for one of another device, and `CapabilityError` for one that is
        being captured.
        """
        device = self._device
        if stream is None:
            handle: int = self._current(device.ordinal).ptr
        elif isinstance(stream, self._cupys):
            handle = stream.ptr
        else:
            handle = handle_of(stream, OWN, DEFAULT)
        try:
            capturing = device.is_capturing(handle)
        except RuntimeError as error:
            capturing = _means_capture(error)
        if capturing:
            raise captured(handle)
        if device.several and handle > PER_THREAD and not device.owns(handle):
            raise of_another_device(handle, device.ordinal)
        return handle

    def is_capturing(self, handle: int) -> bool:
        """Tell whether nothing may be recorded on the stream now because of a capture."""
        try:
            return bool(self._device.is_capturing(handle))
        except RuntimeError as error:
            return _means_capture(error)

    def current_as(self, stream: object | None) -> Any:
        """Return CuPy's own object for a stream, to be made the current one."""
        if stream is None:
            return self._current(self._device.ordinal)
        if isinstance(stream, self._cupys):
            return stream
        handle = handle_of(stream, OWN, DEFAULT)
        if hasattr(cupy.cuda.Stream, "from_external"):
            return cupy.cuda.Stream.from_external(_Foreign(handle))
        return cupy.cuda.ExternalStream(handle, self._device.ordinal)


@final
class _Foreign:
    """A handle, in the form that CuPy 14 takes."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _means_capture(error: RuntimeError) -> bool:
    """Return True if the error means a capture; raise it again if it is a failure."""
    if not isinstance(error, runtime.CUDARuntimeError):
        # This is how CuPy says that a capture was invalidated; the capture has yet to be ended.
        return True
    # The legacy default stream cannot be used while a stream that synchronises with it is being captured.
    if error.status == CAPTURE_IMPLICIT:
        return True
    raise error
