"""Files of one series: their names differ in their last number alone, such as "step_100.npy" and "step_200.npy"."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

__all__ = ["is_numbered", "remove_older", "series_of"]


def is_numbered(file: Path) -> bool:
    """Tell whether a number tells a file from others of its series."""
    return bool(_numbers(file.stem))


def series_of(name: str) -> str:
    """Return what the names of a series have in common: what is around their last number. A name without one is its own series."""
    stem, _, suffix = name.rpartition(".")
    numbers = _numbers(stem)
    return name if not numbers else f"{stem[: numbers[-1].start()]}*{stem[numbers[-1].end() :]}.{suffix}"


def remove_older(file: Path, keep: int) -> list[str]:
    """Remove all files of a series but the newest, of which this is one. Return what to say of those that cannot be removed."""

    def changed(path: Path) -> int:
        # Another save may have removed it.
        with suppress(FileNotFoundError):
            return path.stat().st_mtime_ns
        return 0

    series = series_of(file.name)
    try:
        others = [path for path in file.parent.iterdir() if path != file and series_of(path.name) == series and path.is_file()]
    except OSError as error:
        return [f"older files than {str(file)!r} could not be looked for, and stay: {error}"]
    said: list[str] = []
    others.sort(key=changed)
    for path in others[: max(0, len(others) - (keep - 1))]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            said.append(f"{str(path)!r} is older than is to be kept, and could not be removed: {error}")
    return said


def _numbers(stem: str) -> list[re.Match[str]]:
    return list(re.finditer(r"\d+", stem))
