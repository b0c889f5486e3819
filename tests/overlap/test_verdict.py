"""Loops that overlap and loops that do not, on a machine that is played by hand: what is said of them, and which line is blamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.overlap.machine import BACK, BLOCKING, COMPUTE, COPIES, MIB, OTHER, Machine
from xferlib.overlap.calls import LEGACY
from xferlib.overlap.verdict import Verdict, judge

Loop = Callable[[Machine, int], None]


def verdict(loop: Loop, *, holds: tuple[Any, ...] = ("h2d",), steps: int = 3) -> Verdict:
    machine = Machine()
    return judge(*machine.judged(lambda number: loop(machine, number), holds=holds, steps=steps))


def causes(found: Verdict) -> list[str]:
    assert not found.undecided, found.undecided
    return [finding.cause for finding in found.findings]


# Loops that overlap.


def two_slots(m: Machine, n: int) -> None:
    """The next batch is copied while this one is computed; a slot is written again behind its reader."""
    if n == 0:
        m.copy(1, "h2d", COPIES, address=0)
        m.record(2, 100, COPIES)
    if n > 0:
        m.wait(10, 200 + (n - 1) % 2, COPIES)
    m.copy(11, "h2d", COPIES, address=(n + 1) % 2)
    m.record(12, 100 + (n + 1) % 2, COPIES)
    m.wait(13, 100 + n % 2, COMPUTE)
    m.launch(14)
    m.record(15, 200 + n % 2, COMPUTE)


def launch_first(m: Machine, n: int) -> None:
    """The same the other way round: the copy is enqueued behind the launch."""
    if n == 0:
        m.copy(1, "h2d", COPIES, address=0)
        m.record(2, 100, COPIES)
    m.wait(10, 100 + n % 2, COMPUTE)
    m.launch(11)
    m.record(12, 200 + n % 2, COMPUTE)
    if n > 0:
        m.wait(13, 200 + (n - 1) % 2, COPIES)
    m.copy(14, "h2d", COPIES, address=(n + 1) % 2)
    m.record(15, 100 + (n + 1) % 2, COPIES)


def host_waits_for_the_slot(m: Machine, n: int) -> None:
    """The host waits for the reader of the slot before last: back-pressure, which is right."""
    if n > 1:
        m.sync_event(10, 200 + n % 2)
    m.copy(11, "h2d", COPIES, address=n % 2)
    m.record(12, 100 + n % 2, COPIES)
    m.wait(13, 100 + n % 2, COMPUTE)
    m.launch(14)
    m.record(15, 200 + n % 2, COMPUTE)


def reads_the_loss_behind_the_next_copy(m: Machine, n: int) -> None:
    two_slots(m, n)
    m.copy(20, "d2h", COMPUTE, nbytes=8, synchronous=True)


def behind_compute_but_two_ahead(m: Machine, n: int) -> None:
    """Each copy waits for all compute before it, but is for the step after the next."""
    if n == 0:
        for index in range(2):
            m.copy(1, "h2d", COPIES, address=index)
            m.record(2, 100 + index, COPIES)
    m.wait(10, 100 + n % 3, COMPUTE)
    m.launch(11)
    m.record(12, 200, COMPUTE)
    m.wait(13, 200, COPIES)
    m.copy(14, "h2d", COPIES, address=(n + 2) % 3)
    m.record(15, 100 + (n + 2) % 3, COPIES)


def converts_on_the_copy_stream(m: Machine, n: int) -> None:
    if n == 0:
        m.copy(1, "h2d", COPIES, address=0)
        m.launch(2, COPIES)
        m.record(3, 100, COPIES)
    if n > 0:
        m.wait(10, 200 + (n - 1) % 2, COPIES)
    m.copy(11, "h2d", COPIES, address=(n + 1) % 2)
    m.launch(12, COPIES)
    m.record(13, 100 + (n + 1) % 2, COPIES)
    m.wait(14, 100 + n % 2, COMPUTE)
    m.launch(15)
    m.record(16, 200 + n % 2, COMPUTE)


def both_ways(m: Machine, n: int) -> None:
    """A batch in, a result out, on a stream for each direction."""
    two_slots(m, n)
    m.wait(20, 200 + n % 2, BACK)
    m.copy(21, "d2h", BACK, address=50 + n % 2)


@pytest.mark.parametrize(
    "loop",
    [two_slots, launch_first, host_waits_for_the_slot, reads_the_loss_behind_the_next_copy, converts_on_the_copy_stream],
)
def test_a_loop_that_overlaps_passes(loop: Loop) -> None:
    assert causes(verdict(loop)) == []


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_a_copy_behind_all_compute_overlaps_with_the_step_after_that(steps: int) -> None:
    assert causes(verdict(behind_compute_but_two_ahead, steps=steps)) == []


def test_a_loop_that_overlaps_in_both_directions_passes() -> None:
    assert causes(verdict(both_ways, holds=("h2d", "d2h"))) == []


def test_copies_of_a_thread_that_runs_ahead_are_counted_by_their_bytes() -> None:
    def loop(m: Machine, n: int) -> None:
        m.in_loop = False
        for index in range(3 if n == 0 else 1):
            number = n + 2 + index - (2 if n == 0 else 0)
            # Each batch in two pieces.
            m.copy(1, "h2d", COPIES, address=number % 4, nbytes=MIB)
            m.copy(1, "h2d", COPIES, address=number % 4, nbytes=MIB)
            m.record(1, 100 + number % 4, COPIES)
        m.in_loop = True
        m.wait(10, 100 + n % 4, COMPUTE)
        m.launch(11)

    assert causes(verdict(loop)) == []


# Loops that do not.


def on_the_compute_stream(m: Machine, n: int) -> None:
    m.launch(10)
    m.copy(11, "h2d", COMPUTE, address=n % 2)


def all_on_the_null_stream(m: Machine, n: int) -> None:
    m.copy(10, "h2d", LEGACY, pageable=True)
    m.launch(11, LEGACY)


def blocking_beside_the_null_stream(m: Machine, n: int) -> None:
    m.copy(10, "h2d", BLOCKING, address=n % 2)
    m.launch(11, LEGACY)


def sets_memory_on_the_null_stream(m: Machine, n: int) -> None:
    """A framework clears a counter, on no stream by name: that stands between the streams that wait for it."""
    m.launch(10, OTHER)
    m.set(11, LEGACY)
    m.copy(12, "h2d", BLOCKING, address=n % 2)
    m.set(13, LEGACY)


def null_between_blocking_streams(m: Machine, n: int) -> None:
    m.launch(10, OTHER)
    m.launch(11, OTHER)
    m.copy(12, "h2d", LEGACY, address=n % 2)


def waits_for_the_step(m: Machine, n: int) -> None:
    m.copy(10, "h2d", COPIES, address=n % 2)
    m.record(11, 100, COPIES)
    m.wait(12, 100, COMPUTE)
    m.launch(13)
    m.sync_stream(14, COMPUTE)


def reads_the_loss_before_the_next_copy(m: Machine, n: int) -> None:
    m.launch(10)
    m.copy(11, "d2h", COMPUTE, nbytes=4, pageable=True)
    m.copy(12, "h2d", COPIES, address=n % 2)
    m.record(13, 100, COPIES)
    m.wait(14, 100, COMPUTE)


def stands_in_the_framework(m: Machine, n: int) -> None:
    m.copy(10, "h2d", COPIES, address=n % 2)
    m.record(11, 100, COPIES)
    m.wait(12, 100, COMPUTE)
    m.launch(13)
    m.stand(14, lambda call: call.kind == "launch")


def framework_waits(m: Machine, n: int) -> None:
    """The call that copies also makes its stream wait, on a thread of the framework's."""
    m.launch(10)
    m.record(10, 200, COMPUTE)
    m.in_loop = False
    m.wait(11, 200, COPIES)
    m.copy(11, "h2d", COPIES, address=n % 2)
    m.record(11, 100, COPIES)
    m.in_loop = True
    m.wait(12, 100, COMPUTE)


