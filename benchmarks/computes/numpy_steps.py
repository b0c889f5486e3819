"""Compute of the host backend: NumPy in the calling thread. A step is done when it was launched, so nothing runs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, final

import numpy as np

from benchmarks.steps import OUTPUTS, Bytes

__all__ = ["NumpySteps"]

ROUND = 16 << 10
"""Words that a round of arithmetic goes over: some microseconds."""


@final
class NumpySteps:
    """The checksum is the sum of the 64-bit words."""

    stream: Final = None
    handle: Final = None

    def __init__(self, nbytes: int) -> None:
        self._outputs = [np.zeros(nbytes, np.uint8) for _ in range(OUTPUTS)]
        self._words = np.arange(ROUND, dtype=np.uint64)
        self._launched = 0

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def adopt(self, array: Any) -> Any:
        return array

    def step(self, batch: Any, rounds: int, tag: int) -> tuple[Any, Any]:
        output = self._outputs[self._launched % OUTPUTS]
        self._launched += 1
        mark = self.checksum(batch)
        np.bitwise_xor(batch, np.uint8(tag), out=output)
        for _ in range(rounds):
            np.invert(self._words, out=self._words)
        return mark, output

    def wait(self, mark: Any) -> None:
        """Do nothing: it is done."""

    def checksums(self, marks: Sequence[Any]) -> list[int]:
        return list(marks)

    def checksum(self, values: Bytes) -> int:
        return int(values.view(np.uint64).sum(dtype=np.uint64))
