"""How things are timed, the same for every contender.

Bandwidth: a sample is `count` transfers back to back, host clock from the first start to the end of the last synchronization;
`count` is such that a sample lasts some milliseconds. Overhead: a sample is the host time of one call that starts a transfer.
Contenders take turns, sample by sample, in an order that rotates, so that drift of clocks and neighbours cancels in their ratio.
Everything is warmed up at its final count, poisoned before and verified after, outside the clock. Where a contender should be warm,
as in a loop of its own, its turn begins with a sample that is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.arena import Arena, Batch
from benchmarks.ways import Call, Corrupted, Way

__all__ = ["BRIEF", "FULL", "QUICK", "Absences", "Contender", "Effort", "Timing", "able", "sample", "time_bandwidth", "time_calls"]

T = TypeVar("T")

USUAL_RATE = 50e9
"""Bytes a second."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    samples: int
    """Rounds of bandwidth samples."""
    sample_seconds: float
    """About how long a bandwidth sample should last at least; not reached where the arena is too small."""
    chunks: int
    """Rounds of chunks of calls."""
    chunk: int = 50
    """Calls between two synchronizations: enough to run back to back, and fewer than a queue holds."""
    row_seconds: float = 0.06
    """About how long a row of steps or copies lasts that is timed by itself."""
    part: float = 1.0
    """Of the steps, samples and rounds that a case makes at full effort."""
    between: Call = lambda: None
    """Called before each round. Raises where the row is to be cut there."""
    same: bool = False
    """Whether all calls of a chunk move the same array; otherwise each has memory of its own, as in a loop over many arrays."""

    def row(self, nbytes: int) -> int:
        """Return how many copies of `nbytes` bytes make a row, at the rate of a usual link."""
        return max(6, int(self.row_seconds * USUAL_RATE / nbytes))


FULL = Effort(samples=7, sample_seconds=0.0045, chunks=100)
BRIEF = Effort(samples=3, sample_seconds=0.0045, chunks=25, row_seconds=0.03, part=0.2)
"""For a look at everything in minutes. Medians of fewer samples, of which one that was disturbed still does not count."""
QUICK = Effort(samples=3, sample_seconds=0.0005, chunks=4, row_seconds=0.0002)
MOST = 8192
"""Transfers in a sample."""
WARM_UP_CHUNKS = 2


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is timed under one name: one way, or one per direction, started together; and the memory between which bytes move."""

    name: str
    ways: tuple[Way, ...]
    arena: Arena
    optional: bool = True
    """Whether it is left out and named as absent if it cannot run; otherwise the run fails."""

    @property
    def waits(self) -> bool:
        return any(way.waits for way in self.ways)


@dataclass(kw_only=True)
class Timing:
    """Seconds of one transfer, or of one call: all values, and one figure per round to compare with others of that round."""

    values: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    count: int = 1
    """Transfers that one value is the mean of."""

    def add(self, values: Sequence[float]) -> None:
        """Add the values of one round."""
        self.values.extend(values)
        self.rounds.append(statistics.median(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def share_of(self, limit: Timing) -> float:
        """Return the median, over the rounds, of the limit's time over this time: 1 is as fast as the limit."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.rounds, limit.rounds, strict=True))


