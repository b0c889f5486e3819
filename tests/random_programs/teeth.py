"""How soon the programs find a defect: `python -m tests.random_programs.teeth --backend host`. For every mutant, how many it took.

Each is planted in a copy of the checkout. What fails without a mutant counts for none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.random_programs.kits import NAMES
from tests.random_programs.mutants import MUTANTS, Mutant
from tests.random_programs.supervise import Failure, Runner

__all__ = ["environment_of", "plant"]

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("xferlib", "backends", "tests/random_programs")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs.teeth")
    parser.add_argument("--backend", choices=NAMES, default="host")
    parser.add_argument("--programs", type=int, default=400, help="at most, for each mutant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="mutants with this in their name")
    options = parser.parse_args()
    missed = 0
    for mutant in MUTANTS:
        if options.only not in mutant.name or (mutant.only and options.backend not in mutant.only):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            if not plant(mutant, root):
                print(f"| {mutant.name} | its text is gone | |", flush=True)
                continue
            found = _hunt(options.backend, root, options.seed, options.programs)
        words = "NOT FOUND |" if found is None or found.number is None else f"{1 + found.number} | {found.signature}"
        missed += found is None
        print(f"| {mutant.name} | {words} | {time.monotonic() - began:.0f} s |", flush=True)
    return missed


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


def _hunt(backend: str, root: Path, seed: int, programs: int) -> Failure | None:
    """Return the first program that fails with the mutant and passes without it."""
    environment = environment_of(root)
    if backend == "jax":
        environment["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
    with Runner(backend, environment, root=root) as mutated, Runner(backend) as sound:
        for number in range(programs):
            try:
                _, failure = mutated.run(seed, number)
            except RuntimeError as error:
                # It does not even start.
                return Failure(seed, -1, f"{error}".splitlines()[-1], "", "", "")
            if failure is None:
                continue
            if all(sound.run_text(failure.program) is None for _ in range(3)):
                return failure
    return None


if __name__ == "__main__":
    sys.exit(main())
