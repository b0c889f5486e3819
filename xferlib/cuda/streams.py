"""What `stream=` may be besides a framework's own streams, and how it is refused. Nothing here calls CUDA.

A stream that is being captured is refused: an event recorded there becomes a node of the user's graph, and a copy stream that waits
for it is drawn into the capture.
"""

from __future__ import annotations

from xferlib.errors import CapabilityError

__all__ = ["CAPTURE_IMPLICIT", "LEGACY", "PER_THREAD", "captured", "handle_of", "of_another_device"]

LEGACY, PER_THREAD = 1, 2
"""Handles of the default streams: one for all threads of the device, and one that is another in each thread. Up to these, handles
are no addresses; 0 is one of the two."""
CAPTURE_IMPLICIT = 906
"""The status of a call on the legacy default stream, which cannot be used while a stream that synchronises with it is captured."""


def handle_of(stream: object, own: str, default: str) -> int:
    """Return the handle of what is no stream of the framework's: an int, or an object with `__cuda_stream__`, which may give 0.

    `own` and `default` are what an error advises to pass: a stream of the framework's, and its default stream.
    Raises `TypeError` for what is no stream, `ValueError` for an int that is no handle.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream > 0:
            return stream
        raise ValueError(f"stream={stream} is no handle. For the default stream pass {default}, or leave stream out")
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        kind = f"{type(stream).__module__}.{type(stream).__qualname__}"
        raise TypeError(f"stream={stream!r} ({kind}) is no CUDA stream. Pass {own}, an object with __cuda_stream__, or a handle")
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


def captured(handle: int) -> CapabilityError:
    """Return the refusal of a stream that is being captured."""
    return CapabilityError(
        f"stream {handle:#x} is being captured into a graph, and a transfer cannot be part of one. "
        "Start transfers before the capture or after it, or pass stream= another stream"
    )


def of_another_device(handle: int, ordinal: int) -> ValueError:
    """Return the refusal of a stream that is not of the stager's device."""
    return ValueError(
        f"stream {handle:#x} is of another device than cuda:{ordinal}. Pass a stream of that device, and let yours wait for it"
    )
