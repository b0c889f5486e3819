"""What a backend may ship for `doctor` beside its entry point, the module `diagnosis`; and the versions of what is installed.

`diagnosis` has `findings() -> list[str]`, sentences that the user should read even when the backend is ready, and
`versions() -> dict[str, str]`, its distributions by name. Neither needs a device, and only the backend can know what they say.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, cast

from xferlib.registry import backend_module

__all__ = ["Diagnosis", "diagnosis", "own_versions"]

OURS = ("xferlib", "numpy", "optree", "psutil", "rich", "typer")
EXTRAS = ("matplotlib", "pillow", "pytest")


class Diagnosis(Protocol):
    """What the module `diagnosis` offers."""

    def findings(self) -> list[str]: ...

    def versions(self) -> dict[str, str]: ...


def diagnosis(backend: str) -> Diagnosis | None:
    """Return what the backend knows about this machine; None if it ships no such module."""
    return cast("Diagnosis | None", backend_module(backend, "diagnosis"))


def own_versions() -> dict[str, str]:
    """Return the versions of Python, of what the core needs, and of the optional packages that are installed."""
    found = {"python": platform.python_version()}
    for name in (*OURS, *EXTRAS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in OURS:
                found[name] = "not installed"
    return found
