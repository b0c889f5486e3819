"""The harness sees an engine that is wrong in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engine.build import COMPILER, ENGINE, NOT_TRIED, built, run
from tests.huge_pages import gives_huge_pages
from tests.mutants.engine.engines import ENDS_IN_A_HUGE_PAGE, MUTANTS, TOUCHED_IN_HUGE_PAGES, WRITTEN_IN_HUGE_PAGES, Mutant
from tests.side_by_side import chosen, side_by_side

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: the engine's mutants were not tried")


@pytest.fixture(scope="module")
def is_seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Mutant], bool]]:
    def tried(mutant: Mutant) -> bool:
        text = (ENGINE / mutant.file).read_text().replace(mutant.old, mutant.new)
        folder, changed = tmp_path_factory.mktemp("mutant"), {mutant.file: text}
        # Nobody looks for lines in it.
        program = built(folder, mutant.sanitizer, changed, patience_seconds=3, options=["-g0"])
        # What races may come out right now and then.
        return any(run(program, mutant.test, seconds=8)[0] != 0 for _ in range(12))

    mutants = [parameters["mutant"] for parameters in chosen(request, "test_the_harness_sees_it")]
    with side_by_side(tried, [mutant for mutant in mutants if mutant.sanitizer not in NOT_TRIED]) as outcome:
        yield outcome


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_harness_sees_it(mutant: Mutant, is_seen: Callable[[Mutant], bool]) -> None:
    assert (ENGINE / mutant.file).read_text().count(mutant.old) == 1
    if mutant.sanitizer in NOT_TRIED:
        pytest.skip(NOT_TRIED[mutant.sanitizer])
    if mutant.test in (TOUCHED_IN_HUGE_PAGES, WRITTEN_IN_HUGE_PAGES, ENDS_IN_A_HUGE_PAGE) and not gives_huge_pages():
        pytest.skip("this system gives no huge pages")
    assert is_seen(mutant)
