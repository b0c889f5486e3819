"""Device arrays that are not contiguous, brought together by the copy engine: no kernel is compiled, and no framework asked.

Everything runs on one stream, that of the copies to the host, so that memory for it may be used again without asking who reads it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Any, NamedTuple, final

from xferlib_numba._device import Device
from xferlib_numba._memory import Block
from xferlib_numba._streams import Handle

__all__ = ["Gathering", "Run", "plan"]

LIMIT = 1 << 16
"""Copies. Each takes microseconds; a kernel of the user's own does better far below that."""
PITCH_LIMIT = 1 << 31
KEPT = 4
DEVICE_MEMORY = 2


class Run(NamedTuple):
    """One copy of `rows` rows of `width` bytes, from offset to offset."""

    source: int
    target: int
    width: int
    rows: int
    source_pitch: int
    target_pitch: int


def plan(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> list[Run]:
    """Return the copies that bring an array into C order. Raises `ValueError` if they are too many."""
    width, axes = _joined(shape, strides, itemsize)
    steps = _steps(width, axes)
    # The longest axis whose rows do not overlap becomes the rows of each copy.
    fit = [index for index, (_, stride) in enumerate(axes) if width <= stride < PITCH_LIMIT]
    rows, source_pitch, target_pitch = 1, width, width
    if fit:
        chosen = max(fit, key=lambda index: axes[index][0])
        (rows, source_pitch), target_pitch = axes.pop(chosen), steps.pop(chosen)
    count = math.prod(length for length, _ in axes)
    if count > LIMIT:
        raise ValueError(
            f"the array lies in memory so that {count} copies would be needed to bring it together. Copy it into a contiguous "
            "array with a kernel of your own first"
        )
    return [
        Run(
            sum(index * stride for index, (_, stride) in zip(place, axes, strict=True)),
            sum(index * step for index, step in zip(place, steps, strict=True)),
            width,
            rows,
            source_pitch,
            target_pitch,
        )
        for place in itertools.product(*(range(length) for length, _ in axes))
    ]


@final
class Gathering:
    """Memory for gathered arrays, and the copies into it, on one stream. Any thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._binding = binding = device.numba.driver.binding
        self._memory_type = binding.CUmemorytype(DEVICE_MEMORY)
        self._copy_row = device.call("cuMemcpyDtoDAsync")
        self._copy_rows = device.call("cuMemcpy2DAsync")
        self._idle: deque[Block] = deque(maxlen=KEPT)

    def copy(self, address: int, nbytes: int, runs: list[Run], stream: Handle) -> Gathered:
        """Enqueue the copies, and return what holds the result in C order."""
        gathered = Gathered(self._block(nbytes), self._idle)
        start = gathered.block.address
        for run in runs:
            if run.rows == 1:
                self._copy_row(start + run.target, address + run.source, run.width, stream)
            else:
                self._copy_rows(self._what(start, address, run), stream)
        return gathered

    def close(self) -> None:
        """Let go of the memory. What is still held is freed when it is let go of."""
        self._idle = deque(maxlen=0)

    def _what(self, target: int, source: int, run: Run) -> Any:
        what = self._binding.CUDA_MEMCPY2D()
        what.srcMemoryType = what.dstMemoryType = self._memory_type
        what.srcDevice, what.dstDevice = source + run.source, target + run.target
        what.srcPitch, what.dstPitch = run.source_pitch, run.target_pitch
        what.WidthInBytes, what.Height = run.width, run.rows
        return what

    def _block(self, nbytes: int) -> Block:
        for _ in range(len(self._idle)):
            try:
                block = self._idle.popleft()
            except IndexError:
                break
            if block.nbytes == nbytes:
                return block
            self._idle.append(block)
        return Block(self._device, nbytes)


@final
class Gathered:
    """Memory that goes back when this dies: whatever uses it next comes later on the same stream."""

    __slots__ = ("_idle", "block")

    def __init__(self, block: Block, idle: deque[Block]) -> None:
        self.block = block
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.block)


def _joined(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes that lie together in C order, and the (length, stride) of what is left, outermost first."""
    width = itemsize
    axes: list[tuple[int, int]] = []
    for length, stride in reversed(list(zip(shape, strides, strict=True))):
        if length == 1:
            continue
        if not axes and stride == width:
            width *= length
        elif axes and stride == axes[0][0] * axes[0][1]:
            axes[0] = (axes[0][0] * length, axes[0][1])
        else:
            axes.insert(0, (length, stride))
    return width, axes


def _steps(width: int, axes: list[tuple[int, int]]) -> list[int]:
    """Return the strides of the result along these axes."""
    steps, step = [], width
    for length, _ in reversed(axes):
        steps.append(step)
        step *= length
    return steps[::-1]
