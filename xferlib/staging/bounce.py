"""To the device on the caller's thread: what is small passes through a pinned block of its own size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from xferlib.inflight import Fill, Traffic
from xferlib.memory.pool import HostBlock, PinnedPool
from xferlib.protocol import HostStager
from xferlib.staging.parts import Part, Placed, lay, run_of

__all__ = ["Bounce", "few_parts"]


@final
class Bounce:
    """One stager's. Any thread."""

    def __init__(self, backend: HostStager[Any], pool: PinnedPool, traffic: Traffic) -> None:
        self._backend = backend
        self._pool = pool
        self._traffic = traffic

    def __call__(self, part: Part) -> None:
        """Start the copy of a part; its arrays are free on return."""
        # Counts as in flight before another thread finds neither room nor anything to wait for.
        fill = Fill()
        block: HostBlock | None = None
        try:
            block = self._pool.take(part.nbytes, lambda: self._traffic.jobs.add(fill))
            lay(part, np.asarray(block)[: part.nbytes])
            self._backend.copy_h2d(part.address, block.address, part.nbytes)
            # Whose bytes they are is counted by who puts them: these have pads.
            self._traffic.h2d.add(0, (), (), block)
        except BaseException:
            self._traffic.h2d.settle(block)
            raise
        finally:
            # Before anyone is told: who waits for room must find it, and this frame may live on for a while.
            block, fill.over = None, True
            fill.tell()


def few_parts(leaves: Sequence[Placed], nbytes: int) -> list[Part]:
    """Return the parts of what is small, as few as there are."""
    if len(leaves) == 1:
        ((address, array, _),) = leaves
        return [Part(address, nbytes, (array,))]
    return run_of(leaves)
