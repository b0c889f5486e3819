"""Who tests the tests: every law catches the backends that break it, and by an assertion, not because a mutant fell over.

The mutants run many to a process; here stands what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.mutants.laws import host
from tests.mutants.laws.broken import MUTANTS
from tests.mutants.laws.running import Batch, Case, caught, run
from tests.side_by_side import chosen, side_by_side
from xferlib.conformance import StagerConformance
from xferlib.protocol import LAWS

BATCHES = 8
"""Few, since each starts a process, but so many that none takes as long as a test that hangs."""
CASES = [(name, test) for name, mutant in MUTANTS.items() for test in mutant.tests]


def batch_with(name: str) -> tuple[Case, ...]:
    """Return the cases that run in one process, those of this mutant among them."""
    names = list(MUTANTS)[list(MUTANTS).index(name) % BATCHES :: BATCHES]
    return tuple(case for case in CASES if case[0] in names)


def honest(name: str) -> tuple[Case, ...]:
    return tuple((name, test) for test in host.HONEST[name].tests)


@pytest.fixture(scope="module")
def batch_of(request: pytest.FixtureRequest) -> Iterator[Callable[[tuple[Case, ...]], Batch]]:
    caught = [batch_with(parameters["name"]) for parameters in chosen(request, "test_mutant_is_caught")]
    kept = [honest(parameters["name"]) for parameters in chosen(request, "test_what_mutants_are_built_on_keeps_the_laws")]
    with side_by_side(partial(run, host.__file__), caught + kept) as outcome:
        yield outcome


@pytest.mark.parametrize(("name", "test"), CASES)
def test_mutant_is_caught(name: str, test: str, batch_of: Callable[[tuple[Case, ...]], Batch]) -> None:
    outcome = batch_of(batch_with(name)).outcome((name, test))
    assert caught(outcome), outcome
    if test.startswith("test_hook_"):
        assert "the hook " in outcome, f"who wrote it would look for the fault in the backend: {outcome}"


TESTED_ALONE = {"TestHonestTestHost", "TestHonestLockingHost"}
"""Those pass all laws in a file of their own."""


@pytest.mark.parametrize("name", sorted(set(host.HONEST) - TESTED_ALONE))
def test_what_mutants_are_built_on_keeps_the_laws(name: str, batch_of: Callable[[tuple[Case, ...]], Batch]) -> None:
    cases = honest(name)
    batch = batch_of(cases)
    assert {test: batch.outcome((name, test)) for _, test in cases} == dict.fromkeys(host.HONEST[name].tests, "passed")


def test_every_law_has_a_mutant() -> None:
    assert set().union(*(mutant.laws for mutant in MUTANTS.values())) == set(LAWS)


def test_every_test_of_the_suite_fails_for_some_mutant() -> None:
    tests = {name for name in dir(StagerConformance) if name.startswith("test")}
    named = {test.partition("[")[0] for _, test in CASES}
    assert tests - named == set()
    assert named - tests == set()
