"""What is copied by the caller before the engine's threads come into it, and where these run."""

from __future__ import annotations

BOUNCE, STAGING, LANES = "xferlib/staging/bounce.py", "xferlib/staging/pageable.py", "xferlib/engine/lanes.py"

MUTANTS = [
    (BOUNCE, "add(nbytes, (), places,", "add(nbytes, (), (),"),
    (BOUNCE, "looked=not places", "looked=True"),
    (BOUNCE, "bisect_left(self._sizes, nbytes)", "bisect_left(self._sizes, nbytes + 1)"),
    (BOUNCE, "bisect_left(self._sizes, nbytes)", "bisect_left(self._sizes, nbytes - 1)"),
    (BOUNCE, "settle((target, fills[-1].memory if fills else None))", "settle(fills[-1].memory if fills else None)"),
    (STAGING, "            address += piece.nbytes\n", ""),
    (STAGING, "if part.nbytes <= self._piece_nbytes or len(part.arrays) > 1:", "if part.nbytes <= self._piece_nbytes:"),
    (STAGING, "nbytes > self._piece_nbytes or nbytes > self._bounce_nbytes", "nbytes > self._piece_nbytes"),
    (STAGING, "nbytes > self._piece_nbytes or nbytes > self._bounce_nbytes", "nbytes > self._bounce_nbytes"),
    (LANES, "    if near is not None:\n", "    if near is not None and near.node < 0:\n"),
    (LANES, "min(count, len(near.cpus)), near.node,", "count, near.node,"),
    (LANES, "min(count, len(near.cpus)), near.node,", "min(count, len(near.cpus)), 0,"),
    (LANES, "    if library().xe_start(count) == 0:\n", "    if near is None and library().xe_start(count) == 0:\n"),
]
