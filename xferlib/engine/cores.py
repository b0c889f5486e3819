"""How many cores this process may use: what it is pinned to, and what its control group is given."""

from __future__ import annotations

import os
from pathlib import Path

from xferlib.memory.limits import MEMBERSHIP, ROOT, control_groups, text_of

__all__ = ["usable_cores"]


def usable_cores(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int:
    """Return the number, at least 1: a share of a core counts as one."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *_quotas(membership, root)]))


def _quotas(membership: Path, root: Path) -> list[int]:
    """Read how much time each group is given, in cores."""
    found = [_quota_1(group) if old else _quota_2(group) for group, old in control_groups("cpu", membership, root)]
    return [quota for quota in found if quota is not None]


def _quota_2(group: Path) -> int | None:
    words = text_of(group / "cpu.max").split()
    return _whole(words[0], words[1]) if len(words) == 2 else None


def _quota_1(group: Path) -> int | None:
    return _whole(text_of(group / "cpu.cfs_quota_us"), text_of(group / "cpu.cfs_period_us"))


def _whole(quota: str, period: str) -> int | None:
    # "max", or -1 in version 1, means as much as there is.
    return -(-int(quota) // int(period)) if quota.isdigit() and period.isdigit() and int(period) else None
