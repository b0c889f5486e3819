"""What type checkers make of programs that use the library: misspelt names are errors, and what is right is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import xferlib
from tests.typed.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"# E: ([a-z-]+)$")
ERROR = re.compile(r"(\w+)\.py:(\d+): error: .*\[([a-z-]+)\]$")


def planted() -> set[tuple[str, int, str]]:
    marks = {
        (name, number, MARK.search(line))
        for name, program in PROGRAMS.items()
        for number, line in enumerate(program.splitlines(), 1)
    }
    return {(name, number, mark[1]) for name, number, mark in marks if mark}


def found(folder: Path, cache: Path) -> set[tuple[str, int, str]]:
    """Run mypy over all programs at once."""
    for name, program in PROGRAMS.items():
        (folder / f"{name}.py").write_text(program)
    config = folder / "mypy.ini"
    config.write_text("[mypy]\nstrict = true\nfollow_imports = silent\n[mypy-jax.*,optree.*]\nignore_missing_imports = true\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(cache), "--no-pretty", "."]
    environment = os.environ | {"MYPYPATH": f"{ROOT}:{ROOT / 'backends'}"}
    shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert shown.stderr == ""
    lines = [line for line in shown.stdout.splitlines() if ": error: " in line]
    matches = [ERROR.search(line) for line in lines]
    assert None not in matches, shown.stdout
    return {(match[1], int(match[2]), match[3]) for match in matches if match}


def test_misspelt_names_are_errors_and_nothing_else_is(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    # There is none where pytest was told to write nothing.
    cache = getattr(pytestconfig, "cache", None)
    assert found(tmp_path, cache.mkdir("typed") if cache else tmp_path / "cache") == planted()


@pytest.mark.parametrize("name", ["Drain", "Drained", "Prefetch", "Results", "Ring", "Run", "SharedRing", "Slot", "Transfer"])
def test_what_holds_trees_can_be_annotated_with_their_type_at_run_time(name: str) -> None:
    of_ints = getattr(xferlib, name)[int]
    assert typing.get_origin(of_ints) is getattr(xferlib, name)
    assert typing.get_args(of_ints) == (int,)