def one_slot(m: Machine, n: int) -> None:
    if n > 0:
        m.wait(10, 200, COPIES)
    m.copy(11, "h2d", COPIES, address=7)
    m.record(12, 100, COPIES)
    m.wait(13, 100, COMPUTE)
    m.launch(14)
    m.record(15, 200, COMPUTE)


def one_slot_and_the_host_waits(m: Machine, n: int) -> None:
    if n > 0:
        m.sync_event(10, 200)
    m.copy(11, "h2d", COPIES, address=7)
    m.record(12, 100, COPIES)
    m.wait(13, 100, COMPUTE)
    m.launch(14)
    m.record(15, 200, COMPUTE)


def frees_each_step(m: Machine, n: int) -> None:
    two_slots(m, n)
    m.free(30)


def pageable(m: Machine, n: int) -> None:
    if n == 0:
        m.copy(1, "h2d", COPIES, address=0)
        m.record(2, 100, COPIES)
    m.copy(11, "h2d", COPIES, address=(n + 1) % 2, pageable=True)
    m.record(12, 100 + (n + 1) % 2, COPIES)
    m.wait(13, 100 + n % 2, COMPUTE)
    m.launch(14)


@pytest.mark.parametrize(
    ("loop", "cause", "line"),
    [
        (on_the_compute_stream, "same stream", 11),
        (all_on_the_null_stream, "same stream", 10),
        (blocking_beside_the_null_stream, "NULL stream", 10),
        (null_between_blocking_streams, "NULL stream", 12),
        (sets_memory_on_the_null_stream, "NULL stream", 12),
        (waits_for_the_step, "host waits", 14),
        (reads_the_loss_before_the_next_copy, "host waits", 11),
        (stands_in_the_framework, "host waits", 14),
        (framework_waits, "waits for compute", 11),
        (one_slot, "too few slots", 11),
        (one_slot_and_the_host_waits, "too few slots", 10),
        (frees_each_step, "memory call", 30),
        (pageable, "pageable memory", 11),
    ],
)
def test_a_loop_that_does_not_overlap_fails_for_its_cause(loop: Loop, cause: str, line: int) -> None:
    found = verdict(loop)
    assert causes(found)[0] == cause
    site = found.findings[0].site
    assert site is not None
    assert site.line == line
    assert f"loop.py:{line}" in found.findings[0].words


