"""What lies under an address, as the kernel tells it: which memory of a caller can never be page-locked, or not for writing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, final

__all__ = ["Mapping", "is_write_protected", "mappings", "why_unlockable"]

MAPS, MOUNTS = Path("/proc/self/maps"), Path("/proc/self/mountinfo")
IN_MEMORY = frozenset({"devtmpfs", "hugetlbfs", "ramfs", "tmpfs"})
"""File systems whose files are memory: nothing is written back to a disk behind the copy engine's back."""


@final
class Mapping(NamedTuple):
    """A range of the address space with one kind of memory under it."""

    start: int
    end: int
    permissions: str
    device: str
    """As `major:minor`, decimal; `0:0` where there is no file."""
    path: str

    @property
    def shared_and_writable(self) -> bool:
        return "w" in self.permissions and self.permissions.endswith("s")


def why_unlockable(address: int, nbytes: int) -> str | None:
    """Return why this memory cannot be page-locked, and what to do; None: nothing speaks against it.

    The kernel locks no pages for writing if it has to write them back to a disk, since nobody could tell it of a device's writes.
    """
    for mapping in mappings(address, nbytes):
        if mapping.shared_and_writable:
            kind = file_system(mapping.device)
            if kind is not None and kind not in IN_MEMORY:
                return (
                    f"it is a writable shared mapping of a file on disk, {mapping.path!r} ({kind}), and the kernel locks no such "
                    "pages. Map the file privately or read-only (mode 'c' or 'r' of numpy.memmap), or leave pin out: it is staged"
                )
    return None


def is_write_protected(address: int, nbytes: int) -> bool:
    """Tell whether no mapping in the range may be written."""
    found = mappings(address, nbytes)
    return bool(found) and not any("w" in mapping.permissions for mapping in found)


def mappings(address: int, nbytes: int, *, table: Path = MAPS) -> list[Mapping]:
    """Return what lies under the range, in order."""
    found = []
    for line in table.read_text(errors="surrogateescape").splitlines():
        span, rest = line.split(maxsplit=1)
        first, last = span.split("-")
        start, end = int(first, 16), int(last, 16)
        if start >= address + nbytes:
            break
        if address < end:
            permissions, _, device, rest = rest.split(maxsplit=3)
            major, minor = (int(number, 16) for number in device.split(":"))
            _, _, path = rest.partition(" ")
            found.append(Mapping(start, end, permissions, f"{major}:{minor}", path.strip()))
    return found


def file_system(device: str, *, table: Path = MOUNTS) -> str | None:
    """Return the type of the file system on a device; None: not mounted here, like the kernel's own one for anonymous memory."""
    for line in table.read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == device:
            return after.split()[0]
    return None
