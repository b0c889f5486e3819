"""The fixture of pytest, in a run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

PROGRAM = """
def test_loop(assert_overlaps):
    assert_overlaps(lambda: None, device=0)
"""


def run(folder: Path, **environment: str) -> str:
    (folder / "test_loop.py").write_text(PROGRAM)
    # As on a machine without a GPU, whatever this one has.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **environment}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-c", os.devnull, "--rootdir", str(folder)]
    if not any(entry.value == "xferlib.overlap.plugin" for entry in entry_points(group="pytest11")):
        command += ["-p", "xferlib.overlap.plugin"]
    return subprocess.run([*command, str(folder)], capture_output=True, text=True, env=environment).stdout


def test_without_a_gpu_the_test_is_skipped_and_says_why(tmp_path: Path) -> None:
    shown = run(tmp_path, XFERLIB_REQUIRE="")
    assert "1 skipped" in shown
    assert "A CPU has nothing to prove here" in " ".join(shown.split())


def test_where_it_is_required_it_fails(tmp_path: Path) -> None:
    shown = run(tmp_path, XFERLIB_REQUIRE="cupy")
    assert "1 failed" in shown
    assert "forbids to skip this" in shown


def test_the_plugin_imports_no_framework() -> None:
    program = (
        "import sys, xferlib.overlap.plugin; print([name for name in ('cupy', 'jax', 'numba', 'torch') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
