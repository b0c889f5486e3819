"""Where the time of a thread went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import final

__all__ = ["PhaseTimer"]


@final
class PhaseTimer:
    """Adds up the seconds of one thread by what it was doing. That thread turns it, any thread reads it.

    Time before the first `turn` and after `stop` counts for nothing.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._now: tuple[str | None, float] = (None, 0.0)

    @property
    def phase(self) -> str | None:
        """What the thread is doing now."""
        return self._now[0]

    def turn(self, phase: str | None) -> float:
        """Say that the thread does something else from now on; return how long it did the last."""
        before, since = self._now
        now = time.perf_counter()
        # In this order a reader misses a moment at worst, and counts none twice.
        self._now = (phase, now)
        if before is None:
            return 0.0
        self._seconds[before] = self._seconds.get(before, 0.0) + now - since
        return now - since

    def stop(self) -> None:
        """Say that the thread does nothing more that counts."""
        self.turn(None)

    def move(self, seconds: float, phase: str, to: str) -> None:
        """Count some of the time of one phase for another, because only afterwards it is known what it was."""
        seconds = min(seconds, self._seconds.get(phase, 0.0))
        self._seconds[phase] = self._seconds.get(phase, 0.0) - seconds
        self._seconds[to] = self._seconds.get(to, 0.0) + seconds

    def since(self, before: Mapping[str, float]) -> Mapping[str, float]:
        """Return the seconds by phase since `read` returned this."""
        return {phase: max(0.0, seconds - before.get(phase, 0.0)) for phase, seconds in self.read().items()}

    def read(self) -> Mapping[str, float]:
        """Return the seconds by phase, those of the running phase included."""
        seconds = dict(self._seconds)
        phase, since = self._now
        if phase is not None:
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - since
        return seconds
