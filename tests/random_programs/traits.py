"""What a program may do with a backend: all that drawing one needs to know, so that one seed gives one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["Traits"]


@final
@dataclass(frozen=True)
class Traits:
    """See `Kit` for the words."""

    backend: str
    streams: bool
    put_into: bool
    mapped: bool
    register: bool
    on_gpu: bool
    has_current: bool
    devices: int
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    views: tuple[str, ...]
    has_empty_views: bool
    canaries: tuple[str, ...]
    holds: int
    held_sizes: tuple[int, ...]
    files: tuple[str, ...]
