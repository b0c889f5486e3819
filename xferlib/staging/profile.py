"""How many threads copy pageable memory, through chunks of which size: given by the program or the environment."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass

__all__ = ["VARIABLE", "StagingProfile", "as_profile", "given_profile"]

VARIABLE = "XFERLIB_STAGING"
SHAPE = re.compile(r"\s*(\d+)\s*x\s*(\d+)\s*(KiB|MiB)\s*", re.IGNORECASE)
UNITS = {"kib": 1 << 10, "mib": 1 << 20}
MIN_CHUNK = 4096


@dataclass(frozen=True)
class StagingProfile:
    """How pageable memory is copied. Printed, and read from the environment, as `8x4MiB`.

    Attributes:
        threads: At least so many for the whole process, both directions and all stagers; on machines with several NUMA nodes, for
            each node that has a device in use, as far as it has CPUs.
        chunk_nbytes: Bytes of a chunk, at most: under a small limit they are smaller. The engine copies by way of several at once
            that lie side by side.
        hand_off_nbytes: A transfer of up to so many bytes is copied by its caller, in the time that it takes to wake other threads.
            On an H100 machine puts of 384, 512 and 768 KiB that come now and then took 200, 220 and 280 us by the caller, and 270,
            230 and 200 by threads that had to be woken; one right behind the other 100, 100 and 165, and 90, 90 and 110. Gets are
            alike.
    """

    threads: int
    chunk_nbytes: int
    hand_off_nbytes: int = 512 << 10

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name}: expected an int, got {number!r}")
        if self.threads < 1:
            raise ValueError(f"threads: expected at least 1, got {self.threads!r}")
        if self.chunk_nbytes < MIN_CHUNK or self.chunk_nbytes % MIN_CHUNK:
            raise ValueError(f"chunk_nbytes: expected a multiple of {MIN_CHUNK}, got {self.chunk_nbytes!r}")
        if self.hand_off_nbytes < 0:
            raise ValueError(f"hand_off_nbytes: expected 0 or more, got {self.hand_off_nbytes!r}")

    @staticmethod
    def parse(text: str) -> StagingProfile:
        """Read `8x4MiB`. Raises `ValueError`."""
        match = SHAPE.fullmatch(text)
        if match is None:
            raise ValueError(f"expected threads and chunk size as in '8x4MiB', got {text!r}")
        threads, size, unit = match.groups()
        return StagingProfile(int(threads), int(size) * UNITS[unit.lower()])

    def __str__(self) -> str:
        unit, name = (UNITS["mib"], "MiB") if self.chunk_nbytes % UNITS["mib"] == 0 else (UNITS["kib"], "KiB")
        return f"{self.threads}x{self.chunk_nbytes // unit}{name}"


def given_profile() -> StagingProfile | None:
    """Return what the environment says; None: nothing. Raises `ValueError` for what cannot be read."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    return _parsed(text, VARIABLE)


def as_profile(staging: StagingProfile | str | None) -> StagingProfile | None:
    """Return what the argument `staging` says, which may be text as in the environment. Raises `TypeError` and `ValueError`."""
    if staging is None or isinstance(staging, StagingProfile):
        return staging
    if isinstance(staging, str):
        return _parsed(staging, "staging")
    raise TypeError(f"staging: expected text such as '8x4MiB', or a StagingProfile, got {staging!r}")


def _parsed(text: str, name: str) -> StagingProfile:
    try:
        return StagingProfile.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
