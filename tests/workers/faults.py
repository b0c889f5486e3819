"""Random faults in whole pipelines: what is planned, how it is made to happen, and what is left afterwards.

Invariant: a fault is reached by counts: of batches, of rows that a worker has written, of lines of the library that were run, of
words that a process has said; none of them by waiting for a while. What comes out of it is judged in the test.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

import xferlib
from tests.core.fakes import on_thread
from tests.pipeline.steps import PATIENCE
from tests.workers.fills import STAMPED, OwnError, Stamp, Trip, stamp
from xferlib.errors import WorkerDiedError
from xferlib.pipeline.workers.run import Run
from xferlib.pipeline.workers.shared_ring import SharedRing

WORKERS = 2
ROWS = STAMPED["image"][0][0]
SHARES = {"worker": 8, "tasks": 4, "fill": 4, "fn": 4, "sink": 4, "break": 5, "close": 8, "parent": 3}
"""Of forty faults, how many are of which kind."""
HEAD_START = 0.05
"""Seconds that a thread gives another to finish what it must not wait for for ever: that may wait for it in turn."""

Tree = dict[str, npt.NDArray[np.uint64]]


class Boom(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One pass over a pipeline, and what befalls it. `when` counts batches, or calls, before the fault."""

    index: int
    kind: str
    way: str
    detail: str
    count: int
    when: int
    depth: int
    ordered: bool
    into: bool
    """Results go to an array instead of pinned memory."""
    rows: tuple[int, ...]
    """Of every batch, in turn."""
    row: int
    """Where the worker falls, if it does."""
    beside: int | None
    """The task at which a worker dies besides."""
    kept: frozenset[int]
    """The results that the consumer keeps."""
    switch: float
    """Seconds that a thread may go on while others wait: the shorter, the more moments there are at which another comes in."""
    file: str
    lines: int
    """So many lines of this file of the library are run between batch `when` and the moment at which another thread closes."""

    @property
    def run(self) -> int:
        """A number that no other pass has."""
        return self.index + 1

    @property
    def computes(self) -> bool:
        """Whether there is an `fn` on the way."""
        return self.way != "prefetch"

    @property
    def endless(self) -> bool:
        """Whether only the fault ends it."""
        return self.kind in ("close", "parent")

    @property
    def raises_death(self) -> bool:
        """Whether a death is raised in place of its batch."""
        return self.kind == "worker" and self.detail.endswith("raised")

    def stamp(self, number: int, trip: Trip | None = None) -> Stamp:
        """Return a task."""
        return Stamp(self.run, number, self.rows[number % len(self.rows)], trip)

    def expected(self, number: int) -> Tree:
        """Return what must come out."""
        batch = self.stamp(number).batch
        return fn(batch) if self.computes else batch


DETAILS = {
    "worker": ("inside, replaced", "inside, raised", "outside, replaced", "outside, raised"),
    "break": ("closed", "dropped"),
    "close": ("first", "last", "run", "ring"),
}
FILES = {
    "prefetch": ("prefetch.py", "background.py", "source_thread.py", "workers/run.py"),
    "stream_map": ("stream_map.py", "drain.py", "drained.py", "source_thread.py", "workers/run.py"),
    "drain": ("drain.py", "drained.py", "source_thread.py", "workers/run.py"),
    "hand": ("drain.py", "workers/run.py"),
}


def planned(seed: int, count: int) -> list[Scenario]:
    """Return so many scenarios, of every forty so many of each kind, in random order."""
    rng = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < count:
        forty = [kind for kind, share in SHARES.items() for _ in range(share)]
        rng.shuffle(forty)
        kinds += forty
    # Each from a seed of its own: the same whatever the count.
    return [_scenario(random.Random(f"{seed} {index}"), index, kind) for index, kind in enumerate(kinds[:count])]


def _scenario(rng: random.Random, index: int, kind: str) -> Scenario:
    count = rng.randint(3, 14)
    endless = kind in ("close", "parent")
    ways = ("stream_map", "drain", "hand") if kind == "fn" else ("prefetch", "stream_map", "drain", "hand")
    way = rng.choice(ways)
    # Nobody can drop a loop that has a thread of the consumer's own.
    details = ("closed",) if kind == "break" and way == "hand" else DETAILS.get(kind, ("",))
    # What a close loses between two batches is seen only in their order.
    ordered = rng.random() < 0.75 or kind == "close"
    beside = rng.randrange(count) if kind != "worker" and rng.random() < 0.25 else None
    when = rng.randrange(count)
    return Scenario(
        index=index,
        kind=kind,
        way=way,
        detail=rng.choice(details),
        count=count,
        when=when,
        depth=rng.randint(1, 3),
        ordered=ordered,
        into=way in ("stream_map", "drain") and not endless and rng.random() < 0.3,
        rows=(ROWS, ROWS, ROWS, rng.randint(1, ROWS)),
        row=rng.randrange(ROWS),
        beside=None if kind == "fill" and beside == when else beside,
        kept=frozenset(rng.sample(range(count), 2)),
        switch=rng.choice((5e-3, 1e-4, 1e-6)),
        file=rng.choice(FILES[way]),
        lines=rng.randrange(60),
    )


