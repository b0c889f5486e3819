"""Plants a defect in a copy of the checkout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.mutants.planted.defects import Mutant

__all__ = ["environment_of", "plant"]

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("xferlib", "backends", "tests/random_programs")


def environment_of(root: Path) -> dict[str, str]:
    """Return the environment in which the copy of the checkout is what is imported."""
    # What else is on it may have the packages that both need.
    found = [str(root), str(root / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(found)}


def plant(mutant: Mutant, root: Path) -> bool:
    """Copy what programs need of the checkout, and plant the mutant there. False: its text is gone."""
    for part in PARTS:
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    file = root / mutant.file
    text = file.read_text()
    if mutant.old not in text:
        return False
    file.write_text(text.replace(mutant.old, mutant.new))
    return True
