"""Whatever fails in a whole pipeline, and whenever: it ends, what came out of it is right, and nothing is left behind.

One sequence of faults, drawn from a seed, on one stager and, as long as none of them closes it, one ring: every scenario begins
with what those before it have left. `XFERLIB_FAULTS` says how many, `XFERLIB_SEED` which.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple, final

import psutil
import pytest

import xferlib
from tests.core.fakes import on_thread
from tests.pipeline.steps import PATIENCE, until
from tests.workers.conftest import descriptors, shared_names
from tests.workers.faults import MARK, ROWS, SHARES, WORKERS, Boom, Pass, Scenario, planned, same
from tests.workers.fills import STAMPED, OwnError, Stamp, stamp
from xferlib.conformance.guard import allow
from xferlib.errors import WorkerDiedError
from xferlib.pipeline.workers.shared_ring import SharedRing

FAULTS = int(os.environ.get("XFERLIB_FAULTS", "40"))
SEED = int(os.environ.get("XFERLIB_SEED", "1"))
DEATH = re.compile(r"worker (\d+) was killed by SIGKILL while it (?:had nothing to fill|filled a slot for task (\d+))")
STAYING = ("xferlib-host-", "xferlib-dispatcher")
"""Threads of an open stager."""


@pytest.mark.parametrize("seed", [SEED], ids="seed{}".format)
def test_faults_at_random_moments_hang_nothing_leave_nothing_and_give_no_wrong_batch(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loop would warn of a source that is slow to come back, as one is whose worker is being replaced on a busy machine.
    monkeypatch.setattr("xferlib.pipeline.background.CLOSE_SECONDS", PATIENCE)
    # It comes with the first spawned process, and stays.
    resource_tracker.ensure_running()
    # And so do threads of the process with the first stager.
    xferlib.stager("host").close()
    before = footprint()
    names = shared_names()
    plan = planned(seed, FAULTS)
    with warnings_kept() as heard, xferlib.stager("host", pinned_limit=64 << 20) as stager:
        ground = Ground(stager, tmp_path, heard)
        for scenario in plan:
            # However many there are.
            allow(3 * PATIENCE)
            ground.stage(scenario)
        allow(3 * PATIENCE)
        ground.close()
    until(lambda: footprint() == before)
    until(lambda: shared_names() <= names)
    print(f"seed {seed}: {dict(sorted(ground.tally.items()))}, workers killed: {len(ground.killed)}")
    assert {kind: ground.tally[kind] for kind in SHARES} == {kind: [each.kind for each in plan].count(kind) for kind in SHARES}


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Have threads take turns after so many seconds."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@contextmanager
def warnings_kept() -> Iterator[list[warnings.WarningMessage]]:
    """Keep what is warned of, on any thread, to be compared with what was done."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", xferlib.SynchronousTransferWarning)
        yield heard


