"""Law 8. Memory is not written again while work that was enqueued before it was let go of may still read it.

To find memory that is free for reuse, the tests put other values of the same size, several times, and keep all of them. For pinned
memory the addresses tell. A reader is on a stream that the transfer was told of, or on an array that orders itself.
"""

from __future__ import annotations

import gc
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest

from xferlib.conformance.base import MOST_PUTS, WINDOW_SECONDS, Laws
from xferlib.conformance.hooks import Hold
from xferlib.conformance.values import LARGE, SIZES, Array, assert_same, words
from xferlib.errors import CapabilityError
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["ReuseLaws"]

SMALL_RING = "1x64KiB"
"""A ring of chunks: a large transfer through it is not enqueued as a whole while copies are held."""
NAMES = ("value", "result", "value_on", "stream=", "stream_wait", "put(into=)")
"""How a program tells that a stream reads what was put. The first two name the calling thread's current stream."""


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

    @pytest.mark.parametrize("name", NAMES)
    def test_law08_work_on_a_stream_that_was_named_is_waited_for(self, stager: Stager, name: str) -> None:
        values = words(1)
        self.warm(stager, values)
        source = self.pinned(stager, values)
        with self.hold_compute(stager.backend) as hold:
            array = self.put_naming(stager, source, hold, name)
            if array is None:
                return
            read = self.read_later(array, hold)
            del array
            gc.collect()
            kept = self.put_others(stager, values)
            assert hold.held
            hold.release()
            assert_same(read(), values)
        del kept

    @pytest.mark.parametrize("way", ["get", "get_pageable_out"])
    @pytest.mark.parametrize("reader", ["the same stager", "another stager"])
    def test_law08_put_into_waits_for_gets_of_any_stager(self, stager: Stager, reader: str, way: str) -> None:
        old, new = words(1, LARGE), words(2, LARGE)
        if self.put_into_is_refused(stager):
            return
        array, source = self.from_numpy(old), self.pinned(stager, new)
        with self.new_stager(staging=SMALL_RING) as reading:
            writing = stager if reader == "another stager" else reading
            for one in (writing, reading):
                self.warm(one, old)
            out = np.empty_like(old) if way == "get_pageable_out" else None
            with self.hold_copies(reading.backend, "d2h") as hold:
                got = reading.get(array, out=out)
                # Only the host can wait for what is not enqueued yet.
                putting = self.calls.start(lambda: writing.put(source, into=array))
                self.assert_stays(lambda: not (putting.done() and putting.result().done()), hold)
            putting.result(self.deadline_seconds).synchronize()
            assert_same(got.result(), old)
            assert_same(self.to_numpy(array), new)

    @pytest.mark.parametrize("way", ["get", "get_pageable_out"])
    def test_law08_memory_that_another_stager_reads_is_not_rewritten(self, stager: Stager, way: str) -> None:
        values = words(1, LARGE)
        with self.new_stager(staging=SMALL_RING) as reading:
            for one in (stager, reading):
                self.warm(one, values)
            array = self.put_values(stager, values)
            out = np.empty_like(values) if way == "get_pageable_out" else None
            with self.hold_copies(reading.backend, "d2h") as hold:
                got = reading.get(array, out=out)
                del array
                gc.collect()
                kept = self.put_others(stager, values)
                assert hold.held
            assert_same(got.result(), values)
            del kept

    @pytest.mark.parametrize("way", ["put", "get"])
    def test_law08_a_pinned_slot_is_nobody_elses_while_another_stager_uses_it(self, stager: Stager, way: str) -> None:
        values = words(1)
        with self.new_stager() as using:
            for one in (stager, using):
                self.warm(one, values)
            slot, array = self.pinned(stager, values), self.from_numpy(values)
            others = [words(seed) for seed in range(50, 56)]
            with self.hold_copies(using.backend) as hold:
                transfer = using.put(slot) if way == "put" else using.get(array, out=slot).completion
                del slot
                gc.collect()
                # Memory that was handed out too early is rewritten by these, or rewrites them.
                fresh = [self.pinned(stager, other) for other in others]
                assert hold.held
            transfer.synchronize()
            if way == "put":
                assert_same(self.to_numpy(transfer.value), values)
            for memory, other in zip(fresh, others, strict=True):
                assert_same(memory, other)

    def test_law08_memory_for_a_put_that_is_not_enqueued_yet_is_nobody_elses(self, stager: Stager) -> None:
        values, borrowed = words(1, LARGE), words(90, LARGE)
        with self.new_stager(staging=SMALL_RING) as lending:
            self.warm(lending, values)
            source = self.pinned(lending, values)
            with self.hold_copies(lending.backend, "h2d") as hold:
                lending.put(borrowed, borrow=True)
                gc.collect()
                taken, transfers = lending.stats().device_nbytes, [lending.put(source)]
                # Until no memory of this size is free: one of these now writes to memory that was wrongly taken for free.
                while lending.stats().device_nbytes == taken:
                    assert len(transfers) < MOST_PUTS
                    transfers.append(lending.put(source))
                assert hold.held
            for transfer in transfers:
                transfer.synchronize()
            # Any later part of the borrowed source would have to run before this is done.
            lending.put(borrowed, borrow=True).synchronize()
            for transfer in transfers:
                assert_same(self.to_numpy(transfer.value), values)

    @pytest.mark.parametrize("view", ["alive", "dropped"])
    def test_law08_a_pin_is_not_closed_under_a_reader_of_its_views(self, stager: Stager, view: str) -> None:
        values = words(1, LARGE)
        if not (stager.capabilities.register and stager.capabilities.mapped):
            with pytest.raises(CapabilityError), stager.pin(values):
                stager.mapped(values)
            return
        self.warm(stager, values)
        pin = stager.pin(values)
        with self.hold_compute(stager.backend) as hold:
            mapped: Any = stager.mapped(values, stream=hold.stream)
            read = self.read_later(mapped, hold)
            if view == "dropped":
                mapped = None
                gc.collect()
            closing = self.calls.start(pin.close)
            self.assert_stays(lambda: not closing.done(), hold)
            hold.release()
            assert_same(read(), words(1, LARGE))
        closing.result(self.deadline_seconds)

    def put_naming(self, stager: Stager, source: Array, hold: Hold, name: str) -> Any:
        """Put the source and name the hold's stream in this way; None where there is no such way, after asserting the refusal."""
        inside = None
        if not stager.capabilities.streams:
            with pytest.raises(CapabilityError):
                stager.put(source, stream=object())
        elif name in ("value", "result"):
            inside = self.current(hold.stream)
            if inside is None:
                return None
        if name == "stream=" and stager.capabilities.streams:
            return self.completed(stager.put(source, stream=hold.stream)).value
        transfer = self.completed(stager.put(source))
        if name == "put(into=)" and stager.capabilities.put_into:
            # The memory is ours, although the array is now the caller's.
            transfer = self.completed(stager.put(source, into=transfer.value))
        if not stager.capabilities.streams:
            return transfer.value
        if name == "value_on":
            return transfer.value_on(hold.stream)
        if inside is not None:
            with inside:
                return transfer.value if name == "value" else transfer.result()
        transfer.stream_wait(hold.stream)
        return transfer.value

    def completed(self, transfer: Transfer) -> Transfer:
        self.assert_completes(transfer)
        return transfer

    def assert_not_handed_out(self, stager: Stager, busy: int, values: Array) -> None:
        """Assert that new pinned arrays of this size lie elsewhere."""
        gc.collect()
        fresh = [stager.empty_pinned(values.shape, values.dtype) for _ in range(6)]
        for array in fresh:
            start = array.ctypes.data
            assert start + array.nbytes <= busy or busy + values.nbytes <= start, "this memory is in use by a copy under way"
