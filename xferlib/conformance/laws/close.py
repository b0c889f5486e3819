"""Law 10. `close()` returns when nothing is in flight; what is still reachable outlives it, pinned memory as pinned memory."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from xferlib.conformance.base import WINDOW_SECONDS, Laws
from xferlib.conformance.hooks import Hold
from xferlib.conformance.values import LARGE, assert_same, words
from xferlib.errors import ClosedError
from xferlib.stager import Stager

__all__ = ["CloseLaws"]


class CloseLaws(Laws):
    def test_law10_close_waits_for_what_is_in_flight(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        array, pageable = self.from_numpy(values), words(2)
        source = self.pinned(stager, values)
        with self.hold_copies(stager.backend) as hold:
            transfers = [stager.put(source), stager.get(array), stager.get(array, out=pageable)]
            closing = self.calls.start(stager.close)
            self.assert_stays(lambda: not closing.done(), hold)
        closing.result(self.deadline_seconds)
        assert all(transfer.done() for transfer in transfers)
        assert_same(self.to_numpy(transfers[0].value), values)
        assert_same(transfers[1].value, values)
        assert_same(pageable, values)

    def test_law10_closing_twice_is_fine(self, stager: Stager) -> None:
        with stager:
            stager.put(words(1)).synchronize()
        stager.close()
        stager.close()

    def test_law10_close_after_an_interrupt_waits_as_ever(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        array, source, pageable = self.from_numpy(values), self.pinned(stager, values), words(2)
        with self.hold_copies(stager.backend) as hold:
            transfers = [stager.put(source), stager.get(array, out=pageable)]
            raised = threading.Event()
            interrupting = self.calls.start(lambda: self.interrupt(hold, raised))
            with pytest.raises(KeyboardInterrupt):
                stager.close()
                # A `close` that returned at once is interrupted here.
                interrupting.result(self.deadline_seconds)
                raised.wait(self.deadline_seconds)
            raised.set()
            if hold.held:
                again = self.calls.start(stager.close)
                self.assert_stays(lambda: not again.done(), hold)
        self.assert_returns(stager.close)
        assert all(transfer.done() for transfer in transfers)
        assert_same(self.to_numpy(transfers[0].value), values)
        assert_same(pageable, values)
        with pytest.raises(ClosedError):
            stager.put(source)

    def test_law10_arrays_outlive_the_stager(self, stager: Stager) -> None:
        values = words(1, LARGE)
        source = self.pinned(stager, values)
        array = stager.put(source).result()
        got = stager.get(array).result()
        stager.close()
        gc.collect()
        for memory in (self.to_numpy(array), source, got):
            assert_same(memory, values)
        source[...] = words(2, LARGE)
        assert_same(source, words(2, LARGE))
        # Memory that went away with the stager would be handed out to these.
        with self.new_stager() as other:
            kept = [self.put_values(other, words(seed, LARGE)) for seed in range(3, 8)]
            assert_same(self.to_numpy(array), values)
            assert_same(got, values)
            del kept

    def test_law10_pinned_memory_stays_pinned_until_its_last_reference_goes(self, stager: Stager) -> None:
        if not stager.capabilities.pinned:
            assert stager.stats().pinned_nbytes == 0
            return
        kept, dropped = (stager.empty_pinned(LARGE, np.uint8) for _ in range(2))
        start, gone = kept.ctypes.data, dropped.ctypes.data
        view = kept[100:]
        del kept, dropped
        stager.close()
        gc.collect()
        assert self.page_locked(start)
        assert self.page_locked(start + LARGE - 1)
        assert not self.page_locked(gone)
        assert not self.page_locked(gone + LARGE - 1)
        del view
        gc.collect()
        # From here on nobody calls the stager.
        self.assert_comes(lambda: not self.page_locked(start), lambda: "still page-locked")

    def test_law10_memory_pinned_in_place_is_unpinned_by_close(self, stager: Stager) -> None:
        array = words(1, LARGE)
        if not (stager.capabilities.pinned and stager.capabilities.register):
            assert stager.stats().pinned_nbytes == 0
            return
        with stager.pin(array):
            assert self.page_locked(array.ctypes.data)
            stager.close()
            assert not self.page_locked(array.ctypes.data)

    def test_law10_close_gives_back_what_nobody_reaches(self, stager: Stager) -> None:
        values = words(1, LARGE)
        stager.get(self.put_values(stager, values)).synchronize()
        gc.collect()
        before = self.memory_calls(stager.backend)
        stager.close()
        assert self.memory_calls(stager.backend) > before
        assert stager.stats().device_nbytes == 0
        assert stager.stats().pinned_nbytes == 0

    def test_law10_a_stager_that_was_never_closed_says_so(self) -> None:
        open_stagers = [self.new_stager()]
        open_stagers[0].put(words(1)).synchronize()
        with pytest.warns(ResourceWarning, match="never closed"):
            open_stagers.clear()

    def test_law10_a_closed_stager_refuses_everything(self, stager: Stager) -> None:
        array = self.from_numpy(words(1))
        stager.close()
        refused: dict[str, Callable[[], Any]] = {
            "put": lambda: stager.put(words(1)),
            "get": lambda: stager.get(array),
            "empty_pinned": lambda: stager.empty_pinned(8, np.uint8),
            "pin": lambda: stager.pin(words(1)),
            "trim": stager.trim,
        }
        for name, call in refused.items():
            with pytest.raises(ClosedError):
                call()
                pytest.fail(f"{name} was not refused")

    def interrupt(self, hold: Hold, raised: threading.Event) -> None:
        """Interrupt the main thread, which waits; and where it hears nothing as it waits, let it have waited."""
        time.sleep(WINDOW_SECONDS)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not raised.wait(WINDOW_SECONDS):
            hold.release()