@final
class Ground:
    """Where scenarios take place, one after the other: the ring that they share, and what has become of its workers."""

    def __init__(self, stager: xferlib.Stager, graves: Path, heard: list[warnings.WarningMessage]) -> None:
        self.tally: Counter[str] = Counter()
        self.killed: set[int] = set()
        self._told: set[int] = set()
        self._stager = stager
        self._graves = graves
        self._heard = heard
        self._healthy = 0
        self._without_ring = footprint(stager)
        self._ring: SharedRing | None = self._opened()
        self._with_ring = footprint(stager)

    def stage(self, scenario: Scenario) -> None:
        """Play one scenario, judge it, and look at what is left."""
        try:
            if scenario.kind == "parent":
                kill_parent(scenario, self._graves)
            else:
                self._play(scenario)
        except BaseException as error:
            error.add_note(f"in {scenario}")
            raise
        self.tally[scenario.kind] += 1
        if scenario.detail:
            self.tally[f"{scenario.kind}: {scenario.detail}"] += 1

    def close(self) -> None:
        """Close the ring. Nothing may be left of it."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        until(lambda: footprint(self._stager) == self._without_ring)

    def _play(self, scenario: Scenario) -> None:
        if self._ring is None:
            self._ring = self._opened()
        staged = self._stager.stats().synchronous
        playing = Pass(scenario, self._stager, self._ring, self._graves, self.killed)
        with switching(scenario.switch):
            on_thread(playing.play).result(PATIENCE)
        judge(playing)
        deaths = self._deaths(playing)
        judge_deaths(playing, deaths)
        del playing
        if scenario.kind == "close" and scenario.detail == "ring":
            self.close()
            return
        assert scenario.into or self._stager.stats().synchronous == staged
        until(self._whole)
        until(lambda: footprint(self._stager) == self._with_ring)

    def _opened(self) -> SharedRing:
        ring = SharedRing(self._stager, STAMPED, slots=4)
        self._ring = ring
        until(self._whole)
        return ring

    def _whole(self) -> bool:
        """Pass a few batches through the ring, all right, and tell whether it has all its workers again."""
        assert self._ring is not None
        self._healthy += 1
        tasks = [Stamp(1 << 20 | self._healthy, number, ROWS) for number in range(6)]
        for task, batch in zip(tasks, self._ring.run(stamp, tasks, workers=WORKERS), strict=True):
            assert same(batch, task.batch)
        self._deaths(None)
        pids = self._ring.pids
        return len(pids) == WORKERS and all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)

    def _deaths(self, playing: Pass | None) -> dict[int, int | None]:
        """Return which deaths were told since, and of which tasks; all of them were ours, and each is told once."""
        self.killed.update(fallen(self._graves).values())
        said = [str(warning.message) for warning in self._heard]
        self._heard.clear()
        if playing is not None and isinstance(playing.error, WorkerDiedError):
            said.append(str(playing.error))
        found: dict[int, int | None] = {}
        for words in said:
            death = DEATH.match(words)
            assert death is not None, words
            pid, task = int(death[1]), None if death[2] is None else int(death[2])
            assert pid in self.killed - self._told, words
            self._told.add(pid)
            found[pid] = task
        return found


def judge(playing: Pass) -> None:
    """Compare what came out, and how it ended, with what the fault was."""
    scenario, taken = playing.scenario, playing.taken
    assert not playing.wrong
    assert len(set(taken)) == len(taken)
    assert taken == list(range(len(taken))) or not scenario.ordered
    assert scenario.endless or set(taken) <= set(range(scenario.count))
    error = None if playing.error is None else type(playing.error)
    allowed = ends(scenario)
    assert error in allowed, playing
    assert len(taken) in allowed[error], playing
    assert playing.struck or scenario.kind == "fill" or scenario.detail.startswith("inside"), playing


def ends(scenario: Scenario) -> dict[type[Exception] | None, range]:
    """Return the errors with which a scenario may end, and how many batches come out before each."""
    count, when, ordered = scenario.count, scenario.when, scenario.ordered
    whole, later = range(count, count + 1), range(when + 1, sys.maxsize)
    # Without an order an error overtakes batches, and batches overtake it.
    until_then, until_lost = (range(when, when + 1),) * 2 if ordered else (range(when + 1), range(count))
    by_fault: dict[str, dict[type[Exception] | None, range]] = {
        "tasks": {Boom: until_then},
        "fill": {OwnError: until_lost},
        "fn": {Boom: range(when, when + 1)},
        "sink": {Boom: range(when + 1, when + 2)},
        "break": {None: range(when + 1, when + 2)},
        "worker: inside, replaced": {None: whole},
        "worker: inside, raised": {WorkerDiedError: until_lost},
        "worker: outside, replaced": {None: whole},
        "worker: outside, raised": {None: whole, WorkerDiedError: later},
        "close: first": {xferlib.ClosedError: later},
        "close: last": {xferlib.ClosedError: later},
        "close: run": {None: later},
        "close: ring": {xferlib.ClosedError: later},
    }
    return by_fault.get(scenario.kind) or by_fault[f"{scenario.kind}: {scenario.detail}"]


def judge_deaths(playing: Pass, deaths: dict[int, int | None]) -> None:
    """A worker that fell inside a task of which the consumer heard was told of, and of that task."""
    scenario = playing.scenario
    inside = scenario.detail.startswith("inside")
    here = {number: pid for (run, number), pid in fallen(playing.graves).items() if run == scenario.run}
    for number, pid in here.items():
        if inside or number in playing.taken:
            assert deaths.get(pid) == number, (playing, deaths)
    assert not inside or list(here) == [scenario.when]


def fallen(graves: Path) -> dict[tuple[int, int], int]:
    """Return the workers that have died inside a task, by its run and number."""
    found = {}
    for name in os.listdir(graves):
        run, number = name.split("-")
        found[int(run), int(number)] = int(os.readlink(graves / name))
    return found


def kill_parent(scenario: Scenario, graves: Path) -> None:
    """Kill a process that has a pipeline when it has said so much; its workers end."""
    mark = str(uuid.uuid4())
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.workers.faults import endless; endless({SEED}, {scenario.index}, {str(graves)!r})"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, MARK: mark},
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        # The first says that it has begun; the batches come behind it.
        said = [process.stdout.readline() for _ in range(scenario.when + 1)]
        family = marked(mark)
        process.kill()
        failure = on_thread(process.stderr.read).result(PATIENCE).decode() if b"" in said else ""
    assert b"" not in said, failure
    assert process.pid in family
    assert len(family) > WORKERS or scenario.when == 0
    until(partial(lambda mark: not marked(mark), mark))


class Footprint(NamedTuple):
    """What this process has, and a stager if there is one."""

    threads: frozenset[str]
    children: int
    mappings: int
    """Of memory that has the name of ours."""
    descriptors: Counter[str]
    pinned_used: int
    pins: int
    busy: bool


def footprint(stager: xferlib.Stager | None = None) -> Footprint:
    """Look around."""
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    allowed = STAYING if stager is not None else STAYING[1:2]
    mappings = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:xferlib" in line}
    used = pins = 0
    if stager is not None:
        # What staging has at rest is idle, and this process's own to keep.
        stager.trim()
        used = stager._pool.usage().used
        calls = stager.backend.memory.calls()  # type: ignore[attr-defined]  # Of the host backend only.
        pins = calls.pins - calls.unpins
    return Footprint(
        threads=frozenset(name for name in names if not name.startswith(allowed)),
        children=len(psutil.Process().children(recursive=True)),
        mappings=len(mappings),
        descriptors=descriptors(),
        pinned_used=used,
        pins=pins,
        busy=stager is not None and stager._ledger.busy,
    )


def marked(mark: str) -> list[int]:
    """Return the processes that were started, directly or not, with a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in process.environ().values():
                found.append(process.pid)
    return found
