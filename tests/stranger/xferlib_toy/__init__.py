"""A backend in one file. Its device is host memory; its arrays carry the event after which they hold their data."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xferlib.errors import BackendUnavailableError
from xferlib.protocol import Capabilities, DeviceBlock, DeviceRange, Event, Stream


class ToyError(Exception):
    """What this framework raises."""


@dataclass(frozen=True)
class Point:
    """An event: a future of the queue that it was recorded in."""

    future: Future[None]

    def done(self) -> bool:
        return self.future.done() and self.future.result() is None

    def synchronize(self) -> None:
        self.future.result()

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        return None  # Arrays order themselves: whoever reads one waits for its `ready`.


class Queue:
    """Work in order of submission, on a thread of its own. After a failure nothing more is run."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._failure: Exception | None = None
        self.close = self._thread.shutdown

    def run(self, work: Callable[..., Any], *args: Any) -> None:
        self._thread.submit(self._run, work, args)

    def record(self) -> Point:
        return Point(self._thread.submit(self._check))

    def _run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            if self._failure is None:
                work(*args)
        except Exception as error:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            raise ToyError(f"work failed: {self._failure!r}") from self._failure


class Block(NamedTuple):
    address: int
    nbytes: int
    ready: Event | None = None


@dataclass(frozen=True)
class ToyArray:
    """What users of the toy hold. `values` may be read when `ready` is done; `lease` keeps the memory ours."""

    values: np.ndarray
    ready: Event | None
    lease: object

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)


class ToyStager:
    """Every flag is off: no page-locking, no streams, no overwriting. The laws hold all the same."""

    name = device = "toy"
    on_gpu = fallback = False
    pci_bus_id = None
    capabilities = Capabilities()
    failures: tuple[type[Exception], ...] = (ToyError,)

    def __init__(self) -> None:
        self.h2d, self.d2h, self.producers = Queue(), Queue(), Queue()
        self.copy_h2d = lambda dst, src, nbytes: self.h2d.run(ctypes.memmove, dst, src, nbytes)
        self.copy_d2h = lambda dst, src, nbytes: self.d2h.run(ctypes.memmove, dst, src, nbytes)
        self.record_h2d, self.record_d2h = self.h2d.record, self.d2h.record
        self._host: dict[int, np.ndarray] = {}
        self._blocks: dict[int, np.ndarray] = {}
        self.memory_calls = 0

    def alloc_pinned(self, nbytes: int) -> int:
        self.memory_calls += 1
        memory = np.empty(nbytes, np.uint8)
        self._host[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free_pinned(self, address: int) -> None:
        self.memory_calls += 1
        del self._host[address]

    def pin(self, address: int, nbytes: int) -> None: ...  # Never called: `register` is off.
    def unpin(self, address: int) -> None: ...
    def check_stream(self, stream: object) -> None: ...
    def sweep(self) -> None: ...

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + memory.nbytes for start, memory in self._host.copy().items())

    def order_h2d(self, after: Event) -> None:
        self.h2d.run(after.synchronize)

    def order_d2h(self, after: Event) -> None:
        self.d2h.run(after.synchronize)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        if dtype.kind not in "biufc":
            raise TypeError(f"the toy holds numbers and bools, not {dtype!r}. Convert the array first")

    def alloc_device(self, nbytes: int) -> Block:
        self.memory_calls += 1
        memory = np.empty(nbytes + 256, np.uint8)
        block = Block(-(-memory.ctypes.data // 256) * 256, nbytes)
        self._blocks[block.address] = memory
        return block

    def free_device(self, block: DeviceBlock) -> None:
        self.memory_calls += 1
        del self._blocks[block.address]

    def as_array(
        self, block: DeviceBlock, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, after: Event, lease: object
    ) -> ToyArray:
        raw: Any = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(block.address + offset)
        return ToyArray(np.ndarray(shape, dtype, raw), after, lease)

    def place(self, array: ToyArray, stream: object | None = None) -> DeviceRange:
        if not isinstance(array, ToyArray):
            raise TypeError(f"expected a ToyArray, got {type(array)!r}")
        if array.ready is not None:
            self.producers.run(array.ready.synchronize)
        return DeviceRange(array.values.ctypes.data, array.values.nbytes, array)

    def mark(self, stream: object | None = None) -> Event:
        return self.producers.record()

    def as_source(self, array: ToyArray, stream: object | None = None) -> DeviceRange:
        source = self.place(array)
        self.order_d2h(self.mark())
        return source

    def as_target(self, array: ToyArray, stream: object | None = None) -> DeviceRange:
        raise TypeError("toy arrays are immutable")  # Never called: `put_into` is off.

    def retire(self, streams: Iterable[Stream]) -> Event | None:
        return None  # Work that reads an array holds it, and so its lease, until it is done.

    def lost(self, block: DeviceBlock) -> bool:
        return False

    def close(self) -> None:
        for queue in (self.h2d, self.d2h, self.producers):
            queue.close()


def open_stager(*, device: int = 0) -> ToyStager:
    if device != 0:
        raise BackendUnavailableError(f"backend 'toy' cannot run here: there is one device, 0, not {device}")
    return ToyStager()
