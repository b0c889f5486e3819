"""The command line: what to run, where the records go, and the exit status."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

import xferlib
from benchmarks import machine, records, report
from benchmarks.bench import Bench, Case, OpenStager
from benchmarks.cases import CASES
from benchmarks.devices import open_device
from benchmarks.harness import FULL, QUICK, Absences
from benchmarks.records import Record
from benchmarks.ways import Corrupted, Device

__all__ = ["main", "run"]

RESULTS = Path(__file__).resolve().parent / "results"
TO_RESULTS = "results"
LOG_WIDTH = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and return the exit status: 0, 1 if it could not run or bytes were wrong."""
    options = _parser().parse_args(arguments)
    if options.list:
        for case in CASES.values():
            print(f"{case.name:10s} {case.summary}")
        return 0
    cases = [CASES[name] for name in options.case or CASES]
    try:
        with xferlib.stager(options.backend) as stager:
            backend = stager.name
        device = open_device(backend)
    except (xferlib.XferError, LookupError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 1
    return run(partial(xferlib.stager, backend), device, cases, quick=options.quick, json_file=options.json)


def run(open_stager: OpenStager, device: Device, cases: Sequence[Case], *, quick: bool, json_file: str | None) -> int:
    """Run the cases, write the records of each when it has ended, and print the table. Wrong bytes end the run with status 1."""
    bench = Bench(
        open_stager=open_stager,
        device=device,
        machine=machine.machine(device),
        versions=machine.versions(device),
        effort=QUICK if quick else FULL,
        quick=quick,
        absences=Absences(),
        say=_say_when(),
    )
    file = _file(json_file, machine.slug(device.name))
    shown: list[Record] = []
    for case in cases:
        try:
            with warnings.catch_warnings():
                # Of puts that wait: what they cost is the question.
                warnings.simplefilter("ignore", xferlib.SynchronousTransferWarning)
                measured = list(case.run(bench))
        except Corrupted as error:
            print(f"case {case.name!r} failed: {error}", file=sys.stderr)
            return 1
        if file is not None:
            records.merge(file, measured)
        shown += measured
    report.show(_console(), shown, bench.absences.reasons)
    return 0


def _say_when() -> Callable[[str], None]:
    """Return what prints a line to the standard error, after the seconds since now."""
    begin = time.perf_counter()
    return lambda line: print(f"{time.perf_counter() - begin:6.1f} s  {line}", file=sys.stderr, flush=True)


def _console() -> Console:
    # Into a file or a pipe there is no width to keep to but that of the table.
    return Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)


def _file(asked: str | None, stem: str) -> Path | None:
    if asked is None:
        return None
    return RESULTS / f"{stem}.json" if asked == TO_RESULTS else Path(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description="Measure xferlib beside its peers and the limit.")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="run this case only; may be repeated")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="what xferlib.stager() takes (default: auto)")
    parser.add_argument(
        "--json",
        nargs="?",
        const=TO_RESULTS,
        metavar="FILE",
        help="merge the records into FILE (default: benchmarks/results/<gpu>.json)",
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and repeats: shows that it runs, not how fast")
    return parser
