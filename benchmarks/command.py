"""The command line: what to run, where the records go, and the exit status."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TextIO

from rich.console import Console

import xferlib
from benchmarks import machine, records, report
from benchmarks.bench import Bench, Case, OpenStager
from benchmarks.budget import Budget, OutOfTime, Teller
from benchmarks.cases import CASES
from benchmarks.devices import open_device
from benchmarks.harness import BRIEF, FULL, QUICK, Absences
from benchmarks.records import Record
from benchmarks.ways import Corrupted, Device

__all__ = ["main", "run"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS, SCRATCH = ROOT / "benchmarks" / "results", ROOT / "build" / "benchmarks"
"""What the pages are written from, which is in version control, and what nobody keeps."""
TO_SCRATCH, TO_RESULTS = "scratch", "results"
MINUTES = 7.5
"""What is measured when they are over ends with its round, and is no row."""
TO_STDOUT = "-"
LOG_WIDTH = 200
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and return the exit status: 0, 1 if it could not run or bytes were wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.resume and options.json == TO_STDOUT:
        parser.error("--resume goes on with a file, and --json - writes none")
    if options.record and options.json is not None:
        parser.error("--record and --json each say where the records go. Give one of them")
    json_file = TO_RESULTS if options.record else options.json
    if options.quick and json_file == TO_RESULTS:
        parser.error("--quick shows that it runs, not how fast, and --record writes what the pages are made from. Leave one out")
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: expected more than 0. --full has no limit")
    if options.list:
        for case in CASES.values():
            print(f"{case.name:12s} {case.seconds:4.0f} s  {case.summary}")
        return 0
    if options.compare:
        for file in options.compare:
            if file.is_dir():
                parser.error(f"--compare {file}: it is a folder. Name a file of records in it")
            if not file.is_file():
                parser.error(f"--compare {file}: there is no such file")
        try:
            old, new = map(records.read, options.compare)
        except ValueError as error:
            parser.error(f"--compare {error}")
        report.show_ratios(_console(sys.stdout), old, new)
        return 0
    cases = [CASES[name] for name in options.case or CASES]
    try:
        with xferlib.stager(options.backend) as stager:
            backend = stager.name
        device = open_device(backend)
    except (xferlib.XferError, LookupError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 1
    return run(
        partial(xferlib.stager, backend),
        device,
        cases,
        quick=options.quick,
        full=options.full,
        minutes=options.minutes,
        json_file=json_file,
        resume=options.resume,
        sizes=options.size,
    )


def run(
    open_stager: OpenStager,
    device: Device,
    cases: Sequence[Case],
    *,
    quick: bool,
    json_file: str | None,
    full: bool = False,
    minutes: float | None = None,
    resume: bool = False,
    sizes: Sequence[int] = (),
) -> int:
    """Run the cases, write the records of each when it has ended, and print the table. Wrong bytes end the run with status 1.

    `minutes`: what the run may take (None: `MINUTES`, and no limit with `full` or `quick`). `full`: make all samples and steps.

    `json_file` "-": the records are all that goes to the standard output, at the end; the table goes to the standard error.
    `resume`: where the case can do so, write each record at once and leave out rows that the file has already.
    """
    file = _file(json_file, machine.slug(device.name))
    if file is not None:
        try:
            # Before minutes are spent on what could not be put into it.
            records.read(file)
        except ValueError as error:
            print(f"cannot run: {error}", file=sys.stderr)
            return 1
    limited = MINUTES if minutes is None and not (full or quick) else minutes
    budget = Budget(None if limited is None else 60 * limited, cases)
    teller = Teller(budget, Console(stderr=True))
    bench = _bench(open_stager, device, teller, budget, quick=quick, full=full, sizes=sizes)
    if resume and file is not None:
        bench = replace(bench, done=records.keys_of(file, bench))
    table: dict[records.Key, Record] = {}
    with teller.drawn():
        # When all had their turns, it is the turn of those that had too little time, with what others did not need.
        for number, case in chain(enumerate(cases, 1), _again(budget, len(cases))):
            teller.begin(case, number, len(cases), budget.begin(case))
            turn = replace(bench, done={*bench.done, *table})
            try:
                measured = _measure(turn, case, budget, file, at_once=resume)
            except Corrupted as error:
                if file is not None:
                    records.forget(file, [record for record in table.values() if record["case"] == case.name])
                print(f"case {case.name!r} failed: {error}", file=sys.stderr)
                return 1
            table |= {records.key(record): record for record in measured}
    shown = list(table.values())
    to_stdout = json_file == TO_STDOUT
    console = _console(sys.stderr if to_stdout else sys.stdout)
    report.show(console, shown, bench.absences.reasons)
    if budget.ended:
        console.print(
            f"the time ran out: {'; '.join(budget.ended)}. Some may have had no more rows. --minutes says how long a run "
            "may take, and --full measures all"
        )
    if file is not None and shown:
        print(f"written: {file}", file=sys.stderr)
    if to_stdout:
        records.write(sys.stdout, shown)
    return 0


def _again(budget: Budget, number: int) -> Iterator[tuple[int, Case]]:
    """Yield the cases that get what time is left, as the last ones of the run: asked when all others have had theirs."""
    for case in budget.turn_again():
        yield number, case


def _bench(
    open_stager: OpenStager, device: Device, teller: Teller, budget: Budget, *, quick: bool, full: bool, sizes: Sequence[int]
) -> Bench:
    return Bench(
        open_stager=open_stager,
        device=device,
        machine=machine.machine(device),
        versions=machine.versions(device),
        effort=replace(QUICK if quick else FULL if full else BRIEF, between=budget.between_rounds),
        quick=quick,
        absences=Absences(),
        say=teller.say,
        sizes=sizes,
    )


def _measure(bench: Bench, case: Case, budget: Budget, file: Path | None, *, at_once: bool) -> list[Record]:
    """Return the records of a case, as far as its time goes. They are then in the file; if bytes were wrong, none is."""
    measured: list[Record] = []
    rows = case.run(bench)
    try:
        with warnings.catch_warnings():
            # It warns of puts that wait; what these cost is the question.
            warnings.simplefilter("ignore", xferlib.SynchronousTransferWarning)
            while not budget.is_over(case, len(measured)):
                record = next(rows, None)
                if record is None:
                    break
                measured.append(record)
                if at_once and file is not None:
                    records.merge(file, [record])
            if isinstance(rows, Generator):
                # What it has open is closed now, and not when the next case has begun.
                rows.close()
    except OutOfTime:
        budget.note_cut(case, len(measured))
    except Corrupted:
        if at_once and file is not None:
            records.forget(file, measured)
        raise
    if file is not None:
        records.merge(file, measured)
    return measured


def _console(stream: TextIO) -> Console:
    # In a file or a pipe only the table's own width matters.
    return Console(file=stream, width=None if stream.isatty() else LOG_WIDTH)


def _file(asked: str | None, stem: str) -> Path | None:
    if asked is None or asked == TO_STDOUT:
        return None
    return (SCRATCH if asked == TO_SCRATCH else RESULTS) / f"{stem}.json" if asked in (TO_SCRATCH, TO_RESULTS) else Path(asked)


def _size(text: str) -> int:
    """Return the bytes of a size such as 16MiB."""
    found = re.fullmatch(r"([1-9][0-9]*)([KMG]iB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 16MiB, in KiB, MiB or GiB")
    return int(found[1]) * UNITS[found[2]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description="Measure xferlib beside its peers and the limit.")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("OLD", "NEW"),
        help="print the ratios of two files of records, and stop",
    )
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="run this case only; may be repeated")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="what xferlib.stager() takes (default: auto)")
    parser.add_argument(
        "--json",
        nargs="?",
        const=TO_SCRATCH,
        metavar="FILE",
        help="merge the records into FILE (default: build/benchmarks/<gpu>.json); -: print them instead, and the table to stderr",
    )
    parser.add_argument(
        "--record", action="store_true", help="merge the records into benchmarks/results/, which the pages are made from"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="N", help=f"what the run may take (default: {MINUTES:g}; no limit with --full or --quick)"
    )
    parser.add_argument("--full", action="store_true", help="all sizes, samples and steps, however long that takes")
    parser.add_argument(
        "--resume", action="store_true", help="write each row at once, and skip those FILE has of this machine and these versions"
    )
    parser.add_argument(
        "--size",
        action="append",
        type=_size,
        default=[],
        metavar="SIZE",
        help="of 'sizes', 'saving', 'loading' and 'devices', as 16MiB; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and repeats: shows that it runs, not how fast")
    return parser
