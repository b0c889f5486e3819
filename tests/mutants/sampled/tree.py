"""A scratch copy of the tree, in which one file at a time is broken and mended again: the checkout is never touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import final

__all__ = ["ROOT", "Scratch"]

ROOT = Path(__file__).resolve().parents[3]
COPIED = ("xferlib", "backends", "tests", "benchmarks", "examples", "docs", "README.md", "pyproject.toml", "LICENSE")


@final
class Scratch:
    """Files are broken with times of their own, so that no compiled file of another moment is taken for theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._moment = 1
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
            else:
                shutil.copy2(source, target)

    def read(self, path: str) -> str:
        return (self.folder / path).read_text()

    def write(self, path: str, text: str) -> None:
        (self.folder / path).write_text(text)
        self._moment += 1
        os.utime(self.folder / path, (self._moment, self._moment))

    def mend(self, path: str) -> None:
        """Bring back the file that the checkout has."""
        shutil.copy2(ROOT / path, self.folder / path)
