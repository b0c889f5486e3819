"""What is lost when a process is killed: a worker, at any moment; the parent; and what is left of either."""

from __future__ import annotations

import errno
import gc
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import xferlib
from tests import children
from tests.core.fakes import on_thread
from tests.pipeline.steps import until
from tests.workers import fills
from tests.workers.conftest import descriptors, first, shared_names
from tests.workers.fills import Gate
from xferlib.errors import WorkerDiedError
from xferlib.pipeline.workers.shared_ring import SharedRing

KILLS = int(os.environ.get("XFERLIB_KILLS", "20"))
SEED = int(os.environ.get("XFERLIB_SEED", "1"))

replaced = pytest.mark.filterwarnings("ignore:worker .* was killed by SIGKILL while it:RuntimeWarning")


NO_PIDFD = """
import errno, os

def pidfd_open(pid, flags=0):
    raise OSError(errno.ENOSYS, "not here")

os.pidfd_open = pidfd_open
"""


def talk() -> set[str]:
    """Return what this process has open by which processes and threads hear of each other, but for pipes, by number."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            kind = os.readlink(link)
            if kind.startswith(("socket:", "anon_inode:[eventfd]", "anon_inode:[pidfd]", "pidfd:")):
                found.add(f"{link.name} {kind}")
    return found


def ended(pidfd: int, seconds: float = 10) -> bool:
    """Wait for a process to end."""
    return bool(select.select([pidfd], [], [], seconds)[0])


@replaced
def test_a_killed_worker_loses_its_batch_which_another_fills(ring: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = ring.run(fills.behind, [(0, slow), 1, 2, 3], workers=2)
    coming = on_thread(lambda: first(next(run)))
    victim = slow.arrived()
    os.kill(victim, signal.SIGKILL)
    assert slow.arrived() != victim
    slow.open()
    assert coming.result(10) == 0
    assert [first(batch) for batch in run] == [1, 2, 3]
    assert victim not in ring.pids
    assert not psutil.pid_exists(victim)


@replaced
def test_a_killed_worker_is_noticed_without_process_descriptors(ring: SharedRing, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(pid: int) -> int:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(os, "pidfd_open", absent)
    run = ring.run(fills.die, [0, 1], workers=1, retries=1)
    assert first(next(run)) == 0
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        next(run)


def test_a_replaced_worker_is_told_of(ring: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = ring.run(fills.behind, [(0, slow)], workers=1)

    def follow() -> int:
        os.kill(slow.arrived(), signal.SIGKILL)
        slow.arrived()
        slow.open()
        return 0

    following = on_thread(follow)
    with pytest.warns(RuntimeWarning, match=r"worker \d+ was killed by SIGKILL while it filled a slot for task 0 .*tries again"):
        assert first(next(run)) == 0
    following.result(10)


@pytest.mark.parametrize("within", ["a for", "a prefetch"])
def test_a_replaced_worker_is_told_of_at_the_line_that_began_the_run(
    ring: SharedRing, stager: xferlib.Stager, tmp_path: Path, within: str
) -> None:
    """Also where a thread of ours goes over the batches, which has no line of the program's."""
    once = str(tmp_path / "killed")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run, line = ring.run(fills.die_once, [once], workers=1), sys._getframe().f_lineno
        for batch in run if within == "a for" else xferlib.prefetch(run, stager):
            assert first(batch) == 1
    said = [warning for warning in told if "was killed by SIGKILL" in str(warning.message)]
    assert [(warning.filename, warning.lineno) for warning in said] == [(__file__, line)]


def test_or_is_raised_in_place_of_its_batch_and_the_rest_goes_on(ring: SharedRing) -> None:
    run = ring.run(fills.die, range(5), workers=1, on_death="raise")
    got: list[int | str] = []
    for _ in range(5):
        try:
            got.append(first(next(run)))
        except WorkerDiedError as error:
            got.append(str(error).split(maxsplit=2)[2])
    lost = "was killed by SIGKILL while it filled a slot for task {0} ({0})"
    assert got == [0, lost.format(1), 2, lost.format(3), 4]


@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "as they are ready"])
def test_what_a_worker_finished_before_it_died_is_not_lost(ring: SharedRing, ordered: bool) -> None:
    run = ring.run(fills.die, [4, 0, 1], workers=1, on_death="raise", ordered=ordered)
    assert first(next(run)) == 4
    # By now it has the other two tasks.
    watched = os.pidfd_open(ring.pids[0])
    assert ended(watched)
    os.close(watched)
    assert first(next(run)) == 0
    with pytest.raises(WorkerDiedError, match="for task 2"):
        next(run)


@replaced
def test_what_a_dead_worker_leaves_is_filled_in_the_order_of_the_tasks(ring: SharedRing, gate: Callable[[int], Gate]) -> None:
    """Of the task that it was filling and of the next, which it had as well."""
    slow = gate(0)
    run = ring.run(fills.behind, [(0, slow), 1, 2], workers=1, ordered=False)
    coming = on_thread(lambda: [first(batch) for batch in run])
    os.kill(slow.arrived(), signal.SIGKILL)
    slow.arrived()
    slow.open()
    assert coming.result(10) == [0, 1, 2]


