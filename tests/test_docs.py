"""What the pages of the site show is true: their programs run as they are pasted, and every public name has its place.

The site itself is built by CI, which fails at a warning.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import xferlib_jax

import xferlib
from tests import children

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PROGRAMS = {
    f"{page.stem}-{number}": program
    for page in PAGES
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
}
PACKAGES = ("jax", "torch", "grain", "datasets", "tensorflow", "ray", "orbax", "flax", "equinox")
SECONDS = 100


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_is_pasted(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    wanted = [package for package in PACKAGES if re.search(rf"^(import|from) {package}\b", program, flags=re.MULTILINE)]
    missing = [package for package in wanted if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: this program was not tried")
    script = tmp_path / "pasted.py"
    script.write_text(program)
    # What such packages warn of among themselves is theirs to mend; Ray would write to the home directory.
    strict = [] if wanted else ["-W", "error"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_AUTH_MODE": "disabled"}
    done = children.run([sys.executable, *strict, str(script)], seconds=SECONDS, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


def test_there_are_programs() -> None:
    assert {name.rpartition("-")[0] for name in PROGRAMS} == {
        "files",
        "index",
        "jax",
        "loaders",
        "memory",
        "overlap",
        "pipelines",
        "reports",
        "services",
        "tracing",
    }


@pytest.mark.parametrize("package", [xferlib, xferlib_jax], ids=lambda package: package.__name__)
def test_every_public_name_is_on_the_page_of_the_api(package: object) -> None:
    # Of these the page has the whole module.
    names = set(getattr(package, "__all__", None) or (name for name, value in vars(package).items() if is_public(name, value)))
    page = (DOCS / "api.md").read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: [\w.]*\.(\w+)$", page, flags=re.MULTILINE))
    assert "\n.. automodule:: xferlib.protocol\n" in page
    assert names - listed - set(xferlib.protocol.__all__) == set()


def is_public(name: str, value: object) -> bool:
    return not name.startswith("_") and not isinstance(value, type(xferlib))


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?!xferlib_jax)[a-z_/]+\.(?!(?:c|h|py)`)[A-Za-z_]+)`", (DOCS / "internals.md").read_text())))
)
def test_what_the_page_of_internals_names_is_there(name: str) -> None:
    module, _, attribute = name.replace("/", ".").rpartition(".")
    assert hasattr(import_module(f"xferlib.{module}"), attribute)


def test_every_page_is_in_the_contents() -> None:
    contents = re.findall(r"```\{toctree\}\n.*?\n\n(.*?)```", (DOCS / "index.md").read_text(), flags=re.DOTALL)
    assert sorted(["index", *contents[0].split()]) == [page.stem for page in PAGES]


def test_ci_builds_the_site_as_its_settings_say() -> None:
    command = re.findall(r"`python (-m sphinx .*?)`", (DOCS / "conf.py").read_text())
    assert command == ["-m sphinx -W --keep-going docs build/docs"]
    assert f"python {command[0]}" in (ROOT / ".ci" / "run").read_text()
