"""Device memory that was used again before: its later readers are waited for as its first ones were."""

from __future__ import annotations

import ctypes
import threading
from contextlib import closing

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import WATCHDOG, held, on_thread

NBYTES = 1 << 20


@pytest.mark.parametrize("before", [1, 2, 3])
def test_readers_of_memory_that_was_used_again_are_waited_for(stager: xferlib.Stager, before: int) -> None:
    source, tiny = stager.empty_pinned(NBYTES, np.uint8), stager.empty_pinned(16, np.uint8)
    gate = threading.Event()
    with closing(Stream()) as stream:
        addresses = set()
        for _ in range(before):
            addresses.add(stager.put(source, stream=stream).result().ctypes.data)
            # The next put asks when its readers are done; then they are.
            stager.put(tiny).synchronize()
            stream.synchronize()
        source[:] = 1
        array = stager.put(source, stream=stream).result()
        seen, busy = np.zeros_like(source), array.ctypes.data
        assert addresses == {busy}, "the memory was not used again"
        stream.submit(gate.wait, WATCHDOG)
        # By its address: a job that held the array would hold its memory.
        stream.submit(ctypes.memmove, seen.ctypes.data, busy, NBYTES)
        del array
        source[:] = 2
        kept = [stager.put(source).result() for _ in range(3)]
        assert all(abs(other.ctypes.data - busy) >= NBYTES for other in kept)
        gate.set()
        stream.synchronize()
    assert (seen == 1).all()


@pytest.mark.parametrize("which", [0, 1])
def test_at_the_limit_a_put_waits_for_a_get_of_any_leaf_of_a_block(which: int) -> None:
    with xferlib.stager("host", device_limit=1024) as stager:
        kept = stager.put(stager.empty_pinned(256, np.uint8)).result()
        leaves = stager.put([stager.empty_pinned(64, np.uint8), stager.empty_pinned(64, np.uint8)]).result()
        large = stager.empty_pinned(512, np.uint8)
        with held(stager.backend.d2h) as gate:  # type: ignore[attr-defined]  # the host backend's
            getting = stager.get(leaves[which])
            del leaves
            putting = on_thread(lambda: stager.put(large))
            with pytest.raises(TimeoutError):
                putting.result(0.2)
            gate.set()
            putting.result(10).synchronize()
        getting.synchronize()
        assert stager.stats().device_nbytes == 256 + 512
        del kept


@pytest.mark.parametrize("read", [0, 1])
def test_readers_of_any_target_of_a_put_are_waited_for(stager: xferlib.Stager, read: int) -> None:
    source = stager.empty_pinned(NBYTES, np.uint8)
    gate = threading.Event()
    with closing(Stream()) as stream:
        arrays = [stager.put(source).result() for _ in range(2)]
        source[:] = 1
        stager.put([source, source], into=arrays, stream=stream).synchronize()
        seen, busy = np.zeros_like(source), arrays[read].ctypes.data
        stream.submit(gate.wait, WATCHDOG)
        stream.submit(ctypes.memmove, seen.ctypes.data, busy, NBYTES)
        del arrays
        source[:] = 2
        kept = [stager.put(source).result() for _ in range(4)]
        assert all(abs(other.ctypes.data - busy) >= NBYTES for other in kept)
        gate.set()
        stream.synchronize()
    assert (seen == 1).all()