def fn(tree: Tree) -> Tree:
    """Compute something that can be told from its argument, and undone."""
    return {"image": ~tree["image"], "label": ~tree["label"]}


def same(tree: Tree, expected: Tree) -> bool:
    """Compare two batches byte for byte."""
    return tree.keys() == expected.keys() and all(
        (tree[key].shape, tree[key].dtype, tree[key].tobytes()) == (value.shape, value.dtype, value.tobytes())
        for key, value in expected.items()
    )


class Loop(Protocol):
    """What stands between a run and its consumer."""

    def __iter__(self) -> Iterator[Any]: ...

    def close(self) -> None: ...


@final
class ByHand:
    """Each batch put, computed on and submitted to a drain by a thread, and taken by another."""

    def __init__(self, run: Run, stager: xferlib.Stager, compute: Callable[[Tree], Tree], depth: int) -> None:
        self._drain = xferlib.Drain(stager, depth)
        self._results = self._drain.results()
        self._producing = on_thread(partial(_produce, run, stager, compute, self._drain))

    def __iter__(self) -> Iterator[Any]:
        return self._results

    def close(self) -> None:
        self._drain.close()
        self._producing.result(PATIENCE)


def _produce(run: Run, stager: xferlib.Stager, compute: Callable[[Tree], Tree], drain: xferlib.Drain) -> None:
    try:
        for batch in run:
            drain.submit(compute(stager.put(batch).value))
    except Exception as error:
        # Its traceback would keep a batch.
        drain.end(error.with_traceback(None))
    drain.end()


def loops(scenario: Scenario, run: Run, stager: xferlib.Stager, compute: Callable[[Tree], Tree], out: Tree | None) -> list[Loop]:
    """Build a pipeline behind a run. The consumer iterates the first of them."""
    if scenario.way == "stream_map":
        return [xferlib.stream_map(compute, run, stager, scenario.depth, out=out)]
    if scenario.way == "hand":
        return [ByHand(run, stager, compute, scenario.depth)]
    ahead = xferlib.prefetch(run, stager, scenario.depth)
    if scenario.way == "prefetch":
        return [ahead]
    return [xferlib.drain(map(compute, ahead), stager, scenario.depth, out=out), ahead]


@final
class Ambush:
    """Has another thread do something at a certain line: when threads have run so many lines of a file since it was armed.

    The thread that comes there lets the other one finish first, if that does not wait for it.
    """

    def __init__(self, file: str, lines: int) -> None:
        self.striking: list[Future[None]] = []
        self._end = f"/xferlib/pipeline/{file}"
        self._strike: Callable[[], None] | None = None
        # Counts in single steps, whichever threads come by.
        self._passed = itertools.count()
        self._lines = lines

    def arm(self, strike: Callable[[], None]) -> None:
        """Begin to count."""
        self._strike = strike

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """See `sys.settrace`."""
        if not frame.f_code.co_filename.endswith(self._end):
            return None
        if event == "line" and self._strike is not None and next(self._passed) == self._lines:
            self.striking.append(on_thread(self._strike))
            with suppress(TimeoutError):
                self.striking[0].result(HEAD_START)
        return self.trace

    @contextmanager
    def laid(self) -> Iterator[None]:
        """Look at what this thread, and those that are started, run."""
        before = sys.gettrace(), threading.gettrace()
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before[0])
            threading.settrace(before[1])


