"""Decide from recorded calls whether a loop overlaps. Pure: the same records always give the same verdict. `causes` says why.

Two pieces of work run beside each other if neither is before the other. So each is held once. While the compute of step c is held,
copies up to number i are done: they are not behind it. While copy number t is held, compute up to step j is done. Some copy runs
beside some compute if, and only if, (i - c) + (j - t) >= 0: that does not depend on how copies and steps are numbered, as long as
the numbers are the same in both holds. Bytes stand for numbers: a step's worth of bytes is one.

A verdict "does not overlap" needs both: work that was seen not to be done, and a path in the order of the calls that says why. One
without the other is no verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from xferlib.overlap.calls import DIRECTIONS, Baseline, CopyDirection, CudaCall, HeldSteps
from xferlib.overlap.causes import NAMES, Causes, Finding, copy_words, where
from xferlib.words import in_words

__all__ = ["Verdict", "judge"]

ROUNDING = 0.02
"""Of a step's worth of bytes: what is too little to count."""


@final
@dataclass(frozen=True)
class Verdict:
    """`findings`: why it does not overlap. `undecided`: what could not be told, and why. Neither: it overlaps."""

    findings: tuple[Finding, ...] = ()
    undecided: tuple[str, ...] = ()


def judge(baseline: Baseline, held: Sequence[HeldSteps], calls: Sequence[CudaCall]) -> Verdict:
    """Judge a loop. `held`: one of "compute", and one of each direction that it copies in. `calls`: all, from the baseline on."""
    by_what: dict[str, HeldSteps] = {hold.what: hold for hold in held}
    findings: list[Finding] = []
    undecided: list[str] = []
    directions = [direction for direction in DIRECTIONS if any(baseline.nbytes.get(direction, ()))]
    if not directions:
        undecided.append(f"the loop makes no copy of {in_words(baseline.smallest)} or more in a step, so there is nothing to hide")
    if not baseline.compute:
        undecided.append("the loop launches no work on the device, so there is nothing to hide a copy under")
    if undecided:
        return Verdict((), tuple(undecided))
    for direction in directions:
        found, doubts = _DirectionCheck(baseline, by_what, calls, direction).judge()
        findings += [finding for finding in found if finding not in findings]
        undecided += doubts
    if not undecided and len(directions) == 2:
        known = {finding.cause for finding in findings}
        findings += [finding for finding in _both_directions(baseline, by_what, calls) if finding.cause not in known]
    # What is wrong in one direction is wrong whatever is unknown of the other.
    return Verdict(tuple(findings), () if findings else tuple(undecided))


