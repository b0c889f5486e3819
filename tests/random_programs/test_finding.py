"""That the programs find what is wrong, whatever it is, and say it with a short program that fails again."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.mutants.planted.defects import MUTANTS, Mutant
from tests.mutants.planted.planting import environment_of, plant
from tests.random_programs.driver import POISON, Driver
from tests.random_programs.program import Program
from tests.random_programs.release import Releaser
from tests.random_programs.shrink import shrink
from tests.random_programs.supervise import Failure, Runner

MOST = 60
"""Programs."""


def first_failure(runner: Runner, message: str) -> Failure:
    for number in range(MOST):
        _, failure = runner.run(7, number)
        if failure is not None and message in failure.message:
            return failure
    pytest.fail(f"{MOST} programs found nothing")


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ("keeps_memory", "memory is left"),
        ("reads_what_is_freed", "the process died"),
        ("crashes", "the process died"),
        ("raises_on_a_thread", "on thread ours: ZeroDivisionError"),
        ("leaves_a_thread", "threads are left: ['left'"),
    ],
)
def test_a_defect_is_found_and_told_with_its_program(defect: str, message: str) -> None:
    with Runner("host", defect=defect) as runner:
        failure = first_failure(runner, message)
        again = runner.run_text(failure.program)
    assert again is not None
    assert again.signature == failure.signature


def test_a_program_that_fails_is_made_short() -> None:
    with Runner("host", defect="changes_a_byte") as runner:
        failure = first_failure(runner, "bytes are wrong")
        short = shrink(failure, runner, seconds=30)
        again = runner.run_text(short.program)
    assert again is not None
    assert again.signature == short.signature == failure.signature
    # A stager, a host array, put, value, where it is to go, and get.
    assert Program.from_json(short.program).count <= 8


def test_programs_of_large_arrays_find_what_others_have_no_arrays_for(tmp_path: Path) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if "mapped over the second" in mutant.name]
    assert plant(mutant, tmp_path)
    with Runner("host", environment_of(tmp_path), large=True, root=tmp_path) as runner:
        failure = first_failure(runner, "the process died")
        again = runner.draw(7, failure.number or 0)
    assert again == failure.program


def test_a_hang_is_told_with_the_place_where_it_hangs() -> None:
    with Runner("host", {"XFERLIB_RANDOM_PROGRAMS_HANG_SECONDS": "2"}, defect="hangs") as runner:
        failure = first_failure(runner, "the program hung")
    assert "in trim" in failure.trace or "defects.py" in failure.trace


def test_one_seed_gives_one_program() -> None:
    with Runner("host") as one, Runner("host", {"PYTHONHASHSEED": "5"}) as other:
        programs = [runner.draw(3, number) for runner in (one, other) for number in range(5)]
    assert programs[:5] == programs[5:]
    assert len(set(programs)) == 5
    assert [Program.from_json(text).to_json() for text in programs] == programs


def test_a_step_is_released_also_where_one_releasing_thread_is_stuck() -> None:
    stuck, over, released = threading.Event(), threading.Event(), threading.Event()

    def release() -> None:
        if not stuck.is_set():
            stuck.set()
            over.wait(60)
        released.set()

    with Releaser().watch(2, release):
        assert released.wait(30)
        assert not over.is_set()
    over.set()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    assert not driver.violations


def told(driver: Driver) -> str:
    (violation,) = driver.violations
    driver.violations.clear()
    return violation


def test_a_copy_over_two_allocations_is_noted(driver: Driver) -> None:
    first, second = driver.allocate(256), driver.allocate(256)
    assert abs(first - second) == 256
    driver.check_device(min(first, second), 256, "a copy")
    driver.check_device(min(first, second), 257, "a copy")
    assert "two allocations" in told(driver)


def test_a_copy_to_freed_memory_is_noted(driver: Driver) -> None:
    address = driver.allocate(1000)
    driver.check_device(address + 10, 990, "a copy")
    driver.free(address)
    driver.check_device(address + 10, 990, "a copy")
    assert "freed" in told(driver)


def test_a_write_to_freed_memory_is_noted(driver: Driver) -> None:
    address = driver.allocate(1000)
    driver.free(address)
    driver.look_at_freed()
    assert ctypes.string_at(address, 1000) == bytes([POISON]) * 1000
    ctypes.memset(address + 7, 1, 1)
    assert driver.allocate(1000) == address
    assert "written after it was freed" in told(driver)


def test_memory_that_is_freed_twice_is_noted(driver: Driver) -> None:
    address = driver.allocate(10)
    driver.free(address)
    driver.free(address)
    assert "freed before" in told(driver)


def test_a_hole_between_two_locked_ranges_is_noted(driver: Driver) -> None:
    memory = np.zeros(3000, np.uint8)
    start = memory.ctypes.data
    driver.lock(start, 1000, ValueError)
    driver.lock(start + 2000, 1000, ValueError)
    driver.check_host(start, 1000, "a copy")
    driver.check_host(start, 3000, "a copy")
    assert "byte 1000 is not page-locked" in told(driver)
    driver.unlock(start)
    driver.unlock(start + 2000)


def test_an_array_that_comes_back_from_a_cycle_shows_that_its_memory_was_given_away(tmp_path: Path) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if "die together in a cycle" in mutant.name]
    program = (Path(__file__).parent / "regressions" / "host_array_comes_back_from_a_cycle.json").read_text()
    assert plant(mutant, tmp_path)
    with Runner("host", environment_of(tmp_path), root=tmp_path) as runner:
        failure = runner.run_text(program)
    assert failure is not None
    assert "bytes are wrong" in failure.message


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_planted(mutant: Mutant) -> None:
    text = (Path(__file__).resolve().parents[2] / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
