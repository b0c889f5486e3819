"""Where frames come from: arrays in memory or in a .npy file, and frames repeated to a size.

Invariant: frames have one shape and one dtype, in native byte order, that `EdgeSpec` allows. Bad input is refused on opening.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xferlib.cli.command_error import CommandError
from xferlib.memory.foreign import copy_foreign
from xferlib.words import counted

__all__ = ["PIECE", "FrameSource", "from_array", "open_npy", "tiled"]

Array = npt.NDArray[Any]

PIECE = 4 << 20
"""Bytes that a thread makes or touches at a time."""
DTYPES = ("uint8", "int16", "uint16", "float32", "float64")
SHAPES = "(N, H, W), (N, H, W, C) with C from 1 to 4, or (H, W)"


@dataclass(frozen=True, kw_only=True)
class FrameSource:
    """Frames, by number. Both functions: any thread, several at once."""

    label: str
    frames: int
    """At least 1."""
    frame_shape: tuple[int, ...]
    """(height, width) or (height, width, channels)."""
    dtype: np.dtype[Any]
    read: Callable[[int, Array], object]
    """`read(start, out)` copies `len(out)` frames from number `start` on."""
    original: Callable[[int], Array]
    """Returns a frame as it is at the origin. If `read` copies from memory that was made from that, this memory is not used."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """The files that are not among the frames because they cannot be read, and why."""
    subfolders: tuple[str, ...] = ()
    """The folders that were not looked into."""


def from_array(array: Array, label: str, copy: Callable[[Array, Array], object] = np.copyto) -> FrameSource:
    """Return the frames of an array of three or four axes. `copy(out, frames)` copies some of them."""
    dtype = array.dtype.newbyteorder("=")

    def read(start: int, out: Array) -> None:
        # In one piece: a thread waits for the interpreter after each.
        copy(out, array[start : start + len(out)])

    def original(number: int) -> Array:
        frame = np.empty(array.shape[1:], dtype)
        copy(frame, array[number])
        return frame

    return FrameSource(label=label, frames=len(array), frame_shape=array.shape[1:], dtype=dtype, read=read, original=original)


def open_npy(path: Path) -> FrameSource:
    """Map a .npy file. Raises `CommandError` for a file, dtype or shape that the demo cannot use.

    What reads the frames raises it where the file has become shorter meanwhile.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError) as error:
        if zipfile.is_zipfile(path):
            raise CommandError(f"{str(path)!r} is an archive of arrays. Save one of them as .npy, with numpy.save") from error
        # NumPy's first line says what is wrong; a second would tell how to run what is in the file.
        reason = str(error).partition("\n")[0].rstrip(".")
        advice = "Write it, whole, with numpy.save and without objects"
        raise CommandError(f"cannot read {str(path)!r} as .npy: {reason}. {advice}") from error

    def copy(out: Array, frames: Array) -> None:
        # Not by NumPy: where another program cuts the file off meanwhile, a signal would end the process.
        here = out if out.dtype == frames.dtype and out.flags.c_contiguous else np.empty(frames.shape, frames.dtype)
        if not copy_foreign(frames, here.ctypes.data):
            raise CommandError(f"{str(path)!r} was cut off while it was read. Start again when it is whole")
        if here is not out:
            np.copyto(out, here)

    return from_array(_as_frames(array, path), f"{path.name}, {array.dtype} {array.shape}", copy)


def _as_frames(array: Array, path: Path) -> Array:
    if array.dtype.newbyteorder("=").name not in DTYPES:
        raise CommandError(
            f"{str(path)!r} has dtype {str(array.dtype)!r}: expected one of {', '.join(DTYPES)}. Convert it with astype"
        )
    shape = f"{str(path)!r} has shape {array.shape}"
    if array.size == 0:
        raise CommandError(f"{shape}: there is no frame in it. Expected {SHAPES}")
    if array.ndim == 2:
        return array[np.newaxis]
    if array.ndim == 3 and array.shape[2] <= 4:
        raise CommandError(
            f"{shape}, which reads as {counted(len(array), 'frame')} only {counted(array.shape[2], 'pixel')} wide. "
            "If it is one colour image, save array[None]"
        )
    if array.ndim == 3 or (array.ndim == 4 and array.shape[3] <= 4):
        return array
    raise CommandError(f"{shape}: expected {SHAPES}")


def tiled(base: FrameSource, frames: int, pool: Executor) -> FrameSource:
    """Make `frames` frames in memory, a source as fast as memory. Frames after `base`'s are copies, and no two are alike.

    In each round they are rolled by another step, which repeats only after every pixel.
    """
    period = min(base.frames, frames)
    height, width = base.frame_shape[:2]
    step = next(step for step in count(max(1, width // 14)) if math.gcd(step, width) == 1)
    memory = np.empty((frames, *base.frame_shape), base.dtype)

    def shift(turn: int) -> tuple[int, int]:
        return turn // width % height, turn * step % width

    def original(number: int) -> Array:
        turn, index = divmod(number, period)
        return np.roll(base.original(index), shift(turn), (0, 1))

    def repeat(turn: int) -> None:
        down, right = shift(turn)
        target = memory[turn * period : (turn + 1) * period]
        for to_row, from_row in ((slice(down, None), slice(height - down)), (slice(down), slice(height - down, None))):
            target[:, to_row, right:] = memory[: len(target), from_row, : width - right]
            target[:, to_row, :right] = memory[: len(target), from_row, width - right :]

    stretch = max(1, PIECE // memory[0].nbytes)
    list(pool.map(lambda start: base.read(start, memory[start : min(start + stretch, period)]), range(0, period, stretch)))
    list(pool.map(repeat, range(1, -(-frames // period))))
    label = base.label if frames <= base.frames else f"{base.label}, repeated and shifted"
    return replace(base, label=label, frames=frames, read=from_array(memory, label).read, original=original)
