"""The harness sees an engine that is wrong in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.build import COMPILER, ENGINE, NOT_TRIED, built, run
from tests.engine.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: the engine's mutants were not tried")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_harness_sees_it(mutant: Mutant, tmp_path: Path) -> None:
    text = (ENGINE / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    if mutant.sanitizer in NOT_TRIED:
        pytest.skip(NOT_TRIED[mutant.sanitizer])
    program = built(tmp_path, mutant.sanitizer, {mutant.file: text.replace(mutant.old, mutant.new)}, patience_seconds=3)
    # What races may come out right now and then.
    assert any(run(program, mutant.test, seconds=8)[0] != 0 for _ in range(5))
