"""What a case is, and what it is given to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from benchmarks.harness import Absences, Effort
from benchmarks.records import Record
from benchmarks.ways import Device, Direction, Kind, Peer, Way
from xferlib import Stager

__all__ = ["Bench", "Case", "OpenStager", "ways_of"]


class OpenStager(Protocol):
    def __call__(self, *, pinned_limit: int | None = None) -> Stager:
        """Open a stager of the backend that is measured; the caller closes it."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run: a backend, its device, how much to measure, and where to say how far it is."""

    open_stager: OpenStager
    device: Device
    machine: dict[str, str]
    versions: dict[str, str]
    effort: Effort
    quick: bool
    absences: Absences
    say: Callable[[str], None]

    def open_peers(self, names: Iterable[str]) -> list[Peer]:
        """Open those of these peers that the device knows; the reasons of those that cannot run are noted."""
        peers = []
        for name in names:
            opener = self.device.peers.get(name)
            if opener is None:
                continue
            try:
                peers.append(opener())
            except Exception as error:
                self.absences.add(name, error)
        return peers


def ways_of(peers: Iterable[Peer], kind: Kind, direction: Direction) -> list[Way]:
    """Return the ways of all peers."""
    return [way for peer in peers for way in peer.ways(kind, direction)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named benchmark. Its records come as they are measured."""

    name: str
    summary: str
    run: Callable[[Bench], Iterator[Record]]
