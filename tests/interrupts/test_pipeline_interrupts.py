"""Pipelines that are interrupted anywhere: nothing stays held, nothing stays behind, and the next one works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import xferlib_host

import xferlib
from tests.core.fakes import on_thread
from tests.interrupts.harness import COUNT, PATIENCE, SEED, at_rest, interrupted, until_free

NUMBERS = range(6)
SHAPE = (64, 100)

PIPELINE = Path(xferlib.__file__).parent / "pipeline"
CORE = (str(Path(xferlib.__file__).parent), str(Path(xferlib_host.__file__).parent))

Run = Callable[[], None]
Maker = Callable[[xferlib.Stager], Run]


def in_pipelines(frame: FrameType | None) -> bool:
    """Tell whether no transfer, and no finalizer of one, is being interrupted: only what is built on them."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(CORE) and not name.startswith(str(PIPELINE)):
            return False
        frame = frame.f_back
    return True


def arrays() -> Iterator[np.ndarray]:
    return (np.full(SHAPE, number, np.int32) for number in NUMBERS)


def whole(taken: list[int]) -> None:
    assert taken == list(NUMBERS)


def number_in(array: Any) -> int:
    """Return the number that an array is full of."""
    least, most = int(array.min()), int(array.max())
    assert least == most
    return least


def ordinary(stager: xferlib.Stager) -> Run:
    def run() -> None:
        with xferlib.prefetch(arrays(), stager) as loop:
            whole([number_in(batch) for batch in loop])

    return run


def lent(stager: xferlib.Stager) -> Run:
    def run() -> None:
        with xferlib.prefetch(list(arrays()), stager, rewrites=False) as loop:
            whole([number_in(batch) for batch in loop])

    return run


def pinned(stager: xferlib.Stager) -> Run:
    def source() -> Iterator[np.ndarray]:
        array = stager.empty_pinned(SHAPE, np.int32)
        for number in NUMBERS:
            array[:] = number
            yield array

    def run() -> None:
        with xferlib.prefetch(source(), stager) as loop:
            whole([number_in(batch) for batch in loop])

    return run


def slots(stager: xferlib.Stager) -> Run:
    ring = xferlib.Ring(stager, (SHAPE, np.int32), 3)

    def source() -> Iterator[xferlib.Slot]:
        for number in NUMBERS:
            slot = ring.acquire()
            slot.tree[:] = number
            yield slot

    def run() -> None:
        with xferlib.prefetch(source(), stager) as loop:
            whole([number_in(batch) for batch in loop])

    return run


def drained(stager: xferlib.Stager) -> Run:
    def run() -> None:
        with xferlib.drain(arrays(), stager) as loop:
            whole([number_in(result) for result in loop])

    return run


def drained_into_arrays(stager: xferlib.Stager) -> Run:
    def run() -> None:
        out = np.empty((len(NUMBERS), *SHAPE), np.int32)
        with xferlib.drain(arrays(), stager, out=out) as loop:
            whole([number_in(result) for result in loop])
        whole([number_in(row) for row in out])

    return run


def mapped(stager: xferlib.Stager) -> Run:
    def run() -> None:
        with xferlib.stream_map(lambda batch: batch + 1, arrays(), stager) as loop:
            whole([number_in(result) - 1 for result in loop])

    return run


PIPELINES = pytest.mark.parametrize("make", [ordinary, lent, pinned, slots, drained, drained_into_arrays, mapped])


@PIPELINES
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")
def test_an_interrupted_pipeline_leaves_nothing_held_and_nothing_behind(make: Maker, twice: bool) -> None:
    with xferlib.stager("host", pinned_limit=64 << 20) as stager:
        run = make(stager)
        struck = interrupted(run, times=COUNT, seed=SEED, twice=twice, where=in_pipelines)
        assert struck.hits == COUNT
        until_free()
        run()
        on_thread(run).result(PATIENCE)
        del run
        no_threads()
        at_rest(stager)
    stager.close()


def no_threads() -> None:
    """Wait until no loop's thread is left."""
    for thread in threading.enumerate():
        if thread.name.startswith("xferlib-prefetch") and thread.ident is not None:
            thread.join(PATIENCE)
            assert not thread.is_alive(), thread


@pytest.mark.parametrize("make", [xferlib.prefetch, xferlib.drain])
def test_an_interrupted_close_can_be_repeated(make: Callable[[Any, xferlib.Stager], Any]) -> None:
    with xferlib.stager("host", pinned_limit=64 << 20) as stager:
        loops: list[Any] = []

        def begin() -> None:
            loops.append(make(arrays(), stager))
            assert number_in(next(loops[-1])) == 0

        def end() -> None:
            loops[-1].close()
            loops[-1].close()
            with pytest.raises(xferlib.ClosedError):
                next(loops[-1])
            loops.clear()
            begin()

        begin()
        interrupted(lambda: loops[-1].close(), times=COUNT, seed=SEED, where=in_pipelines, after=end)
        until_free()
        loops.pop().close()
        no_threads()
        at_rest(stager)


@pytest.mark.parametrize("make", [xferlib.prefetch, xferlib.drain])
def test_whoever_goes_on_after_an_interrupt_gets_the_next_batch_or_an_error(
    make: Callable[[Any, xferlib.Stager], Any],
) -> None:
    """Not an end: a batch that an interrupt took is not the last one."""
    with xferlib.stager("host", pinned_limit=64 << 20) as stager:
        loops: list[Any] = [make(arrays(), stager)]
        taken: list[int] = []

        def take() -> None:
            for batch in loops[-1]:
                taken.append(number_in(batch))  # noqa: PERF401  # All that came before the interrupt.

        def go_on() -> None:
            try:
                for batch in loops[-1]:
                    taken.append(number_in(batch))  # noqa: PERF401  # As above.
            except xferlib.ClosedError:
                assert taken == list(NUMBERS)[: len(taken)]
            else:
                # Interrupted outside of `next`, or on the way out of it, with a batch in its hands.
                assert taken == sorted(set(taken))
                assert len(taken) >= len(NUMBERS) - 1
            taken.clear()
            loops[-1].close()
            loops[-1] = make(arrays(), stager)

        interrupted(take, times=COUNT, seed=SEED, where=in_pipelines, after=go_on)
        loops.pop().close()
        no_threads()
        at_rest(stager)
