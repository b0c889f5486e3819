"""What doctor knows of a device's link: as the kernel tells it, and as copies have it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from xferlib_host import open_stager

import xferlib
from tests.mutants.laws.locking import LockingBackend
from xferlib.cli import doctor
from xferlib.cli.link import PciLink, link_of, measured_link, node_of

DEVICE = "0000:3b:00.0"
LINK = PciLink(speed=32.0, width=16, most_speed=32.0, most_width=16, node=None, h2d_gbps=55.2, d2h_gbps=54.8)


class OnGpu(LockingBackend):
    """The host, which says that it is a device on a link."""

    on_gpu = True
    pci_bus_id = DEVICE

    def __init__(self) -> None:
        super().__init__(open_stager(), {})


def device(root: Path, *texts: str, port: tuple[str, str] | None = ("32.0 GT/s PCIe", "16")) -> Path:
    """Lay out what the kernel tells. `port`: what the port can do that the device is plugged into."""
    folder = root / "port" / DEVICE
    folder.mkdir(parents=True)
    (root / DEVICE).symlink_to(folder)
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "numa_node")
    for name, text in zip(names, texts, strict=True):
        (folder / name).write_text(f"{text}\n")
    for name, text in zip(("max_link_speed", "max_link_width"), port or (), strict=False):
        (folder.parent / name).write_text(f"{text}\n")
    return root


def test_a_link_is_read_as_the_kernel_tells_it(tmp_path: Path) -> None:
    device(tmp_path, "16.0 GT/s PCIe", "8", "32.0 GT/s PCIe", "16", "-1")
    assert link_of("00000000:3B:00.0", tmp_path) == (16.0, 8, 32.0, 16)


@pytest.mark.parametrize("port", [("16.0 GT/s PCIe", "8"), ("Unknown", "16"), None])
def test_a_link_can_do_what_both_of_its_ends_can(tmp_path: Path, port: tuple[str, str] | None) -> None:
    """A fast card in a slower slot is at its best, and so is one whose slot nobody knows, as far as anybody knows."""
    device(tmp_path, "16.0 GT/s PCIe", "8", "32.0 GT/s PCIe", "16", "-1", port=port)
    assert link_of(DEVICE, tmp_path) == (16.0, 8, 16.0, 8)


@pytest.mark.parametrize(
    "texts",
    [
        ("Unknown", "16", "32.0 GT/s PCIe", "16", "-1"),
        ("32.0 GT/s PCIe", "0", "32.0 GT/s PCIe", "16", "-1"),
        ("32.0 GT/s PCIe", "16", "32.0 GT/s PCIe", "255", "-1"),
    ],
)
def test_what_the_kernel_does_not_know_is_not_told(tmp_path: Path, texts: tuple[str, ...]) -> None:
    assert link_of(DEVICE, device(tmp_path, *texts)) is None


@pytest.mark.parametrize("pci_bus_id", [None, "no address", "0000:3c:00.0"])
def test_a_device_without_an_address_of_the_kernel_s_has_no_link(tmp_path: Path, pci_bus_id: str | None) -> None:
    device(tmp_path, "32.0 GT/s PCIe", "16", "32.0 GT/s PCIe", "16", "0")
    assert link_of(pci_bus_id, tmp_path) is None


@pytest.mark.parametrize(
    ("speed", "width", "gbps"), [(32.0, 16, 63.0), (16.0, 16, 31.5), (8.0, 8, 7.9), (5.0, 16, 8.0), (2.5, 1, 0.25)]
)
def test_what_a_link_carries(speed: float, width: int, gbps: float) -> None:
    link = PciLink(speed=speed, width=width, most_speed=32.0, most_width=16, node=None, h2d_gbps=1.0, d2h_gbps=1.0)
    assert link.carries_gbps == pytest.approx(gbps, rel=0.01)


def test_a_link_at_its_best_is_no_finding() -> None:
    assert LINK.findings() == []
    assert "of 32 GT/s" not in str(LINK)
    assert "55.2 GB/s to the device and 54.8 to the host" in str(LINK)


@pytest.mark.parametrize(
    ("speed", "width", "most_speed", "most_width"), [(16.0, 16, 32.0, 16), (32.0, 8, 32.0, 16)], ids=["slower", "narrower"]
)
def test_a_link_that_could_do_more_is_a_finding(speed: float, width: int, most_speed: float, most_width: int) -> None:
    link = PciLink(speed=speed, width=width, most_speed=most_speed, most_width=most_width, node=None, h2d_gbps=28.0, d2h_gbps=28.0)
    (finding,) = link.findings()
    assert f"both ends could do {most_speed:g} GT/s x{most_width}" in finding
    assert f"of {most_speed:g} GT/s" in str(link)


@pytest.mark.parametrize(("h2d", "d2h"), [(12.0, 54.0), (54.0, 12.0)])
def test_copies_that_do_not_use_the_link_are_a_finding_either_way(h2d: float, d2h: float) -> None:
    link = PciLink(speed=32.0, width=16, most_speed=32.0, most_width=16, node=1, h2d_gbps=h2d, d2h_gbps=d2h)
    (finding,) = link.findings()
    assert "12.0 GB/s on a link that carries 63.0" in finding
    assert "--cpunodebind=1" in finding


def test_a_process_that_may_not_run_where_the_device_is_is_a_finding() -> None:
    link = PciLink(speed=32.0, width=16, most_speed=32.0, most_width=16, node=1, is_far=True, h2d_gbps=55.0, d2h_gbps=55.0)
    (finding,) = link.findings()
    assert finding.startswith("this process may use no CPU of NUMA node 1, where the device is")
    assert "on NUMA node 1, where this process may not run" in str(link)


@pytest.mark.parametrize(
    ("online", "cpus", "told"),
    [("0", "0-63", (None, False)), ("0-1", "here", (1, False)), ("0-1", "999", (1, True)), ("0-1", "", (None, False))],
    ids=["one node", "near", "far", "no CPUs there"],
)
def test_whether_the_device_is_near_is_read_as_the_kernel_tells_it(
    online: str, cpus: str, told: tuple[int | None, bool], tmp_path: Path
) -> None:
    here = ",".join(map(str, os.sched_getaffinity(0)))
    (tmp_path / "0000:17:00.0").mkdir()
    (tmp_path / "0000:17:00.0" / "numa_node").write_text("1\n")
    (tmp_path / "node1").mkdir()
    (tmp_path / "online").write_text(f"{online}\n")
    (tmp_path / "node1" / "cpulist").write_text(f"{here if cpus == 'here' else cpus}\n")
    assert node_of("0000:17:00.0", tmp_path, tmp_path) == told


@pytest.fixture
def on_gpu() -> Iterator[xferlib.Stager]:
    with xferlib.stager(OnGpu(), pinned_limit=512 << 20) as stager:
        yield stager


def test_it_is_measured_while_bytes_travel(on_gpu: xferlib.Stager, tmp_path: Path) -> None:
    link = measured_link(on_gpu, device(tmp_path, "32.0 GT/s PCIe", "16", "32.0 GT/s PCIe", "16", "0"))
    assert link is not None
    assert (link.speed, link.width) == (32.0, 16)
    assert min(link.h2d_gbps, link.d2h_gbps) > 0


def test_where_nothing_is_known_nothing_is_said(stager: xferlib.Stager, on_gpu: xferlib.Stager, tmp_path: Path) -> None:
    assert measured_link(stager) is None
    assert measured_link(on_gpu, tmp_path) is None


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch, stager: xferlib.Stager) -> None:
    def refuse(opened: xferlib.Stager) -> PciLink:
        raise xferlib.AllocationError("the device is full")

    monkeypatch.setattr(doctor, "measured_link", refuse)
    assert doctor._link(stager) == ({"error": "the device is full"}, [])
