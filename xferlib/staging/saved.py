"""A measured shape that a user has kept: for the machine on which it was measured, in the user's cache folder.

Nothing is written unless it is asked for: what is measured while other programs are busy would stay wrong for ever.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xferlib.staging.profile import StagingProfile

__all__ = ["save_profile", "saved_path", "saved_profile"]


def saved_path() -> Path:
    """Return where shapes are kept: below `XDG_CACHE_HOME`, or `~/.cache`. Raises `RuntimeError` where there is no home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "xferlib" / "staging.json"


def saved_profile() -> StagingProfile | None:
    """Return the shape that was kept on this machine; None: there is none. Warns of a file that cannot be read."""
    try:
        path = saved_path()
        kept = _read(path)
        # The processor's name takes the system a while to print, where there are many cores.
        found = kept.get(_machine()) if kept else None
        return None if found is None else StagingProfile(**found)
    except RuntimeError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"{path} cannot be used ({error}). Measure it again with: xferlib doctor --save-staging", RuntimeWarning, 2)
        return None


def save_profile(profile: StagingProfile) -> Path:
    """Keep a shape for this machine, and return the file. Other machines' stay. Raises `OSError`, or `RuntimeError` as above."""
    path = saved_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        kept = _read(path)
    except (ValueError, AttributeError):
        kept = {}
    text = json.dumps({**kept, _machine(): asdict(profile)}, indent=2) + "\n"
    # Whole or not at all: other processes read it at any time.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()).items())
    except FileNotFoundError:
        return {}


def _machine() -> str:
    """Name what decides about the shape, so that machines that share a home folder each find their own."""
    model = "unknown processor"
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
