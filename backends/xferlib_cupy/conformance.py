"""Hooks that let the conformance suite hold CuPy's work and look at its data: `pytest --pyargs xferlib_cupy.conformance`.

Everything that runs under a hold has run once before, when the bench is made: compiles, first launches, streams and events. CuPy
is imported when the first hook runs, so that a machine without it skips and does not fail at collection.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias, final

import numpy as np

from xferlib.conformance import Direction, HeldArray, Hold, StagerConformance, cuda, cupti
from xferlib.conformance.values import bytes_of, others
from xferlib.protocol import HostStager
from xferlib_cupy import open_stager

__all__ = ["Bench", "TestCupy", "bench"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

BYTE_KERNEL = r"""
extern "C" __global__ void copy_bytes(unsigned char* target, const unsigned char* source, unsigned long long nbytes) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < nbytes; i += step)
        target[i] = source[i];
}
"""
GRID, BLOCK = (64,), (256,)
STREAMS = 6
MEMORY_CALLS = (
    *("malloc", "mallocAsync", "mallocManaged", "free", "freeAsync"),
    *("hostAlloc", "freeHost", "hostRegister", "hostUnregister"),
)


class TestCupy(StagerConformance):
    def open(self) -> HostStager[Any]:
        return open_stager(device=0)

    def from_numpy(self, values: Array) -> Any:
        return bench().array(values)

    def to_numpy(self, array: Any) -> Array:
        # Before the copy, so that it has nothing to wait for: a copy to pageable memory may keep the driver busy while it waits.
        bench().cupy.cuda.get_current_stream().synchronize()
        values: Array = array.get()
        return values

    @contextmanager
    def hold_compute(self, stager: HostStager[Any]) -> Iterator[Hold]:
        with bench().compute_stream() as stream, cuda.hold_streams([stream.ptr], stream=stream) as hold:
            yield hold

    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> AbstractContextManager[Hold]:
        streams: Any = stager
        handles = {"h2d": [streams.h2d], "d2h": [streams.d2h], "both": [streams.h2d, streams.d2h]}
        return cuda.hold_streams(handles[direction])

    @contextmanager
    def held_array(self, stager: HostStager[Any], values: Array) -> Iterator[HeldArray]:
        array, product = bench().array(others(values)), bench().array(values)
        with bench().compute_stream() as stream:

            def produce() -> None:
                bench().copy_bytes(array, product, stream)

            with cuda.hold_streams([stream.ptr], stream=stream, enqueue=produce, array=array) as hold:
                yield hold

    def read_later(self, array: Any, hold: Hold) -> Callable[[], Array]:
        return bench().read_on(hold.stream, array)

    @contextmanager
    def break_copies(self, stager: HostStager[Any]) -> Iterator[None]:
        # Below the protocol's methods, so that the test sees how the backend handles a failure.
        insides: Any = stager
        copy = insides._copy

        def copy_nowhere(dst: int, src: int, nbytes: int, kind: int, stream: int) -> None:
            to_device = kind == bench().cupy.cuda.runtime.memcpyHostToDevice
            copy(cuda.NO_DEVICE_MEMORY if to_device else dst, src if to_device else cuda.NO_DEVICE_MEMORY, nbytes, kind, stream)

        insides._copy = copy_nowhere
        try:
            with cuda.copies_go_nowhere(insides.driver_calls.calls):
                yield
        finally:
            insides._copy = copy

    def memory_calls(self, stager: HostStager[Any]) -> int:
        witness, calls = _memory_calls()
        # Shown only if the test fails: then by name.
        print(f"memory calls so far, as {witness} saw them: {dict(calls())}")
        return calls().total()

    def page_locked(self, address: int) -> bool:
        return cuda.page_locked(address)

    def write(self, array: Any, values: Array) -> None:
        product = bench().array(values)
        with bench().compute_stream() as stream:
            bench().copy_bytes(array, product, stream)
            stream.synchronize()

    def write_combined(self, address: int) -> bool:
        return cuda.write_combined(address)

    def current(self, stream: Any) -> AbstractContextManager[object]:
        current: AbstractContextManager[object] = stream
        return current

    def layouts(self, values: Array) -> Iterable[tuple[str, Any]]:
        yield "Fortran order", bench().array(np.ascontiguousarray(values.T)).T
        yield "backwards", bench().array(np.ascontiguousarray(values[::-1, ::-1]))[::-1, ::-1]
        yield "columns of a wider one", bench().array(np.pad(values, ((0, 0), (1, 2))))[:, 1:-2]

    def aliases(self, array: Any) -> Iterable[tuple[str, Any]]:
        cupy = bench().cupy
        yield "slice", array[1:]
        yield "reshape and view", array.reshape(1, -1).view(np.uint8)
        yield "view of a view", array[1:][1:].reshape(-1)
        yield "asarray", cupy.asarray(array)
        yield "from_dlpack", cupy.from_dlpack(array)
        yield "array over its memory pointer", cupy.ndarray(array.shape, array.dtype, array.data)


@final
class Bench:
    """Compute streams and a kernel, all used once, so that none waits for held work. One per process: `bench()`."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self._copy_bytes = cupy.RawKernel(BYTE_KERNEL, "copy_bytes")
        # Non-blocking: while they are held, they must not stop what the calling thread has on the NULL stream.
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
        self._idle = deque(self.streams)
        values = np.arange(7, dtype=np.uint8)
        for stream in self.streams:
            read = self.read_on(stream, self.array(values))
            assert read().tolist() == values.tolist(), "the warm-up of the kernel that reads arrays came out wrong"

    @contextmanager
    def compute_stream(self) -> Iterator[Any]:
        """Yield a stream that nobody else has meanwhile: two holds at once are released one by one. A lone hold has the last."""
        stream = self._idle.pop()
        try:
            yield stream
        finally:
            self._idle.append(stream)

    def array(self, values: Array) -> Any:
        """Return a finished array with these values, copied as bytes: CuPy holds dtypes that it cannot convert to."""
        raw = self.cupy.asarray(bytes_of(values))
        self.cupy.cuda.get_current_stream().synchronize()
        return self.cupy.ndarray(values.shape, values.dtype, raw.data)

    def copy_bytes(self, target: Any, source: Any, stream: Any) -> None:
        """Enqueue a kernel that copies one contiguous array to another of as many bytes. Keeps neither alive."""
        assert source.flags.c_contiguous
        assert target.flags.c_contiguous
        assert source.nbytes == target.nbytes
        with stream:
            self._copy_bytes(GRID, BLOCK, (target.data, source.data, np.uint64(source.nbytes)))

    def read_on(self, stream: Any, array: Any) -> Callable[[], Array]:
        """Enqueue a kernel that reads the array, and return a function, to be called once, that waits and gives what it read."""
        shape, dtype = array.shape, array.dtype
        with stream:
            # From the pool's share of this very stream, so that no other stream uses it while this work may write it.
            seen = self.cupy.empty(array.nbytes, np.uint8)
        self.copy_bytes(seen, array, stream)
        mark = cuda.Mark(stream.ptr)

        def values() -> Array:
            mark.wait()
            mark.destroy()
            read: Array = seen.get().view(dtype).reshape(shape)
            return read

        return values


@functools.cache
def bench() -> Bench:
    """Return this process's bench, making it on the first call: not under a hold."""
    return Bench()


@functools.cache
def _memory_calls() -> tuple[str, Callable[[], Counter[str]]]:
    """Return what counts, in words, and a function that gives what it has counted so far, by name."""
    runtime = bench().cupy.cuda.runtime
    try:
        calls = cupti.driver_calls()
        # The driver's calls are seen; CuPy has a runtime of its own, whose calls must be seen as well.
        calls.require_seen(lambda: runtime.freeHost(runtime.hostAlloc(4096, 0)), 2)
    except cupti.CuptiError as error:
        # It does not see the calls of CuPy's own pools.
        return f"CuPy's runtime module (CUPTI cannot: {error})", cuda.count_calls(runtime, MEMORY_CALLS)
    return "CUPTI", calls.by_name
