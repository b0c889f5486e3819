"""The engine in C alone: its harness, as it is and under each sanitizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.build import COMPILER, SANITIZERS, TESTS, built, run

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: the engine's own tests were not tried")


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    """Return the programs that were built so far."""
    return {}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("name", TESTS)
def test_the_engine(name: str, sanitizer: str, programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    if sanitizer not in programs:
        programs[sanitizer] = built(tmp_path_factory.mktemp(sanitizer), sanitizer)
    status, said = run(programs[sanitizer], name)
    assert status == 0, said
