"""How many cores a process may use, told from trees of control groups that the test writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xferlib.engine.cores import usable_cores

PINNED = len(os.sched_getaffinity(0))
"""More than that are never usable, whatever the groups are given."""


def given(folder: Path, *, membership: str, files: dict[str, str]) -> int:
    """Return what is told of a process whose `/proc/self/cgroup` says so, with these files below the root."""
    root = folder / "root"
    root.mkdir()
    (folder / "cgroup").write_text(membership)
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return usable_cores(folder / "cgroup", root)


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be pinned to no fewer than 64, so that the groups decide on small machines, too."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


UNIFIED = {
    "its own quota": ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n"}, 3),
    "a part of a core counts as one": ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),
    "a core and a part are two": ("0::/a\n", {"a/cpu.max": "150000 100000\n"}, 2),
    "no quota": ("0::/a\n", {"a/cpu.max": "max 100000\n"}, 64),
    "the quota of a group above": ("0::/a/b/c\n", {"a/b/c/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
    "the least of several": ("0::/a/b\n", {"a/b/cpu.max": "500000 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
    "the root's, where the path is the host's": ("0::/elsewhere/pod\n", {"cpu.max": "200000 100000\n"}, 2),
    "the root's own group": ("0::/\n", {"cpu.max": "700000 100000\n"}, 7),
    "a path with a colon in it": ("0::/a:b\n", {"a:b/cpu.max": "200000 100000\n"}, 2),
    "no files at all": ("0::/a\n", {}, 64),
    "a file that says nothing": ("0::/a\n", {"a/cpu.max": "\n"}, 64),
    "more than there are": ("0::/a\n", {"a/cpu.max": "9900000 100000\n"}, 64),
}


@pytest.mark.parametrize("name", UNIFIED)
def test_a_unified_hierarchy_is_read(name: str, tmp_path: Path) -> None:
    membership, files, expected = UNIFIED[name]
    assert given(tmp_path, membership=membership, files=files) == expected


def quota(group: str, microseconds: int, period: int = 100_000) -> dict[str, str]:
    return {f"{group}cpu.cfs_quota_us": f"{microseconds}\n", f"{group}cpu.cfs_period_us": f"{period}\n"}


LINES = "5:memory:/a/b\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a/b\n"
FIRST_EDITION = {
    "its own quota": (LINES, quota("cpu/a/b/", 300_000), 3),
    "no quota": (LINES, quota("cpu/a/b/", -1), 64),
    "the quota of a group above": (LINES, quota("cpu/a/b/", -1) | quota("cpu/a/", 200_000), 2),
    "the root's, where the path is the host's": (LINES, quota("cpu/", 200_000), 2),
    "a period of another length": (LINES, quota("cpu/a/b/", 100_000, 50_000), 2),
    "a period of nothing": (LINES, quota("cpu/a/b/", 100_000, 0), 64),
    "controllers of other kinds": ("5:cpuset:/a\n", quota("cpu/a/", 200_000), 64),
    "beside a unified one without the controller": ("4:cpu:/a\n0::/a\n", quota("cpu/a/", 200_000), 2),
}


@pytest.mark.parametrize("name", FIRST_EDITION)
def test_a_hierarchy_of_version_1_is_read(name: str, tmp_path: Path) -> None:
    membership, files, expected = FIRST_EDITION[name]
    assert given(tmp_path, membership=membership, files=files) == expected


def test_where_there_are_no_groups_those_count_that_the_process_is_pinned_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8})
    assert usable_cores(tmp_path / "absent", tmp_path / "absent too") == 3


def test_this_machine_has_at_least_one_and_no_more_than_the_process_is_pinned_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= usable_cores() <= PINNED
