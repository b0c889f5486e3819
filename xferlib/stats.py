"""A stager's figures, as a value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A stager's figures at one moment; bytes unless said otherwise.

    Attributes:
        pinned_nbytes: Page-locked now: the pool, and memory locked by `pin` and by shared rings. 0 where the backend cannot
            page-lock.
        pinned_peak_nbytes: The most of `pinned_nbytes` so far.
        pinned_limit_nbytes: What `pinned_nbytes` never exceeds.
        pinned_used_nbytes: What arrays and copies in flight hold of the pool, page-locked or not. This is what `pinned_limit` and
            errors of a full pool speak of where the backend cannot page-lock.
        pinned_asked_nbytes: The part of `pinned_nbytes` that was asked for and is in use: without idle memory, alignment and unused
            rests of pages.
        pinned_asked_peak_nbytes: The most of `pinned_asked_nbytes` at a time.
        pool_hits: Requests for pinned memory that found some idle.
        pool_misses: Requests that had to page-lock more.
        pool_waits: How often a request waited for a transfer to make room.
        pool_wait_seconds: For how long, all of them together.
        pool_fallbacks: Arrays in pageable memory, since the pool was full: with when_full="stage".
        device_nbytes: Device memory taken from the framework for puts, in use or idle.
        device_limit_nbytes: What `device_nbytes` never exceeds; None: there is no limit.
        device_peak_nbytes: The most of `device_nbytes` so far.
        device_waits: Puts whose copy had to wait, on the device, for a reader of an older batch.
        h2d_nbytes: Bytes of the copies to the device started so far.
        d2h_nbytes: Bytes of the copies to the host started so far.
        synchronous: Pageable leaves so far that were put while the caller waited for the CPU's copy, or that were the `out` of a
            get. Borrowed leaves are not counted.
    """

    pinned_nbytes: int
    pinned_peak_nbytes: int
    pinned_limit_nbytes: int
    pinned_used_nbytes: int
    pinned_asked_nbytes: int
    pinned_asked_peak_nbytes: int
    pool_hits: int
    pool_misses: int
    pool_waits: int
    pool_wait_seconds: float
    pool_fallbacks: int
    device_nbytes: int
    device_limit_nbytes: int | None
    device_peak_nbytes: int
    device_waits: int
    h2d_nbytes: int
    d2h_nbytes: int
    synchronous: int

    @property
    def waste(self) -> float:
        """Of the memory that is page-locked now, the share that nobody asked for or uses."""
        return _share_left(self.pinned_asked_nbytes, self.pinned_nbytes)

    @property
    def waste_at_peak(self) -> float:
        """Of the most that was ever page-locked, the share that was never in use at the same time."""
        return _share_left(self.pinned_asked_peak_nbytes, self.pinned_peak_nbytes)


def _share_left(asked: int, pinned: int) -> float:
    return 1 - asked / pinned if pinned else 0.0
