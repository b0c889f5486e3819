"""On machines with several NUMA nodes, the engine's threads run on the CPUs near the devices in use.

Each program here has an engine of its own, and a machine that the test writes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.core.fakes import succeeds, tampered, until
from xferlib import Stager
from xferlib.engine import lanes
from xferlib.memory import numa
from xferlib.staging.profile import StagingProfile

CPUS = sorted(os.sched_getaffinity(0))
FIRST, LAST = CPUS[0], CPUS[-1]
"""The same, where there is one."""

PROGRAM = """
import os, threading
import numpy as np
from tests.engine.test_threads import CPUS, FIRST, LAST, affinities, on, use
"""


def affinities(count: int) -> list[list[int]]:
    """Return the CPUs of each of the engine's threads, of which there should be so many."""
    found: list[list[int]] = []

    def look() -> bool:
        found[:] = []
        for task in Path("/proc/self/task").iterdir():
            # A thread may end meanwhile: stagers are opened on one of their own.
            text = ""
            with suppress(OSError):
                text = (task / "status").read_text()
            lines = {"Name": "", **dict(line.split(":", 1) for line in text.splitlines())}
            if lines["Name"].strip() == "xferlib-engine":
                found.append(sorted(numa._numbers(lines["Cpus_allowed_list"])))
        return len(found) >= count

    # They have their names as soon as they run.
    until(look, 5)
    assert len(found) == count, found
    return sorted(found)


def on(device: str | None, threads: int) -> Stager:
    """Return a stager on a device at this address."""
    return Stager(tampered(pci_bus_id=device), staging=StagingProfile(threads, 1 << 20, 0))


def use(folder: str) -> None:
    """Take what is written there for the machine."""
    root = Path(folder)
    vars(lanes).update(node_near=partial(numa.node_near, devices=root / "devices", nodes=root / "nodes"))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two nodes with a CPU each, and one with both, each with a device."""
    for file, text in {
        "nodes/online": "0-2\n",
        "nodes/node0/cpulist": f"{FIRST}\n",
        "nodes/node1/cpulist": f"{LAST},3000-3003\n",
        "nodes/node2/cpulist": f"{FIRST},{LAST}\n",
        **{f"devices/0000:0{node}:00.0/numa_node": f"{node}\n" for node in range(3)},
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def program(machine: Path, body: str) -> None:
    succeeds(f"{PROGRAM}\nuse({str(machine)!r})\n{body}")


def test_there_are_more_threads_for_further_devices_of_a_node(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    near = partial(numa.node_near, devices=machine / "devices", nodes=machine / "nodes")
    for name, value in (("node_near", near), ("_nodes", {}), ("usable_cores", lambda: 32)):
        monkeypatch.setattr(lanes, name, value)
    first, second, other = "0000:02:00.0", "0000:02:00.1", "0000:01:00.0"
    (machine / "devices" / second).mkdir()
    (machine / "devices" / second / "numa_node").write_text("2\n")
    asked = [lanes.usual_threads(device) for device in (None, first, first, second, first, other)]
    assert asked == [10, 10, 10, 15, 15, 10]
    monkeypatch.setattr(lanes, "usable_cores", lambda: 16)
    assert lanes.usual_threads(first) == 10
    monkeypatch.setattr(lanes, "usable_cores", lambda: 22)
    assert lanes.usual_threads(first) == 13


def test_threads_run_on_the_cpus_near_the_device_and_the_caller_where_it_did(machine: Path) -> None:
    program(
        machine,
        """
with on("0000:01:00.0", 1) as stager:
    assert affinities(1) == [[LAST]]
    source = np.arange(5 << 20, dtype=np.uint8)
    assert (stager.put(source).value == source).all()
    assert affinities(1) == [[LAST]]
assert sorted(os.sched_getaffinity(0)) == CPUS
""",
    )


def test_stagers_of_one_node_share_its_threads_and_another_node_has_its_own(machine: Path) -> None:
    program(
        machine,
        """
with on("0000:01:00.0", 1), on("0000:01:00.0", 1):
    assert affinities(1) == [[LAST]]
    with on("0000:00:00.0", 1):
        assert affinities(2) == [[FIRST], [LAST]]
    with on("0000:00:00.0", 1), on("0000:01:00.0", 1), on(None, 2):
        assert affinities(2) == [[FIRST], [LAST]]
""",
    )


def test_a_device_on_no_node_has_as_many_threads_as_there_are_and_they_run_anywhere(machine: Path) -> None:
    program(
        machine,
        """
with on(None, 2), on(None, 1), on("0000:ff:00.0", 2):
    assert affinities(2) == [CPUS] * 2
with on("0000:01:00.0", 1):
    assert affinities(3) == sorted([CPUS, CPUS, [LAST]])
""",
    )


def test_what_a_node_has_no_cpus_for_runs_anywhere(machine: Path) -> None:
    """Two threads on a CPU would take turns."""
    program(
        machine,
        """
with on("0000:01:00.0", 3), on("0000:01:00.0", 3):
    assert affinities(3) == sorted([CPUS, CPUS, [LAST]])
""",
    )


def test_threads_run_nowhere_else_than_the_process_may(machine: Path) -> None:
    program(
        machine,
        """
os.sched_setaffinity(0, {LAST})
with on("0000:02:00.0", 1), on("0000:00:00.0", 1):
    assert affinities(1) == [[LAST]]
""",
    )


def test_a_thread_that_may_run_on_fewer_cpus_starts_no_more_of_them(machine: Path) -> None:
    program(
        machine,
        """
def open_it():
    os.sched_setaffinity(0, {FIRST})
    with on("0000:02:00.0", 2):
        pass

count = len({FIRST, LAST})
with on("0000:02:00.0", count):
    assert affinities(count) == [sorted({FIRST, LAST})] * count
    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert len(affinities(2)) == 2
""",
    )


def test_one_node_is_no_choice(machine: Path) -> None:
    (machine / "nodes" / "online").write_text("0\n")
    program(
        machine,
        """
with on("0000:00:00.0", 2), on("0000:01:00.0", 2):
    assert affinities(2) == [CPUS] * 2
""",
    )


def test_a_forked_child_has_threads_of_its_own_near_its_device(machine: Path) -> None:
    program(
        machine,
        """
with on("0000:01:00.0", 1):
    assert affinities(1) == [[LAST]]
    child = os.fork()
    if child == 0:
        try:
            with on("0000:00:00.0", 1) as stager:
                assert affinities(1) == [[FIRST]]
                source = np.arange(5 << 20, dtype=np.uint8)
                assert (stager.put(source).value == source).all()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    )


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (6, 6), (8, 6), (11, 6), (12, 7), (14, 8), (16, 10), (64, 10)])
def test_there_are_as_many_threads_as_copy_faster_and_leave_cores_to_others(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: cores)
    assert lanes.usual_threads(None) == threads
