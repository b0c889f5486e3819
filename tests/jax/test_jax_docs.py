"""What the page about JAX shows is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from xferlib.stager import Stager

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "jax.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_there_is_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(stager: Stager, number: int) -> None:
    """On whatever JAX computes on here; without JAX the fixture skips."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", EXAMPLES[number]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
