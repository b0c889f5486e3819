"""Compute in CuPy: matrix products in half precision, on the default stream or on one that does not stop for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, final

import cupy
import numpy as np

from benchmarks.steps import OUTPUTS, Bytes

__all__ = ["CupySteps"]

SIDE = 2560
SUMS = 1024


@final
class CupySteps:
    """The checksum is the sum of the 64-bit words, modulo 2**64."""

    stream: Final = None

    def __init__(self, nbytes: int, *, own_stream: bool) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True) if own_stream else None
        self.handle: Final[int] = 0 if self._stream is None else self._stream.ptr
        self._outputs = [cupy.zeros(nbytes, np.uint8) for _ in range(OUTPUTS)]
        self._sums = cupy.zeros(SUMS, np.uint64)
        self._events = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(SUMS)]
        self._weights = cupy.full((SIDE, SIDE), 1e-4, np.float16)
        self._products = [cupy.ones((SIDE, SIDE), np.float16) for _ in range(2)]
        self._launched = 0
        cupy.cuda.Device().synchronize()

    def current(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else self._stream

    def adopt(self, array: Any) -> Any:
        return array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)

    def step(self, batch: Any, rounds: int, tag: int) -> tuple[Any, Any]:
        mark, output = self._launched % SUMS, self._outputs[self._launched % OUTPUTS]
        self._launched += 1
        words = batch.view(np.uint64)
        words.sum(keepdims=True, out=self._sums[mark : mark + 1])
        cupy.bitwise_xor(words, np.uint64(tag * 0x0101010101010101), out=output.view(np.uint64))
        source, target = self._products
        for _ in range(rounds):
            cupy.matmul(source, self._weights, out=target)
            source, target = target, source
        self._events[mark].record()
        return mark, output

    def wait(self, mark: Any) -> None:
        self._events[mark].synchronize()

    def checksums(self, marks: Sequence[Any]) -> list[int]:
        sums = cupy.asnumpy(self._sums)
        return [int(sums[mark]) for mark in marks]

    def checksum(self, values: Bytes) -> int:
        return int(values.view(np.uint64).sum(dtype=np.uint64))
