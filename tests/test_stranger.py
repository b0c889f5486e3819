"""A backend that somebody else wrote and installed: found, opened and held to the laws like ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import xferlib_host

from tests import children

STRANGER = Path(__file__).parent / "stranger"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    site = [str(STRANGER), str(Path(xferlib_host.__file__).parents[1]), str(Path(xferlib_host.__file__).parents[2])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(site), "XFERLIB_REQUIRE": "toy"}
    return children.run([sys.executable, "-m", "xferlib", *arguments], env=environment, seconds=110)


def test_doctor_finds_it_ready() -> None:
    done = run("doctor", "--require", "toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "toy" in done.stdout


def test_it_passes_every_law_with_no_skip_and_no_known_failure() -> None:
    done = run("conformance", "toy", "-q")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
    assert "xfailed" not in summary


def test_the_demo_says_in_one_line_that_it_ships_no_workload() -> None:
    done = run("demo", "--backend", "toy")
    assert done.returncode == 1
    assert "toy" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_guide_counts_its_lines_as_they_are() -> None:
    guide = (STRANGER.parent.parent / "backends" / "README.md").read_text()
    backend, hooks = (
        len((STRANGER / "xferlib_toy" / f"{name}.py").read_text().splitlines()) for name in ("__init__", "conformance")
    )
    assert f"has {backend} lines, and its hooks another {hooks};" in " ".join(guide.split())


def test_the_guide_names_what_is_asked_of_a_backend_beyond_its_methods() -> None:
    guide = " ".join((STRANGER.parent.parent / "backends" / "README.md").read_text().split())
    for words in (
        "`dtype` that `numpy.dtype()` takes",
        "asked with `pinned` off",
        "`stream` stays usable",
        "`xferlib demo` and `xferlib overlap` refuse",
    ):
        assert words in guide
