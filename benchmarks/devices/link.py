"""The slot that a device sits in, as the system reports it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["link"]


def link(bus: str) -> str:
    """Return the speed and width of the slot, at most: an idle link reports less than it can do."""
    folder = Path("/sys/bus/pci/devices") / bus.lower()
    try:
        speed, width = ((folder / f"max_link_{part}").read_text().strip() for part in ("speed", "width"))
    except OSError:
        return "unknown"
    return f"{speed} x{width}"
