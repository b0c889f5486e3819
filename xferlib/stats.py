"""A stager's figures, as a value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A stager's figures at one moment; bytes unless said otherwise."""

    pinned_nbytes: int
    """Page-locked now: the pool, and memory locked by `pin`. 0 where the backend cannot page-lock."""
    pinned_peak_nbytes: int
    """The pool's largest size so far."""
    pinned_limit_nbytes: int
    pinned_used_nbytes: int
    """Of the pool, what arrays and copies in flight hold."""
    pool_hits: int
    """Requests for pinned memory that found some idle."""
    pool_misses: int
    """Requests that had to page-lock more."""
    device_nbytes: int
    """Device memory taken from the framework for puts, in use or idle."""
    device_peak_nbytes: int
    device_waits: int
    """Puts that made the H2D stream wait for a reader, at the device limit."""
    h2d_nbytes: int
    """Of the copies to the device started so far."""
    d2h_nbytes: int
    """Of the copies to the host started so far."""
    synchronous: int
    """Leaves so far that passed through the CPU because their memory is pageable."""
