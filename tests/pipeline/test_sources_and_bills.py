"""Which sources are taken, what is refused before the first step, what the first batch says of all, and what a wait took."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import Gated, held, on_thread
from tests.pipeline.steps import PATIENCE, batch, h2d, until
from xferlib.pipeline.memory_estimate import tree_nbytes


class Rows:
    """A source that is known by its numbers alone, as old sequences are."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise IndexError
        return batch(index)


def test_a_source_may_have_numbers_and_no_iterator(stager: xferlib.Stager) -> None:
    with xferlib.prefetch(Rows(), stager) as batches:  # type: ignore[call-overload]  # as `iter` takes it
        assert len(list(batches)) == 3


@pytest.mark.parametrize("source", [3, None, object()])
def test_what_cannot_be_iterated_is_refused(stager: xferlib.Stager, source: Any) -> None:
    with pytest.raises(TypeError, match="expected something to iterate"):
        xferlib.prefetch(source, stager)


@pytest.mark.parametrize("loop", [xferlib.drain, lambda *args, **named: xferlib.stream_map(lambda tree: tree, *args, **named)])
def test_a_stream_that_is_closed_is_refused_before_anything_is_asked_for(stager: xferlib.Stager, loop: Any) -> None:
    asked: list[int] = []

    def results() -> Iterator[Any]:
        asked.append(1)
        yield np.zeros(3)

    stream = Stream()
    stream.close()
    with pytest.raises(xferlib.ClosedError):
        loop(results(), stager, stream=stream)
    assert asked == []


def test_the_bill_is_that_of_the_first_batch(stager: xferlib.Stager) -> None:
    sizes = [1 << 20, 10, 2 << 20]
    with xferlib.prefetch((np.zeros(size, np.uint8) for size in sizes), stager, 2) as batches:
        first = str(batches.bill)
        assert first == "4.0 MiB device: 4 x 1.0 MiB batches"
        for _ in batches:
            assert str(batches.bill) == first


def test_what_has_no_bytes_that_anybody_knows_costs_nothing() -> None:
    class Foreign:
        """An array of a library whose dtypes are its own."""

        shape = (3,)
        dtype = "its own"

    assert tree_nbytes([np.zeros(3, np.int32), object(), Foreign(), np.dtype(np.int8)]) == 12


def test_a_source_of_ordinary_memory_is_asked_again_though_its_copy_is_held(stager: xferlib.Stager) -> None:
    """What was copied first may be rewritten."""
    asked: list[int] = []

    def source() -> Iterator[Any]:
        for number in range(3):
            asked.append(number)
            yield np.full(100, number)

    with held(h2d(stager)):
        batches = xferlib.prefetch(source(), stager, 3)
        until(lambda: len(asked) == 3)
    assert [int(array[0]) for array in batches] == [0, 1, 2]


def rewriting(asked: list[int], tail: int = 0) -> Iterator[Any]:
    """Give the same array each time, with other bytes, too many for the chunks there are."""
    image = np.zeros((16 << 20) + tail, np.uint8)
    for number in range(3):
        asked.append(number)
        image[:] = number
        yield image


def is_read(batches: xferlib.Prefetch) -> bool:
    """Tell whether the source's thread waits until a batch may be rewritten."""
    return batches._background.clock.phase == "read"


@pytest.mark.parametrize("tail", [0, 1])
def test_a_source_is_not_asked_again_before_its_bytes_are_staged(tail: int) -> None:
    asked: list[int] = []
    gated = Gated()
    with xferlib.stager(gated.backend, pinned_limit=4 << 20) as stager:
        batches = xferlib.prefetch(rewriting(asked, tail), stager)
        until(lambda: is_read(batches))
        assert asked == [0]
        gated.gate.set()
        assert [set(image.tolist()) for image in batches] == [{0}, {1}, {2}]


def test_a_batch_that_is_staged_is_its_sources_again_though_its_copy_is_held(stager: xferlib.Stager) -> None:
    gone: list[bool] = []

    def source() -> Iterator[Any]:
        for number in range(3):
            # Of no more parts, two together, than there are chunks.
            image = np.full(1 << 20, number, np.uint8)
            known = weakref.ref(image)
            yield image
            del image
            gone.append(known() is None)

    with held(h2d(stager)):
        batches = xferlib.prefetch(source(), stager, 3)
        until(lambda: len(gone) == 2)
        assert gone == [True, True]
    assert [set(image.tolist()) for image in batches] == [{0}, {1}, {2}]


def test_a_source_that_rewrites_what_is_staged_is_nothing_that_debug_mode_tells_of() -> None:
    """It watches what is read until a copy is done, which no source of a prefetch need care for."""
    asked: list[int] = []

    def source() -> Iterator[Any]:
        # As in the test above.
        image = np.zeros(1 << 20, np.uint8)
        for number in range(3):
            image[:] = number
            asked.append(number)
            yield image

    with xferlib.stager("host", pinned_limit=64 << 20, debug=True) as stager:
        with held(h2d(stager)):
            batches = xferlib.prefetch(source(), stager, 3)
            until(lambda: len(asked) >= 2)
        assert [set(image.tolist()) for image in batches] == [{0}, {1}, {2}]


def test_a_source_ends_when_what_it_gave_is_staged_though_nobody_takes_it() -> None:
    gone: list[bool] = []
    asked: list[int] = []

    def source() -> Iterator[Any]:
        try:
            yield from rewriting(asked)
        finally:
            gone.append(gated.gate.is_set())

    gated = Gated()
    with xferlib.stager(gated.backend, pinned_limit=4 << 20) as stager:
        batches = xferlib.prefetch(source(), stager)
        until(lambda: is_read(batches))
        closing = on_thread(batches.close)
        until(lambda: batches._background.closed)
        assert gone == []
        gated.gate.set()
        closing.result(PATIENCE)
        until(lambda: gone == [True])
        assert asked == [0]


def test_a_report_behind_the_end_does_not_change(stager: xferlib.Stager) -> None:
    with xferlib.prefetch([batch(number) for number in range(3)], stager) as batches:
        for _ in batches:
            pass
        first = batches.report()
        assert batches.report() == first


def test_a_slot_knows_how_long_its_thread_waited_for_it(stager: xferlib.Stager) -> None:
    def acquire() -> tuple[float, float, float]:
        began = time.perf_counter()
        with ring.acquire() as slot:
            return slot.waited_here(), time.perf_counter() - began, slot.waited_here()

    with xferlib.Ring(stager, (100, np.uint8), slots=1) as ring:
        assert acquire()[0] == 0
        with held(h2d(stager)) as gate:
            ring.acquire().put()
            waiting = on_thread(acquire)
            assert not wait([waiting], 0.1).done
            gate.set()
            waited, took, again = waiting.result(PATIENCE)
    assert 0.05 < waited <= took
    assert again == 0