@final
@dataclass
class Pass:
    """One scenario as it happens. `play()` runs on a thread, so that one that hangs is seen."""

    scenario: Scenario
    stager: xferlib.Stager
    ring: SharedRing
    graves: Path
    killed: set[int]
    """Processes that have been killed from outside, here and before."""
    taken: list[int] = field(default_factory=list)
    error: Exception | None = None
    struck: bool = False
    wrong: str = ""
    """What came out that should not have."""
    calls: int = 0
    _kept: list[tuple[int, Tree]] = field(default_factory=list)

    def play(self) -> None:
        """Run the pipeline to its end, whatever that is. Raises nothing that was to be expected."""
        scenario = self.scenario
        run = self.ring.run(
            stamp,
            self._tasks(),
            workers=WORKERS,
            ordered=scenario.ordered,
            on_death="raise" if scenario.raises_death else "replace",
        )
        out = {name: np.zeros((scenario.count * ROWS, *shape[1:]), dtype) for name, (shape, dtype) in STAMPED.items()}
        ambush = Ambush(scenario.file, scenario.lines)
        with ambush.laid() if scenario.kind == "close" else nullcontext():
            self._end(run, out if scenario.into else None, ambush)
        for closing in ambush.striking:
            closing.result(PATIENCE)
        for number, tree in self._kept:
            self._check(number, tree)
        self._kept.clear()

    def _end(self, run: Run, out: Tree | None, ambush: Ambush) -> None:
        parts = loops(self.scenario, run, self.stager, self._compute, out)
        try:
            self._consume(parts, run, ambush)
        except (Boom, OwnError, WorkerDiedError, xferlib.ClosedError) as error:
            self.error = error.with_traceback(None)
        finally:
            if self.scenario.detail != "dropped":
                for part in parts:
                    part.close()
            parts.clear()

    def _tasks(self) -> Iterator[Stamp]:
        scenario = self.scenario
        for number in itertools.count() if scenario.endless else range(scenario.count):
            if scenario.kind == "tasks" and number == scenario.when:
                self.struck = True
                raise Boom
            yield scenario.stamp(number, self._trip(number))

    def _trip(self, number: int) -> Trip | None:
        scenario = self.scenario
        at = min(scenario.row, scenario.rows[number % len(scenario.rows)] - 1)
        grave = str(self.graves / f"{scenario.run}-{number}")
        if number == scenario.beside:
            return Trip(at, grave)
        if number != scenario.when:
            return None
        if scenario.kind == "worker" and scenario.detail.startswith("inside"):
            return Trip(at, grave)
        return Trip(at) if scenario.kind == "fill" else None

    def _compute(self, tree: Tree) -> Tree:
        if self.scenario.kind == "fn" and self.calls == self.scenario.when:
            self.struck = True
            raise Boom
        self.calls += 1
        return fn(tree)

    def _consume(self, parts: list[Loop], run: Run, ambush: Ambush) -> None:
        for tree in parts[0]:
            label = int(tree["label"][0])
            number = (~label if self.scenario.computes else label) & 0xFFFFFFFF
            self._check(number, tree)
            if len(self.taken) in self.scenario.kept:
                self._kept.append((number, tree))
            self.taken.append(number)
            if len(self.taken) == self.scenario.when + 1 and self._strike(parts, run, ambush):
                return

    def _strike(self, parts: list[Loop], run: Run, ambush: Ambush) -> bool:
        """Do what is due behind so many batches, and tell whether the consumer leaves."""
        kind, detail = self.scenario.kind, self.scenario.detail
        if kind == "worker" and detail.startswith("outside"):
            self.struck = True
            self.killed.add(kill_one(self.ring, self.scenario.row))
        if kind == "close":
            self.struck = True
            ends = {"first": parts[0].close, "last": parts[-1].close, "run": run.close, "ring": self.ring.close}
            ambush.arm(ends[detail])
        if kind in ("sink", "break"):
            self.struck = True
        if kind == "sink":
            raise Boom
        return kind == "break"

    def _check(self, number: int, tree: Tree) -> None:
        if not same(tree, self.scenario.expected(number)):
            self.wrong += f"result {len(self.taken)} is not that of task {number}. "


def kill_one(ring: SharedRing, choice: int) -> int:
    """Kill one of the workers and return its process id."""
    # One that had fallen before is no more once the ring has heard of it.
    for _ in range(100):
        pid = ring.pids[choice % len(ring.pids)]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return pid
    raise AssertionError(f"no worker among {ring.pids} could be killed")


MARK = "XFERLIB_TEST_MARK"


def endless(seed: int, index: int, graves: str) -> None:
    """Be the process that is killed: play a scenario that has no end, and say how many batches have come out of it."""
    scenario = planned(seed, index + 1)[index]
    with xferlib.stager("host", pinned_limit=64 << 20) as stager, SharedRing(stager, STAMPED, slots=4) as ring:
        print("begun", flush=True)
        playing = Pass(scenario, stager, ring, Path(graves), set(), taken=_Said())
        playing.play()
    raise AssertionError(f"it came to an end: {playing}")


class _Said(list[int]):
    """Numbers that are said as they come."""

    def append(self, number: int) -> None:
        super().append(number)
        print(number, flush=True)
