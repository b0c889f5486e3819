"""The memory between which a benchmark's transfers run, and the calls of one sample, with the proof that they moved the bytes.

Sources on both sides hold the same seeded random bytes, so each side's target is compared on that side, without a transfer. A
sample of `count` transfers moves the source from `shift` on, cut into `count` pieces, to a target cut in the same way. So every
transfer has memory of its own, and no sample repeats the bytes of the one before. Before each sample the target is poisoned with
the inverse of what it should get, so that no byte is right by chance or by history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from benchmarks import memory
from benchmarks.steps import Bytes
from benchmarks.ways import Call, Corrupted, Device, Direction, Way

__all__ = ["Arena", "Batch", "fitted", "shift_of"]

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
            device_target=device.empty(nbytes) if device.in_place else None,
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
        """Compare on the target's side. A list is the parts, one after the other."""
        if isinstance(target, list):
            ends = tuple(accumulate(part.nbytes for part in target))
            if ends[-1] != expected.nbytes:
                return False
            wanted = self.device.cut(expected, ends) if direction == "h2d" else memory.pieces(expected, ends)
            return all(self.equal(direction, piece, part) for piece, part in zip(wanted, target, strict=True))
        return self.device.equal(expected, target) if direction == "h2d" else memory.equal(expected, target)


class Batch:
    """The calls of one sample of one way. Made and verified outside the clock."""

    def __init__(self, way: Way, arena: Arena, *, nbytes: int, count: int, index: int, same: bool = False) -> None:
        span = nbytes if same else count * nbytes
        self._way = way = fitted(way, arena.device)
        self._arena = arena
        self._shift = shift = shift_of(index)
        self._span = span
        self._starts = [0] * count if same else list(range(0, span, nbytes))
        self._nbytes = nbytes
        self.kept: deque[object] = deque(maxlen=way.keep)
        source = arena.source(way.direction)
        # Cut from the whole array, once: where slices are copies, a slice of a slice would first copy the whole.
        starts = self._starts[:1] if same else self._starts
        sources = [source[shift + start : shift + start + nbytes] for start in starts]
        targets = [self._target_of(start) for start in starts]
        # Bare calls know only addresses, and a slice may be the only reference to its memory.
        self._held = (sources, targets)
        bound = [way.bind(*pair) for pair in zip(sources, targets, strict=True)]
        self.calls = bound * (count // len(bound))

    def poison(self) -> None:
        """Make every byte of the target wrong. For a way that makes its own target, only the change of bytes proves the copy."""
        if self._way.result is None:
            self._arena.poison(self._way.direction, self._expected(0, self._span), self._target())

    def synchronize(self) -> None:
        """Block until every call is done."""
        self._way.synchronize(self.kept)

    def verify(self) -> None:
        """Compare the target, or what the kept calls returned, with the source. Raises `Corrupted`."""
        way, same = self._way, self._arena.equal
        if way.result is None:
            intact = same(way.direction, self._expected(0, self._span), self._target())
        else:
            starts = self._starts[-len(self.kept) :]
            results = (way.result(returned) for returned in self.kept)
            pairs = zip(starts, results, strict=True)
            intact = all(same(way.direction, self._expected(start, self._nbytes), result) for start, result in pairs)
        if not intact:
            raise Corrupted(
                f"{way.name!r} said it was done, but the {way.direction} target does not hold the source's bytes: "
                f"{len(self.calls)} transfers of {self._nbytes} bytes. Every figure of this run is void; mend the copy first"
            )

    def _target_of(self, start: int) -> Any:
        if self._way.given_new:
            return self._arena.device.inverted(self._expected(start, self._nbytes))
        return None if self._way.result else self._arena.target(self._way.direction)[start : start + self._nbytes]

    def _expected(self, start: int, nbytes: int) -> Any:
        begin = self._shift + start
        return self._arena.expected(self._way.direction)[begin : begin + nbytes]

    def _target(self) -> Any:
        return self._arena.target(self._way.direction)[: self._span]


def fitted(way: Way, device: Device) -> Way:
    """Return the way as it can be measured on this device.

    Where device arrays cannot be written to, a way that writes to one is given a new array for each call.
    """
    if way.direction == "d2h" or way.result is not None or device.in_place:
        return way

    def bind(source: Any, target: Any) -> Call:
        call = way.bind(source, target)
        return lambda: (call(), target)[1]

    return replace(way, bind=bind, result=lambda array: array, keep=None, given_new=True)
