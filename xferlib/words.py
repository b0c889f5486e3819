"""Counts, sizes and doubts as people read them. Every message of ours takes them from here; nothing else belongs here."""

from __future__ import annotations

__all__ = ["counted", "doubt", "in_words"]

SHORT_SECONDS = 0.2
"""Below this the same program may show something else when it runs again."""

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return "1 slot", "3 slots", "1,024 slots". `many`: the plural, where it is not `one` and an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def in_words(nbytes: int) -> str:
    """Return a size in the largest unit of which there is one: "1 byte", "1.5 KiB", "64.0 MiB"."""
    if nbytes < 1024:
        return "1 byte" if nbytes == 1 else f"{nbytes} bytes"
    size = float(nbytes)
    for unit in UNITS:
        size /= 1024
        # A size that would be rounded up to the next unit is given in that unit.
        if size < 1023.95 or unit == UNITS[-1]:
            break
    return f"{size:.1f} {unit}"


def doubt(seconds: float, more: str) -> tuple[str, ...]:
    """Say that a verdict comes from too short a time, if it does. `more`: what to take more of."""
    return (f"in so short a time another run may say otherwise: take more {more}",) if seconds < SHORT_SECONDS else ()
