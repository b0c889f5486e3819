"""A backend whose memory the engine moves by functions of C, on the CPU: see device.c.

To the core it is what a GPU's backend is: copies go by the addresses of a driver, in two streams; streams of the user's are told to
wait for events, and nobody waits for them. All but copies, events and streams is the host backend's.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, final

import numpy as np
from xferlib_host import open_stager
from xferlib_host._memory import MemoryCallError, array_over
from xferlib_host._stager import _packed, _reach, _source
from xferlib_host._stream import AllEvents

from tests.engine.build import COMPILER
from xferlib.engine.native import VERSION, Calls
from xferlib.protocol import Capabilities, DeviceRange, Event, Stream

__all__ = ["FUNCTIONS", "Device", "DeviceError", "DeviceEvent", "DeviceStream", "Driven", "built_device", "the_device"]

SOURCE = Path(__file__).with_name("device.c")
OPTIONS = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Wshadow", "-Wpedantic", "-Werror")
NOT_READY = 600
RELAXED = 2
DRIVER = ("enter", "current", "capture_mode", "copy_h2d", "copy_d2h", "record", "query", "wait")
"""What the engine is given."""

_P, _U64, _N, _I, _U = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "device_copy_h2d": (_I, (_U64, _P, _N, _P)),
    "device_copy_d2h": (_I, (_P, _U64, _N, _P)),
    "device_record": (_I, (_P, _P)),
    "device_query": (_I, (_P,)),
    "device_wait": (_I, (_P, _P, _U)),
    "device_synchronize": (_I, (_P,)),
    "device_new_event": (_P, ()),
    "device_new_stream": (_P, ()),
    "device_end_stream": (None, (_P,)),
    "device_hold": (_I, (_P,)),
    "device_release": (None, (_P,)),
    "device_refuse": (None, (_P, _I, _I)),
    "device_break": (_I, (_P, _I)),
    "device_call": (_I, (_P, _P, _U64)),
    "device_be_late": (None, (_U,)),
    "device_watch": (None, (_P,)),
}
Array = np.ndarray[Any, np.dtype[Any]]


def built_device(folder: Path) -> ctypes.CDLL:
    """Build the device into a folder and return its library."""
    assert COMPILER is not None
    made = folder / "device.so"
    done = subprocess.run([*COMPILER, *OPTIONS, str(SOURCE), "-o", str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(made))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def the_device() -> Device:
    """Return this process's device."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Device(built_device(Path(folder.name)))


class DeviceError(Exception):
    """A status that is not 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the device says {status}")
        self.status = status


def check(status: int) -> None:
    if status:
        raise DeviceError(status)


@final
class Device:
    """The library, as Python calls it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def event(self) -> DeviceEvent:
        return DeviceEvent(self, self.library.device_new_event())

    def stream(self) -> DeviceStream:
        return DeviceStream(self, self.library.device_new_stream())

    def watch(self, call: Callable[[int, int, int], None]) -> None:
        """Have it called before each copy, with target, source and bytes, on the stream's thread. One for the process."""
        self._watch = ctypes.CFUNCTYPE(None, _U64, _U64, _U64)(call)
        self.library.device_watch(self._watch)

    def calls(self) -> Calls:
        addresses = {name: ctypes.cast(getattr(self.library, f"device_{name}"), ctypes.c_void_p) for name in DRIVER}
        return Calls(version=VERSION, nbytes=ctypes.sizeof(Calls), context=1, not_ready=NOT_READY, relaxed=RELAXED, **addresses)


@final
class DeviceEvent:
    """See `Event`."""

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self.handle = handle

    def done(self) -> bool:
        status: int = self.device.library.device_query(self.handle)
        if status == NOT_READY:
            return False
        check(status)
        return True

    def synchronize(self) -> None:
        check(self.device.library.device_synchronize(self.handle))

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        on = resolved(stream)
        if on is None:
            # A thread of the host is a stream itself.
            self.synchronize()
            return None
        on.wait(self)
        return Stream(on.handle, on)


