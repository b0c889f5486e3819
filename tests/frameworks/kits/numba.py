"""Numba: streams without a current one, and no graphs of its own, which the driver's calls make here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, final

from xferlib_numba import conformance

from tests.frameworks.kits.kit import CudaKit, Foreign, Named
from xferlib.conformance import cuda

__all__ = ["NUMBA"]


def module() -> Any:
    return conformance.bench().cuda


def non_blocking() -> Any:
    return conformance.bench().non_blocking()


def external_stream() -> Named:
    stream = non_blocking()
    return Named(stream, stream)


def stream_of_numba() -> Named:
    stream = module().stream()
    return Named(stream, stream)


def handle() -> Named:
    stream = non_blocking()
    return Named(int(stream.handle), stream)


def foreign_object() -> Named:
    stream = non_blocking()
    return Named(Foreign(stream, int(stream.handle)), stream)


def default_stream() -> Named:
    return Named(module().default_stream(), module().legacy_default_stream())


def legacy_default_stream() -> Named:
    stream = module().legacy_default_stream()
    return Named(stream, stream)


def per_thread_default_stream() -> Named:
    stream = module().per_thread_default_stream()
    return Named(stream, stream)


NAMES: tuple[Callable[[], Named], ...] = (
    external_stream,
    stream_of_numba,
    handle,
    foreign_object,
    default_stream,
    legacy_default_stream,
    per_thread_default_stream,
)


@final
class NumbaKit(CudaKit):
    name = "numba"
    hooks = conformance.TestNumba
    whole_alias = "as_cuda_array"
    streams: ClassVar[Mapping[str, Callable[[], Named]]] = {named.__name__: named for named in NAMES}
    has_current_stream = False
    capture_failures = (cuda.CudaError,)
    crash = """
import numpy
from xferlib_numba._module import load

cuda = load().cuda
if not hasattr(numpy, "row_stack"):
    numpy.row_stack = numpy.vstack

@cuda.jit
def crash(array):
    array[1 << 60] = 1

transfer = stager.put(source)
crash[256, 1](transfer.result())
wait_for_the_device = cuda.synchronize
"""

    @property
    def bench(self) -> conformance.Bench:
        return conformance.bench()

    def non_blocking(self) -> Any:
        return non_blocking()

    def blocking(self) -> Any:
        return module().stream()

    def destroy(self, stream: Any) -> None:
        """Destroy it, whatever Numba's object for it does."""
        with cuda.context(0):
            cuda.call("cuStreamDestroy", stream.handle)

    def handle(self, stream: Any) -> int:
        return int(stream.handle)

    def null_stream(self) -> Any:
        return module().legacy_default_stream()

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        module().synchronize()

    def address(self, array: Any) -> int:
        return int(array.gpu_data.device_pointer_value)

    def copy(self, array: Any, stream: Any) -> Any:
        copy = conformance.bench().empty(array.shape, array.dtype)
        conformance.bench().copy_bytes(copy, array, stream)
        return copy

    def enqueue(self, target: Any, source: Any, stream: Any) -> None:
        with cuda.context(0):
            pointers = (array.gpu_data.device_pointer for array in (target, source))
            cuda.call("cuMemcpyDtoDAsync", *pointers, target.nbytes, stream.handle)

    def begin_capture(self, stream: Any, mode: int) -> None:
        from cuda.bindings import driver

        cuda.call("cuStreamBeginCapture", stream.handle, driver.CUstreamCaptureMode(mode))

    def end_capture(self, stream: Any) -> Any:
        return cuda.call("cuStreamEndCapture", stream.handle)

    def launch(self, graph: Any, stream: Any) -> None:
        with cuda.context(0):
            cuda.call("cuGraphLaunch", cuda.call("cuGraphInstantiate", graph, 0), stream.handle)

    # Not by Numba's events and memory: what it frees, it frees late.

    def record_and_wait(self, stream: Any) -> None:
        mark = cuda.Mark(int(stream.handle))
        mark.wait()
        mark.destroy()

    def allocate_and_free(self, nbytes: int) -> None:
        with cuda.context(0):
            cuda.call("cuMemFree", cuda.call("cuMemAlloc", nbytes))

    def allocate_and_free_pinned(self, nbytes: int) -> None:
        with cuda.context(0):
            cuda.call("cuMemFreeHost", int(cuda.call("cuMemHostAlloc", nbytes, 0)))

    def page_lock(self, address: int, nbytes: int) -> None:
        with cuda.context(0):
            cuda.call("cuMemHostRegister", address, nbytes, 0)

    def page_unlock(self, address: int) -> None:
        with cuda.context(0):
            cuda.call("cuMemHostUnregister", address)


NUMBA = NumbaKit()
