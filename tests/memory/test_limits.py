"""How much may be pinned: the least of physical memory and every control group above the process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

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


def test_a_group_is_not_driven_to_where_it_is_slowed_down(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a\n")
    write(tmp_path / "root/a/memory.max", "5000\n")
    write(tmp_path / "root/a/memory.high", "3000\n")
    assert min(limits._cgroup_limits(membership, tmp_path / "root")) == 3000


def test_what_a_group_has_left_counts_and_cached_files_are_left(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/job\n0::/a\n")
    write(tmp_path / "root/a/memory.max", "5000\n")
    write(tmp_path / "root/a/memory.current", "4000\n")
    write(tmp_path / "root/a/memory.stat", "anon 3000\nactive_file 300\ninactive_file 70\nfile 2000\n")
    write(tmp_path / "root/memory.current", "7\n")
    write(tmp_path / "root/memory/job/memory.limit_in_bytes", "700\n")
    write(tmp_path / "root/memory/job/memory.usage_in_bytes", "600\n")
    write(tmp_path / "root/memory/job/memory.stat", "total_active_file 20\ntotal_inactive_file 3\nactive_file 500\n")
    assert sorted(limits._cgroup_rooms(membership, tmp_path / "root")) == [123, 1370]


def test_a_group_that_is_over_its_limit_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_cgroup_rooms", lambda membership, root: [-5])
    assert limits.available_memory() == 0
    assert limits.default_pinned_limit() == limits.SMALLEST_LIMIT_NBYTES


def test_the_default_is_an_eighth_of_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < limits.memory_limit() <= psutil.virtual_memory().total
    assert 0 < limits.available_memory() <= limits.memory_limit()
    monkeypatch.setattr(limits, "available_memory", lambda: limits.memory_limit())
    assert limits.default_pinned_limit() == limits.memory_limit() // 8


def test_the_default_leaves_half_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 100 << 20)
    assert limits.default_pinned_limit() == 50 << 20
