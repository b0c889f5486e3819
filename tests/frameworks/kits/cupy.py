"""CuPy: streams with a current one per thread, arrays over its own runtime module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

from xferlib_cupy import conformance

from tests.frameworks.kits.kit import CudaKit, Foreign, Named

__all__ = ["CUPY"]

handed_out: list[Any] = []
"""A bare handle must outlive the arrays that it was named for; a test's own variables die in any order."""


def cuda() -> Any:
    return conformance.bench().cupy.cuda


def runtime() -> Any:
    return cuda().runtime


def non_blocking() -> Any:
    return cuda().Stream(non_blocking=True)


def cupy_stream() -> Named:
    stream = non_blocking()
    return Named(stream, stream)


def blocking_stream() -> Named:
    stream = cuda().Stream()
    return Named(stream, stream)


def handle() -> Named:
    stream = non_blocking()
    handed_out.append(stream)
    return Named(stream.ptr, stream)


def foreign_object() -> Named:
    stream = non_blocking()
    return Named(Foreign(stream, stream.ptr), stream)


def null_stream() -> Named:
    stream = cuda().Stream.null
    return Named(stream, stream)


def foreign_null_stream() -> Named:
    stream = cuda().Stream.null
    return Named(Foreign(stream, stream.ptr), stream)


def per_thread_stream() -> Named:
    stream = cuda().Stream.ptds
    return Named(stream, stream)


NAMES: tuple[Callable[[], Named], ...] = (
    cupy_stream,
    blocking_stream,
    handle,
    foreign_object,
    null_stream,
    foreign_null_stream,
    per_thread_stream,
)


@final
class CupyKit(CudaKit):
    name = "cupy"
    hooks = conformance.TestCupy
    whole_alias = "asarray"
    streams: ClassVar[Mapping[str, Callable[[], Named]]] = {named.__name__: named for named in NAMES}
    has_current_stream = True
    # What CuPy raises here is a RuntimeError, be it CUDA's or its own.
    capture_failures = (RuntimeError,)
    crash = """
import cupy

kernel = cupy.RawKernel('extern "C" __global__ void crash() { *(volatile int*)8 = 1; }', "crash")
transfer = stager.put(source)
transfer.synchronize()
kernel((1,), (1,), ())
wait_for_the_device = cupy.cuda.runtime.deviceSynchronize
"""

    @property
    def bench(self) -> conformance.Bench:
        return conformance.bench()

    def non_blocking(self) -> Any:
        return non_blocking()

    def blocking(self) -> Any:
        return cuda().Stream()

    def destroy(self, stream: Any) -> None:
        """Do nothing: CuPy destroys it when the last reference goes."""

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def null_stream(self) -> Any:
        return cuda().Stream.null

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = stream
        return context

    def synchronize(self) -> None:
        runtime().deviceSynchronize()

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def copy(self, array: Any, stream: Any) -> Any:
        with stream:
            copy = conformance.bench().cupy.empty_like(array)
        conformance.bench().copy_bytes(copy, array, stream)
        return copy

    def enqueue(self, target: Any, source: Any, stream: Any) -> None:
        with stream:
            conformance.bench().cupy.add(source, 0, out=target)

    def begin_capture(self, stream: Any, mode: int) -> None:
        stream.begin_capture(mode)

    def end_capture(self, stream: Any) -> Any:
        return stream.end_capture()

    def launch(self, graph: Any, stream: Any) -> None:
        graph.launch(stream)

    def record_and_wait(self, stream: Any) -> None:
        stream.record().synchronize()

    # By CuPy's runtime: it is linked into CuPy, so that not every witness sees what is called in it.

    def allocate_and_free(self, nbytes: int) -> None:
        runtime().free(runtime().malloc(nbytes))

    def allocate_and_free_pinned(self, nbytes: int) -> None:
        runtime().freeHost(runtime().hostAlloc(nbytes, 0))

    def page_lock(self, address: int, nbytes: int) -> None:
        runtime().hostRegister(address, nbytes, 0)

    def page_unlock(self, address: int) -> None:
        runtime().hostUnregister(address)


CUPY = CupyKit()
