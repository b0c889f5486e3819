"""Runs mutants, many to a process, and says what came out: who tests the tests reads it here."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple, TypeAlias

__all__ = ["Batch", "Case", "caught", "run"]

ROOT = Path(__file__).resolve().parents[3]
ASSERTIONS = ("assert", "AssertionError", "Failed")
LIMIT_SECONDS = 110
"""Below the time after which pytest takes this process for hung."""
TAIL = 4_000
QUIET = ("-W", "ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""What a mutant's closed stager still raises on the reaper's thread would be told of the next mutant."""

Case: TypeAlias = tuple[str, str]
"""A mutant's class, and a test of it."""


class Batch(NamedTuple):
    outcomes: dict[Case, str]
    """What the test raised, or that it passed."""
    output: str

    def outcome(self, case: Case) -> str:
        return self.outcomes.get(case, f"did not run: {self.output}")


def caught(outcome: str) -> bool:
    """Tell whether a law has caught the mutant: by an assertion, not because it fell over."""
    return outcome.startswith(ASSERTIONS)


@functools.cache
def run(file: str, cases: tuple[Case, ...]) -> Batch:
    """Run these tests of the file, in a process of their own, once."""
    with tempfile.TemporaryDirectory() as folder:
        report, arguments = Path(folder, "report.xml"), Path(folder, "arguments")
        arguments.write_text("\n".join(f"{file}::{name}::{test}" for name, test in cases))
        child = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *QUIET, f"--junitxml={report}", f"@{arguments}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        tail = child.stdout[-TAIL:]
        return Batch(_outcomes(report) if report.exists() else {}, f"exit status {child.returncode}\n{tail}")


def _outcomes(report: Path) -> dict[Case, str]:
    outcomes: dict[Case, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        name = case.attrib["classname"].rpartition(".")[2]
        # A test that also fails when it is torn down is there twice.
        outcomes.setdefault((name, case.attrib["name"]), problems[0].attrib["message"] if problems else "passed")
    return outcomes
