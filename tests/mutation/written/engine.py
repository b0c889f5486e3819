"""What is copied by the caller before the engine's threads come into it."""

from __future__ import annotations

BOUNCE, STAGING = "xferlib/staging/bounce.py", "xferlib/staging/pageable.py"

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
]
