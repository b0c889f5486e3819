"""Law 7. Work behind a transfer sees the copied data, and a transfer starts behind the work that it must wait for.

A consumer runs on a thread of its own, so that the backend may make it wait in any way: in a stream, in an array that orders
itself, or on the host. If it ends before the copy that it waits for is released, it has read wrong values.
"""

from __future__ import annotations

from typing import Any

import pytest

from xferlib.byte_reader import Span
from xferlib.conformance.base import Laws
from xferlib.conformance.values import assert_same, words
from xferlib.errors import CapabilityError
from xferlib.stager import Stager

__all__ = ["OrderLaws"]


class OrderLaws(Laws):
    def test_law07_value_can_be_used_at_once(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        source = self.pinned(stager, values)
        with self.hold_copies(stager.backend, "h2d") as hold:
            transfer = stager.put(source)
            seen = self.calls.start(lambda: self.to_numpy(transfer.value))
            self.assert_stays(lambda: not seen.done(), hold)
        assert_same(seen.result(self.deadline_seconds), values)

    def test_law07_work_behind_stream_wait_sees_the_data(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        source = self.pinned(stager, values)
        with self.hold_copies(stager.backend, "h2d") as copies:
            transfer = stager.put(source)
            with self.hold_compute(stager.backend) as compute:
                seen = self.calls.start(lambda: self.read_on(stager, transfer, compute)())
                compute.release()
                self.assert_stays(lambda: not seen.done(), copies)
                copies.release()
                assert_same(seen.result(self.deadline_seconds), values)

    def test_law07_put_lets_its_stream_wait_for_the_copy(self, stager: Stager) -> None:
        values = words(1)
        self.warm(stager, values)
        source = self.pinned(stager, values)
        if not stager.capabilities.streams:
            with pytest.raises(CapabilityError):
                stager.put(source, stream=object())
            return
        with self.hold_copies(stager.backend, "h2d") as copies, self.hold_compute(stager.backend) as compute:
            transfer = stager.put(source, stream=compute.stream)
            seen = self.calls.start(lambda: self.read_later(transfer.value, compute)())
            compute.release()
            self.assert_stays(lambda: not seen.done(), copies)
            copies.release()
            assert_same(seen.result(self.deadline_seconds), values)

    @pytest.mark.parametrize("out", ["fresh", "pinned", "pageable"])
    def test_law07_get_reads_after_its_producer(self, stager: Stager, out: str) -> None:
        values = words(1)
        self.warm(stager, values)
        memory = {"fresh": None, "pinned": self.pinned(stager, words(2)), "pageable": words(2)}[out]
        with self.held_array(stager.backend, values) as held:
            transfer = self.assert_returns(lambda: stager.get(held.array, out=memory, stream=held.stream))
            self.assert_stays_undone(transfer, held)
            assert memory is None or (memory == words(2)).all()
        self.assert_completes(transfer)
        assert_same(transfer.value, values)

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_law07_get_of_a_tree_reads_after_the_producer_of_each_leaf(self, stager: Stager, place: int) -> None:
        values = words(1)
        self.warm(stager, values)
        leaves = [self.from_numpy(words(2)), self.from_numpy(words(3))]
        with self.held_array(stager.backend, values) as held:
            leaves.insert(place, held.array)
            transfer = self.assert_returns(lambda: stager.get(leaves, stream=held.stream))
            self.assert_stays_undone(transfer, held)
        self.assert_completes(transfer)
        expected = [words(2), words(3)]
        expected.insert(place, values)
        for result, wanted in zip(transfer.value, expected, strict=True):
            assert_same(result, wanted)

    def test_law07_a_reader_reads_after_the_producer(self, stager: Stager) -> None:
        """Piece by piece, on another thread, and also where the backend finds the arrays only then."""
        values, others = words(1), words(2)
        self.warm(stager, values)
        other = self.from_numpy(others)  # made before the hold: a framework's own copy to the device may wait for all compute
        with self.held_array(stager.backend, values) as held:
            tree = [other, held.array]
            spans = [Span(0, 0, others.nbytes), Span(1, 0, values.nbytes)]
            # Nobody can close a stager as long as one of its readers is open.
            with self.assert_returns(lambda: stager.reader(tree, stream=held.stream)) as reader:
                read = self.calls.start(lambda: reader.read(spans, reader.empty(others.nbytes + values.nbytes)).result())
                self.assert_stays(lambda: not read.done(), held)
                held.release()
                got = read.result(self.deadline_seconds)
        assert got.tobytes() == others.tobytes() + values.tobytes()

    def test_law07_put_into_waits_for_readers_that_were_enqueued(self, stager: Stager) -> None:
        old, new = words(1), words(2)
        if self.put_into_is_refused(stager):
            return
        self.warm(stager, old)
        source, array = self.pinned(stager, new), self.from_numpy(old)
        with self.hold_compute(stager.backend) as hold:
            read = self.read_later(array, hold)
            transfer = self.assert_returns(lambda: stager.put(source, into=array, stream=hold.stream))
            self.assert_stays_undone(transfer, hold)
            hold.release()
            assert_same(read(), old)
        self.assert_completes(transfer)
        assert_same(self.to_numpy(transfer.value), new)

    def test_law07_a_copy_on_the_device_has_what_the_array_held(self, stager: Stager) -> None:
        """Of a backend that makes such copies: what was produced, and not what is written behind the copy."""
        old, new = words(1), words(2)
        self.warm(stager, old)
        backend: Any = stager.backend
        array, source = self.from_numpy(old), self.pinned(stager, new)
        if not hasattr(backend, "copied"):
            with pytest.raises(CapabilityError):
                stager.reader(array, snapshot=True)
            return

        def read(copy: Any, stream: Any) -> bytes:
            # It may be no array: the backend says where its memory is, and is asked for nothing else.
            place, after = backend.place(copy, stream), backend.mark(stream)
            if after is not None:
                after.synchronize()
            memory = stager.empty_pinned(old.shape, old.dtype)
            backend.copy_d2h(memory.ctypes.data, place.address, place.nbytes)
            backend.record_d2h().synchronize()
            return memory.tobytes()

        self.calls.start(lambda: read(backend.copied([array])[0], None)).result(self.deadline_seconds)
        with self.held_array(backend, old) as held:
            (copy,) = self.assert_returns(lambda: backend.copied([held.array], held.stream))
            if stager.capabilities.put_into:
                overwriting = self.assert_returns(lambda: stager.put(source, into=held.array, stream=held.stream))
                self.assert_stays_undone(overwriting, held)
            held.release()
            got = self.calls.start(lambda: read(copy, held.stream)).result(self.deadline_seconds)
        assert got == old.tobytes()
