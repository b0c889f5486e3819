"""What is told to install when a package is missing: commands that work before this project is published, too."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import xferlib_cupy._probe
import xferlib_jax._probe
import xferlib_numba._module

from xferlib.cli.command_error import INSTALL_PLOT
from xferlib.files.formats import INSTALL as INSTALL_FILES

ROOT = Path(__file__).resolve().parent.parent
ADVICE = {
    "cupy": xferlib_cupy._probe.INSTALL,
    "numba": xferlib_numba._module.INSTALL,
    "jax": xferlib_jax._probe.ON_CPU,
    "jax on a GPU": xferlib_jax._probe.ON_CUDA,
    "files": INSTALL_FILES,
    "plot": INSTALL_PLOT,
}


@pytest.mark.parametrize("name", ADVICE)
def test_what_is_named_are_the_packages_of_the_extras(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r'"(.+?)"', ADVICE[name])
    assert len(named) >= 2
    assert set(named) <= {requirement for extra in extras.values() for requirement in extra}
    assert "with: pip install " in ADVICE[name]


@pytest.mark.parametrize("name", ["cupy", "numba", "jax", "jax on a GPU"])
def test_who_has_cuda_12_and_who_has_cuda_13_are_told_their_own(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for cuda in ("12", "13"):
        (requirement,) = re.findall(rf'"([^"]+)" \(CUDA {cuda}\)', ADVICE[name])
        assert requirement in extras[f"cuda{cuda}"]
