"""The words of pipelines: compute on one batch after another, and what feeds and drains it. Nothing here runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["OUTPUTS", "Bytes", "Compute", "Drain", "Feed"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
OUTPUTS = 4
"""Outputs of one compute that are intact at a time."""


class Compute(Protocol):
    """Work on the device, of a length to choose: the checksum of a batch, its bytes xor a tag, and `rounds` of arithmetic."""

    @property
    def stream(self) -> Any:
        """What `stream=` takes to name the stream that the work runs on; None: the current one, or there is none to name."""

    @property
    def handle(self) -> int | None:
        """The stream's number, for peers; None: there is no such thing."""

    def current(self) -> AbstractContextManager[object]:
        """Make the stream the current one, where the framework has such a thing."""

    def adopt(self, array: Any) -> Any:
        """Return the framework's array over a peer's array. The peer has taken care of the order."""

    def step(self, batch: Any, rounds: int, tag: int) -> tuple[Any, Any]:
        """Launch one step and return its mark and its output. The latest `OUTPUTS` outputs are intact, no others."""

    def wait(self, mark: Any) -> None:
        """Block the host until the step is done."""

    def checksums(self, marks: Sequence[Any]) -> list[int]:
        """Return what the steps found in their batches: a thousand of the latest at most."""

    def checksum(self, values: Bytes) -> int:
        """Return what a step must find in these bytes."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """How batches come to the device, one call for each half of it."""

    name: str
    start: Callable[[Bytes], Any]
    """Start moving a batch. Every fourth batch may go into the same memory: by then the step that read it is done."""
    use: Callable[[Any], Any]
    """Turn what `start` returned into an array that the compute's stream may read."""
    share: float = 1.0
    """The share of the steps that are measured for ours; less for a feed that would take minutes."""


@dataclass(frozen=True, kw_only=True)
class Drain:
    """How outputs come to the host, into a given array or one of the drain's own."""

    name: str
    start: Callable[[Any, Bytes], Any]
    """Take an output that may still be computed."""
    finish: Callable[[Any], Bytes]
    """Block until what `start` returned is done and return where the bytes are."""
    share: float = 1.0
