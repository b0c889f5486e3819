"""How pipelines are timed: compute on one batch after another while the next one comes, or while the outputs go.

The bound of a pipeline is the longer of compute alone and copy alone, measured just before and just after each sample, in the same
order of calls. Before that, compute is tuned to take as long as the copy: then it is hardest to hide one behind the other.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from benchmarks import memory
from benchmarks.harness import Timing
from benchmarks.steps import OUTPUTS, Bytes, Compute, Drain, Feed
from benchmarks.ways import Call, Corrupted, Device, Direction

__all__ = [
    "Alone",
    "Pipe",
    "Result",
    "checksums",
    "drain",
    "drain_on",
    "measure",
    "random_batches",
    "train",
    "train_on",
    "train_steadily",
    "tune",
]

TAGS = 7
"""It shares no factor with the number of outputs, so no target gets the same bytes twice in a row."""
LATE = 2
"""Outputs that are under way while another one is computed."""
PROBES = 257
FEWEST_STEPS = 12
MOST_SECONDS = 4.0
MOST_ROUNDS = 1 << 20


class Pipe(NamedTuple):
    """A contender: runs so many steps and returns their seconds, verified. Raises `Corrupted`."""

    name: str
    run: Callable[[int], float]
    share: float


@dataclass(kw_only=True)
class Result:
    """What was measured: seconds of a step by contender, and of the bound in the rounds of the first."""

    timings: dict[str, Timing]
    bound: Timing
    copies: Timing
    """Of the bare copy alone, in the same rounds."""
    compute: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)

    def details(self, timing: Timing, *, rounds: int) -> dict[str, Any]:
        """Return what a record says beside the usual figures."""
        each = [round(ours / bound, 4) for ours, bound in zip(timing.rounds, self.bound.rounds, strict=True)]
        return {
            "over_bound": round(1 / timing.share_of(self.bound), 4),
            "over_bound_each": each,
            "compute_seconds": statistics.median(self.compute),
            "copy_seconds": statistics.median(self.copy),
            "verified_steps": timing.count * len(timing.rounds),
            "rounds_of_compute": rounds,
        }


def random_batches(empty: Callable[[int], Bytes], nbytes: int, count: int, seed: int) -> list[Bytes]:
    """Return batches that differ in nearly every byte."""
    batches = [empty(nbytes) for _ in range(count)]
    for index, batch in enumerate(batches):
        memory.fill_random(batch, seed + index)
    return batches


def checksums(compute: Compute, batches: Sequence[Bytes]) -> list[int]:
    """Return what steps must find in these batches."""
    return [compute.checksum(batch) for batch in batches]


class Alone:
    """Times compute without copies, and bare copies without compute."""

    def __init__(
        self, device: Device, compute: Compute, batches: Sequence[Bytes], direction: Direction, *, count: int, repeats: int
    ) -> None:
        self._compute = compute
        self._device = device
        self._count = count
        self._repeats = repeats
        self._batch = device.upload(batches[0])
        self._wait = device.raw(direction).synchronize
        self._copies = self._bind(batches, direction)
        self.rounds = 0
        self.bound = 0.0
        """Seconds of a step at best, once compute is tuned."""

    def steps(self, most: int) -> int:
        """Return how many steps make a sample: as many as asked for, or fewer on devices that would take minutes."""
        return min(most, max(FEWEST_STEPS, int(MOST_SECONDS / self.bound)))

    def _bind(self, batches: Sequence[Bytes], direction: Direction) -> list[Call]:
        """Return a bare copy for each batch. Where arrays can be written to, one device array serves for all."""
        way = self._device.raw(direction)
        # A bare copy to memory that already holds these bytes is as fast as any other, and cannot make an array wrong.
        self._held = [self._batch] if direction == "d2h" else [self._device.upload(batch) for batch in batches]
        if direction == "h2d":
            return [way.bind(batch, array) for batch, array in zip(batches, self._held, strict=True)]
        return [way.bind(self._batch, batch) for batch in batches]

    def copy_seconds(self) -> float:
        """Return the seconds of one bare copy, of a row of them."""
        begin = time.perf_counter()
        for index in range(self._count):
            self._copies[index % len(self._copies)]()
        self._wait(())
        return (time.perf_counter() - begin) / self._count

    def compute_seconds(self, rounds: int) -> float:
        """Return the seconds of one step of compute, of a row of them, launched as in a pipeline."""
        compute, before = self._compute, None
        begin = time.perf_counter()
        for index in range(self._count):
            mark, _ = compute.step(self._batch, rounds, index % TAGS + 1)
            if before is not None:
                compute.wait(before)
            before = mark
        compute.wait(before)
        return (time.perf_counter() - begin) / self._count

    def measure(self) -> list[tuple[float, float]]:
        """Return pairs of seconds: of compute, of a copy."""
        return [(self.compute_seconds(self.rounds), self.copy_seconds()) for _ in range(self._repeats)]


def tune(alone: Alone) -> int:
    """Choose the number of rounds with which compute takes as long as the copy, and return it."""
    alone.copy_seconds()
    target = statistics.median(alone.copy_seconds() for _ in range(5))

    def seconds(rounds: int) -> float:
        # The first time compiles, or grows a pool.
        alone.compute_seconds(rounds)
        return statistics.median(alone.compute_seconds(rounds) for _ in range(3))

    rounds, low = 1, (0, seconds(0))
    high = (1, seconds(1))
    while high[1] < target and rounds < MOST_ROUNDS:
        rounds *= 2
        low, high = high, (rounds, seconds(rounds))
    for _ in range(2):
        if high[0] <= low[0] or high[1] <= low[1]:
            break
        rounds = max(1, round(low[0] + (target - low[1]) * (high[0] - low[0]) / (high[1] - low[1])))
        point = (rounds, seconds(rounds))
        low, high = (point, high) if point[1] < target and rounds < high[0] else (low, point)
    alone.rounds = rounds
    alone.bound = max(target, seconds(rounds))
    return rounds


def train(compute: Compute, feed: Feed, batches: Sequence[Bytes], rounds: int, steps: int) -> float:
    """Run a training loop in place: the next batch is asked for after the step is launched. Return its seconds, verified."""
    marks: list[Any] = []
    begin = time.perf_counter()
    coming = feed.start(batches[0])
    for index in range(steps):
        mark, _ = compute.step(feed.use(coming), rounds, 1)
        coming = feed.start(batches[(index + 1) % len(batches)])
        marks.append(mark)
        if index:
            compute.wait(marks[index - 1])
    compute.wait(marks[-1])
    seconds = time.perf_counter() - begin
    feed.use(coming)
    _verify(feed.name, compute, checksums(compute, batches), marks)
    return seconds


def train_on(
    compute: Compute,
    name: str,
    open_source: Callable[[int], AbstractContextManager[Iterable[Any]]],
    expected: Sequence[int],
    rounds: int,
    steps: int,
) -> float:
    """Run a training loop on device arrays that a source has put ahead of time; as `train`.

    `expected`: the checksums of the batches that come in turn.
    """
    marks: list[Any] = []
    begin = time.perf_counter()
    with open_source(steps) as source:
        for index, array in enumerate(source):
            mark, _ = compute.step(compute.adopt(array), rounds, 1)
            marks.append(mark)
            if index:
                compute.wait(marks[index - 1])
        compute.wait(marks[-1])
    seconds = time.perf_counter() - begin
    _verify(name, compute, expected, marks)
    return seconds


def train_steadily(
    compute: Compute,
    name: str,
    open_source: Callable[[], AbstractContextManager[Iterable[Any]]],
    expected: Sequence[int],
    rounds: int,
    warm: int,
    steps: int,
) -> float:
    """Run a training loop as `train_on`, from the middle of an endless source: neither its start nor its end is in the seconds.

    The seconds go from the end of the last of `warm` steps, one at least, to the end of the last step of all, when batches are
    still coming. `expected`: the checksums of the batches that come in turn.
    """
    marks: list[Any] = []
    begin = 0.0
    with open_source() as source:
        for index, array in enumerate(islice(source, warm + steps)):
            mark, _ = compute.step(compute.adopt(array), rounds, 1)
            marks.append(mark)
            if index:
                compute.wait(marks[index - 1])
            if index == warm:
                begin = time.perf_counter()
        compute.wait(marks[-1])
        seconds = time.perf_counter() - begin
    if len(marks) < warm + steps:
        raise RuntimeError(f"{name!r} gave {len(marks)} batches and ended: expected {warm + steps} and more to come")
    _verify(name, compute, expected, marks)
    return seconds


class _Frames:
    """Verifies outputs: some hundred bytes of each as it comes, all bytes of the latest at the end."""

    def __init__(self, name: str, bases: Sequence[tuple[Bytes, Any]], keep: int) -> None:
        nbytes = bases[0][0].nbytes
        self._name = name
        self._values = [values for values, _ in bases]
        self._probes = np.unique(np.linspace(0, nbytes - 1, min(PROBES, nbytes)).astype(np.intp))
        self._samples = [values[self._probes] for values in self._values]
        self._latest: deque[tuple[int, Bytes]] = deque(maxlen=keep)

    def add(self, index: int, found: Bytes) -> None:
        """Take the output of a step. Raises `Corrupted`."""
        if not np.array_equal(found[self._probes], self._samples[index % len(self._samples)] ^ np.uint8(_tag(index))):
            raise _corrupted(self._name, "d2h", f"frame {index}")
        self._latest.append((index, found))

    def end(self) -> None:
        """Compare all bytes of the latest. Raises `Corrupted`."""
        for index, found in self._latest:
            if not memory.equal(found ^ np.uint8(_tag(index)), self._values[index % len(self._values)]):
                raise _corrupted(self._name, "d2h", f"frame {index}")


def drain(
    compute: Compute, way: Drain, bases: Sequence[tuple[Bytes, Any]], targets: Sequence[Bytes], rounds: int, steps: int
) -> float:
    """Bring the output of every step to the host, two steps late, into targets in turn. Return the seconds, verified.

    Some hundred bytes of each output are compared as soon as it is said to be there, all bytes of the last ones at the end.
    """
    under_way: deque[tuple[int, Any]] = deque()
    frames = _Frames(way.name, bases, OUTPUTS)

    def finish() -> None:
        index, started = under_way.popleft()
        frames.add(index, way.finish(started))

    begin = time.perf_counter()
    for index in range(steps):
        _, output = compute.step(bases[index % len(bases)][1], rounds, _tag(index))
        under_way.append((index, way.start(output, targets[index % len(targets)])))
        if len(under_way) > LATE:
            finish()
    while under_way:
        finish()
    seconds = time.perf_counter() - begin
    frames.end()
    return seconds


def drain_on(
    compute: Compute,
    name: str,
    open_drain: Callable[[Iterable[Any]], Iterable[Bytes]],
    bases: Sequence[tuple[Bytes, Any]],
    rounds: int,
    steps: int,
) -> float:
    """Take the output of every step from what brings them to the host; as `drain`, but only the last one is kept."""
    frames = _Frames(name, bases, 1)
    begin = time.perf_counter()
    outputs = (compute.step(bases[index % len(bases)][1], rounds, _tag(index))[1] for index in range(steps))
    taken = 0
    for found in open_drain(outputs):
        frames.add(taken, found)
        taken += 1
    seconds = time.perf_counter() - begin
    if taken < steps:
        raise RuntimeError(f"{name!r} gave {taken} outputs and ended: expected {steps}")
    frames.end()
    return seconds


def measure(pipes: Sequence[Pipe], alone: Alone, *, steps: int, samples: int, between: Call = lambda: None) -> Result:
    """Let the contenders take turns; the first is ours. Compute and copy alone are measured before, between and after.

    `between`: see `Effort`.
    """
    timings = {pipe.name: Timing(count=max(8, int(steps * pipe.share))) for pipe in pipes}
    result = Result(timings=timings, bound=Timing(), copies=Timing())
    for pipe in pipes:
        pipe.run(max(8, min(20, timings[pipe.name].count)))
    before = alone.measure()
    for _ in range(samples):
        between()
        for pipe in pipes:
            timing = timings[pipe.name]
            timing.add([pipe.run(timing.count) / timing.count])
            after = alone.measure()
            if pipe is pipes[0]:
                computes, copies = zip(*before, *after, strict=True)
                result.copies.add([statistics.median(copies)])
                result.bound.add([max(statistics.median(computes), statistics.median(copies))])
                result.compute += computes
                result.copy += copies
            before = after
    return result


def _verify(name: str, compute: Compute, expected: Sequence[int], marks: Sequence[Any]) -> None:
    found = compute.checksums(marks)
    wrong = [index for index, value in enumerate(found) if value != expected[index % len(expected)]]
    if wrong:
        raise _corrupted(name, "h2d", f"step {wrong[0]}, and {len(wrong)} of {len(marks)} in all")


def _tag(index: int) -> int:
    return index % TAGS + 1


def _corrupted(name: str, direction: Direction, where: str) -> Corrupted:
    return Corrupted(
        f"{name!r} said it was done, but the {direction} target does not hold the source's bytes: {where}. "
        "Every figure of this run is void; mend the copy first"
    )
