"""How much memory this process may use, and the share of it that may be pinned unless the user says otherwise.

Pinned memory cannot be swapped or reclaimed, so a limit that ignores the container's is a way to be killed.
"""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["default_pinned_limit", "memory_limit"]

PINNED_SHARE = 8


def default_pinned_limit() -> int:
    """Return an eighth of `memory_limit()`, in bytes."""
    return memory_limit() // PINNED_SHARE


def memory_limit() -> int:
    """Return the bytes this process may use: physical memory, or the limit of its control group where that is less."""
    return min([int(psutil.virtual_memory().total), *_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _cgroup_limits(membership: Path, root: Path) -> list[int]:
    """Read the limits of every group from the process's own up to the root; version 1 and 2 hierarchies."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, name = (root, "memory.max") if controllers == "" else (root / "memory", "memory.limit_in_bytes")
        group = Path(path.lstrip("/"))
        # Inside a container the path may be the host's and absent here; the root of the mount is then the container's own group.
        found += [_read_limit(base / above / name) for above in (group, *group.parents)]
    return [limit for limit in found if limit is not None]


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