@final
class DeviceStream:
    """A stream, which is held or broken by the test. Inside `with stream:` it is the calling thread's current one."""

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self.handle = handle
        self._pid = os.getpid()

    def record(self) -> DeviceEvent:
        event = self.device.event()
        check(self.device.library.device_record(event.handle, self.handle))
        return event

    def wait(self, event: Event) -> None:
        for one in event._events if isinstance(event, AllEvents) else (event,):
            check(self.device.library.device_wait(self.handle, cast("DeviceEvent", one).handle, 0))

    def submit(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call when all that came before is done."""
        number = next(_numbers)
        _calls[number] = partial(call, *arguments)
        check(self.device.library.device_call(self.handle, _MAKE, number))

    def synchronize(self) -> None:
        self.record().synchronize()

    def __enter__(self) -> DeviceStream:
        _entered().append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _entered().pop()

    def hold(self) -> None:
        """Have nothing that comes now done, until `release`."""
        check(self.device.library.device_hold(self.handle))

    def release(self) -> None:
        self.device.library.device_release(self.handle)

    def refuse(self, after: int, status: int) -> None:
        """Have one copy refused, after so many others."""
        self.device.library.device_refuse(self.handle, after, status)

    def break_with(self, status: int) -> None:
        """Have whatever comes now fail."""
        check(self.device.library.device_break(self.handle, status))

    def close(self) -> None:
        """Wait until it has done what it was told."""
        if os.getpid() == self._pid:
            # Without the interpreter's lock: what it was told may be a call.
            self.device.library.device_end_stream(self.handle)


_numbers = itertools.count(1)
_calls: dict[int, Callable[[], object]] = {}
_local = threading.local()


def _make(number: int) -> None:
    _calls.pop(number)()


_MAKE_NATIVE = ctypes.CFUNCTYPE(None, _U64)(_make)
_MAKE = ctypes.cast(_MAKE_NATIVE, _P)


def _entered() -> list[DeviceStream]:
    stack: list[DeviceStream] = vars(_local).setdefault("entered", [])
    return stack


def resolved(stream: object | None) -> DeviceStream | None:
    """Return the stream that `stream=` names; for None the calling thread's current one, or None where there is none."""
    if stream is None:
        entered = _entered()
        return entered[-1] if entered else None
    if not isinstance(stream, DeviceStream):
        raise TypeError(f"expected a DeviceStream, got {stream!r}")
    return stream


@final
class DeviceCalls:
    """See `DriverCalls`."""

    def __init__(self, device: Device, streams: tuple[int, int]) -> None:
        self.calls = device.calls()
        self.streams = streams
        self._device = device

    def new_event(self) -> tuple[Event, int]:
        event = self._device.event()
        return event, event.handle

    def handle(self, event: Event) -> int:
        return cast("DeviceEvent", event).handle

    def failure(self, status: int) -> Exception:
        return DeviceError(status)


@final
class Driven:
    """The host backend, with its copies, events and order on such a device."""

    name: Final = "driven"
    capabilities: Final = Capabilities(register=True, streams=True, put_into=True, mapped=True)
    failures: Final[tuple[type[Exception], ...]] = (DeviceError, MemoryCallError)

    def __init__(self, device: Device) -> None:
        self.inner = open_stager()
        self.h2d, self.d2h = device.stream(), device.stream()
        self.driver_calls = DeviceCalls(device, (self.h2d.handle, self.d2h.handle))
        self._library = device.library

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        check(self._library.device_copy_h2d(dst, src, nbytes, self.h2d.handle))

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        check(self._library.device_copy_d2h(dst, src, nbytes, self.d2h.handle))

    def record_h2d(self) -> Event:
        return self.h2d.record()

    def record_d2h(self) -> Event:
        return self.d2h.record()

    def order_h2d(self, after: Event) -> None:
        self.h2d.wait(after)

    def order_d2h(self, after: Event) -> None:
        self.d2h.wait(after)

    def check_stream(self, stream: object) -> None:
        resolved(stream)

    def as_mapped(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, stream: object | None, lease: object
    ) -> tuple[Array, Stream | None]:
        on = resolved(stream)
        return array_over(address, shape, dtype, lease=lease), None if on is None else Stream(on.handle, on)

    def place(self, array: Array, stream: object | None = None) -> DeviceRange:
        if isinstance(array, np.generic):
            array = np.asarray(array)
        self.inner._check_array(array)
        if array.flags.c_contiguous:
            return _source(array)
        packed = _packed(array, cast("Any", resolved(stream)))
        return DeviceRange(*_source(packed)[:2], (packed, array), _reach(array))

    def mark(self, stream: object | None = None) -> Event | None:
        on = resolved(stream)
        return None if on is None else on.record()

    def copied(self, arrays: Sequence[Array], stream: object | None = None) -> list[Array]:
        on: Any = resolved(stream)
        return [_packed(array, on) for array in map(np.asarray, arrays)]

    def as_source(self, array: Array, stream: object | None = None) -> DeviceRange:
        source, after = self.place(array, stream), self.mark(stream)
        if after is not None:
            self.order_d2h(after)
        return source

    def as_target(self, array: Array, stream: object | None = None) -> DeviceRange:
        target, after = self.inner.as_target(array), self.mark(stream)
        if after is not None:
            self.order_h2d(after)
        return target

    def retire(self, streams: Iterable[Stream]) -> Event | None:
        events = [cast("DeviceStream", stream.keepalive).record() for stream in streams]
        return AllEvents(events) if events else None

    def close(self) -> None:
        self.h2d.close()
        self.d2h.close()
        self.inner.close()
