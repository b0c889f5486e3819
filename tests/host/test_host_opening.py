"""What opening the host backend gives, what ends with it, and what outlives it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from xferlib_host import open_stager

from tests.children import threads
from tests.host.work import SECONDS
from xferlib.errors import BackendUnavailableError, ClosedError
from xferlib.protocol import HostStager, Opener


def test_the_stager_is_what_the_protocol_asks_for() -> None:
    opener: Opener = open_stager
    stager: HostStager[Any] = opener()
    assert (stager.name, stager.on_gpu, stager.fallback) == ("host", False, True)
    assert stager.device.startswith("the CPU (")
    assert not stager.capabilities.pinned
    assert stager.capabilities.register
    assert stager.capabilities.streams
    assert stager.capabilities.put_into
    stager.close()


def test_another_device_than_0_is_refused_with_what_to_type() -> None:
    with pytest.raises(BackendUnavailableError, match=r"no device 3.*Use device=0$"):
        open_stager(device=3)


def test_close_ends_the_threads_and_events_outlive_it() -> None:
    before = threads()
    stager = open_stager()
    started = threads() - before
    assert {thread.name for thread in started} == {"xferlib-host-h2d", "xferlib-host-d2h"}
    assert all(thread.daemon for thread in started)
    event = stager.record_h2d()
    stager.close()
    assert not any(thread.is_alive() for thread in started)
    assert event.done()
    with pytest.raises(ClosedError, match=r"'xferlib-host-h2d' is closed"):
        stager.copy_h2d(0, 0, 1)


def test_a_stager_that_is_dropped_ends_its_threads() -> None:
    before = threads()
    stager = open_stager()
    started = threads() - before
    del stager
    gc.collect()
    for thread in started:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in started)
