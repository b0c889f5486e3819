"""Every mutant that was written down still has its place. One whose text is gone would be run by nobody and test nothing."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import tests.mutants.sampled.written as by_area
from tests.mutants.planted.defects import MUTANTS as PLANTED
from tests.mutants.sampled.areas import AREAS
from tests.mutants.sampled.tree import ROOT

NAMES = [module.name for module in pkgutil.iter_modules(by_area.__path__)]


def lost(mutants: list[tuple[str, str, str]]) -> list[str]:
    """Return those whose text does not occur exactly once in its file, or stays as it is."""
    texts = {path: (ROOT / path).read_text() for path in {path for path, _, _ in mutants}}
    places = [(path, old, texts[path].count(old), old == new) for path, old, new in mutants]
    return [f"{path}: {count} times: {old!r}" for path, old, count, same in places if count != 1 or same]


@pytest.mark.parametrize("name", NAMES)
def test_written_mutants_have_their_places(name: str) -> None:
    mutants = importlib.import_module(f"{by_area.__name__}.{name}").MUTANTS
    assert mutants
    assert lost(mutants) == []
    assert len(set(mutants)) == len(mutants)


def test_planted_mutants_have_their_places() -> None:
    assert lost([(mutant.file, mutant.old, mutant.new) for mutant in PLANTED]) == []


def test_written_mutants_are_of_areas() -> None:
    assert {name.replace("_", "-") for name in NAMES} <= set(AREAS)
