"""What `stream=` may be, and what may be done with it: users' streams, checked before CUDA is asked to use them.

Numba has no current stream: work that names none goes to the default stream, and so `None` is that one here. A stream that is being
captured is refused: an event recorded there becomes a node of the user's graph, and a copy stream that waits for it is drawn into
the capture.
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias, final

from xferlib.errors import CapabilityError
from xferlib.protocol import Stream
from xferlib_numba._device import LEGACY, PER_THREAD, Device

__all__ = ["Handle", "Streams"]

CAPTURE_IMPLICIT = 906
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
            number = _number(stream)
            handle = self._handle(number) if number else self.default
        if self.is_capturing(handle):
            raise CapabilityError(
                f"stream {int(handle):#x} is being captured into a graph, and a transfer cannot be part of one. "
                "Start transfers before the capture or after it, or pass stream= another stream"
            )
        device = self._device
        if device.several and int(handle) > PER_THREAD and not device.owns(handle):
            raise ValueError(
                f"stream {int(handle):#x} is of another device than cuda:{device.ordinal}. Pass a stream of that device, and let "
                "yours wait for it"
            )
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


def _number(stream: object) -> int:
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream > 0:
            return stream
        raise ValueError(f"stream={stream} is no handle. For the default stream pass cuda.default_stream(), or leave stream out")
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        kind = f"{type(stream).__module__}.{type(stream).__qualname__}"
        raise TypeError(
            f"stream={stream!r} ({kind}) is no CUDA stream. Pass a stream of Numba's, an object with __cuda_stream__, or a handle"
        )
    # It was a property in the first libraries that had it.
    found = protocol() if callable(protocol) else protocol
    try:
        version, number = found
        # Some give an object of the driver bindings.
        handle = int(number)
    except (TypeError, ValueError):
        raise TypeError(f"__cuda_stream__ gave {found!r}, expected (0, handle)") from None
    if version != 0 or isinstance(number, str | float) or handle < 0:
        raise TypeError(f"__cuda_stream__ gave {found!r}, expected (0, handle)")
    return handle