@replaced
def test_a_dead_worker_gives_back_the_slots_that_it_had_for_a_run_that_was_left(
    ring: SharedRing, gate: Callable[[int], Gate]
) -> None:
    slow = gate(0)
    left = ring.run(fills.behind, [7, (8, slow), 9], workers=1)
    assert first(next(left)) == 7
    victim = slow.arrived()
    left.close()
    later = ring.run(fills.number, range(3), workers=1)
    os.kill(victim, signal.SIGKILL)
    # Held at once, they need every slot.
    batches = on_thread(lambda: [next(later) for _ in range(3)]).result(10)
    assert [first(batch) for batch in batches] == [0, 1, 2]


def test_a_batch_that_is_given_up_takes_no_slot_with_it(stager: xferlib.Stager) -> None:
    with SharedRing(stager, (64, np.int64), slots=2) as ring:
        run = ring.run(fills.die, [1, 3, 0], workers=1, on_death="raise")
        for _ in range(2):
            with pytest.raises(WorkerDiedError):
                on_thread(lambda: next(run)).result(10)
        assert on_thread(lambda: first(next(run))).result(10) == 0


@replaced
@pytest.mark.parametrize(("limit", "tries"), [({"retries": 1}, 1), ({}, 2)], ids=["one", "by default"])
def test_a_task_that_kills_its_workers_is_named_after_so_many(ring: SharedRing, limit: dict[str, Any], tries: int) -> None:
    run = ring.run(fills.die, [0, 1, 2], workers=1, **limit)
    assert first(next(run)) == 0
    with pytest.raises(WorkerDiedError, match=rf"SIGKILL while it filled a slot for task 1 \(1\), with {tries} tries before"):
        next(run)
    assert first(next(run)) == 2


def test_a_worker_that_leaves_is_a_dead_one(ring: SharedRing) -> None:
    with pytest.raises(WorkerDiedError, match="left with code 5 while it filled a slot for task 0"):
        next(ring.run(fills.leave, [1], workers=1, on_death="raise"))


@replaced
def test_workers_killed_at_random_moments_cost_no_batch_and_leave_nothing(stager: xferlib.Stager) -> None:
    rng = random.Random(SEED)
    # It comes with the first spawned process, and stays.
    resource_tracker.ensure_running()
    # What other tests have left in cycles must not go meanwhile.
    gc.collect()
    files = descriptors()
    stop = threading.Event()

    def tasks() -> Iterator[int]:
        number = 0
        while not stop.is_set():
            yield number
            number += 1

    with SharedRing(stager, ((256, 256), np.int64), slots=4) as ring:
        killed: set[int] = set()
        for expected, batch in enumerate(ring.run(fills.slowly, tasks(), workers=2, retries=1000)):
            assert first(batch) == expected
            if len(killed) >= KILLS:
                stop.set()
            elif rng.random() < 0.3 and (alive := [pid for pid in ring.pids if pid not in killed]):
                # Somewhere inside a batch or between two; the moment itself need not be known.
                time.sleep(rng.random() * 2e-3)
                killed.add(victim := rng.choice(alive))
                os.kill(victim, signal.SIGKILL)
            del batch
        assert len(killed) == KILLS
    del ring
    gc.collect()
    assert not any(psutil.pid_exists(pid) for pid in killed)
    assert descriptors() == files


