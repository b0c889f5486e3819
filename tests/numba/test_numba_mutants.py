"""Who tests the tests against Numba on a GPU: each law meant for a mistake catches it, by an assertion.

The mutants run a few dozen to a process; here stands what came out.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.numba import mutants
from tests.numba.mutants import NUMBA_MUTANTS
from xferlib.conformance.suite import _test_names
from xferlib.protocol import LAWS
from xferlib.stager import Stager

ROOT = Path(__file__).resolve().parents[2]
ASSERTIONS = ("assert", "AssertionError", "Failed")
BATCHES = 4
"""Each ends before a test is taken for hung, and few enough that starting processes is not what takes the time."""
LIMIT_SECONDS = 110
TAIL = 4_000

CASES = [(name, test) for name, mutant in NUMBA_MUTANTS.items() for test in mutant.tests]


class Batch(NamedTuple):
    outcomes: dict[tuple[str, str], str]
    """By mutant and test: what the test raised, or that it passed."""
    output: str


@functools.cache
def run(number: int) -> Batch:
    names = sorted(NUMBA_MUTANTS)[number::BATCHES]
    with tempfile.TemporaryDirectory() as folder:
        report, arguments = Path(folder, "report.xml"), Path(folder, "arguments")
        arguments.write_text("\n".join(f"{mutants.__file__}::{name}::{test}" for name, test in CASES if name in names))
        child = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"@{arguments}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        tail = child.stdout[-TAIL:]
        return Batch(_outcomes(report) if report.exists() else {}, f"exit status {child.returncode}\n{tail}")


def _outcomes(report: Path) -> dict[tuple[str, str], str]:
    outcomes: dict[tuple[str, str], str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        name = case.attrib["classname"].rpartition(".")[2]
        # A test that also fails when it is torn down is there twice.
        outcomes.setdefault((name, case.attrib["name"]), problems[0].attrib["message"] if problems else "passed")
    return outcomes


@pytest.mark.parametrize(("name", "test"), CASES)
def test_numba_mutant_is_caught(stager: Stager, name: str, test: str) -> None:
    batch = run(sorted(NUMBA_MUTANTS).index(name) % BATCHES)
    outcome = batch.outcomes.get((name, test), f"did not run: {batch.output}")
    assert outcome.startswith(ASSERTIONS), f"{NUMBA_MUTANTS[name].wall.__doc__ or name} But the test {outcome}"


def test_every_law_has_a_numba_mutant() -> None:
    assert set().union(*(mutant.laws for mutant in NUMBA_MUTANTS.values())) == set(LAWS)


def test_numba_mutants_name_tests_that_exist() -> None:
    assert {test for _, test in CASES} - set(_test_names()) == set()
