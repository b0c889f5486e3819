"""Which CPUs are next to a device: those of its NUMA node. Memory that they touch first lies there, and is copied from there.

Asks the kernel only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple, final

__all__ = ["DEVICES", "Near", "node_near", "pci_name"]

NODES = Path("/sys/devices/system/node")
DEVICES = Path("/sys/bus/pci/devices")
PCI_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


@final
class Near(NamedTuple):
    """A NUMA node, and its CPUs that may be used."""

    node: int
    cpus: frozenset[int]


def node_near(pci_bus_id: str | None, *, devices: Path = DEVICES, nodes: Path = NODES) -> Near | None:
    """Return the node of a PCI device, with those of its CPUs that this thread may run on.

    None where it makes no difference or cannot be had: one node, a device whose node nobody knows, or no such CPU allowed.
    """
    try:
        if len(_numbers((nodes / "online").read_text())) < 2:
            return None
        node = int((devices / pci_name(pci_bus_id or "") / "numa_node").read_text())
        near = _numbers((nodes / f"node{node}" / "cpulist").read_text()) & os.sched_getaffinity(0)
    except (OSError, ValueError):
        # Also for -1, which is how the kernel says that it does not know.
        return None
    return Near(node, frozenset(near)) if near else None


def pci_name(pci_bus_id: str) -> str:
    """Return the id as the kernel spells it: drivers write letters as capitals, or the domain with eight digits."""
    match = PCI_ID.fullmatch(pci_bus_id.lower())
    if match is None:
        raise ValueError(f"not the address of a PCI device: {pci_bus_id!r}")
    return f"{int(match[1] or '0', 16):04x}:{match[2]}"


def _numbers(text: str) -> set[int]:
    """Read a list such as `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
