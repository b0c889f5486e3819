"""What the README shows is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
DOCS = [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))]
LINKS = [
    (page, link)
    for page in ("README.md", *(f"{part}/README.md" for part in ("backends", "benchmarks", "examples")), *DOCS)
    for link in re.findall(r"\]\(([^):]+)\)", (ROOT / page).read_text())
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", EXAMPLES[number]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_link_leads_somewhere(page: str, link: str) -> None:
    file, _, anchor = link.partition("#")
    target = (ROOT / page).parent.joinpath(file) if file else ROOT / page
    assert target.exists()
    assert not anchor or anchor in anchors(target)


def anchors(page: Path) -> set[str]:
    """Return what the headings of a page are called in links, as GitHub and the site have it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_ci_runs_the_test_command_that_the_page_names() -> None:
    commands = [line for line in README.splitlines() if line.endswith("python -m pytest")]
    assert len(commands) == 1
    assert "grep -m 1 'python -m pytest$' README.md" in (ROOT / ".ci" / "run").read_text()
