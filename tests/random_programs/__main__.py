"""`python -m tests.random_programs --backend host --minutes 5 --seed 1`. See the package."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.random_programs.kits import NAMES
from tests.random_programs.program import Program
from tests.random_programs.shrink import shrink
from tests.random_programs.supervise import Failure, Runner, Unavailable


def main() -> int:
    options = _options()
    environment = {} if options.backend != "jax" or options.gpu else {"JAX_PLATFORMS": "cpu"}
    try:
        with Runner(options.backend, environment, large=options.large) as runner:
            if options.replay is not None:
                return _replay(runner, options)
            return _hunt(runner, options)
    except Unavailable as error:
        print(f"backend {options.backend!r} cannot run here: {error}")
        return 2


def _options() -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_programs", description="Random programs over the whole public API."
    )
    parser.add_argument("--backend", choices=NAMES, default="host")
    parser.add_argument("--minutes", type=float, help="run for so long")
    parser.add_argument("--programs", type=int, help="run so many; 200 if neither is given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", type=int, help="run this one of the seed alone, and print it")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--large", action="store_true", help="run the programs of large arrays, which several threads use")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run a program that was kept")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure, and count failures that look alike")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--shrink-seconds", type=float, default=120.0)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep failing programs there, as short as they were made")
    parser.add_argument("--gpu", action="store_true", help="let JAX take a GPU; otherwise it computes on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args()


def _hunt(runner: Runner, options: Any) -> int:
    deadline = float("inf") if options.minutes is None else time.monotonic() + 60 * options.minutes
    count = options.programs or (200 if options.minutes is None else sys.maxsize)
    numbers = range(options.first, options.first + count) if options.program is None else [options.program]
    began, ran, steps, skipped, seconds = time.monotonic(), 0, 0, 0, []
    rss: list[int] = []
    failures: list[Failure] = []
    for number in numbers:
        if time.monotonic() > deadline:
            break
        if options.program is not None:
            print(Program.from_json(runner.draw(options.seed, number)))
        answer, failure = runner.run(options.seed, number)
        ran += 1
        if answer:
            steps, skipped = steps + answer["steps"], skipped + answer["skipped"]
            seconds.append(answer["seconds"])
            rss.append(answer["rss"])
        if failure is not None:
            known = {other.signature for other in failures}
            failures.append(failure)
            if failure.signature not in known:
                _tell(runner, failure, options)
            if not options.keep_going:
                break
    figures = {
        "backend": options.backend,
        "large": options.large,
        "seed": options.seed,
        "programs": ran,
        "steps": steps,
        "skipped": skipped,
        "minutes": round((time.monotonic() - began) / 60, 2),
        "median_milliseconds": round(1000 * statistics.median(seconds), 1) if seconds else None,
        "rss_mib": [rss[len(rss) // 10] >> 20, rss[-1] >> 20] if rss else None,
        "failures": dict(Counter(failure.signature for failure in failures)),
        "failed": [failure.number for failure in failures],
    }
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if failures else 0


def _tell(runner: Runner, failure: Failure, options: Any) -> None:
    print(f"FAILED: seed {failure.seed}, program {failure.number}: {failure.message}", flush=True)
    if failure.at:
        print(f"at: {failure.at}")
    short = failure if options.no_shrink else shrink(failure, runner, seconds=options.shrink_seconds)
    print(f"{short.trace}\n{Program.from_json(short.program)}", flush=True)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        file = options.save / f"{options.backend}{'-large' * options.large}-{failure.seed}-{failure.number}.json"
        file.write_text(short.program)
        print(f"kept in {file}", flush=True)


def _replay(runner: Runner, options: Any) -> int:
    text = options.replay.read_text()
    print(Program.from_json(text))
    failure = runner.run_text(text)
    print("ok" if failure is None else f"FAILED: {failure.message}\nat: {failure.at}\n{failure.trace}")
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
