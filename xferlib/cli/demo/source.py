"""Where frames come from: the interface, and arrays in memory or in a .npy file.

Invariant: frames have one shape and one dtype, in native byte order, that `EdgeSpec` allows. Bad input is refused on opening.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from xferlib.cli.demo.team import copy
from xferlib.cli.errors import CommandError

__all__ = ["ArraySource", "Source", "open_npy"]

DTYPES = ("uint8", "int16", "uint16", "float32", "float64")
SHAPES = "(N, H, W), (N, H, W, C) with C from 1 to 4, or (H, W)"


class Source(Protocol):
    """Frames, by number."""

    @property
    def label(self) -> str:
        """What they are, in words."""

    @property
    def frames(self) -> int:
        """How many, at least 1."""

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """(height, width) or (height, width, channels)."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy `len(out)` frames from number `start` on. Any thread, several at once."""

    def original(self, number: int) -> npt.NDArray[Any]:
        """Return a frame as it is at the origin, in native byte order. Any thread."""


@final
class ArraySource:
    """The frames of an array, in memory or mapped. `array` has three or four axes."""

    def __init__(self, array: npt.NDArray[Any], label: str) -> None:
        self._array = array
        self.label = label
        self.frames = len(array)
        self.frame_shape = array.shape[1:]
        self.dtype = array.dtype.newbyteorder("=")

    def read(self, start: int, out: npt.NDArray[Any]) -> None:
        copy(out, self._array[start : start + len(out)])

    def original(self, number: int) -> npt.NDArray[Any]:
        return np.array(self._array[number], self.dtype)


def open_npy(path: Path) -> ArraySource:
    """Map a .npy file. Raises `CommandError` for a file, dtype or shape that the demo cannot use."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).rstrip(".")
        raise CommandError(f"cannot read {str(path)!r} as .npy: {reason}. Write it with numpy.save, without objects") from error
    if not isinstance(array, np.ndarray):
        raise CommandError(f"{str(path)!r} holds several arrays. Save one of them as .npy, with numpy.save")
    return ArraySource(_as_frames(array, path), f"{path.name}, {array.dtype} {array.shape}")


def _as_frames(array: npt.NDArray[Any], path: Path) -> npt.NDArray[Any]:
    if array.dtype.newbyteorder("=").name not in DTYPES:
        raise CommandError(
            f"{str(path)!r} has dtype {str(array.dtype)!r}: expected one of {', '.join(DTYPES)}. Convert it with astype"
        )
    if array.size == 0:
        raise CommandError(f"{str(path)!r} has shape {array.shape}: there is no frame in it. Expected {SHAPES}")
    if array.ndim == 2:
        return array[np.newaxis]
    if array.ndim == 3 and array.shape[2] <= 4:
        raise CommandError(
            f"{str(path)!r} has shape {array.shape}, which reads as {array.shape[0]} frames only {array.shape[2]} pixels wide. "
            "If it is one colour image, save array[None]"
        )
    if array.ndim == 3 or (array.ndim == 4 and array.shape[3] <= 4):
        return array
    raise CommandError(f"{str(path)!r} has shape {array.shape}: expected {SHAPES}")
