"""The ways in which bytes can be moved, each as one object, so that a law is written once and holds for all of them.

A move has allocated everything that it needs before it starts. Its destination is read without the stager: a put is never judged by
a get, nor a get by a put.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from xferlib.conformance.base import Laws
from xferlib.conformance.values import Array, others
from xferlib.stager import Stager
from xferlib.transfer import Transfer

__all__ = ["FROM_PINNED", "WAYS", "Move", "prepare"]

WAYS = ("put", "put_pageable", "get", "get_out", "get_pageable_out")
"""`put` is from pinned memory, `get` into new pinned memory, `out` is the caller's memory. `prepare` also knows `put_into`."""
FROM_PINNED = ("put", "get", "get_out")
"""The ways that the copy engine makes alone: to start them never waits."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """One transfer, ready to start."""

    direction: Literal["h2d", "d2h"]
    start: Callable[[], Transfer]
    values: Array
    """What the destination holds once the transfer is done."""
    read: Callable[[Transfer], Array]
    """Return what the destination holds. The transfer must be done."""


def prepare(laws: Laws, stager: Stager, way: str, values: Array) -> Move:
    """Warm up, then make a move of these values. It starts from, or goes to, memory that held other bytes before."""
    laws.warm(stager, values)
    return _put(laws, stager, way, values) if way.startswith("put") else _get(laws, stager, way, values)


def _put(laws: Laws, stager: Stager, way: str, values: Array) -> Move:
    source = values.copy() if way == "put_pageable" else laws.pinned(stager, values)
    into = laws.from_numpy(others(values)) if way == "put_into" else None
    return Move(
        direction="h2d",
        start=lambda: stager.put(source, into=into),
        values=values,
        read=lambda transfer: laws.to_numpy(transfer.value),
    )


def _get(laws: Laws, stager: Stager, way: str, values: Array) -> Move:
    array = laws.from_numpy(values)
    out: Array | None = None
    if way == "get_out":
        out = laws.pinned(stager, others(values))
    elif way == "get_pageable_out":
        out = others(values)
    # Where the caller gave the memory, the caller's own array is read, without telling the transfer.
    return Move(
        direction="d2h",
        start=lambda: stager.get(array, out=out),
        values=values,
        read=lambda transfer: np.array(transfer.value if out is None else out),
    )
