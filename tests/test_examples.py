"""Every example runs to its end, which is to say that it found right what it computed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import xferlib
from tests import children

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())
ON_HOST = ["drain_frames.py --backend host", "out_of_core.py --backend host", "offload_adam.py --backend host"]
ON_JAX = [
    "drain_frames.py --backend jax",
    "out_of_core.py --backend jax",
    "offload_adam.py --backend jax",
    "train_images.py",
    "train_images.py --loader workers",
    "multi_gpu.py --backend cpu",
    "resume_training.py",
]
PAGES = [EXAMPLES / "README.md", ROOT / "docs" / "loaders.md"]
LINKS = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]


def run(command: str, *, errors: str = "error") -> subprocess.CompletedProcess[str]:
    script, *options = command.split()
    line = [sys.executable, "-W", errors, str(EXAMPLES / script), "--quick", *options]
    return children.run(line, seconds=100)


@pytest.mark.parametrize("command", [*ON_HOST, *ON_JAX])
def test_example_verifies_what_it_computed(command: str) -> None:
    required = "jax" in os.environ.get("XFERLIB_REQUIRE", "").split(",")
    if command in ON_JAX and find_spec("jax") is None and not required:
        pytest.skip("JAX is not installed: this example was not tried")
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert "every byte verified" in done.stdout or re.search(r"loss \d\.\d\d -> \d\.\d\d\n", done.stdout)


def test_the_example_for_gpus_says_what_is_missing() -> None:
    missing = what_is_missing()
    if missing is None and find_spec("numba") is None:
        pytest.skip("Numba is not installed: this example was not tried")
    # Numba warns of what NumPy deprecates and Numba itself uses, and of grids as small as these.
    done = run("cupy_numba.py", errors="error::ResourceWarning")
    if missing is None:
        assert done.returncode == 0, done.stderr
        assert "every byte verified" in done.stdout
    else:
        assert done.returncode == 1
        assert done.stderr == f"this example needs a GPU: {missing}\n"


def what_is_missing() -> str | None:
    try:
        xferlib.stager("cupy").close()
    except xferlib.BackendUnavailableError as error:
        return str(error)
    return None


def test_every_example_is_tried_and_listed() -> None:
    assert {command.split()[0] for command in [*ON_HOST, *ON_JAX]} | {"cupy_numba.py"} == set(SCRIPTS)
    listed = re.findall(r"^- \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_says_how_to_run_it(script: str) -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / script).read_text()))
    assert docstring is not None
    assert f"python examples/{script}" in docstring


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_link_leads_somewhere(page: Path, link: str) -> None:
    assert (page.parent / link).exists()
