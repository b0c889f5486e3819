"""Who tests the tests: every law catches the backends that break it, and by an assertion, not because a mutant fell over.

The mutants run many to a process; here stands what came out.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.mutants import host
from tests.mutants.broken import MUTANTS
from xferlib.conformance import StagerConformance
from xferlib.protocol import LAWS

ROOT = Path(__file__).resolve().parents[2]
ASSERTIONS = ("assert", "AssertionError", "Failed")
BATCHES = 3
"""Few, since each starts a process, but so many that none takes as long as a test that hangs."""
LIMIT_SECONDS = 110
CASES = [(name, test) for name, mutant in MUTANTS.items() for test in mutant.tests]


@functools.cache
def outcomes(batch: int) -> dict[tuple[str, str], str]:
    """Run what each mutant of the batch must fail; return, by mutant and test, what pytest says of it."""
    names = list(MUTANTS)[batch::BATCHES]
    with tempfile.TemporaryDirectory() as folder:
        report, arguments = Path(folder, "report.xml"), Path(folder, "arguments")
        arguments.write_text("\n".join(f"{host.__file__}::{name}::{test}" for name, test in CASES if name in names))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"@{arguments}"]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=LIMIT_SECONDS, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[tuple[str, str], str] = {}
    for case in cases:
        problems = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        name = case.attrib["classname"].rpartition(".")[2]
        # A test that also fails when it is torn down is there twice.
        found.setdefault((name, case.attrib["name"]), problems[0].attrib["message"] if problems else "it passed")
    return found


@pytest.mark.parametrize(("name", "test"), CASES)
def test_mutant_is_caught(name: str, test: str) -> None:
    outcome = outcomes(list(MUTANTS).index(name) % BATCHES).get((name, test), "it did not run")
    assert outcome.startswith(ASSERTIONS), outcome


def test_every_law_has_a_mutant() -> None:
    assert set().union(*(mutant.laws for mutant in MUTANTS.values())) == set(LAWS)


def test_every_test_of_the_suite_fails_for_some_mutant() -> None:
    tests = {name for name in dir(StagerConformance) if name.startswith("test_law")}
    caught = {test.partition("[")[0] for _, test in CASES}
    assert tests - caught == set()
    assert caught - tests == set()
