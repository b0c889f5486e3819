"""How much memory this process may use, how much is to be had now, and the share that may be pinned unless the user says otherwise.

Pinned memory cannot be swapped or reclaimed, so a limit that ignores the container's is a way to be killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["MEMBERSHIP", "ROOT", "available_memory", "control_groups", "default_pinned_limit", "memory_limit", "text_of"]

MEMBERSHIP, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

PINNED_SHARE = 8
AVAILABLE_SHARE = 2
SMALLEST_LIMIT_NBYTES = 16 << 20
"""The default is never less than this: with nothing to transfer through, nothing could be transferred."""


class _Files(NamedTuple):
    """The names of the same figures in one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


# Above memory.high a group is not killed, but slowed down until it is of no use. Pinned memory cannot help that.
VERSION_1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
VERSION_2 = _Files(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))


def default_pinned_limit() -> int:
    """Return an eighth of `memory_limit()`, or half of `available_memory()` where that is less, in bytes.

    What is available now counts, since others on the machine may have pinned their share already.
    """
    return max(SMALLEST_LIMIT_NBYTES, min(memory_limit() // PINNED_SHARE, available_memory() // AVAILABLE_SHARE))


def memory_limit() -> int:
    """Return the bytes this process may use: physical memory, or the limit of its control group where that is less."""
    return min([int(psutil.virtual_memory().total), *_cgroup_limits(MEMBERSHIP, ROOT)])


def available_memory() -> int:
    """Return the bytes that could be had now without swapping and without a control group being full."""
    return max(0, min([int(psutil.virtual_memory().available), *_cgroup_rooms(MEMBERSHIP, ROOT)]))


def _cgroup_limits(membership: Path, root: Path) -> list[int]:
    """Read the limits of every group from the process's own up to the root; version 1 and 2 hierarchies."""
    return [limit for group, files in _groups(membership, root) for limit in _limits(group, files)]


def _cgroup_rooms(membership: Path, root: Path) -> list[int]:
    """Read what every group that has a limit may still take; cached files make room."""
    rooms = []
    for group, files in _groups(membership, root):
        limits, usage = _limits(group, files), _read(group / files.usage)
        if limits and usage is not None:
            rooms.append(min(limits) - usage + _reclaimable(group, files))
    return rooms


def _groups(membership: Path, root: Path) -> Iterator[tuple[Path, _Files]]:
    return ((group, VERSION_1 if old else VERSION_2) for group, old in control_groups("memory", membership, root))


def _limits(group: Path, files: _Files) -> list[int]:
    found = [_read(group / name) for name in files.limits]
    return [limit for limit in found if limit is not None]


def _reclaimable(group: Path, files: _Files) -> int:
    lines = text_of(group / "memory.stat").splitlines()
    return sum(int(value) for name, _, value in (line.partition(" ") for line in lines) if name in files.reclaimable)


def _read(file: Path) -> int | None:
    text = text_of(file)
    return int(text) if text.isdigit() else None


def text_of(file: Path) -> str:
    """Return what the kernel says in a file; nothing where there is none, or it says nothing."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def control_groups(controller: str, membership: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """Iterate the groups from the process's own up to the root, of version 1 and 2 hierarchies; True: version 1.

    Inside a container the path may be the host's and absent here; the root of the mount is then the container's own group.
    """
    for line in text_of(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        old = controllers != ""
        if old and controller not in controllers.split(","):
            continue
        base, group = root / controller if old else root, Path(path.lstrip("/"))
        yield from ((base / above, old) for above in (group, *group.parents))
