"""Who tests the tests of JAX: each law meant for a mistake catches it, by an assertion, on the platform that JAX has here."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.jax import mutants
from tests.jax.mutants import JAX_MUTANTS
from xferlib.conformance.suite import _test_names
from xferlib.stager import Stager

ROOT = Path(__file__).resolve().parents[2]
ASSERTIONS = ("assert", "AssertionError", "Failed")
LIMIT_SECONDS = 110
"""Below the time after which pytest takes this process for hung."""


def expected_of(name: str, on_gpu: bool) -> tuple[str, ...]:
    mutant = JAX_MUTANTS[name]
    return mutant.cuda if on_gpu else mutant.cpu


@functools.cache
def outcomes(on_gpu: bool) -> dict[tuple[str, str], str]:
    """Run the mutants in a process of their own; return, by mutant and test, what the test raised."""
    cases = [(name, test) for name in JAX_MUTANTS for test in expected_of(name, on_gpu)]
    with tempfile.TemporaryDirectory() as folder:
        report, arguments = Path(folder, "report.xml"), Path(folder, "arguments")
        arguments.write_text("\n".join(f"{mutants.__file__}::{name}::{test}" for name, test in cases))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"@{arguments}"]
        child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        assert report.exists(), child.stdout[-4_000:] + child.stderr[-4_000:]
        found: dict[tuple[str, str], str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            problems = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
            name = case.attrib["classname"].rpartition(".")[2]
            # A test that also fails when it is torn down is there twice.
            found.setdefault((name, case.attrib["name"]), problems[0].attrib["message"] if problems else "passed")
        return found


@pytest.mark.parametrize("name", JAX_MUTANTS)
def test_jax_mutant_is_caught(stager: Stager, name: str) -> None:
    found = outcomes(stager.on_gpu)
    wanted = expected_of(name, stager.on_gpu)
    got = {test: found.get((name, test), "did not run") for test in wanted}
    assert wanted
    assert {test: outcome for test, outcome in got.items() if not outcome.startswith(ASSERTIONS)} == {}


def test_jax_mutants_name_tests_that_exist() -> None:
    named = {test for mutant in JAX_MUTANTS.values() for test in mutant.tests}
    assert named - set(_test_names()) == set()
