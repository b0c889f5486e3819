"""The engine in C alone: its harness, as it is and under each sanitizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from tests.engine.build import COMPILER, ENGINE, NOT_TRIED, SANITIZERS, TESTS, built, run
from tests.side_by_side import chosen, side_by_side

Outcome: TypeAlias = Callable[[tuple[str, bool, str]], tuple[int, str]]
"""Gives the status of a run, and what it said: by sanitizer, whether there are cores to spare, and the test's name."""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: the engine's own tests were not tried")

SPARES = "5 * sysconf(_SC_NPROCESSORS_ONLN) >= 8 * threads"
"""Whether threads stay awake for a moment depends on the machine."""


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    text = (ENGINE / "engine.c").read_text()
    assert text.count(SPARES) == 1
    spared = {"engine.c": text.replace(SPARES, "true")}
    asked = [
        (parameters["sanitizer"], spares, parameters["name"])
        for spares, test in ((False, "test_the_engine"), (True, "test_the_engine_where_there_are_cores_to_spare"))
        for parameters in chosen(request, test)
        if parameters["sanitizer"] not in NOT_TRIED
    ]
    programs = {
        build: built(tmp_path_factory.mktemp("harness"), build[0], spared if build[1] else None)
        for build in dict.fromkeys(key[:2] for key in asked)
    }
    with side_by_side(lambda key: run(programs[key[:2]], key[2]), asked) as outcome:
        yield outcome


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("name", TESTS)
def test_the_engine(name: str, sanitizer: str, outcome: Outcome) -> None:
    if sanitizer in NOT_TRIED:
        pytest.skip(NOT_TRIED[sanitizer])
    status, said = outcome((sanitizer, False, name))
    assert status == 0, said


@pytest.mark.parametrize("sanitizer", ["plain", "threads"])
@pytest.mark.parametrize(
    "name",
    [
        "moves_by_four_threads",
        "misses_nothing_as_it_falls_asleep",
        "falls_asleep",
        "stands_a_rush",
        "stops",
        "leaves_what_it_began",
        "works_while_it_waits_to_the_device",
        "works_while_it_waits_to_the_host",
    ],
)
def test_the_engine_where_there_are_cores_to_spare(name: str, sanitizer: str, outcome: Outcome) -> None:
    status, said = outcome((sanitizer, True, name))
    assert status == 0, said