def test_memory_that_is_set_on_the_null_stream_is_named_by_its_line() -> None:
    (finding,) = verdict(sets_memory_on_the_null_stream).findings
    assert "cuset at loop.py:11 in step is on the NULL stream" in finding.words


def test_pageable_memory_is_named_beside_the_stream() -> None:
    assert causes(verdict(all_on_the_null_stream)) == ["same stream", "pageable memory"]


def test_a_result_that_is_read_at_once_fails() -> None:
    def loop(m: Machine, n: int) -> None:
        m.launch(10)
        m.copy(11, "d2h", COMPUTE, address=n % 2, pageable=True)

    found = verdict(loop, holds=("d2h",))
    assert "pageable memory" in causes(found)
    assert found.findings[0].site is not None
    assert found.findings[0].site.line == 11


def test_a_result_on_the_compute_stream_fails() -> None:
    def loop(m: Machine, n: int) -> None:
        m.launch(10)
        m.copy(11, "d2h", COMPUTE, address=n % 2)

    assert causes(verdict(loop, holds=("d2h",))) == ["same stream"]


def test_one_stream_for_both_directions_is_named() -> None:
    def loop(m: Machine, n: int) -> None:
        two_slots(m, n)
        m.wait(20, 200 + n % 2, COPIES)
        m.copy(21, "d2h", COPIES, address=50 + n % 2)

    assert causes(verdict(loop, holds=("h2d", "d2h"))) == ["one stream for both directions"]


