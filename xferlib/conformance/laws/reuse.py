"""Law 8. Memory is not written again while work that was enqueued before it was let go of may still read it.

Memory that is free for reuse is found out by putting other values of the same size, several times, and keeping all of them. For
pinned memory the addresses tell. A reader is on a stream that the transfer was told of, or on an array that orders itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import wait

import pytest

from xferlib.conformance.base import WINDOW_SECONDS, Laws
from xferlib.conformance.hooks import Hold
from xferlib.conformance.values import SIZES, Array, assert_same, words
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["ReuseLaws"]


class ReuseLaws(Laws):
    @pytest.mark.parametrize("size", SIZES)
    def test_law08_memory_of_a_dropped_array_is_not_rewritten_under_a_reader(self, stager: Stager, size: str) -> None:
        values = words(1, SIZES[size])
        self.warm(stager, values)
        transfer = stager.put(self.pinned(stager, values))
        transfer.synchronize()
        with self.hold_compute(stager.backend) as hold:
            read = self.read_on(stager, transfer, hold)
            del transfer
            gc.collect()
            kept = self.put_others(stager, values)
            assert hold.held
            hold.release()
            assert_same(read(), values)
        del kept

    def test_law08_every_reader_is_waited_for(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        transfer = stager.put(self.pinned(stager, values))
        transfer.synchronize()
        with self.hold_compute(stager.backend) as first, self.hold_compute(stager.backend) as second:
            reads = [self.read_on(stager, transfer, hold) for hold in (first, second)]
            del transfer
            gc.collect()
            kept = self.put_others(stager, values)
            assert first.held
            first.release()
            # It can be done now, unless both holds are on one stream.
            seen = self.calls.start(reads[0])
            wait([seen], WINDOW_SECONDS)
            kept += self.put_others(stager, values, at_least=3)
            assert second.held
            second.release()
            assert_same(seen.result(self.deadline_seconds), values)
            assert_same(reads[1](), values)
        del kept

    def test_law08_views_and_aliases_keep_the_memory(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        names = [name for name, _ in self.aliases(self.put_values(stager, values))]
        for name in names:
            (alias,) = [alias for known, alias in self.aliases(self.put_values(stager, values)) if known == name]
            want = self.to_numpy(alias)
            gc.collect()
            kept = self.put_others(stager, values)
            assert_same(self.to_numpy(alias), want)
            del kept, alias

    def test_law08_leaves_of_one_tree_keep_their_memory(self, stager: Stager) -> None:
        values = [words(1), words(2), words(3)]
        sources = [self.pinned(stager, value) for value in values]
        self.warm(stager, values[0])
        stager.put(sources).synchronize()
        leaf = stager.put(sources).result()[1]
        gc.collect()
        kept = [stager.put([words(seed)] * 3).result() for seed in range(4, 8)]
        assert_same(self.to_numpy(leaf), values[1])
        del kept

    @pytest.mark.parametrize("size", SIZES)
    def test_law08_a_pinned_slot_is_not_handed_out_while_a_put_reads_it(self, stager: Stager, size: str) -> None:
        values = words(1, SIZES[size])
        self.warm(stager, values)
        with self.hold_copies(stager.backend, "h2d") as hold:
            source = self.pinned(stager, values)
            busy = source.ctypes.data
            transfer = stager.put(source)
            del source
            self.assert_not_handed_out(stager, busy, values)
            assert hold.held
        assert_same(self.to_numpy(transfer.result()), values)

    @pytest.mark.parametrize("size", SIZES)
    def test_law08_a_pinned_slot_is_not_handed_out_while_a_get_writes_it(self, stager: Stager, size: str) -> None:
        values = words(1, SIZES[size])
        self.warm(stager, values)
        array = self.from_numpy(values)
        with self.hold_copies(stager.backend, "d2h") as hold:
            out = self.pinned(stager, words(2, SIZES[size]))
            busy = out.ctypes.data
            stager.get(array, out=out)
            del out
            self.assert_not_handed_out(stager, busy, values)
            assert hold.held

    def test_law08_a_pinned_slot_is_handed_out_again_when_it_is_free(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        addresses = set()
        for _ in range(100):
            source = self.pinned(stager, values)
            addresses.add(source.ctypes.data)
            stager.put(source).synchronize()
            del source
        assert len(addresses) < 100

    def read_on(self, stager: Stager, transfer: Transfer, hold: Hold) -> Callable[[], Array]:
        """Enqueue a reader of what was put, on the stream of the hold, which the transfer is told of."""
        array = transfer.value
        if stager.capabilities.streams:
            transfer.stream_wait(hold.stream)
        return self.read_later(array, hold)

    def assert_not_handed_out(self, stager: Stager, busy: int, values: Array) -> None:
        """Assert that new pinned arrays of this size lie elsewhere."""
        gc.collect()
        fresh = [stager.empty_pinned(values.shape, values.dtype) for _ in range(6)]
        for array in fresh:
            start = array.ctypes.data
            assert start + array.nbytes <= busy or busy + values.nbytes <= start, "this memory is in use by a copy under way"
