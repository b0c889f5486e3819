"""Who tests the tests: each law meant for a mistake catches it, by an assertion, with the framework that makes the mistake.

The mutants run a few dozen to a process; here stands what came out. JAX's own must be caught on the CPU, too.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.frameworks.kits.cupy import CUPY
from tests.frameworks.kits.every import CUDA_KITS, given
from tests.frameworks.kits.jax import JAX
from tests.frameworks.kits.kit import Kit
from tests.frameworks.kits.numba import NUMBA
from tests.mutants.laws import cupy, jax, numba
from tests.mutants.laws.broken import Mutant
from tests.mutants.laws.jax import JaxMutant
from tests.mutants.laws.running import Case, caught, run
from xferlib.conformance.suite import _test_names
from xferlib.protocol import LAWS
from xferlib.stager import Stager

FILES: dict[Kit, ModuleType] = {CUPY: cupy, NUMBA: numba, JAX: jax}
BATCHES = {CUPY: 4, NUMBA: 4, JAX: 1}
"""Each ends before a test is taken for hung, and few enough that starting processes is not what takes the time."""

NAMES = [pytest.param(kit, name, id=name) for kit, file in FILES.items() for name in file.MUTANTS]


def expected(kit: Kit, name: str, on_gpu: bool) -> tuple[str, ...]:
    """Return the tests by which this mutant must fail here."""
    mutant: Mutant | JaxMutant = FILES[kit].MUTANTS[name]
    if isinstance(mutant, Mutant):
        return mutant.tests
    return mutant.cuda if on_gpu else mutant.cpu


def batch_with(kit: Kit, name: str, on_gpu: bool) -> tuple[Case, ...]:
    """Return the cases that run in one process, those of this mutant among them."""
    names = sorted(FILES[kit].MUTANTS)
    first = names.index(name) % BATCHES[kit]
    return tuple((each, test) for each in names[first :: BATCHES[kit]] for test in expected(kit, each, on_gpu))


@pytest.mark.parametrize(("kit", "name"), NAMES)
def test_mutant_is_caught(kit: Kit, stager: Stager, name: str) -> None:
    batch = run(str(FILES[kit].__file__), batch_with(kit, name, stager.on_gpu))
    wanted = expected(kit, name, stager.on_gpu)
    assert wanted
    outcomes = {test: batch.outcome((name, test)) for test in wanted}
    not_caught = {test: outcome for test, outcome in outcomes.items() if not caught(outcome)}
    assert not_caught == {}, f"{FILES[kit].MUTANTS[name].wall.__doc__ or name} But these tests do not show it"


# JAX has only those mistakes that it alone invites.
@given(*CUDA_KITS)
def test_every_law_has_a_mutant(kit: Kit) -> None:
    assert set().union(*(mutant.laws for mutant in FILES[kit].MUTANTS.values())) == set(LAWS)


def test_mutants_name_tests_that_exist(kit: Kit) -> None:
    named = {test for mutant in FILES[kit].MUTANTS.values() for test in mutant.tests}
    assert named - set(_test_names()) == set()
