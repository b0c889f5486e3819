"""Other libraries that move the same bytes, one module each, imported when the peer is opened and not before."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from benchmarks.ways import Opener, Peer

__all__ = ["OPENERS"]


def _open(name: str) -> Peer:
    peer: Peer = import_module(f"benchmarks.peers.{name}_calls").open_peer()
    return peer


OPENERS: dict[str, Opener] = {name: partial(_open, name) for name in ("cuda", "cupy", "jax", "numba", "numpy", "torch")}
"""By the peers' names. Opening one raises what its imports raise."""
