"""The fixture of pytest, in a run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE = "_xferlib_pytest"
LOOP = """
def test_loop(assert_overlaps):
    assert_overlaps(lambda: None, device=0)
"""
FAULTY = """
def test_loop(assert_overlaps):
    assert_overlaps([].pop)
"""
OTHER = """
import sys

def test_other():
    assert "{module}" in sys.modules
    assert not {{"xferlib", "numpy"}} & sys.modules.keys()
"""
TAKEN = """
import types

from xferlib.overlap import callbacks, loops
from xferlib.tracing.library import TAKEN

# A GPU, and a CUPTI that serves somebody else.
cupti = types.SimpleNamespace(cuptiSubscribe=lambda *_: TAKEN, cuptiGetResultString=lambda *_: 0)
loops.Driver = lambda number: None
callbacks.load = lambda: cupti
"""
BROKEN = """
import types

from xferlib.overlap import libcuda

libcuda.ctypes.CDLL = lambda name: types.SimpleNamespace(cuInit=lambda flags: {status})
"""


def run(folder: Path, program: str = LOOP, conftest: str = "", **environment: str) -> str:
    (folder / "test_loop.py").write_text(program)
    (folder / "conftest.py").write_text(conftest)
    # As on a machine without a GPU, whatever this one has.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "XFERLIB_REQUIRE": "", **environment}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-c", os.devnull, "--rootdir", str(folder)]
    if not any(entry.value == MODULE for entry in entry_points(group="pytest11")):
        command += ["-p", MODULE]
    return subprocess.run([*command, str(folder)], capture_output=True, text=True, env=environment, cwd=ROOT).stdout


def test_without_a_gpu_the_loop_runs_and_the_skip_says_that_it_could_not_be_tested(tmp_path: Path) -> None:
    shown = run(tmp_path)
    assert "1 skipped" in shown
    assert "whether the loop overlaps cannot be tested here" in " ".join(shown.split())
    assert "The loop itself ran: 6 steps, without an error" in " ".join(shown.split())


def test_without_a_gpu_a_loop_that_fails_by_itself_fails_the_test(tmp_path: Path) -> None:
    shown = " ".join(run(tmp_path, FAULTY).split())
    assert "1 failed" in shown
    assert "IndexError: pop from empty list" in shown
    assert "raised by the loop itself, in step 1. Besides, whether the loop overlaps cannot be tested here" in shown


def test_where_it_is_required_it_fails(tmp_path: Path) -> None:
    shown = run(tmp_path, XFERLIB_REQUIRE="cupy")
    assert "1 failed" in shown
    assert "forbids to skip this" in shown


def test_cupti_that_another_tool_has_is_an_error_and_not_a_skip(tmp_path: Path) -> None:
    shown = run(tmp_path, conftest=TAKEN)
    assert "1 failed" in shown
    assert "another tool has CUPTI in this process" in " ".join(shown.split())


def test_a_driver_without_a_device_is_a_skip_and_one_that_fails_an_error(tmp_path: Path) -> None:
    assert "1 skipped" in run(tmp_path, conftest=BROKEN.format(status=100))
    shown = run(tmp_path, conftest=BROKEN.format(status=803))
    assert "1 failed" in shown
    assert "it cannot begin: CUDA error 803" in shown


def test_a_run_that_does_not_ask_for_the_fixture_imports_neither_xferlib_nor_numpy(tmp_path: Path) -> None:
    assert "1 passed" in run(tmp_path, OTHER.format(module=MODULE))


def test_the_plugin_is_installed_as_xferlib() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"xferlib": MODULE}
    assert f"{MODULE}.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (ROOT / f"{MODULE}.py").is_file()