@pytest.mark.parametrize("pidfd", [True, False], ids=["", "without process descriptors"])
def test_killing_the_parent_leaves_no_worker_and_no_memory(tmp_path: Path, pidfd: bool) -> None:
    before = shared_names()
    if not pidfd:
        (tmp_path / "sitecustomize.py").write_text(NO_PIDFD)
    gate = Gate(tmp_path / "gate").make()
    program = f"""
import pathlib, numpy, xferlib
from tests.workers.fills import Gate, behind
from xferlib.pipeline.workers.shared_ring import SharedRing
stager = xferlib.stager("host")
ring = SharedRing(stager, (64, numpy.int64), slots=3)
run = ring.run(behind, [0, 1, (2, Gate(pathlib.Path({str(gate.place)!r}))), 3], workers=2)
next(run), next(run), print(*ring.pids, flush=True)
next(run)
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root, env=environment)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert gate.arrived() in pids
    children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    assert set(pids) <= set(children)
    watched = [os.pidfd_open(pid) for pid in children]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(ended(number) for number in watched)
    for number in watched:
        os.close(number)
    until(lambda: shared_names() <= before)


def test_workers_outlive_the_thread_that_started_them(ring: SharedRing) -> None:
    run = ring.run(fills.number, range(4), workers=1)
    assert on_thread(lambda: first(next(run))).result(10) == 0
    pids = ring.pids
    assert [first(batch) for batch in run] == [1, 2, 3]
    assert ring.pids == pids


def test_workers_do_not_hear_an_interrupt(ring: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = ring.run(fills.behind, [(0, slow)], workers=1)
    coming = on_thread(lambda: first(next(run)))
    os.kill(slow.arrived(), signal.SIGINT)
    slow.open()
    assert coming.result(10) == 0


def test_an_interrupt_of_the_consumer_ends_the_run_and_the_ring_goes_on(
    ring: SharedRing, gate: Callable[[int], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = gate(0)
    run = ring.run(fills.behind, [1, (0, slow)], workers=1)
    kept = next(run)

    pid = slow.arrived()
    listen = ring._pool.listen

    def interrupted(timeout: float | None) -> object:
        on_thread(lambda: os.kill(os.getpid(), signal.SIGINT))
        return listen(timeout)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ring._pool, "listen", interrupted)
        next(run)
    assert not psutil.pid_exists(pid)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this run was interrupted"):
            next(run)
    assert [first(batch) for batch in ring.run(fills.number, range(5), workers=1)] == [0, 1, 2, 3, 4]
    assert first(kept) == 1


def test_closing_kills_a_worker_that_does_not_come_to_an_end(
    stager: xferlib.Stager, gate: Callable[[int], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xferlib.pipeline.workers.shared_ring.FINISHING", 0.1)
    slow = gate(0)
    with SharedRing(stager, (64, np.int64), slots=2) as ring:
        run = ring.run(fills.behind, [1, (0, slow)], workers=1)
        assert first(next(run)) == 1
        pid = slow.arrived()
    assert not psutil.pid_exists(pid)


def test_workers_that_cannot_start_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    program = tmp_path / "unguarded.py"
    program.write_text(
        """
import operator, sys
import xferlib
from xferlib.pipeline.workers.shared_ring import SharedRing
stager = xferlib.stager("host")
ring = SharedRing(stager, (64, "int64"), slots=3)
try:
    next(ring.run(operator.setitem, [1], workers=1))
except xferlib.XferError as error:
    print(type(error).__name__, error)
finally:
    ring.close(), stager.close()
"""
    )
    shown = children.run([sys.executable, str(program)], seconds=30)
    assert shown.stdout.startswith("WorkerDiedError a worker process could not start: it left with code 1")
    assert 'if __name__ == "__main__"' in shown.stdout


def test_a_program_that_forgets_its_ring_ends_and_its_workers_with_it(tmp_path: Path) -> None:
    program = tmp_path / "forgets.py"
    program.write_text(
        """
import xferlib
from xferlib.pipeline.workers.shared_ring import SharedRing

def fill(task, slot):
    slot[:] = task

if __name__ == "__main__":
    stager = xferlib.stager("host")
    ring = SharedRing(stager, (64, "int64"), slots=3)
    run = ring.run(fill, range(9), workers=1)
    print(next(run)[0], *ring.pids)
"""
    )
    shown = children.run([sys.executable, str(program)], seconds=30)
    assert shown.returncode == 0
    number, pid = map(int, shown.stdout.split())
    assert number == 0
    assert not psutil.pid_exists(pid)


def test_a_forked_child_is_refused_and_disturbs_nobody(ring: SharedRing) -> None:
    run = ring.run(fills.number, range(6), workers=1)
    assert first(next(run)) == 0
    pid = children.fork()
    if pid == 0:
        code = 1
        try:
            next(run)
        except xferlib.BackendUnavailableError:
            ring.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert [first(batch) for batch in run] == [1, 2, 3, 4, 5]


def test_a_child_that_is_forked_in_the_middle_of_a_step_is_refused(ring: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = ring.run(fills.behind, [(0, slow)], workers=1)
    coming = on_thread(lambda: first(next(run)))
    slow.arrived()
    pid = children.fork()
    if pid == 0:
        code = 1
        # One that hangs is killed.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            next(run)
        except xferlib.BackendUnavailableError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    slow.open()
    assert coming.result(10) == 0


def test_a_forked_child_has_nothing_by_which_a_ring_and_its_workers_talk(stager: xferlib.Stager) -> None:
    resource_tracker.ensure_running()
    before = talk()
    with SharedRing(stager, (64, np.int64), slots=2) as ring:
        run = ring.run(fills.number, range(2), workers=1)
        assert first(next(run)) == 0
        ours = talk() - before
        # What wakes the iteration, the worker's socket, and what tells of its end, where the system knows descriptors of processes.
        assert len(ours) in (2, 3)
        pid = children.fork()
        if pid == 0:
            os._exit(len(ours & talk()))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert first(next(run)) == 1


def test_no_zombie_is_left_by_a_closed_ring(stager: xferlib.Stager) -> None:
    with SharedRing(stager, (64, np.int64), slots=2) as ring:
        next(ring.run(fills.number, [1], workers=2))
        pids = ring.pids
        assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
