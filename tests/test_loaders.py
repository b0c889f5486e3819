"""The loaders of the examples, each with its real package: all rows arrive, in order, as they were, the smaller last batch too."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import xferlib

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "loaders.md").read_text()

PACKAGES = {
    "generator": None,
    "in-place": None,
    "workers": None,
    "torch": "torch",
    "torch-workers": "torch",
    "grain": "grain",
    "grain-loader": "grain",
    "datasets": "datasets",
    "tf": "tensorflow",
    "ray": "ray",
}
BATCH = 16
COUNT = 2 * BATCH + 5


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    # Found by spawned workers, too: they are given this path.
    return import_module("loaders")


@pytest.fixture
def tiles(loaders: ModuleType) -> Any:
    return import_module("tiles").Tiles(COUNT)


@pytest.mark.parametrize("name", PACKAGES)
# What these packages warn of among themselves is theirs to mend.
@pytest.mark.filterwarnings("default")
def test_every_row_arrives_as_it_was(name: str, loaders: ModuleType, tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = PACKAGES[name]
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed: its loader was not tried")
    # Ray would write one to the home directory.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with xferlib.stager("host") as stager:
        batches = loaders.LOADERS[name](tiles, BATCH, stager)
        with xferlib.prefetch(batches, stager, rewrites=False) as loop:
            arrived = list(loop)
    assert [len(batch["label"]) for batch in arrived] == [BATCH, BATCH, 5]
    for key, dtype in (("image", np.uint8), ("label", np.int32)):
        rows = np.concatenate([batch[key] for batch in arrived])
        assert rows.dtype == dtype
        assert np.array_equal(rows, np.stack([tiles[index][key] for index in range(COUNT)]))


@pytest.mark.parametrize("name", ["in-place", "workers", "torch", "grain"])
def test_what_is_written_in_place_is_not_copied_again(name: str, loaders: ModuleType, tiles: Any) -> None:
    if PACKAGES[name] is not None and find_spec(name) is None:
        pytest.skip(f"{name} is not installed: its loader was not tried")
    # Such a stager refuses whatever has to be copied on the host first.
    with xferlib.stager("host", strict=True) as stager:
        with xferlib.prefetch(loaders.LOADERS[name](tiles, BATCH, stager), stager) as loop:
            assert sum(len(batch["label"]) for batch in loop) == COUNT
        assert stager.stats().synchronous == 0


def test_every_loader_is_tried(loaders: ModuleType) -> None:
    assert set(PACKAGES) == set(loaders.LOADERS)


def test_the_page_shows_every_package() -> None:
    shown = set(re.findall(r"^(?:import|from) (\w+)", PAGE, flags=re.MULTILINE))
    assert shown >= {package for package in PACKAGES.values() if package is not None}
