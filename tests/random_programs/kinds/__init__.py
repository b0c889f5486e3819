"""The kinds of steps, each with how it is drawn and how it is run. `KINDS` has them by name."""

from __future__ import annotations

from tests.random_programs.kinds import (
    canaries,
    files,
    gets,
    holds,
    hosts,
    lifetime,
    locks,
    pipelines,
    puts,
    rings,
    slices,
    stagers,
    threads,
)
from tests.random_programs.kinds.kind import Kind

__all__ = ["KINDS"]

MODULES = (stagers, hosts, puts, slices, gets, lifetime, holds, locks, rings, pipelines, files, canaries, threads)
KINDS: dict[str, Kind] = {kind.name: kind() for module in MODULES for kind in module.ALL}