# What cannot be told.


def test_a_loop_without_copies_is_not_judged() -> None:
    found = verdict(lambda m, n: m.launch(10), holds=())
    assert not found.findings
    assert "makes no copy" in found.undecided[0]


def test_a_loop_without_compute_is_not_judged() -> None:
    def loop(m: Machine, n: int) -> None:
        m.copy(10, "h2d", COPIES)

    machine = Machine()
    baseline, _, calls = machine.judged(lambda number: loop(machine, number), holds=())[0], None, machine.calls
    assert "launches no work" in judge(baseline, [], calls).undecided[0]


def test_a_loop_that_waits_for_something_else_is_not_judged() -> None:
    """Nothing in the order of the calls says why the copy did not come."""
    machine = Machine()
    baseline, held, calls = machine.judged(lambda number: waits_for_the_step(machine, number), holds=("h2d",))
    for hold in held:
        if hold.stuck is not None:
            object.__setattr__(hold.stuck, "freed", False)
    found = judge(baseline, held, calls)
    assert not found.findings
    assert "nothing in the order of the calls says why" in found.undecided[0]


def test_copies_that_prepare_memory_under_a_hold_are_not_taken_for_batches() -> None:
    """Under the hold of compute no memory is free from the second step on. What is new is behind all compute."""

    def loop(m: Machine, n: int) -> None:
        m.wait(10, 100 + n, COMPUTE)
        m.launch(11)
        if n in (7, 8):
            m.record(12, 200, COMPUTE)
            m.in_loop = False
            m.wait(13, 200, BACK)
            m.copy(13, "h2d", BACK, address=n + 1)
            m.record(13, 300, BACK)
            m.in_loop = True
            m.wait(14, 300, COPIES)
        m.copy(14, "h2d", COPIES, address=n + 1)
        m.record(15, 101 + n, COPIES)

    found = verdict(loop)
    assert not found.findings
    assert "2.0 MiB host to device more than its batches" in found.undecided[0]


def test_a_memory_call_that_comes_only_under_a_hold_is_no_cause() -> None:
    def passes(m: Machine, n: int) -> None:
        two_slots(m, n)
        if n == 7:
            m.free(30)

    def is_not_judged(m: Machine, n: int) -> None:
        m.launch(10)
        if n == 6:
            m.free(30)
        m.copy(11, "h2d", COPIES)
        m.record(12, 100, COPIES)
        m.wait(13, 100, COMPUTE)

    assert causes(verdict(passes)) == []
    found = verdict(is_not_judged)
    assert not found.findings
    assert "stood in cumemory at loop.py:30" in found.undecided[0]


def test_a_copy_of_a_framework_s_thread_says_where_the_loop_was_at_the_latest() -> None:
    assert "own, asked at loop.py:11 in step or earlier" in verdict(framework_waits).findings[0].words


@pytest.mark.parametrize("period", [4, 5, 6, 7])
@pytest.mark.parametrize("waits", [True, False], ids=["host waits", "same stream"])
def test_a_loop_that_does_not_overlap_never_passes_because_some_step_copies_nothing(period: int, waits: bool) -> None:
    for first in range(period):

        def loop(m: Machine, n: int, first: int = first) -> None:
            if (n + first) % period:
                m.copy(10, "h2d", COPIES if waits else COMPUTE, address=n % 2)
                m.record(11, 100, COPIES)
            m.wait(12, 100, COMPUTE)
            m.launch(13)
            if waits:
                m.sync_stream(14, COMPUTE)

        assert verdict(loop) != Verdict(), first


def test_batches_of_different_sizes_are_not_judged() -> None:
    def loop(m: Machine, n: int) -> None:
        m.copy(10, "h2d", COPIES, nbytes=(n + 1) * MIB)
        m.launch(11)

    assert "different amounts" in verdict(loop).undecided[0]
