"""Every mutant that was written down still has its place, and is a program.

One whose text is gone would be run by nobody and test nothing. One that names what is not there dies of that, whatever is tested.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import CodeType

import pytest

import tests.mutants.sampled.written as by_area
from tests.mutants.planted.defects import MUTANTS as PLANTED
from tests.mutants.sampled.areas import AREAS
from tests.mutants.sampled.tree import ROOT

IDENTIFIERS = re.compile(r"[^\W\d]\w*").findall
NAMES = [module.name for module in pkgutil.iter_modules(by_area.__path__)]


def lost(mutants: list[tuple[str, str, str]]) -> list[str]:
    """Return those whose text does not occur exactly once in its file, or stays as it is."""
    texts = {path: (ROOT / path).read_text() for path in {path for path, _, _ in mutants}}
    places = [(path, old, texts[path].count(old), old == new) for path, old, new in mutants]
    return [f"{path}: {count} times: {old!r}" for path, old, count, same in places if count != 1 or same]


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def names(code: CodeType, operation: str) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname.startswith(operation)}


def unknown(source: str, suspects: set[str]) -> set[str]:
    """Return those names that a module asks for, as globals, and does not have. Raises `SyntaxError`."""
    module = compile(source, "mutant", "exec", dont_inherit=True)
    asked = {code: suspects.intersection(code.co_names) for code in codes(module)}
    found = {name for code, some in asked.items() if some for name in some & names(code, "LOAD_GLOBAL")}
    return found - names(module, "STORE_NAME") - set(dir(builtins)) if found else found


def broken(mutants: list[tuple[str, str, str]]) -> list[str]:
    """Return those that are no Python, or ask for a name that is not there."""
    found: list[str] = []
    for path, old, new in mutants:
        if path.endswith(".py"):
            source = (ROOT / path).read_text().replace(old, new)
            try:
                found += [f"{path}: no {name}: {new!r}" for name in unknown(source, set(IDENTIFIERS(new)) - set(IDENTIFIERS(old)))]
            except SyntaxError as error:
                found.append(f"{path}: {error}: {new!r}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_written_mutants_are_programs(name: str) -> None:
    assert broken(importlib.import_module(f"{by_area.__name__}.{name}").MUTANTS) == []


def test_planted_mutants_are_programs() -> None:
    assert broken([(mutant.file, mutant.old, mutant.new) for mutant in PLANTED]) == []


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