@final
class _DirectionCheck:
    """One direction of a loop against its compute."""

    def __init__(
        self, baseline: Baseline, held: Mapping[str, HeldSteps], calls: Sequence[CudaCall], direction: CopyDirection
    ) -> None:
        self._baseline = baseline
        self._calls = calls
        self._direction = direction
        self._copies = [*baseline.copies(calls, direction)]
        self._compute_held = held["compute"]
        self._copies_held = held[direction]
        # All steps of a hold are run, if not all of them while the gate is shut.
        self._end = max(hold.first_step for hold in held.values()) + baseline.steps
        self._causes = Causes(baseline, calls, direction)

    def judge(self) -> tuple[list[Finding], list[str]]:
        doubts = [*self._doubts()]
        if doubts:
            return [], doubts
        findings = [*self._causes.kept(self._compute_held), *self._causes.kept(self._copies_held)]
        total = self._sum()
        if total < -ROUNDING:
            # More copies than batches can only make the sum less, never greater: what was done counts on both sides.
            grown = [*self._grown()]
            reasons = [] if grown else self._causes.late(self._compute_held, self._copies_held)
            # What was seen is only a reason if it says why.
            if grown:
                doubts += grown
            elif not reasons:
                doubts.append(
                    f"no copy {NAMES[self._direction]} was done beside compute, but nothing in the order of the calls says why. "
                    "The machine may be too busy, or the loop waits for something that is not CUDA's"
                )
            findings = [*reasons, *(kept for kept in findings if kept.cause not in [reason.cause for reason in reasons])]
        elif total - self._lacking() < -ROUNDING:
            # A step without a batch is done whatever is held, and would stand for one whose batch came in time.
            doubts.append(
                f"while work was held, some steps copied less {NAMES[self._direction]} than in the baseline: run the loop on "
                "batches of one size, one in each step, from a source that does not end"
            )
        return findings, doubts

    def _lacking(self) -> float:
        """Return how many batches the steps under the holds copied less than one each."""
        batch = self._baseline.nbytes[self._direction][0]
        steps = self._end - self._compute_held.first_step
        return steps - sum(call.nbytes for call in self._copies if call.serial >= self._compute_held.start) / batch

    def _grown(self) -> Iterator[str]:
        """Say what the loop did to prepare memory while work was held: that is done once, and says nothing of the loop."""
        name, batch = NAMES[self._direction], self._baseline.nbytes[self._direction][0]
        copied = sum(call.nbytes for call in self._copies if call.serial < self._copies_held.start)
        excess = copied - self._copies_held.first_step * batch
        if excess > ROUNDING * batch:
            yield (
                f"while work was held, the loop copied {in_words(excess)} {name} more than its batches, perhaps to prepare memory "
                "as it ran ahead, and which copies were its batches is not known. More of warmup= may settle it"
            )
        for hold in (self._compute_held, self._copies_held):
            stuck = hold.stuck
            call = None if stuck is None else stuck.call
            if stuck is not None and call is not None and call.kind == "memory" and not self._causes.is_usual(call):
                yield (
                    f"while work was held, the loop stood in {call.function} at {where(call, stuck.site)}, which it does not call "
                    "in each step: it took or gave back memory as it ran ahead. More of warmup= may settle it"
                )

    def _doubts(self) -> Iterator[str]:
        name, sizes = NAMES[self._direction], self._baseline.nbytes[self._direction]
        if min(sizes) != max(sizes):
            shown = ", ".join(in_words(nbytes) for nbytes in sizes)
            yield f"the steps copy different amounts {name} ({shown}): run the loop on batches of one size"
        for hold in (self._compute_held, self._copies_held):
            what = "compute" if hold.what == "compute" else f"copies {name}"
            if hold.overdue:
                yield f"while {what} were held, something kept this process from looking: the gate was opened from outside"
            elif not hold.gates:
                yield f"none of the {what} of the loop came while they were to be held, or on other streams than before"

    def _sum(self) -> float:
        """Return (i - c) + (j - t) as the module's docstring has it."""
        batch = self._baseline.nbytes[self._direction][0]
        held_step = next(call.step for call in self._calls if call.serial == min(self._compute_held.gates.values()))
        computed = self._copies_held.step_not_computed(self._baseline.launches)
        done, before = _done(self._copies, self._compute_held), _before(self._copies, self._copies_held)
        return (done / batch - 1 - held_step) + (computed - 1 - before / batch)


def _both_directions(baseline: Baseline, held: Mapping[str, HeldSteps], calls: Sequence[CudaCall]) -> Iterator[Finding]:
    """Say that the directions wait for each other, where both are on one stream and nothing of one was done beside the other."""
    h2d, d2h = ([*baseline.copies(calls, direction)] for direction in DIRECTIONS)
    shared = {call.stream for call in h2d} & {call.stream for call in d2h}
    if not shared:
        return
    h2d_batch, d2h_batch = (baseline.nbytes[direction][0] for direction in DIRECTIONS)
    total = _done(d2h, held["h2d"]) / d2h_batch - 1 - _before(h2d, held["h2d"]) / h2d_batch
    total += _done(h2d, held["d2h"]) / h2d_batch - 1 - _before(d2h, held["d2h"]) / d2h_batch
    if total < -ROUNDING:
        one = next(call for call in h2d if call.stream in shared)
        two = next(call for call in d2h if call.stream == one.stream)
        yield Finding(
            "one stream for both directions",
            f"{copy_words(one)} and {copy_words(two)} are on one stream, so neither runs beside the other. Use a stream for each "
            "direction",
            one.site or one.near,
        )


def _done(copies: Iterable[CudaCall], hold: HeldSteps) -> int:
    """Return the bytes of the copies before a hold, and of those that were done under it, up to the first that was not."""
    nbytes = 0
    for call in copies:
        if call.serial >= hold.end or (call.serial >= hold.start and not call.done):
            break
        nbytes += call.nbytes
    return nbytes


def _before(copies: Iterable[CudaCall], hold: HeldSteps) -> int:
    """Return the bytes of the copies before the first call that was held."""
    first = min(hold.gates.values())
    return sum(call.nbytes for call in copies if call.serial < first)
