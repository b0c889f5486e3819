"""The engine in C alone: its harness, as it is and under each sanitizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.build import COMPILER, ENGINE, NOT_TRIED, SANITIZERS, TESTS, built, run

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: the engine's own tests were not tried")


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    """Return the programs that were built so far."""
    return {}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("name", TESTS)
def test_the_engine(name: str, sanitizer: str, programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    if sanitizer in NOT_TRIED:
        pytest.skip(NOT_TRIED[sanitizer])
    if sanitizer not in programs:
        programs[sanitizer] = built(tmp_path_factory.mktemp(sanitizer), sanitizer)
    status, said = run(programs[sanitizer], name)
    assert status == 0, said


SPARES = "sysconf(_SC_NPROCESSORS_ONLN) >= 2 * threads"
"""Whether threads stay awake for a moment depends on the machine."""


@pytest.mark.parametrize("sanitizer", ["plain", "threads"])
@pytest.mark.parametrize(
    "name", ["moves_by_four_threads", "misses_nothing_as_it_falls_asleep", "falls_asleep", "stands_a_rush", "stops"]
)
def test_the_engine_where_there_are_cores_to_spare(
    name: str, sanitizer: str, programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    build = f"{sanitizer}, awake"
    if build not in programs:
        text = (ENGINE / "engine.c").read_text()
        assert text.count(SPARES) == 1
        programs[build] = built(tmp_path_factory.mktemp("awake"), sanitizer, {"engine.c": text.replace(SPARES, "true")})
    status, said = run(programs[build], name)
    assert status == 0, said
