"""Random programs in CI: on the host, on a device of C and, where JAX can be imported, on its CPU; new ones each day, and all that
ever failed."""

from __future__ import annotations

import datetime
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.build import COMPILER
from tests.random_programs.program import Program
from tests.random_programs.shrink import shrink
from tests.random_programs.supervise import Failure, Runner

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("XFERLIB_RANDOM_PROGRAMS_SECONDS", "45"))
"""For new programs of each backend."""
LARGE_SECONDS = SECONDS / 10
"""Likewise for programs of large arrays."""
SHRINK_SECONDS = 30.0
BACKENDS = [
    "host",
    pytest.param("driven", marks=pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")),
    pytest.param("jax", marks=pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")),
]


@pytest.fixture(params=BACKENDS)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with Runner(request.param, {"JAX_PLATFORMS": "cpu"}) as runner:
        yield runner


def told(failure: Failure, runner: Runner) -> str:
    """Return a failure in words, with its program made short, and what to type."""
    short = shrink(failure, runner, seconds=SHRINK_SECONDS)
    words = f"{short.message}\nat {short.at or '?'}\n{short.trace}\n{Program.from_json(short.program)}\n{short.program}"
    if failure.number is None:
        return words
    kind = f"{runner.backend}{' --large' * runner.large}"
    again = f"python -m tests.random_programs --backend {kind} --seed {failure.seed} --program {failure.number}"
    return f"seed {failure.seed}, program {failure.number}. Again: {again}\n{words}"


def failed_once(backend: str) -> list[tuple[int, int]]:
    lines = [line.partition("#")[0].split() for line in (HERE / "failed_seeds.txt").read_text().splitlines()]
    return [(int(line[1]), int(line[2])) for line in lines if line and line[0] == backend]


@pytest.mark.parametrize("large", [False, True], ids=["usual", "large"])
def test_programs_of_the_day_come_out_right(runner: Runner, large: bool) -> None:
    runner.large = large
    seed = int(datetime.date.today().strftime("%Y%m%d"))
    end = time.monotonic() + (LARGE_SECONDS if large else SECONDS)
    number = 0
    while time.monotonic() < end:
        _, failure = runner.run(seed, number)
        assert failure is None, told(failure, runner)
        number += 1
    assert number > 0


def test_programs_that_failed_once_come_out_right(runner: Runner) -> None:
    for seed, number in failed_once(runner.backend):
        _, failure = runner.run(seed, number)
        assert failure is None, told(failure, runner)


@pytest.mark.parametrize("file", sorted((HERE / "regressions").glob("*.json")), ids=lambda file: file.stem)
def test_a_program_that_was_kept_comes_out_right(file: Path) -> None:
    text = file.read_text()
    backend = Program.from_json(text).backend
    if importlib.util.find_spec("jax") is None and backend == "jax":
        pytest.skip("JAX is not installed")
    with Runner(backend, {"JAX_PLATFORMS": "cpu"}) as runner:
        for _ in range(3):
            failure = runner.run_text(text)
            assert failure is None, told(failure, runner)
