"""How much may be pinned: the least of physical memory and every control group above the process."""

from __future__ import annotations

from pathlib import Path

import psutil

from xferlib.memory import limits


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_group_above_the_process_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    write(tmp_path / "root/a/b/memory.max", "max\n")
    write(tmp_path / "root/a/memory.max", "1000\n")
    write(tmp_path / "root/memory.max", "5000\n")
    assert sorted(limits._cgroup_limits(membership, tmp_path / "root")) == [1000, 5000]


def test_version_1_hierarchies_count_memory_only(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/x\n4:memory:/job\n1:name=systemd:/y\n")
    write(tmp_path / "root/memory/job/memory.limit_in_bytes", "700\n")
    write(tmp_path / "root/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert sorted(limits._cgroup_limits(membership, tmp_path / "root")) == [700, 9223372036854771712]


def test_the_host_s_path_inside_a_container_falls_back_to_the_root(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/docker/abc\n")
    write(tmp_path / "root/memory.max", "4242\n")
    assert limits._cgroup_limits(membership, tmp_path / "root") == [4242]


def test_no_control_groups_is_no_limit(tmp_path: Path) -> None:
    assert limits._cgroup_limits(tmp_path / "absent", tmp_path) == []


def test_the_default_is_an_eighth_of_what_the_process_may_use() -> None:
    assert 0 < limits.memory_limit() <= psutil.virtual_memory().total
    assert limits.default_pinned_limit() == limits.memory_limit() // 8
