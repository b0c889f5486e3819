"""The command that runs the laws: what it passes on, and what it says without pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def xferlib(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    program = f"import sys; {before}; from xferlib.cli import main; main({list(arguments)!r})"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_arguments_behind_the_name_go_to_pytest() -> None:
    done = xferlib("conformance", "host", "--collect-only", "-q", "-k", "law01")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_law01" in done.stdout
    assert "test_law02" not in done.stdout
    assert "passed" not in done.stdout


def test_the_status_is_that_of_pytest() -> None:
    assert xferlib("conformance", "host", "-q", "-k", "no_law_of_that_name").returncode == 5


def test_an_unknown_backend_is_refused_with_a_suggestion() -> None:
    done = xferlib("conformance", "hots")
    assert done.returncode == 2
    assert done.stderr.startswith("xferlib: no installed package provides backend 'hots'. Did you mean 'host'?")


GONE = """
from xferlib.errors import BackendUnavailableError

def open_stager(*, device=0):
    raise BackendUnavailableError("backend 'gone' cannot run here: no driver. Install one")
"""
LAWS = """
import gone
from xferlib_host import conformance

class TestGone(conformance.TestHost):
    def open(self):
        return gone.open_stager()
"""


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a backend that cannot run here."""
    for name, content in (("gone/__init__.py", GONE), ("gone/conformance.py", LAWS)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    about = tmp_path / "gone-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gone\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[xferlib.backends]\ngone = gone:open_stager\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("option", ["-v", "-q"])
def test_a_backend_that_cannot_run_here_is_told_once_and_is_no_success(option: str) -> None:
    done = xferlib("conformance", "gone", option)
    assert done.returncode == 4, done.stdout + done.stderr
    told = done.stdout + done.stderr
    assert told.count("nothing was tested: backend 'gone' cannot run here: no driver. Install one") == 1
    assert "SKIPPED" not in told
    assert "Traceback" not in told


@pytest.mark.usefixtures("gone")
def test_the_laws_of_a_backend_that_cannot_run_here_can_be_listed() -> None:
    done = xferlib("conformance", "gone", "--collect-only", "-q", "-k", "law01")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_law01" in done.stdout


@pytest.mark.usefixtures("gone")
def test_a_backend_without_hooks_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "gone" / "conformance.py").unlink()
    done = xferlib("conformance", "gone")
    assert done.returncode == 1
    assert done.stderr.startswith("xferlib: backend 'gone' ships no hooks to test it with: no module 'conformance' beside")


def test_without_pytest_it_says_what_to_install() -> None:
    done = xferlib("conformance", "host", before="sys.modules['pytest'] = None")
    assert done.returncode == 1
    assert done.stderr == 'xferlib: the conformance suite needs pytest. Install it with: pip install "pytest>=9.0"\n'
