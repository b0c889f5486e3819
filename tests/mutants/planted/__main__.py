"""How soon the programs find a defect: `python -m tests.mutants.planted --backend host`. For every mutant, how many it took.

Each is planted in a copy of the checkout. What fails without a mutant counts for none.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.planted.defects import MUTANTS
from tests.mutants.planted.planting import environment_of, plant
from tests.random_programs.kits import NAMES
from tests.random_programs.supervise import Failure, Runner


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.planted")
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
            found = _hunt(options.backend, root, options.seed, options.programs, large=mutant.large)
        words = "NOT FOUND |" if found is None or found.number is None else f"{1 + found.number} | {found.signature}"
        missed += found is None
        print(f"| {mutant.name} | {words} | {time.monotonic() - began:.0f} s |", flush=True)
    return missed


def _hunt(backend: str, root: Path, seed: int, programs: int, *, large: bool) -> Failure | None:
    """Return the first program that fails with the mutant and passes without it."""
    environment = environment_of(root)
    if backend == "jax":
        environment["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
    with Runner(backend, environment, large=large, root=root) as mutated, Runner(backend) as sound:
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
