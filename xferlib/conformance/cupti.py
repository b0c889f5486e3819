"""Count the calls that allocate, free, page-lock or unlock memory, whoever makes them, as CUPTI reports them.

CUPTI calls back when such a function is entered, in the driver and in the runtime, which every framework links for itself. This
needs no rights and no recompilation, and costs nothing for calls that are not counted. A process can have only one subscriber to
callbacks.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, final

from xferlib.conformance import cuda
from xferlib.tracing.library import CALLBACK, DRIVER, ENTER, RUNTIME, CuptiError, check, load

__all__ = ["CallLog", "CuptiError", "driver_calls"]

# From cupti_driver_cbid.h and cupti_runtime_cbid.h: numbers are only ever added.
DRIVER_FUNCTIONS = (
    *(29, 31, 33, 37, 38, 39),  # cuMemAlloc, AllocPitch, Free, AllocHost, FreeHost, HostAlloc
    *(243, 244, 245, 294),  # their second versions
    *(301, 302, 379),  # cuMemHostRegister, HostUnregister, HostRegister_v2
    *(371, 547, 548, 549, 550, 551, 552),  # cuMemAllocManaged, AddressReserve, AddressFree, Create, Release, Map, Unmap
    *(598, 599, 600, 601, 607, 608, 611, 612),  # cuMemAllocAsync, FreeAsync, PoolCreate, PoolDestroy, AllocFromPoolAsync
)
RUNTIME_FUNCTIONS = (
    *(20, 21, 22, 23, 24, 25, 26, 27),  # cudaMalloc, MallocPitch, Free, MallocArray, FreeArray, MallocHost, FreeHost, HostAlloc
    *(140, 141, 152, 153, 206),  # cudaMalloc3D, Malloc3DArray, HostRegister, HostUnregister, MallocManaged
    *(373, 374, 375, 376, 391, 392),  # cudaMallocAsync, FreeAsync, MallocFromPoolAsync
)


@final
class CallLog:
    """The calls since this was made, from any thread. Made by `driver_calls()`."""

    def __init__(self) -> None:
        self._cupti = load()
        self._names: list[str] = []
        self._inside_runtime: set[int] = set()
        self._callback = CALLBACK(self._entered)
        self._subscriber = ctypes.c_void_p()
        self._call("cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, None)
        # No callback may enter an interpreter that is going down.
        atexit.register(self._call, "cuptiUnsubscribe", self._subscriber)
        for domain, functions in ((DRIVER, DRIVER_FUNCTIONS), (RUNTIME, RUNTIME_FUNCTIONS)):
            for function in functions:
                self._call("cuptiEnableCallback", ctypes.c_uint32(1), self._subscriber, domain, ctypes.c_uint32(function))

    @property
    def total(self) -> int:
        return len(self._names)

    def by_name(self) -> Counter[str]:
        return Counter(list(self._names))

    def require_seen(self, probe: Callable[[], None], count: int) -> None:
        """Run `probe`, which makes `count` calls that count, and raise `CuptiError` unless exactly these were seen.

        A counter that sees nothing would prove anything. Nothing else may allocate meanwhile.
        """
        before = self.total
        probe()
        seen = self.total - before
        if seen != count:
            raise CuptiError(f"CUPTI reported {seen} of {count} calls that a probe made; seen so far: {dict(self.by_name())}")

    def _entered(self, _: int | None, domain: int, function: int, data: Any) -> None:
        call, thread = data.contents, threading.get_ident()
        if call.site != ENTER:
            if domain == RUNTIME:
                self._inside_runtime.discard(thread)
            return
        # The calls of a runtime function in the driver may be reported, too: together they are one call, counted by the outer name.
        if thread not in self._inside_runtime:
            self._names.append((call.function or b"?").decode())
        if domain == RUNTIME:
            self._inside_runtime.add(thread)

    def _call(self, function: str, *arguments: object) -> None:
        check(self._cupti, function, *arguments)


@functools.cache
def driver_calls() -> CallLog:
    """Return this process's counter; the first call starts it. Raises `CuptiError` if it cannot count here."""
    calls = CallLog()
    calls.require_seen(_allocate_and_free, 2)
    return calls


def _allocate_and_free() -> None:
    with cuda.context(0):
        cuda.call("cuMemFreeHost", int(cuda.call("cuMemHostAlloc", 4096, 0)))
