"""The memory that transfers of a benchmark run between, and the calls of one sample with what proves that they moved the bytes.

Sources on both sides hold the same seeded random bytes, so each side's target is compared on that side, without a transfer.
A sample of `count` transfers takes the source from `shift` on, cut into `count` pieces, into a target of the same cut: every
transfer has memory of its own, no sample repeats the bytes of the one before, and before each sample the target is poisoned with
the inverse of what it should get, so that no byte is right by chance or by history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import memory
from benchmarks.ways import Bytes, Corrupted, Device, Direction, Way

__all__ = ["Arena", "Batch", "shift_of"]

STEP = 4096
"""Bytes. A whole page, so that all samples have the same alignment."""
SHIFTS = 16
SEED = 20_240_229


def shift_of(index: int) -> int:
    """Return where the source of a sample begins."""
    return index % SHIFTS * STEP


@dataclass(frozen=True, kw_only=True)
class Arena:
    """`nbytes` bytes of target on each side, and of source, with room for the shifts."""

    nbytes: int
    device: Device
    host_source: Bytes
    host_target: Bytes
    device_source: Any
    device_target: Any

    @staticmethod
    def allocate(device: Device, nbytes: int, empty_host: Callable[[int], Bytes]) -> Arena:
        """Allocate and touch everything. `empty_host` decides what host memory it is."""
        source, target = empty_host(nbytes + SHIFTS * STEP), empty_host(nbytes)
        memory.fill_random(source, SEED)
        memory.invert(source[:nbytes], target)
        return Arena(
            nbytes=nbytes,
            device=device,
            host_source=source,
            host_target=target,
            device_source=device.upload(source),
            device_target=device.empty(nbytes),
        )

    def with_host(self, empty_host: Callable[[int], Bytes]) -> Arena:
        """Return an arena with the same device memory and other host memory, touched, with the same bytes."""
        source, target = empty_host(self.host_source.nbytes), empty_host(self.nbytes)
        memory.fill_random(source, SEED)
        memory.invert(source[: self.nbytes], target)
        return replace(self, host_source=source, host_target=target)

    def source(self, direction: Direction) -> Any:
        """Return what a transfer reads."""
        return self.host_source if direction == "h2d" else self.device_source

    def target(self, direction: Direction) -> Any:
        """Return what a transfer writes."""
        return self.device_target if direction == "h2d" else self.host_target

    def expected(self, direction: Direction) -> Any:
        """Return the source's bytes, on the target's side."""
        return self.device_source if direction == "h2d" else self.host_source

    def poison(self, direction: Direction, expected: Any, target: Any) -> None:
        """Make every byte of the target wrong."""
        if direction == "h2d":
            self.device.invert(expected, target)
        else:
            memory.invert(expected, target)

    def equal(self, direction: Direction, expected: Any, target: Any) -> bool:
        """Compare on the target's side."""
        return self.device.equal(expected, target) if direction == "h2d" else memory.equal(expected, target)


class Batch:
    """The calls of one sample of one way. Made and verified outside the clock."""

    def __init__(self, way: Way, arena: Arena, *, nbytes: int, count: int, index: int, same: bool = False) -> None:
        shift, span = shift_of(index), nbytes if same else count * nbytes
        self._way = way
        self._arena = arena
        self._target = arena.target(way.direction)[:span]
        self._expected = arena.expected(way.direction)[shift : shift + span]
        self._cuts = [slice(0, nbytes)] * count if same else [slice(start, start + nbytes) for start in range(0, span, nbytes)]
        self.kept: deque[object] = deque(maxlen=way.keep)
        source = arena.source(way.direction)[shift : shift + span]
        fresh = way.result is not None
        cuts = self._cuts[:1] if same else self._cuts
        self.calls = [way.bind(source[cut], None if fresh else self._target[cut]) for cut in cuts] * (count // len(cuts))

    def poison(self) -> None:
        """Make every byte of the target wrong. A way that makes its own target has only the change of bytes to prove it."""
        if self._way.result is None:
            self._arena.poison(self._way.direction, self._expected, self._target)

    def synchronize(self) -> None:
        """Block until every call is done."""
        self._way.synchronize(self.kept)

    def verify(self) -> None:
        """Compare the target, or what the kept calls returned, with the source. Raises `Corrupted`."""
        way, same = self._way, self._arena.equal
        if way.result is None:
            intact = same(way.direction, self._expected, self._target)
        else:
            cuts = self._cuts[-len(self.kept) :]
            results = (way.result(returned) for returned in self.kept)
            intact = all(same(way.direction, self._expected[cut], result) for cut, result in zip(cuts, results, strict=True))
        if not intact:
            raise Corrupted(
                f"{way.name!r} said it was done, but the {way.direction} target does not hold the source's bytes: "
                f"{len(self.calls)} transfers of {self._cuts[0].stop} bytes. Every figure of this run is void; mend the copy first"
            )
