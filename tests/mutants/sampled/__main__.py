"""The command: see the package."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.mutants.sampled.areas import AREAS
from tests.mutants.sampled.draw import STALE, Mutant, drawn, written
from tests.mutants.sampled.judge import Judge, Verdict
from tests.mutants.sampled.tree import ROOT, Scratch

LIMIT_FACTOR = 4
LEAST_SECONDS = 600.0


def main() -> int:
    options = _options()
    mutants = written(options.area) if options.written else drawn(options.area, options.seed, options.count)
    numbers = options.only or range(1, len(mutants) + 1)
    if options.list:
        for number in numbers:
            _show(number, mutants[number - 1])
        return 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        return _run(options, mutants, numbers, Scratch(Path(folder)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.sampled", description="Mutation testing by sample.")
    parser.add_argument("--area", required=True, choices=sorted(AREAS))
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--written", action="store_true", help="those of tests/mutants/sampled/written instead of drawn ones")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument("--only", type=int, nargs="+", metavar="K", help="mutants by number")
    parser.add_argument("--no-baseline", action="store_true", help="trust that the tests pass without a mutant")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what came out")
    return parser.parse_args()


def _run(options: argparse.Namespace, mutants: list[Mutant], numbers: Any, scratch: Scratch) -> int:
    area = AREAS[options.area]
    Judge(scratch.folder, 0, 0).warm()
    baseline = 0.0
    if not options.no_baseline:
        verdict = Judge(scratch.folder, 3600, area.hang_seconds).judge(area.everything())
        baseline = verdict.seconds
        print(f"baseline: {baseline:.0f} s, {verdict.killer or 'all tests pass'} {verdict.reason}", flush=True)
        if verdict.killer is not None:
            return 2
    judge = Judge(scratch.folder, max(LEAST_SECONDS, LIMIT_FACTOR * baseline), area.hang_seconds)
    records = []
    for number in numbers:
        mutant = mutants[number - 1]
        if mutant.kind == STALE:
            _show(number, mutant)
            continue
        scratch.write(mutant.path, mutant.text)
        verdict = judge.judge(area.targets(mutant.path, scratch.folder))
        scratch.mend(mutant.path)
        _show(number, mutant, verdict)
        records.append(_record(number, mutant, verdict))
        if options.json:
            head = {"area": options.area, "written": options.written, "seed": options.seed, "count": len(mutants)}
            options.json.write_text(json.dumps({**head, **_origin(), "baseline_seconds": baseline, "mutants": records}, indent=1))
    alive = [record["number"] for record in records if record["killer"] is None]
    print(f"{options.area}: {len(records)} run, {len(records) - len(alive)} killed, alive: {alive}")
    return 1 if alive else 0


def _record(number: int, mutant: Mutant, verdict: Verdict) -> dict[str, Any]:
    site = {"number": number, "file": mutant.path, "line": mutant.line, "kind": mutant.kind, "diff": mutant.diff()}
    return {**site, **verdict._asdict()}


def _origin() -> dict[str, str]:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {"commit": found.stdout.strip(), "python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d")}


def _show(number: int, mutant: Mutant, verdict: Verdict | None = None) -> None:
    outcome = ""
    if verdict is not None:
        outcome = f"  ALIVE, {verdict.seconds:.0f} s" if verdict.killer is None else f"  {verdict.seconds:.0f} s {verdict.killer}"
    print(f"{number:3} {mutant.path}:{mutant.line} {mutant.kind}{outcome}", flush=True)
    if verdict is None or verdict.killer is None:
        print("    " + mutant.diff().replace("\n", "\n    "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
