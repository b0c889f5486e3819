"""The PCI Express link of a device: what it is, what both of its ends can do, and what copies of pinned memory reach on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import numpy as np

from xferlib.cli.breakeven import NBYTES, seconds_of
from xferlib.memory.numa import DEVICES, NODES, node_near, pci_name
from xferlib.stager import Stager

__all__ = ["PciLink", "link_of", "measured_link", "node_of"]

OLD_SPEED = 5.0
"""GT/s: up to this, ten bits carry eight; 128 of 130 do on newer links."""
USUAL_SHARE = 0.7
"""Of what the link carries. Headers of packets take some; an H100 and an H200 reach 0.85 to 0.88, either way."""


@final
@dataclass(frozen=True, kw_only=True)
class PciLink:
    """Speeds in GT/s a lane, widths in lanes, rates in GB/s (1e9 bytes a second).

    Attributes:
        node: The NUMA node of the device; None: there is one node, or nobody knows.
        is_far: Whether this process may use no CPU of that node.
    """

    speed: float
    width: int
    most_speed: float
    most_width: int
    node: int | None
    h2d_gbps: float
    d2h_gbps: float
    is_far: bool = False

    @property
    def carries_gbps(self) -> float:
        """What the link carries each way, headers included."""
        return self.speed * self.width / 8 * (0.8 if self.speed <= OLD_SPEED else 128 / 130)

    def __str__(self) -> str:
        least = f", of {self.most_speed:g} GT/s x{self.most_width} that both ends could do" if self._is_less else ""
        node = "" if self.node is None else f", on NUMA node {self.node}{', where this process may not run' if self.is_far else ''}"
        return (
            f"PCI Express {self.speed:g} GT/s x{self.width}{least}{node}: {self.carries_gbps:.1f} GB/s each way; pinned memory "
            f"travels at {self.h2d_gbps:.1f} GB/s to the device and {self.d2h_gbps:.1f} to the host"
        )

    def findings(self) -> list[str]:
        """Return a sentence, with what to do, for each thing that holds copies up."""
        found = []
        if self._is_less:
            found.append(
                f"the link runs at {self.speed:g} GT/s x{self.width}, and both ends could do {self.most_speed:g} GT/s "
                f"x{self.most_width}: look whether the card is in the right slot, and whether it shares lanes with another device"
            )
        if self.is_far:
            found.append(
                f"this process may use no CPU of NUMA node {self.node}, where the device is, so its memory lies on another node "
                "and each copy crosses between them. Give the process, or its container, CPUs of that node"
            )
        slowest = min(self.h2d_gbps, self.d2h_gbps)
        if slowest < USUAL_SHARE * self.carries_gbps:
            near = (
                ""
                if self.node is None or self.is_far
                else f" Run on the node of the device: numactl --cpunodebind={self.node} --membind={self.node}"
            )
            found.append(
                f"pinned memory travels at {slowest:.1f} GB/s on a link that carries {self.carries_gbps:.1f}: another program may "
                f"use the link now, or memory of another NUMA node, an IOMMU or a virtual machine is in between.{near}"
            )
        return found

    @property
    def _is_less(self) -> bool:
        return self.speed < self.most_speed or self.width < self.most_width


def measured_link(stager: Stager, devices: Path = DEVICES) -> PciLink | None:
    """Measure with an open stager, which takes some 50 ms; None where there is no such link, or the system does not tell of it."""
    if not stager.on_gpu:
        return None
    source = stager.empty_pinned(NBYTES, np.uint8)
    source[:] = 1
    array = stager.put(source).result()
    # An idle link is slowed down to save power, so it is looked at while bytes travel.
    transfer = stager.put(source)
    ends = link_of(stager.backend.pci_bus_id, devices)
    transfer.synchronize()
    if ends is None:
        return None
    speed, width, most_speed, most_width = ends
    node, is_far = node_of(stager.backend.pci_bus_id, devices)
    return PciLink(
        speed=speed,
        width=width,
        most_speed=most_speed,
        most_width=most_width,
        node=node,
        is_far=is_far,
        h2d_gbps=NBYTES / seconds_of(lambda: stager.put(source).synchronize()) / 1e9,
        d2h_gbps=NBYTES / seconds_of(lambda: stager.get(array).synchronize()) / 1e9,
    )


def link_of(pci_bus_id: str | None, devices: Path = DEVICES) -> tuple[float, int, float, int] | None:
    """Return speed and width of a link as they are now, and as both of its ends can do at most; None: the system does not tell.

    What is above the device may be hidden, as it is in virtual machines: then nobody knows that the link could do more.
    """
    try:
        device = devices / pci_name(pci_bus_id or "")
        speed, width = _told(device, "current")
        ends = [_told(device, "max")]
    except (OSError, ValueError):
        return None
    try:
        # The kernel has devices inside of the port that they are plugged into, and tells of each what it can do by itself.
        ends.append(_told(device.resolve().parent, "max"))
    except (OSError, ValueError):
        ends.append((speed, width))
    return speed, width, min(most for most, _ in ends), min(most for _, most in ends)


def node_of(pci_bus_id: str | None, devices: Path = DEVICES, nodes: Path = NODES) -> tuple[int | None, bool]:
    """Return the NUMA node of a device, and whether this process may use none of its CPUs; None: one node, or nobody knows."""
    near = node_near(pci_bus_id, devices=devices, nodes=nodes)
    if near is not None:
        return near.node, False
    try:
        node = int((devices / pci_name(pci_bus_id or "") / "numa_node").read_text())
        is_one_of_many = not (nodes / "online").read_text().strip().isdecimal()
        has_cpus = bool((nodes / f"node{node}" / "cpulist").read_text().strip())
    except (OSError, ValueError):
        return None, False
    return (node, True) if is_one_of_many and has_cpus else (None, False)


def _told(end: Path, kind: Literal["current", "max"]) -> tuple[float, int]:
    """Return speed and width. Raises `OSError` or `ValueError` where they are not known."""
    width = int((end / f"{kind}_link_width").read_text())
    # How the kernel says that it does not know.
    if not 0 < width <= 32:
        raise ValueError(f"no width of a link: {width}")
    return _speed((end / f"{kind}_link_speed").read_text()), width


def _speed(text: str) -> float:
    """Read "32.0 GT/s PCIe". Raises `ValueError` for "Unknown"."""
    match = re.match(r"([0-9.]+) GT/s", text)
    if match is None:
        raise ValueError(f"no speed of a link: {text!r}")
    return float(match[1])
