"""Compute in a Numba kernel: arithmetic in registers, on the default stream or on one that does not stop for it.

Also the small kernels that the Numba device looks at data with.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Final, NamedTuple, final

import numpy as np

from benchmarks.devices.bare import CudaCopies
from benchmarks.steps import OUTPUTS, Bytes

__all__ = ["GRID", "NumbaSteps", "kernels", "load"]

BLOCKS, THREADS = 528, 256
GRID = (BLOCKS, THREADS)
SUMS = 1024
FOLDED = 4
"""The compiler folds so many multiplications into one. A round has as many, so that the time grows evenly with the rounds."""


@functools.cache
def load() -> Any:
    """Import Numba's CUDA module, the newer package first. Raises what the import raises."""
    if not hasattr(np, "row_stack"):
        # numba-cuda cannot compile on NumPy 2.5 otherwise: https://github.com/NVIDIA/numba-cuda/issues/907
        vars(np)["row_stack"] = np.vstack
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return import_module("numba_cuda_mlir.cuda")
        except ModuleNotFoundError:
            return import_module("numba.cuda")


class Kernels(NamedTuple):
    """Compiled when they are first launched."""

    work: Any
    invert: Any
    differ: Any
    spin: Any


@functools.cache
def kernels() -> Kernels:
    """Make the kernels. All go through their arrays in strides of the grid."""
    cuda = load()
    blocks, threads = BLOCKS, THREADS

    def work(batch: Any, output: Any, sums: Any, mark: int, rounds: int, tag: int, nothing: int) -> None:
        """Sum the words per block, xor them, and multiply as often as said for each word. `nothing`: 0, which no compiler knows."""
        shared = cuda.shared.array(threads, np.uint64)
        thread = cuda.threadIdx.x
        total = np.uint64(0)
        for i in range(cuda.grid(1), batch.size, blocks * threads):
            word = batch[i]
            total += word
            output[i] = word ^ tag
            value = np.uint32(word)
            for _ in range(rounds):
                value = np.uint32(value * np.uint32(1664525) + np.uint32(1013904223))
            total += np.uint64(value) & nothing
        shared[thread] = total
        cuda.syncthreads()
        left = threads // 2
        while left > 0:
            if thread < left:
                shared[thread] += shared[thread + left]
            cuda.syncthreads()
            left //= 2
        if thread == 0:
            sums[mark, cuda.blockIdx.x] = shared[0]

    def invert(source: Any, out: Any) -> None:
        for i in range(cuda.grid(1), source.size, blocks * threads):
            out[i] = ~source[i]

    def differ(left: Any, right: Any, found: Any) -> None:
        for i in range(cuda.grid(1), left.size, blocks * threads):
            if left[i] != right[i]:
                found[0] = 1

    def spin(sinks: Any, rounds: int) -> None:
        value = np.uint32(cuda.threadIdx.x)
        for _ in range(rounds):
            value = np.uint32(value * np.uint32(1664525) + np.uint32(1013904223))
        sinks[cuda.grid(1)] = value

    return Kernels(*(cuda.jit(kernel) for kernel in (work, invert, differ, spin)))


@final
class NumbaSteps:
    """The checksum is the sum of the 64-bit words, modulo 2**64."""

    def __init__(self, copies: CudaCopies, nbytes: int, *, own_stream: bool) -> None:
        self._cuda = cuda = load()
        # Numba's own streams stop for the default one, and the default one for them.
        self.handle: Final[int] = int(copies.stream()) if own_stream else 0
        self._stream = cuda.external_stream(self.handle) if own_stream else cuda.default_stream()
        self.stream: Final[Any] = self._stream if own_stream else None
        # Each step takes Python as little time as it can: every array that a kernel is given costs it 20 us.
        self._launch = kernels().work[BLOCKS, THREADS, self._stream]
        self._outputs = [cuda.device_array(nbytes, np.uint8) for _ in range(OUTPUTS)]
        self._words = [output.view(np.uint64) for output in self._outputs]
        self._sums = cuda.to_device(np.zeros((SUMS, BLOCKS), np.uint64))
        self._events = [cuda.event(timing=False) for _ in range(SUMS)]
        self._array = type(self._outputs[0])
        self._launched = 0
        cuda.synchronize()

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def adopt(self, array: Any) -> Any:
        # Of other libraries. Without `sync=False` it would wait for the stream that the array names.
        return array if isinstance(array, self._array) else self._cuda.as_cuda_array(array, sync=False)

    def step(self, batch: Any, rounds: int, tag: int) -> tuple[Any, Any]:
        mark, number = self._launched % SUMS, self._launched % OUTPUTS
        self._launched += 1
        pattern, nothing = np.uint64(tag * 0x0101010101010101), np.uint64(0)
        self._launch(batch.view(np.uint64), self._words[number], self._sums, mark, FOLDED * rounds, pattern, nothing)
        self._events[mark].record(self._stream)
        return mark, self._outputs[number]

    def wait(self, mark: Any) -> None:
        self._events[mark].synchronize()

    def checksums(self, marks: Sequence[Any]) -> list[int]:
        self._stream.synchronize()
        sums = self._sums.copy_to_host()
        return [int(sums[mark].sum(dtype=np.uint64)) for mark in marks]

    def checksum(self, values: Bytes) -> int:
        return int(values.view(np.uint64).sum(dtype=np.uint64))
