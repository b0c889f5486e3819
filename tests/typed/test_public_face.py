"""What a user sees first: the names, what `help` shows of them, and what was public once."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import xferlib_jax

import xferlib
from xferlib import protocol

ROOT = Path(__file__).resolve().parents[2]
RECORDS = [
    (module, kind)
    for module in (xferlib, protocol)
    for kind in (getattr(module, name) for name in module.__all__)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type)
]


def test_every_public_name_is_there_and_the_docstring_shows_the_way() -> None:
    assert [name for name in xferlib.__all__ if not hasattr(xferlib, name)] == []
    shown = pydoc.plain(pydoc.render_doc(xferlib))
    assert shown.index("stager(name)") < shown.index("prefetch(batches, stager)") < shown.index("CLASSES")
    assert "class Drained" in shown
    assert "class PhaseTimer" not in shown


def test_words_of_the_module_name_what_there_is() -> None:
    listed = re.findall(r"\b(?:[A-Z][a-z]+(?:[A-Z][a-z]+)*)\b", (xferlib.__doc__ or "").split("say the rest:")[-1])
    names = {name for name in listed if name in dir(xferlib)}
    assert {
        "Stager",
        "Transfer",
        "Pin",
        "Prefetch",
        "Drained",
        "Drain",
        "Ring",
        "Slot",
        "SharedRing",
        "Run",
        "Report",
        "Stats",
    } <= names


@pytest.mark.parametrize(
    ("name", "home", "kept"),
    [
        ("Bill", "xferlib", "MemoryEstimate"),
        ("Clock", "xferlib.pipeline.phase_timer", "PhaseTimer"),
        ("Feed", "xferlib.pipeline.background", "BackgroundIterator"),
    ],
)
def test_what_was_public_is_found_with_a_warning(name: str, home: str, kept: str) -> None:
    assert name not in xferlib.__all__
    assert name not in dir(xferlib)
    with pytest.warns(DeprecationWarning, match=rf"xferlib\.{name} is no part .* It is {re.escape(home)}\.{kept}$") as told:
        assert getattr(xferlib, name) is getattr(importlib.import_module(home), kept)
    assert told[0].filename == __file__


def test_a_class_of_the_contract_is_found_by_its_first_name_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"protocol\.Source is called DeviceRange now$") as told:
        assert protocol.Source is protocol.DeviceRange
    assert told[0].filename == __file__
    assert "Source" not in protocol.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Sink'"):
        _ = protocol.Sink  # type: ignore[attr-defined]  # The point of the test.


@pytest.mark.parametrize("module", [xferlib, xferlib_jax], ids=["xferlib", "xferlib_jax"])
def test_a_name_that_never_was_is_none(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'prefecth'"):
        _ = module.prefecth


def test_a_method_of_a_stager_is_told_of_where_it_is_looked_for_in_the_module() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'put'\. It is a method of a stager: stager\.put\(\.\.\.\)"):
        _ = xferlib.put  # type: ignore[attr-defined]  # The point of the test.
    with pytest.raises(AttributeError, match=r"no attribute '__reversed__'$"):
        _ = xferlib.__reversed__  # type: ignore[attr-defined]


@pytest.mark.parametrize(("module", "kind"), RECORDS, ids=[kind.__name__ for _, kind in RECORDS])
def test_help_shows_the_fields_of_a_record_once(module: ModuleType, kind: type) -> None:
    _, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    described = re.findall(r"^    (\w+): \S", attributes, re.MULTILINE)
    assert described == [field.name for field in dataclasses.fields(kind)]
    body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    strings = [node for node in body.body if isinstance(node, ast.Expr)]
    assert len(strings) == 1


def test_the_package_for_jax_says_what_it_has_without_jax() -> None:
    program = "import sys, xferlib_jax; print(dir(xferlib_jax) == sorted(xferlib_jax.__all__), 'jax' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("package", [*sorted(path.name for path in (ROOT / "backends").glob("xferlib_*")), "../xferlib"])
def test_a_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / "backends" / package / "py.typed").is_file()
