"""The command that runs the laws: what it passes on, and what it says without pytest."""

from __future__ import annotations

import subprocess
import sys


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


def test_without_pytest_it_says_what_to_install() -> None:
    done = xferlib("conformance", "host", before="sys.modules['pytest'] = None")
    assert done.returncode == 1
    assert done.stderr == 'xferlib: the conformance suite needs pytest. Install it with: pip install "xferlib[test]"\n'