class Absences:
    """Which contenders are left out, and why."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def add(self, name: str, error: Exception) -> None:
        """Note why; a missing package is told apart from a broken one."""
        lines = str(error).splitlines()
        detail = f"{type(error).__name__}: {lines[0] if lines else ''}"
        self.reasons[name] = "not installed" if isinstance(error, ModuleNotFoundError) else detail[:200]


def able(contenders: Sequence[Contender], absences: Absences, run: Callable[[Contender], object]) -> list[Contender]:
    """Run each once, alone, and return those that can run. Raises the error of one that is not optional, and any `Corrupted`."""
    present = []
    for contender in contenders:
        try:
            run(contender)
        except Corrupted:
            raise
        except Exception as error:
            if not contender.optional:
                raise
            absences.add(contender.name, error)
            continue
        present.append(contender)
    return present


def time_bandwidth(
    contenders: Sequence[Contender], *, nbytes: int, effort: Effort, level: bool, warm: bool = False
) -> dict[str, Timing]:
    """Return the seconds of one transfer of `nbytes` bytes (of one each way, for a pair), by contender, each tried once before.

    `level`: all have as many transfers in a sample as the fastest needs, so that the end of a sample weighs the same for each; but
    at most twice as many as they need by themselves, since in a sample that is long anyhow its end weighs nothing.
    `warm`: right before each sample stands another of the same contender, which is not timed.
    """
    counts = {contender.name: _calibrate(contender, nbytes, effort) for contender in contenders}
    if level:
        # A call that waits by itself has no end of a sample to weigh.
        most = max(counts.values())
        counts = {one.name: counts[one.name] if one.waits else min(most, 2 * counts[one.name]) for one in contenders}
    timings = {name: Timing(count=count) for name, count in counts.items()}
    # Round 0 is the warm-up at the final count.
    for index in range(effort.samples + 1):
        effort.between()
        for contender in _rotated(contenders, index):
            count = counts[contender.name]
            if index == 0 and count == 1:
                continue
            seconds = sample(contender, nbytes=nbytes, count=count, index=index, warm=warm)
            if index > 0:
                timings[contender.name].add([seconds])
    return timings


def time_calls(contenders: Sequence[Contender], *, nbytes: int, effort: Effort, before: Call | None = None) -> dict[str, Timing]:
    """Return the host seconds of one call, by contender. `before` runs ahead of every call, outside the clock."""
    timings = {contender.name: Timing() for contender in contenders}
    for index in range(effort.chunks + WARM_UP_CHUNKS):
        effort.between()
        for contender in _rotated(contenders, index):
            seconds = _chunk(contender, nbytes=nbytes, effort=effort, index=index, before=before)
            if index >= WARM_UP_CHUNKS:
                timings[contender.name].add(seconds)
    return timings


def sample(contender: Contender, *, nbytes: int, count: int, index: int, warm: bool = False) -> float:
    """Return the seconds of one of `count` transfers back to back. `warm`: right behind as many with other bytes."""
    ahead = _poisoned(contender, nbytes=nbytes, count=count, index=index + 1) if warm else []
    batches = _poisoned(contender, nbytes=nbytes, count=count, index=index)
    if warm:
        _run(ahead)
        ahead.clear()
    begin = time.perf_counter()
    _run(batches)
    seconds = time.perf_counter() - begin
    for batch in batches:
        batch.verify()
    return seconds / count


def _rotated(items: Sequence[T], by: int) -> Sequence[T]:
    by %= len(items)
    return [*items[by:], *items[:by]]


def _calibrate(contender: Contender, nbytes: int, effort: Effort) -> int:
    """Return how many transfers make a sample."""
    most = min(MOST, contender.arena.nbytes // nbytes)
    # Indices below 0: the first round starts with bytes that were not moved just before.
    count, index = 1, 0
    while count < most:
        index -= 1
        seconds = count * sample(contender, nbytes=nbytes, count=count, index=index)
        if seconds >= effort.sample_seconds:
            break
        wanted = int(1.2 * count * effort.sample_seconds / seconds) + 1
        count = min(most, max(2 * count, min(wanted, 8 * count)))
    return count


def _chunk(contender: Contender, *, nbytes: int, effort: Effort, index: int, before: Call | None) -> list[float]:
    """Return the host seconds of each call of a chunk."""
    batches = _poisoned(contender, nbytes=nbytes, count=effort.chunk, index=index, same=effort.same)
    seconds = [each for batch in batches for each in _time_each(batch, before)]
    for batch in batches:
        batch.synchronize()
    contender.arena.device.synchronize()
    for batch in batches:
        batch.verify()
    return seconds


def _poisoned(contender: Contender, *, nbytes: int, count: int, index: int, same: bool = False) -> list[Batch]:
    batches = [Batch(way, contender.arena, nbytes=nbytes, count=count, index=index, same=same) for way in contender.ways]
    for batch in batches:
        batch.poison()
    contender.arena.device.synchronize()
    return batches


def _run(batches: Sequence[Batch]) -> None:
    _start(batches)
    for batch in batches:
        batch.synchronize()


def _start(batches: Sequence[Batch]) -> None:
    if len(batches) == 1:
        keep = batches[0].kept.append
        for call in batches[0].calls:
            keep(call())
        return
    one, other = batches
    keep_one, keep_other = one.kept.append, other.kept.append
    # Turn by turn, so that neither direction is idle while the host starts the other.
    for call_one, call_other in zip(one.calls, other.calls, strict=True):
        keep_one(call_one())
        keep_other(call_other())


def _time_each(batch: Batch, before: Call | None) -> list[float]:
    clock, keep, seconds = time.perf_counter_ns, batch.kept.append, []
    for call in batch.calls:
        if before is not None:
            before()
        begin = clock()
        # Dropping what an earlier call returned is part of the price of a call.
        keep(call())
        seconds.append((clock() - begin) * 1e-9)
    return seconds
