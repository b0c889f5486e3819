"""What is asked for pinned memory, and what is returned: requests, blocks, figures, and at which multiples. No policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, final, get_args

__all__ = ["ALIGNMENT", "PAGE", "HostBlock", "PoolRequest", "Usage", "WhenFull", "check_when_full", "round_up"]

ALIGNMENT = 256
"""Bytes. What device memory is aligned to, so that a packed block has one layout on both sides."""
PAGE = 4096

WhenFull: TypeAlias = Literal["wait", "raise", "stage"]
"""What happens to an array for which the limit has no room. "wait": it waits while transfers in flight will make room, and fails if
none will. "raise": it fails at once. "stage": it lies in pageable memory, which is staged. Requests for chunks of staging itself
always wait, since chunks come back by themselves.
"""


def check_when_full(when_full: str) -> None:
    """Raise `ValueError` for what is no `WhenFull`."""
    if when_full not in get_args(WhenFull):
        raise ValueError(f"when_full is 'wait', 'raise' or 'stage', got {when_full!r}")


def round_up(nbytes: int, step: int) -> int:
    """Return the next multiple of `step`."""
    return -(-nbytes // step) * step


@final
class Usage(NamedTuple):
    """Bytes of one pool and of what is reserved beside it, except `used`."""

    pinned: int
    peak: int
    used: int
    """Handed out now, of the pool alone."""
    asked: int
    """The same without what alignment adds, but with what is reserved."""
    asked_peak: int


@final
class PoolRequest(NamedTuple):
    """Pinned memory that somebody asks for."""

    size: int
    """Bytes, whole units of alignment."""
    asked: int
    taken: Callable[[], None] | None
    """Called before any other thread can find the memory gone."""
    write_combined: bool
    for_array: bool


@final
class HostBlock:
    """Bytes for arrays to be based on.

    `held` goes with the last array over them: a ticket, by which their owner takes them back, and perhaps what keeps them alive.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_held", "address", "nbytes")

    def __init__(self, address: int, nbytes: int, held: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self._held = held
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    def split(self, nbytes: int) -> list[HostBlock]:
        """Return blocks of so many bytes each, side by side: this one is given back when the last of them is gone."""
        return [HostBlock(self.address + start, nbytes, self._held) for start in range(0, self.nbytes - nbytes + 1, nbytes)]
