"""Hooks that let the conformance suite hold Numba's work and look at its data: `pytest --pyargs xferlib_numba.conformance`.

Everything that runs under a hold has run once before, when the bench is made: compiles, first launches, streams and events. Numba
is imported when the first hook runs, so that a machine without it skips and does not fail at collection.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias, final

import numpy as np

from xferlib.conformance import Direction, HeldArray, Hold, StagerConformance, cuda, cupti
from xferlib.conformance.values import bytes_of, others
from xferlib.protocol import HostStager
from xferlib.tickets import ticket
from xferlib_numba import open_stager

__all__ = ["Bench", "TestNumba", "bench"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

GRID, BLOCK = 256, 256
STREAMS = 6
NON_BLOCKING = 1
MEMORY_CALLS = (
    *("cuMemAlloc", "cuMemAllocAsync", "cuMemAllocManaged", "cuMemFree", "cuMemFreeAsync"),
    *("cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister"),
)


class TestNumba(StagerConformance):
    def open(self) -> HostStager[Any]:
        return open_stager(device=0)

    def from_numpy(self, values: Array) -> Any:
        return bench().array(values)

    def to_numpy(self, array: Any) -> Array:
        # Before the copy, so that it has nothing to wait for: a copy to pageable memory may keep the driver busy while it waits.
        bench().cuda.default_stream().synchronize()
        values: Array = array.copy_to_host()
        return values

    @contextmanager
    def hold_compute(self, stager: HostStager[Any]) -> Iterator[Hold]:
        with bench().compute_stream() as stream, cuda.hold_streams([int(stream.handle)], stream=stream) as hold:
            yield hold

    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> AbstractContextManager[Hold]:
        streams: Any = stager
        handles = {"h2d": [streams.h2d], "d2h": [streams.d2h], "both": [streams.h2d, streams.d2h]}
        return cuda.hold_streams([int(handle) for handle in handles[direction]])

    @contextmanager
    def held_array(self, stager: HostStager[Any], values: Array) -> Iterator[HeldArray]:
        array, product = bench().array(others(values)), bench().array(values)
        with bench().compute_stream() as stream:

            def produce() -> None:
                bench().copy_bytes(array, product, stream)

            with cuda.hold_streams([int(stream.handle)], stream=stream, enqueue=produce, array=array) as hold:
                yield hold

    def read_later(self, array: Any, hold: Hold) -> Callable[[], Array]:
        return bench().read_on(hold.stream, array)

    @contextmanager
    def break_copies(self, stager: HostStager[Any]) -> Iterator[None]:
        # Below the protocol's methods, so that the test sees how the backend handles a failure.
        insides: Any = stager
        to_device, to_host = insides._copy_h2d, insides._copy_d2h
        insides._copy_h2d = lambda dst, src, nbytes, stream: to_device(cuda.NO_DEVICE_MEMORY, src, nbytes, stream)
        insides._copy_d2h = lambda dst, src, nbytes, stream: to_host(dst, cuda.NO_DEVICE_MEMORY, nbytes, stream)
        try:
            with cuda.copies_go_nowhere(insides.driver_calls.calls):
                yield
        finally:
            insides._copy_h2d, insides._copy_d2h = to_device, to_host

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

    def layouts(self, values: Array) -> Iterable[tuple[str, Any]]:
        yield "columns of a wider one", bench().array(np.pad(values, ((0, 0), (1, 2))))[:, 1:-2]
        yield "every other row of a longer one", bench().array(np.repeat(values, 2, axis=0))[::2]

    def aliases(self, array: Any) -> Iterable[tuple[str, Any]]:
        yield "slice", array[1:]
        yield "slice of a slice", array[1:][1:]
        yield "view", array.view(np.uint8)
        yield "reshape", array.reshape(1, array.size)
        yield "ravel", array.ravel()
        yield "bound to a stream", array.bind(bench().streams[0])
        yield "as_cuda_array", bench().cuda.as_cuda_array(array, sync=False)


@final
class Bench:
    """Compute streams, memory and a kernel, all used once, so that none waits for held work. One per process: `bench()`.

    The memory is never freed: Numba would free it late, eleven pieces at once, and under a hold that waits for the held work.
    """

    def __init__(self) -> None:
        from xferlib_numba._module import load

        numba = load()
        self.cuda = numba.cuda
        self._numba = numba
        self._idle_memory: defaultdict[int, deque[int]] = defaultdict(deque)
        self._unread: dict[int, Any] = {}
        self._kernel = _copying_kernel(self.cuda)
        self.streams = [self.non_blocking() for _ in range(STREAMS)]
        self._idle = deque(self.streams)
        values = np.arange(7, dtype=np.uint8)
        for stream in self.streams:
            read = self.read_on(stream, self.array(values))
            assert read().tolist() == values.tolist(), "the warm-up of the kernel that reads arrays came out wrong"

    def non_blocking(self) -> Any:
        """Make a stream that does not stop for the NULL stream, and is never destroyed. Numba makes only the other kind."""
        with cuda.context(0):
            return self.cuda.external_stream(int(cuda.call("cuStreamCreate", NON_BLOCKING)))

    @contextmanager
    def compute_stream(self) -> Iterator[Any]:
        """Yield a stream that nobody else has meanwhile: two holds at once are released one by one. A lone hold has the last."""
        stream = self._idle.pop()
        try:
            yield stream
        finally:
            self._idle.append(stream)

    def array(self, values: Array) -> Any:
        """Return a finished array with these values, copied as bytes: Numba holds dtypes that it cannot convert to."""
        array = self.empty(values.shape, values.dtype)
        if values.nbytes:
            with cuda.context(0):
                cuda.call("cuMemcpyHtoD", array.gpu_data.device_pointer, bytes_of(values).ctypes.data, values.nbytes)
                # The call may return once 64 KiB or less are staged, and others read the array on streams that wait for nothing.
                self.cuda.default_stream().synchronize()
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array over memory that is given out again as soon as its last view is gone."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        strides = np.empty(shape, dtype).strides
        with cuda.context(0):
            if not nbytes:
                return self._numba.array(shape, strides, dtype)
            idle = self._idle_memory[nbytes]
            address = idle.pop() if idle else int(cuda.call("cuMemAlloc", nbytes))
            # Every view keeps the ticket, so no finalizer that dies with the views finds the memory given away.
            owner = ticket(idle.append, address)
            driver = self._numba.driver
            memory = driver.MemoryPointer(self.cuda.current_context(), driver.binding.CUdeviceptr(address), nbytes, owner=owner)
            return self._numba.array(shape, strides, dtype, 0, memory)

    def copy_bytes(self, target: Any, source: Any, stream: Any) -> None:
        """Enqueue a kernel that copies one contiguous array to another of as many bytes. Keeps neither alive."""
        assert source.is_c_contiguous()
        assert target.is_c_contiguous()
        assert source.nbytes == target.nbytes
        self._launch(self._bytes(target), self._bytes(source), stream)

    def read_on(self, stream: Any, array: Any) -> Callable[[], Array]:
        """Enqueue a kernel that reads the array, and return a function, to be called once, that waits and gives what it read."""
        shape, dtype = array.shape, array.dtype
        seen = self.empty((array.nbytes,), np.dtype(np.uint8))
        # If nobody asks for the values, the memory must not be given out while the kernel may still write it.
        self._unread[id(seen)] = seen
        self.copy_bytes(seen, array, stream)
        mark = cuda.Mark(int(stream.handle))

        def values() -> Array:
            mark.wait()
            mark.destroy()
            read: Array = self._unread.pop(id(seen)).copy_to_host().view(dtype).reshape(shape)
            return read

        return values

    def _launch(self, target: Any, source: Any, stream: Any) -> None:
        self._kernel[GRID, BLOCK, stream](target, source)

    def _bytes(self, array: Any) -> Any:
        return self._numba.array((array.nbytes,), (1,), np.dtype(np.uint8), 0, array.gpu_data)


@functools.cache
def bench() -> Bench:
    """Return this process's bench, making it on the first call: not under a hold."""
    return Bench()


def _copying_kernel(module: Any) -> Any:
    if not hasattr(np, "row_stack"):
        # numba-cuda cannot compile on NumPy 2.5 otherwise: https://github.com/NVIDIA/numba-cuda/issues/907
        vars(np)["row_stack"] = np.vstack

    @module.jit  # type: ignore[untyped-decorator]  # Numba ships no types
    def copy_bytes(target: Any, source: Any) -> None:
        for index in range(module.grid(1), source.size, module.gridsize(1)):
            target[index] = source[index]

    return copy_bytes


@functools.cache
def _memory_calls() -> tuple[str, Callable[[], Counter[str]]]:
    """Return what counts, in words, and a function that gives what it has counted so far, by name."""
    try:
        return "CUPTI", cupti.driver_calls().by_name
    except cupti.CuptiError as error:
        from cuda.bindings import driver

        return f"the driver bindings (CUPTI cannot: {error})", cuda.count_calls(driver, MEMORY_CALLS)
