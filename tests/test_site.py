"""The site as readers see it: its pages are opened from disk in a browser, light and dark, clicked and searched."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tracing.browser import LOADED, Page, chromium

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES = sorted(page.stem for page in DOCS.glob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("sphinx", "furo", "myst_parser") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: the site was not built")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", str(DOCS), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def browsed(site: Path) -> Iterator[Page]:
    if chromium() is None:
        pytest.skip("there is no Chromium: the site was not opened")
    with Page(site / "index.html", ready=LOADED) as opened:
        yield opened


@pytest.fixture
def opened(browsed: Page) -> Iterator[Page]:
    """A browser that has nothing to complain of, before the test and after it."""
    browsed.errors.clear()
    browsed.requests.clear()
    yield browsed
    assert browsed.errors == []
    assert [url for url in browsed.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_its_text_its_pictures_and_its_place_in_the_contents(site: Path, opened: Page, name: str) -> None:
    opened.open(site / f"{name}.html", ready=LOADED)
    written = (DOCS / f"{name}.md").read_text()
    if written.startswith("# "):
        assert opened.evaluate("document.querySelector('h1').innerText") == written.partition("\n")[0].removeprefix("# ")
    assert len(opened.evaluate("document.querySelector('article').innerText")) > 500
    assert opened.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 100)")
    assert opened.evaluate("document.images.length") == written.count("![")
    assert name == "index" or opened.evaluate("document.querySelectorAll('.sidebar-tree .current').length") > 0


def test_a_click_in_the_contents_leads_to_the_page(site: Path, opened: Page) -> None:
    opened.open(site / "index.html", ready=LOADED)
    box = "(box => [box.x + box.width / 2, box.y + box.height / 2])([...document.querySelectorAll('.sidebar-tree a')].find(a => "
    x, y = opened.evaluate(box + "a.innerText === 'Why overlap fails').getBoundingClientRect())")
    opened.click(x, y)
    opened.wait_for(f"location.pathname.endsWith('/overlap.html') && {LOADED}")
    assert opened.evaluate("document.querySelector('h1').innerText") == "Why overlap fails"


def test_a_search_finds_pages(site: Path, opened: Page) -> None:
    opened.open(site / "index.html", ready=LOADED)
    opened.evaluate("document.querySelector('input[name=q]').value = 'pageable'")
    opened.evaluate("document.querySelector('input[name=q]').form.submit()")
    opened.wait_for("/found \\d+ pages/.test(document.getElementById('search-results')?.innerText)")
    assert "Why overlap fails" in opened.evaluate("document.getElementById('search-results').innerText")


def test_pages_and_pictures_follow_the_colors_of_the_system_and_pages_the_button(site: Path, opened: Page) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: colors were not looked at")

    def is_dark(selector: str) -> bool:
        seen = image.open(io.BytesIO(opened.png_at(selector))).convert("L")
        return bool(seen.getpixel((1, 1)) < 100)

    try:
        for scheme in ("light", "dark"):
            opened.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            opened.open(site / "numbers.html", ready=LOADED)
            assert is_dark("article") is is_dark("article img") is (scheme == "dark")
        opened.evaluate("document.querySelector('.theme-toggle').click()")
        assert opened.evaluate("document.body.dataset.theme") == "light"
        assert not is_dark("article")
    finally:
        opened.send("Emulation.setEmulatedMedia", features=[])
        opened.evaluate("localStorage.clear()")
