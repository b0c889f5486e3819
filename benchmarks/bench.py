"""What a case is, and what it is given to run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from benchmarks import ours
from benchmarks.arena import Arena
from benchmarks.harness import Absences, Contender, Effort, able, sample
from benchmarks.pipeline import Pipe
from benchmarks.records import Key, Record
from benchmarks.ways import Corrupted, Device, Direction, Kind, Peer, Way
from xferlib import Stager

__all__ = ["LIMIT", "Bench", "Case", "OpenStager", "ways_of"]

FEW_STEPS = 4
LIMIT = "limit"


class OpenStager(Protocol):
    def __call__(self, *, pinned_limit: int | None = None) -> Stager:
        """Open a stager of the backend that is measured; the caller closes it."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run: a backend, its device, how much to measure, and where to report progress."""

    open_stager: OpenStager
    device: Device
    machine: dict[str, str]
    versions: dict[str, str]
    effort: Effort
    quick: bool
    absences: Absences
    say: Callable[[str], None]
    sizes: Sequence[int] = ()
    """The sizes that were asked for, for a case that takes them; none: all of its own sizes."""
    done: Collection[Key] = ()
    """Rows that need not be measured again."""

    @property
    def brief(self) -> bool:
        """Whether the run has minutes for all cases, so that each begins with the rows that say most, and leaves out some."""
        return not self.quick and self.effort.part < 1

    @property
    def streams(self) -> Sequence[str]:
        """Return the streams that compute is to run on, one row for each: in a brief run the usual one alone."""
        return self.device.streams[:1] if self.brief else self.device.streams

    def count(self, quick: int, full: int, fewest: int = 2) -> int:
        """Return how many of something to make: `quick`, `full`, or of that the part that the effort says, at least `fewest`."""
        return quick if self.quick else max(min(fewest, full), round(full * self.effort.part))

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

    def able_contenders(
        self,
        mine: tuple[Way, ...],
        bare: tuple[Way, ...],
        rivals: Iterable[tuple[Way, ...]],
        *,
        arena: Arena,
        pinned: Arena,
        nbytes: int,
    ) -> list[Contender]:
        """Return ours, the limit (which moves between pinned memory), and the rivals that can run."""
        contenders = [
            Contender(name=ours.NAME, ways=mine, arena=arena, optional=False),
            Contender(name=LIMIT, ways=bare, arena=pinned, optional=False),
            *(Contender(name=_together(ways), ways=ways, arena=arena) for ways in rivals),
        ]
        return able(contenders, self.absences, partial(sample, nbytes=nbytes, count=1, index=-2))

    def able_pipes(self, pipes: Sequence[Pipe]) -> list[Pipe]:
        """Run each for some steps and return those that can. The first is ours, and must."""
        present = []
        for pipe in pipes:
            try:
                pipe.run(FEW_STEPS)
            except Corrupted:
                raise
            except Exception as error:
                if pipe is pipes[0]:
                    raise
                self.absences.add(pipe.name, error)
                continue
            present.append(pipe)
        return present


def ways_of(peers: Iterable[Peer], kind: Kind, direction: Direction) -> list[Way]:
    """Return the ways of all peers."""
    return [way for peer in peers for way in peer.ways(kind, direction)]


def _together(ways: Sequence[Way]) -> str:
    return " + ".join(dict.fromkeys(way.name for way in ways))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named benchmark. Its records come as they are measured."""

    name: str
    summary: str
    run: Callable[[Bench], Iterator[Record]]
    seconds: float = 40.0
    """About what it takes with a GPU at brief effort: its share of a run that is limited."""
    resumes: bool = False
    """Whether it leaves out what is `done`."""
