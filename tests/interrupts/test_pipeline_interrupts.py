"""Pipelines that are interrupted anywhere: nothing stays held, nothing stays behind, and the next one works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import xferlib_host

import xferlib
from tests.core.fakes import on_thread
from tests.interrupts.harness import COUNT, PATIENCE, SEED, at_rest, interrupted, until_free
from tests.pipeline.passes import NUMBERS, PASSES, Pass, arrays, number_in
from tests.pipeline.steps import until

PIPELINE = Path(xferlib.__file__).parent / "pipeline"
CORE = (str(Path(xferlib.__file__).parent), str(Path(xferlib_host.__file__).parent))
LOOPS = 10
"""That are closed by one operation: to close one may be over before an interrupt comes."""

Maker = Callable[[xferlib.Stager], Pass]


def in_pipelines(frame: FrameType | None) -> bool:
    """Tell whether no transfer, and no finalizer of one, is being interrupted: only what is built on them."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(CORE) and not name.startswith(str(PIPELINE)):
            return False
        frame = frame.f_back
    return True


@PASSES
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")
def test_an_interrupted_pipeline_leaves_nothing_held_and_nothing_behind(make: Maker, twice: bool) -> None:
    with xferlib.stager("host", pinned_limit=64 << 20) as stager:
        run = make(stager)
        struck = interrupted(run, times=COUNT, seed=SEED, strikes=1 + twice, where=in_pipelines)
        assert struck.hits == COUNT
        until_free()
        run()
        on_thread(run).result(PATIENCE)
        del run
        no_threads()
        at_rest(stager)
    stager.close()


def no_threads() -> None:
    """Wait until no loop's thread is left, one that has not begun included."""
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("xferlib-prefetch")])


@pytest.mark.parametrize("make", [xferlib.prefetch, xferlib.drain])
def test_an_interrupted_close_can_be_repeated(make: Callable[[Any, xferlib.Stager], Any]) -> None:
    with xferlib.stager("host", pinned_limit=64 << 20) as stager:
        loops: list[Any] = []

        def begin() -> None:
            for _ in range(LOOPS):
                loops.append(make(arrays(), stager))
                assert number_in(next(loops[-1])) == 0

        def close() -> None:
            for loop in loops:
                loop.close()

        def end() -> None:
            close()
            close()
            for loop in loops:
                with pytest.raises(xferlib.ClosedError):
                    next(loop)
            loops.clear()
            begin()

        begin()
        interrupted(close, times=COUNT, seed=SEED, where=in_pipelines, after=end)
        until_free()
        close()
        loops.clear()
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
