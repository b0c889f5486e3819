"""The control groups that this process is in: what a container may use is limited there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["MEMBERSHIP", "ROOT", "control_groups"]

MEMBERSHIP, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def control_groups(controller: str, membership: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """Iterate the groups from the process's own up to the root, of version 1 and 2 hierarchies; True: version 1.

    Inside a container the path may be the host's and absent here; the root of the mount is then the container's own group.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        old = controllers != ""
        if old and controller not in controllers.split(","):
            continue
        base, group = root / controller if old else root, Path(path.lstrip("/"))
        yield from ((base / above, old) for above in (group, *group.parents))
