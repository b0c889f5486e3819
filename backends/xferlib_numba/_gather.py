"""Device arrays that are not contiguous, brought together by the copy engine, without compiling a kernel or asking a framework.

All copies of one `Gathering` run on one stream, so that memory for them may be used again without asking what still writes it.
Whoever reads it on another stream keeps the ticket until that is done. A table owns the memory, and tickets hold it: when a
ticket's number was posted, its memory is idle again.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, final

from xferlib.reaper import watch
from xferlib.tickets import Returns
from xferlib.uninterrupted import uninterrupted
from xferlib_numba import _memory
from xferlib_numba._device import Device
from xferlib_numba._memory import Block
from xferlib_numba._streams import Handle

__all__ = ["Gathering", "Run", "plan"]

LIMIT = 1 << 16
"""Copies. Each takes microseconds; far below this number a kernel of the user's own does better."""
PITCH_LIMIT = 1 << 31
KEPT = 4
"""Blocks that are idle, when another is allocated."""
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
    """Memory for gathered arrays, and the copies into it, on one stream, which each call is given. Any thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._binding = binding = device.numba.driver.binding
        self._memory_type = binding.CUmemorytype(DEVICE_MEMORY)
        self._copy_row = device.call("cuMemcpyDtoDAsync")
        self._copy_rows = device.call("cuMemcpy2DAsync")
        self._count: Callable[[], int] = itertools.count().__next__
        self._returns = Returns()
        # A block is in one of these, and goes from one to the other in one call, which neither a thread nor an interrupt cuts.
        self._held: dict[int, Block] = {}
        """By the number of the ticket."""
        self._idle: dict[int, deque[Block]] = {}
        """By size."""

    def copy(self, address: int, nbytes: int, runs: list[Run], stream: Handle) -> tuple[int, object]:
        """Enqueue the copies, and return where the result lies in C order, and what holds that memory."""
        number = self._count()
        # Made first: whatever happens from here on, what the ticket holds by then goes back.
        ticket = self._returns.ticket(number)
        start = self._hold(nbytes, number, ticket).address
        for run in runs:
            if run.rows == 1:
                self._copy_row(start + run.target, address + run.source, run.width, stream)
            else:
                self._copy_rows(self._what(start, address, run), stream)
        return start, ticket

    def close(self) -> None:
        """Free the memory. What is still held is freed when it is let go of."""
        if uninterrupted(self.settle):
            watch(self)

    def settle(self) -> bool:
        """Free what nobody holds, once closed, and tell whether anything is still held."""
        self._settle()
        self._free_idle(0)
        return bool(self._held)

    def _what(self, target: int, source: int, run: Run) -> Any:
        what = self._binding.CUDA_MEMCPY2D()
        what.srcMemoryType = what.dstMemoryType = self._memory_type
        what.srcDevice, what.dstDevice = source + run.source, target + run.target
        what.srcPitch, what.dstPitch = run.source_pitch, run.target_pitch
        what.WidthInBytes, what.Height = run.width, run.rows
        return what

    def _hold(self, nbytes: int, number: int, ticket: object) -> Block:
        """Return a block, held by the ticket with this number. Whatever used the block before came earlier on the same stream."""
        self._settle()
        nbytes = _size(nbytes)
        idle = self._idle.get(nbytes)
        if idle is not None:
            with suppress(IndexError):
                self._held.update(zip((number,), map(deque.popleft, (idle,)), strict=True))
                return self._held[number]
        # Given the ticket, so that it does not end before the block is there if this thread is interrupted.
        return uninterrupted(partial(self._grow, nbytes, number, ticket))

    def _grow(self, nbytes: int, number: int, ticket: object) -> Block:
        self._free_idle(KEPT - 1)
        block = self._held[number] = _memory.alloc(self._device, nbytes)
        return block

    def _settle(self) -> None:
        for number in self._returns.unsettled():
            block = self._held.get(number)
            if block is not None:
                idle = self._idle.setdefault(block.nbytes, deque())
                # None where another thread was faster.
                idle.extend(filter(None, map(self._held.pop, (number,), (None,))))
            self._returns.settled(number)

    def _free_idle(self, kept: int) -> None:
        """Free all but `kept` idle blocks. Called on a thread that no interrupt comes to."""
        for idle in list(self._idle.values()):
            with suppress(IndexError):
                self._free_some(idle, kept)

    def _free_some(self, idle: deque[Block], kept: int) -> None:
        while sum(map(len, list(self._idle.values()))) > kept:
            _memory.free(self._device, idle.popleft())


def _size(nbytes: int) -> int:
    """Round up to one of few sizes, an eighth apart, so that arrays of near sizes share blocks."""
    step = 1 << max(8, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


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
