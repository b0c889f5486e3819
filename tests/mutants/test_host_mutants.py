"""Who tests the tests: every law catches the backends that break it, and by an assertion, not because a mutant fell over.

The mutants run many to a process; here stands what came out.
"""

from __future__ import annotations

import pytest

from tests.mutants import host
from tests.mutants.broken import MUTANTS
from tests.mutants.running import Case, caught, run
from xferlib.conformance import StagerConformance
from xferlib.protocol import LAWS

BATCHES = 3
"""Few, since each starts a process, but so many that none takes as long as a test that hangs."""
CASES = [(name, test) for name, mutant in MUTANTS.items() for test in mutant.tests]


def batch_with(name: str) -> tuple[Case, ...]:
    """Return the cases that run in one process, those of this mutant among them."""
    names = list(MUTANTS)[list(MUTANTS).index(name) % BATCHES :: BATCHES]
    return tuple(case for case in CASES if case[0] in names)


@pytest.mark.parametrize(("name", "test"), CASES)
def test_mutant_is_caught(name: str, test: str) -> None:
    outcome = run(host.__file__, batch_with(name)).outcome((name, test))
    assert caught(outcome), outcome
    if test.startswith("test_hook_"):
        assert "the hook " in outcome, f"who wrote it would look for the fault in the backend: {outcome}"


def test_every_law_has_a_mutant() -> None:
    assert set().union(*(mutant.laws for mutant in MUTANTS.values())) == set(LAWS)


def test_every_test_of_the_suite_fails_for_some_mutant() -> None:
    tests = {name for name in dir(StagerConformance) if name.startswith("test")}
    named = {test.partition("[")[0] for _, test in CASES}
    assert tests - named == set()
    assert named - tests == set()
