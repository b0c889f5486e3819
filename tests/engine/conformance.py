"""The hooks by which the conformance suite looks at the backend of device.py: the host backend's, on the streams of the device.

Memory is a strict driver's: see tests/random_programs/driver.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast, final

import numpy as np
from xferlib_host import conformance as host

from tests.engine.device import Array, DeviceStream, Driven, the_device
from tests.random_programs.driver import DRIVER, StrictStager
from xferlib.conformance import StagerConformance
from xferlib.protocol import HostStager

__all__ = ["TestDriven"]

BROKEN = 700


@final
class TestDriven(StagerConformance):
    def open(self) -> HostStager[Any]:
        strict: Any = StrictStager(Driven(the_device()), locks=True)
        return cast("HostStager[Any]", strict)

    @contextmanager
    def hold_compute(self, stager: HostStager[Any]) -> Iterator[host.Gate]:
        stream: Any = the_device().stream()
        with host.finished(host.Gate([stream.submit], stream)) as gate:
            yield gate
        stream.close()

    # What it asks of a backend and of its streams, these have as well.
    from_numpy = host.TestHost.from_numpy
    to_numpy = host.TestHost.to_numpy
    hold_copies = host.TestHost.hold_copies
    held_array = host.TestHost.held_array
    read_later = host.TestHost.read_later
    layouts = host.TestHost.layouts
    aliases = host.TestHost.aliases

    @contextmanager
    def break_copies(self, stager: HostStager[Any]) -> Iterator[None]:
        backend = cast("Driven", stager)
        backend.h2d.break_with(BROKEN)
        backend.d2h.break_with(BROKEN)
        yield

    def memory_calls(self, stager: HostStager[Any]) -> int:
        return DRIVER.calls + sum(cast("Driven", stager).inner.memory.calls())

    def page_locked(self, address: int) -> bool:
        return DRIVER.is_locked(address)

    def write(self, array: Array, values: Array) -> None:
        stream = the_device().stream()
        stream.submit(np.copyto, array, values)
        stream.close()

    def current(self, stream: object) -> AbstractContextManager[object]:
        return cast("DeviceStream", stream)
